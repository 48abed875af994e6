"""Asynchronous rollouts on real Ray, engines and DeepSpeed: what overlaps, what is bounded, what takes turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from hygiene import nothing_left
from run_config import asynchronous, read_lines, run_here, write_episodes_run, write_on_policy_distill_run, write_run
from tiny_model import make_tiny_model

from roll_like.inference.weight_transfer.sync import SyncReport
from roll_like.policy_gradient.workers import Workers
from roll_like.rollout.asynchronous import AsyncRollouts
from roll_like.rollout.collection import Collected
from roll_like.rollout.evaluate import Evaluator
from roll_like.rollout.replay import tokens_stem
from roll_like.rollout.storage import read_groups
from roll_like.types import Group, Scored

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]


def trained(run: Path, steps: int) -> list[list[Group[Scored]]]:
    """Return the groups that each step trained on, with their tokens."""
    return [read_groups(tokens_stem(run, step)) for step in range(1, steps + 1)]


def versions(group: Group[Scored]) -> list[list[int]]:
    """Return, of each sample, the policy versions that drew its tokens, in order."""
    return [[segment.policy_version for segment in sample.trajectory.segments] for sample in group.samples]


def require_bound(steps: Sequence[Sequence[Group[Scored]]], staleness: int) -> None:
    """No token is older than the bound, or younger than the weights that it trains: step n trains version n."""
    for step, groups in enumerate(steps, start=1):
        for group in groups:
            drawn = [version for of_sample in versions(group) for version in of_sample]
            assert step - staleness <= min(drawn) <= max(drawn) <= step, f"{group.task.task_id} in step {step}: {drawn}"


class Phases:
    """What the pipeline's thread was at when samples of the stream were finished."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = "between"
        self.finished: Counter[str] = Counter()
        self.evaluated: list[Collected] = []
        training, evaluate, collect, show = (
            Workers.training,
            Evaluator.evaluate,
            AsyncRollouts.collect,
            AsyncRollouts._show,
        )

        @contextmanager
        def as_training(workers: Workers) -> Iterator[None]:
            with training(workers), self._at("training"):
                yield

        def as_evaluating(evaluator: Evaluator[Any]) -> tuple[Any, Collected]:
            with self._at("evaluating"):
                metrics, collected = evaluate(evaluator)
            self.evaluated.append(collected)
            return metrics, collected

        def as_collecting(rollouts: AsyncRollouts, step: int) -> Collected:
            with self._at("collecting"):
                return collect(rollouts, step)

        def as_finished(rollouts: AsyncRollouts, done: int, total: int) -> None:
            self.finished[self.now] += 1
            show(rollouts, done, total)

        patch.setattr(Workers, "training", as_training)
        patch.setattr(Evaluator, "evaluate", as_evaluating)
        patch.setattr(AsyncRollouts, "collect", as_collecting)
        patch.setattr(AsyncRollouts, "_show", as_finished)

    @contextmanager
    def _at(self, phase: str) -> Iterator[None]:
        self.now = phase
        try:
            yield
        finally:
            self.now = "between"


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> Phases:
    return Phases(monkeypatch)


@pytest.mark.parametrize(
    "engine",
    [{"type": "hf"}, pytest.param({"type": "vllm", "kv_cache_gib": 0.1}, marks=pytest.mark.slow)],
    ids=["hf", "vllm"],
)
def test_engines_sample_while_the_policy_is_trained_and_evaluated(
    tmp_path: Path, float_model: Path, phases: Phases, engine: dict[str, Any]
) -> None:
    config = write_run(
        tmp_path,
        float_model,
        **asynchronous(groups=2, samples=4, tokens=200),
        inference={**engine, "max_running": 8},
        evaluation={
            "sources": [{"path": str(tmp_path / "eval.jsonl")}],
            "every": 2,
            "samples_per_prompt": 1,
            "max_response_tokens": 8,
        },
        checkpoint={"at_end": False, "export": False},
        steps=6,
    )
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    groups = trained(run, 6)
    assert [len(of_step) for of_step in groups] == [2] * 6
    require_bound(groups, 2)
    drawn = [of_sample for of_step in groups for group in of_step for of_sample in versions(group)]
    assert any(len(set(of_sample)) > 1 for of_sample in drawn), "no response crossed a push"
    assert phases.finished["training"] > 0, phases.finished
    assert phases.finished["evaluating"] > 0, phases.finished

    steps = read_lines(run / "metrics.jsonl")
    assert [step["staleness/max"] for step in steps] == [
        max(number - version for group in of_step for of_sample in versions(group) for version in of_sample)
        for number, of_step in enumerate(groups, start=1)
    ]
    assert any(step["schedule/off_policy"] > 0 for step in steps)
    assert any(step["time/engines"] > step["time/generate"] for step in steps), "engines only worked while it waited"
    assert all(0 <= step["util/engines"] <= 1 for step in steps)
    assert all(step["rollout/groups/aborted"] == 0 for step in steps)

    evaluated = [line["step"] for line in read_lines(run / "evaluations.jsonl")]
    assert evaluated == [0, 2, 4, 6]
    for step, collected in zip(evaluated, phases.evaluated, strict=True):
        assert {version for group in collected.groups for each in versions(group) for version in each} == {step + 1}
        rows = read_lines(run / "rollouts" / f"eval_{step:06d}.jsonl")
        assert len(rows) == 8
        assert {row["policy_version"] for row in rows} == {step + 1}


