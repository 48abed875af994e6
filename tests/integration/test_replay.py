"""A run that replays the rollouts of another trains exactly as that did, with a trainer and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hygiene import nothing_left
from run_config import (
    command_here,
    read_lines,
    run_here,
    write_episodes_run,
    write_on_policy_distill_run,
    write_run,
)
from tiny_families import make_family

from roll_like.rollout.replay import tokens_stem
from roll_like.rollout.storage import read_groups_and_values
from roll_like.types import Group, Scored, TrainingValues

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]


def trained(run: Path) -> list[dict[str, Any]]:
    """Each step's figures of the trainer and of the samples, without times."""
    parts = ("train/", "mismatch/", "correction/", "distill/", "advantage/", "rollout/reward/", "rollout/tokens")
    return [
        {name: value for name, value in step.items() if name.startswith(parts)}
        for step in read_lines(run / "metrics.jsonl")
    ]


def check_replay(directory: Path, config: Path, *changes: str) -> None:
    """Record two steps, replay the first, resume with the second, and compare."""
    runs = directory / "runs"
    code, output = run_here(config, "steps=2", "rollout.save_tokens=true", *changes)
    assert code == 0, output
    replay = (f"rollout.schedule={{type: replay, path: {runs / 'tiny'}}}", "name=again", *changes)
    with nothing_left():
        code, output = run_here(config, "steps=1", *replay)
        assert code == 0, output
        code, output = run_here(config, "steps=2", *replay, "--resume", "again")
        assert code == 0, output
    expected, found = trained(runs / "tiny"), trained(runs / "again")
    assert found == expected
    assert len(found) == 2
    assert found[0] != found[1]
    assert any(name.startswith("train/grad_norm") for name in found[0]), found[0]
    steps = read_lines(runs / "again" / "metrics.jsonl")
    assert all(step["staleness/max"] == 0 for step in steps)
    assert not [name for step in steps for name in step if name.startswith(("sync/", "time/sync"))]
    code, output = run_here(config, "steps=3", *replay)
    assert code != 0
    assert "has rollouts with tokens of 2 steps, and steps: 3 asks for more" in output


def test_answers_are_replayed(tmp_path: Path, tiny_model: Path) -> None:
    """Of a run that leaves tokens out: what was kept is trained with, written, resumed and read back."""
    sampling = {"top_p": 0.7, "top_k": 100, "min_p": 0.01, "temperature": 0.9}
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_response_tokens": 12, **sampling}
    check_replay(tmp_path, write_run(tmp_path, tiny_model, algorithm={"updates_per_step": 2}, rollout=rollout))
    runs = tmp_path / "runs"
    for number, step in enumerate(read_lines(runs / "tiny" / "metrics.jsonl"), start=1):
        assert step["mismatch/logprob_difference_max"] < 1e-4
        assert 1 < step["rollout/kept/mean"] <= step["rollout/kept/max"] <= 100
        groups, _ = read_groups_and_values(tokens_stem(runs / "tiny", number))
        for trajectory in (sample.trajectory for group in groups for sample in group.samples):
            assert trajectory.kept is not None
            np.testing.assert_array_equal(trajectory.kept.counts > 0, trajectory.sampled)
    # without what was kept: another difference from the engine
    for path in sorted((runs / "tiny" / "rollouts").glob("*.json")):
        path.write_text(re.sub(r'\{"~KeptTokens":\{[^{}]*\{[^{}]*\}[^{}]*\{[^{}]*\}\}\}', "null", path.read_text()))
    schedule = f"rollout.schedule={{type: replay, path: {runs / 'tiny'}}}"
    code, output = run_here(tmp_path / "run.yaml", "steps=1", schedule, "name=others")
    assert code != 0
    assert "was recorded without the tokens that rollout.top_p and rollout.top_k and rollout.min_p kept" in output
    whole = ("rollout.top_p=1", "rollout.top_k=0", "rollout.min_p=0")
    code, output = run_here(tmp_path / "run.yaml", "steps=1", schedule, "name=whole", *whole)
    assert code == 0, output
    (step,) = read_lines(runs / "whole" / "metrics.jsonl")
    assert step["mismatch/logprob_difference"] > 0.1


@pytest.mark.slow
def test_episodes_are_replayed(tmp_path: Path, tiny_model: Path) -> None:
    changes = ("rollout.save_tokens=true", "rollout.save_logprobs=true")
    check_replay(tmp_path, write_episodes_run(tmp_path, tiny_model), *changes)
    runs = tmp_path / "runs"
    for step, figures in enumerate(read_lines(runs / "tiny" / "metrics.jsonl"), start=1):
        groups, values = read_groups_and_values(tokens_stem(runs / "tiny", step))
        assert values is not None
        check_values(groups, values, figures)
        # the second step of the replay was done after a resumption
        again = read_groups_and_values(tokens_stem(runs / "again", step))[1]
        assert again is not None
        np.testing.assert_array_equal(np.concatenate(again.logprobs), np.concatenate(values.logprobs))
        np.testing.assert_array_equal(np.concatenate(again.advantages), np.concatenate(values.advantages))
    check_page(tmp_path)


