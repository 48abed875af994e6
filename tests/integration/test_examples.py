"""What examples/ shows is run: notebooks from the first cell to the last, the custom rewards in a run of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from run_config import command_here

ROOT = Path(__file__).resolve().parents[2]
#: What the notebooks of the other pipelines measure on rows that they do not train on, and its least change.
LEARNS = {
    "sft": ("eval/loss", -0.5),
    "dpo": ("eval/loss", -0.1),
    "reward_model": ("eval/loss", -0.2),
    "distill": ("eval/kl", -0.5),
    "on_policy_distill": ("eval/reverse_kl", -0.3),
    "online_dpo": ("eval/avg", 0.05),
}
NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "commit notebooks without outputs"
    shutil.copy(path.with_name("tiny_model.py"), tmp_path)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no plot was drawn"
    (run_file,) = tmp_path.rglob("metrics.jsonl")
    steps = [json.loads(line) for line in run_file.read_text().splitlines()]
    summary = json.loads((run_file.parent / "summary.json").read_text())
    assert summary["status"] == "finished"
    if path.stem == "rlvr_from_python":
        assert [step["step"] for step in steps] == [1, 2]
        assert all(0 < step["rollout/reward/mean"] < 1 for step in steps)
        printed = "".join(output.get("text", "") for output in outputs)
        assert "no problem found" in printed
        for step in steps:  # by a callback
            assert f"step {step['step']}: reward {step['rollout/reward/mean']:.3f}" in printed
    elif path.stem == "environment_of_your_own":  # an agentic run that learns
        assert [step["step"] for step in steps] == list(range(1, 15))
        assert summary["eval_after"] > summary["eval_before"] + 0.2
    else:
        name, least = LEARNS[path.stem]
        before, *_, after = map(json.loads, (run_file.parent / "evaluations.jsonl").read_text().splitlines())
        print(f"{name}: {before[name]:.3f} → {after[name]:.3f}")
        assert (after[name] - before[name]) / least > 1


def run_example(config: str, name: str, tiny_model: Path, tmp_path: Path, **more: object) -> list[dict[str, float]]:
    """Run two steps of an example, here on a tiny model, and return their metrics."""
    overrides = {
        "model.path": tiny_model,
        "steps": 2,
        "inference.type": "hf",
        "output_dir": tmp_path,
        "metrics.trackers": "[]",
        "checkpoint.at_end": "false",
        "checkpoint.export": "false",
        **more,
    }
    changes = (f"{key}={value}" for key, value in overrides.items() if value is not None)
    code, output = command_here(ROOT, "run", "--config", config, *changes)
    assert code == 0, output
    steps = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    return steps


@pytest.mark.slow
def test_the_custom_rewards_train_a_model(tiny_model: Path, tmp_path: Path) -> None:
    for step in run_example("examples/custom_reward/rlvr.yaml", "custom-reward", tiny_model, tmp_path):
        total = step["rollout/reward/brief"] + 0.5 * step["rollout/reward/uses_word"]
        assert step["rollout/reward/mean"] == pytest.approx(total)
        assert 0 <= step["rollout/uses_word/copied"] <= 1


@pytest.mark.slow
def test_text_written_backwards_is_shown_then_tried(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from examples.reverse_text.reverse_text import main

    data = tmp_path / "data"
    main(["--characters", "8", "12", "--tasks", "40", "--evaluate", "8", str(data)])
    shown: dict[str, object] = {"data.sources": [{"path": str(data / "sft.jsonl")}]}
    shown["evaluation.sources"] = [{"path": str(data / "eval.jsonl")}]
    name = "reverse_text_sft"
    more = {"epochs": "null", "inference.type": None, "checkpoint.export": "true", "checkpoint.at_end": "true"}
    run_example("examples/reverse_text/sft.yaml", name, tiny_model, tmp_path, **shown, **more)
    tried = {
        f"{section}.sources": [{"path": str(data / f"{rows}.jsonl"), "answer_field": "answer"}]
        for section, rows in (("data", "train"), ("evaluation", "eval"))
    }
    model = tmp_path / name / "model"
    for step in run_example("examples/reverse_text/rl.yaml", "reverse_text_rl", model, tmp_path, **tried):
        assert step["rollout/failures"] == 0
        assert 0 <= step["rollout/reward/backwards"] <= 1


@pytest.mark.slow
def test_the_external_agent_plays_episodes(tiny_model: Path, tmp_path: Path) -> None:
    sizes = {"rollout.groups_per_step": 2, "rollout.episodes_per_group": 2}
    steps = run_example("examples/external_agent/agentic.yaml", "external_agent", tiny_model, tmp_path, **sizes)
    for step in steps:
        assert step["rollout/failures"] == 0
        assert step["rollout/samples"] == 4
        assert step["rollout/turns"] > 1  # a random model is wrong, and asked again
        assert step["rollout/conversations"] == 1  # and its tokens go on