def test_on_shared_devices_responses_freeze_until_the_new_weights_are_there(
    tmp_path: Path, float_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[dict[str, int], dict[str, int]]] = []
    training, push = Workers.training, Workers.push

    def under_way(workers: Workers) -> dict[str, int]:
        (engine,) = workers.inference.cluster._actors
        found: dict[str, int] = ray.get(engine.sampled.remote())
        return found

    @contextmanager
    def watched_training(workers: Workers) -> Iterator[None]:
        with training(workers):
            before = under_way(workers)
            yield
        seen.append((before, {}))

    def watched_push(workers: Workers) -> SyncReport:
        if seen:
            seen[-1] = (seen[-1][0], under_way(workers))
        return push(workers)

    monkeypatch.setattr(Workers, "training", watched_training)
    monkeypatch.setattr(Workers, "push", watched_push)
    changes = asynchronous(groups=2, samples=4, tokens=32)
    del changes["resources"]  # both roles have both cores
    config = write_run(tmp_path, float_model, **changes, inference={"type": "hf", "max_running": 8}, steps=4)
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    assert len(seen) == 4
    assert all(before == after for before, after in seen), "sampled between sleep and push"
    assert any(any(before.values()) for before, _ in seen), "nothing was under way"
    groups = trained(tmp_path / "runs" / "tiny", 4)
    require_bound(groups, 2)
    drawn = [of_sample for of_step in groups for group in of_step for of_sample in versions(group)]
    assert any(len(set(of_sample)) > 1 for of_sample in drawn), "no response was carried over a push"


@pytest.mark.slow
def test_an_environment_that_hangs_delays_its_own_group_only(tmp_path: Path, float_model: Path) -> None:
    changes = asynchronous()
    rollout = {
        "groups_per_step": 4,
        "episodes_per_group": 2,
        "max_turns": 4,
        "max_response_tokens": 8,
        "max_episode_tokens": 160,
        "max_failure_fraction": 0.5,
        "retries": 0,
        "save_tokens": True,
        "schedule": {"type": "async", "max_staleness": 2, "ahead": 1.0},
    }
    environments = [{"id": "tiny/SlowLetters-v0", "name": "slow", "kwargs": {"hangs": 2}}]
    config = write_episodes_run(
        tmp_path,
        float_model,
        environments=environments,
        rollout=rollout,
        resources=changes["resources"],
        env_workers={"workers": 1, "deadline_seconds": 8.0},  # a busy machine may take a moment for any step
        algorithm={"advantage": "grpo"},
        checkpoint={"at_end": False, "export": False},
        steps=5,
    )
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    groups = trained(run, 5)
    require_bound(groups, 2)
    assert [len(of_step) for of_step in groups] == [4] * 5
    assert len(groups[0]) == 4  # the first step did not wait for it
    seeds = [group.task.metadata["seed"] for of_step in groups for group in of_step]
    assert len(set(seeds)) == 20
    assert 2 not in seeds
    assert max(seeds) == 20  # one more was played in its place, and no seed was left out
    steps = read_lines(run / "metrics.jsonl")
    lost = [step["rollout/failures"] for step in steps]
    assert sum(lost) == 2
    assert lost[0] == 0, "the first step waited for a group that could still wait"


@pytest.mark.slow
def test_a_student_learns_from_a_teacher_asynchronously(tmp_path: Path, float_model: Path) -> None:
    teacher = make_tiny_model(tmp_path / "teacher", dtype="float32", seed=1)
    config = write_on_policy_distill_run(
        tmp_path,
        float_model,
        teacher,
        **asynchronous(groups=2, samples=2, tokens=16),
        distillation={"use": "advantage"},
        evaluation={"sources": [{"path": str(tmp_path / "eval.jsonl")}], "samples_per_prompt": 2, "every": 1},
        checkpoint={"at_end": False, "export": False},
        steps=4,
    )
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    require_bound(trained(run, 4), 2)
    steps = read_lines(run / "metrics.jsonl")
    assert any(step["staleness/max"] > 0 for step in steps)
    assert all("distill/reverse_kl" in step for step in steps)
    # their requests go through one router: a second one would take results that are not its own
    assert [line["step"] for line in read_lines(run / "evaluations.jsonl")] == [0, 1, 2, 3, 4]