def test_experts_are_replayed(tmp_path: Path) -> None:
    """Episodes of a mixture: what engines tell of its experts is trained with, written, resumed and read back."""
    replay = ("algorithm.router_replay=true", "inference={type: hf, max_running: 8}", "evaluation=null")
    runs = tmp_path / "runs"
    config = write_episodes_run(tmp_path, make_family("qwen3_moe", tmp_path / "model"))
    check_replay(tmp_path, config, *replay)
    for number, step in enumerate(read_lines(runs / "tiny" / "metrics.jsonl"), start=1):
        assert 0 <= step["train/router_disagreement"] < 0.01  # float32: all but near ties are chosen alike
        assert step["mismatch/logprob_difference_max"] < 1e-4
        groups, _ = read_groups_and_values(tokens_stem(runs / "tiny", number))
        for trajectory in (sample.trajectory for group in groups for sample in group.samples):
            routes = trajectory.routes
            assert routes is not None
            assert routes.shape == (len(trajectory.token_ids), 2, 2)
            ends = [part.end - 1 for part in trajectory.parts]
            assert (np.delete(routes, ends, 0) < 4).all()
            assert (routes[ends] == 255).all()
    # other experts: another difference from the engine, and another update
    for path in sorted((runs / "tiny" / "rollouts").glob("*.npz")):
        arrays = dict(np.load(path))
        arrays["uint8"] = np.where(arrays["uint8"] < 4, 3 - arrays["uint8"], arrays["uint8"])
        np.savez(path, **arrays)
    schedule = f"rollout.schedule={{type: replay, path: {runs / 'tiny'}}}"
    code, output = run_here(config, "steps=1", schedule, "name=others", *replay)
    assert code == 0, output
    (step,) = read_lines(runs / "others" / "metrics.jsonl")
    assert step["train/router_disagreement"] > 0.2
    assert step["mismatch/logprob_difference"] > 1e-3


def check_values(groups: list[Group[Scored]], values: TrainingValues, figures: dict[str, Any]) -> None:
    """Compare what was saved of a step with what the engine reported and with the step's own figures."""
    samples = [sample.trajectory for group in groups for sample in group.samples]
    sampled = np.concatenate([one.sampled for one in samples])
    engine = np.concatenate([one.logprobs for one in samples])
    trainer, advantages = np.concatenate(values.logprobs), np.concatenate(values.advantages)
    assert trainer.shape == advantages.shape == sampled.shape
    assert values.trained == [True] * len(samples)
    assert not trainer[~sampled].any()
    assert not advantages[~sampled].any()
    # the weights are those that the engine sampled with: after the update they are not
    difference = np.abs(trainer - engine)[sampled].astype(np.float64)
    assert difference.max() < 1e-4
    assert np.abs(engine[sampled]).mean() > 0.1
    assert figures["mismatch/logprob_difference"] == pytest.approx(difference.mean(), abs=1e-6)
    assert figures["mismatch/kl"] == pytest.approx((np.expm1(difference) - difference).mean(), abs=1e-8)
    assert advantages[sampled].any()


def check_page(directory: Path) -> None:
    """Write the page of the recorded run, and compare its tokens' texts with the rollouts' own."""
    code, output = command_here(directory, "rollouts", "tiny", "-o", "page.html")
    assert code == 0, output
    page = (directory / "page.html").read_text()
    (data,) = re.findall(r'id="data">(.*?)</script>', page)
    rows = [row for row in json.loads(data)["rollouts"] if row["kind"] == "train"]
    assert len(rows) == 32
    for row in rows:
        assert row["staleness"] == 0
        said: dict[int, str] = {}
        for piece in row["saved"]["pieces"]:
            if not isinstance(piece, str):
                said[piece["turn"]] = said.get(piece["turn"], "") + "".join(piece["texts"])
        for turn, record in enumerate(row["turns"]):
            # special tokens, such as the one that ends a turn, are no part of its text
            assert re.sub(r"<pad>|<\|im_start\|>|<\|im_end\|>", "", said[turn]) == record["text"]
        assert (
            sum(len(piece["texts"]) for piece in row["saved"]["pieces"] if not isinstance(piece, str)) == row["tokens"]
        )


@pytest.mark.slow
def test_a_teacher_scores_replayed_answers(tmp_path: Path, tiny_model: Path) -> None:
    config = write_on_policy_distill_run(tmp_path, tiny_model, tiny_model)
    check_replay(tmp_path, config, "evaluation=null")
