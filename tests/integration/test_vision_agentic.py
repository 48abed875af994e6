"""Agentic runs whose environments and programs show pictures in every turn: engine and trainer agree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_config import command_here, finish_run, read_lines, run_here, write_episodes_run
from tiny_vision import TORCHVISION, make_vision_model, quickstart

from roll_like.rollout.storage import read_groups

TESTS = Path(__file__).parents[1]
LARGEST = "mismatch/logprob_difference_max"
pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]


def write_pictures_run(folder: Path, family: str, **changes: Any) -> Path:
    shutil.copy(TESTS / "picture_envs.py", folder)
    program = {"command": [sys.executable, str(TESTS / "integration" / "picture_agent.py")]}
    settings: dict[str, Any] = {
        "import": ["picture_envs"],
        "environments": [{"id": "tiny/Pictures-v0"}, {"name": "agent", "program": program}],
        "steps": 2,
        "rollout": {
            "groups_per_step": 4,
            "episodes_per_group": 3,
            "max_turns": 4,
            "max_response_tokens": 12,
            "max_episode_tokens": 300,
            "retries": 0,
            "max_failure_fraction": 0.0,
            "save_tokens": True,
        },
        "algorithm": {"advantage": "grpo"},
        "training": {"optimizer": {"lr": 1.0e-3}, "max_tokens_per_micro_batch": 1024, "freeze_vision": False},
        "resources": {
            "device": "cpu",
            "devices_per_node": 1,
            "device_mapping": {"training": "0", "inference": "0"},
        },
    }
    return write_episodes_run(folder, make_vision_model(family, folder / "model"), **settings | changes)


def check_run(run: Path) -> None:
    steps = read_lines(run / "metrics.jsonl")
    assert len(steps) == 2
    assert all(step[LARGEST] < 1e-3 for step in steps)
    assert all(step["rollout/failures"] == 0 for step in steps)
    assert all(2 <= step["rollout/images/mean"] <= 4 for step in steps)
    shown: dict[str, list[int]] = {}
    for group in read_groups(run / "rollouts" / "step_000001"):
        for sample in group.samples:
            images = sample.trajectory.images
            shown.setdefault(group.task.source, []).append(len(images))
            assert all(
                sample.trajectory.token_ids[one.start] == sample.trajectory.token_ids[images[0].start] for one in images
            )
    assert set(shown["Pictures"]) == {4}
    assert set(shown["agent"]) == {2}
    rows = read_lines(run / "rollouts" / "step_000001.jsonl")
    kept = {path.name for path in (run / "rollouts" / "images").iterdir()}
    assert {image["file"] for row in rows for image in row["images"]} <= kept
    assert "[image: " in rows[0]["turns"][1]["shown"][0]["content"]


def test_pictures_of_every_turn_are_trained_on(tmp_path: Path) -> None:
    config = write_pictures_run(tmp_path, "qwen2_5_vl")
    code, output = run_here(config)
    assert code == 0, output
    check_run(tmp_path / "runs" / "tiny")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_vllm_and_the_trainer_agree(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not TORCHVISION.is_dir():
        pytest.skip("vLLM needs torchvision for images: make torchvision")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TORCHVISION), os.environ.get("PYTHONPATH", "")]))
    engine = {"type": "vllm", "kv_cache_gib": 0.1, "max_running": 16}
    code, output = finish_run(write_pictures_run(tmp_path, family, inference=engine))
    assert code == 0, output
    check_run(tmp_path / "runs" / "tiny")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_vllm_takes_images_of_later_turns(family: str, tmp_path: Path) -> None:
    if not TORCHVISION.is_dir():
        pytest.skip("vLLM needs torchvision for images: make torchvision")
    script, model = Path(__file__).with_name("images_in_vllm.py"), make_vision_model(family, tmp_path)
    own = [str(TESTS.parent), str(TESTS), str(TORCHVISION), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, script, model],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(own)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert max(found.pop("differences")) < 1e-4
    stop, tokens = found.pop("aborted")
    assert (stop, tokens < 100) == ("aborted", True)
    assert found == {"forgotten": "length"}


@pytest.mark.slow
def test_a_text_model_is_refused_by_the_check(tmp_path: Path, tiny_model: Path) -> None:
    config = write_pictures_run(tmp_path, "qwen2_5_vl")
    code, output = command_here(tmp_path, "run", "--config", str(config), "--check", f"model.path={tiny_model}")
    assert code != 0
    assert "environments.0: the environment 'Pictures' shows images" in output
    assert "set model.path to a vision-language model" in output.replace("\n", " ")


@pytest.mark.slow
def test_the_quickstart_learns_from_its_episodes(tmp_path: Path) -> None:
    made, root = quickstart(), TESTS.parent
    made.make_model(tmp_path / "vision_quickstart" / "model")
    made.make_episodes(tmp_path / "vision_quickstart", "lake", 128)
    runs = tmp_path / "runs"
    few = ["metrics.console=plain", f"output_dir={runs}", "resources.devices_per_node=1"]
    few.append("resources.device_mapping.training=0")
    sft = ["run", "--config", str(root / "configs" / "vision_agentic_sft.yaml")]
    code, output = command_here(tmp_path, *sft, *few, f"model.path={tmp_path / 'vision_quickstart' / 'model'}")
    assert code == 0, output
    few += [
        f"model.path={runs / 'vision_agentic_sft' / 'model'}",
        "resources.device_mapping.inference=0",
        "steps=2",
        "rollout.groups_per_step=4",
        "rollout.episodes_per_step=32",
        "evaluation=null",
    ]
    code, output = command_here(tmp_path, "run", "--config", str(root / "configs" / "vision_agentic.yaml"), *few)
    assert code == 0, output
    differences = [line[LARGEST] for line in read_lines(runs / "vision_agentic" / "metrics.jsonl") if LARGEST in line]
    assert all(difference < 1e-3 for difference in differences)
