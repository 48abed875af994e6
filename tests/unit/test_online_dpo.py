"""Iterations of sampled pairs: when they begin, how long they last, what a resumed run goes on with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_config_online_dpo import config
from test_online_dpo_pairs import group

from roll_like.builtin.pipelines.dpo.preferences import answers_of
from roll_like.builtin.pipelines.online_dpo.iterations import (
    COLLECTIONS,
    RefreshedReference,
    SampledPairs,
    in_steps_of,
)
from roll_like.builtin.pipelines.online_dpo.pipeline import Evaluators, OnlineDPOPipeline
from roll_like.errors import CheckpointError, ConfigError, GenerationError
from roll_like.inference.weight_transfer.sync import WeightSync
from roll_like.policy_gradient.workers import Workers
from roll_like.rollout.collection import Collected
from roll_like.rollout.source import GroupSource
from roll_like.types import FloatArray, Group, Scored, TrainingSample
from roll_like.values import Last, Mean, Metrics, merge, reduce


class FakeRollouts:
    """Iteration n has groups whose pairs are known: prompt `10·n + i`, with one equal group at its end."""

    def __init__(self, groups: int = 3, barren: Sequence[int] = ()) -> None:
        self.groups, self.barren, self.asked = groups, barren, []  # type: ignore[var-annotated]

    def collect(self, step: int) -> Collected:
        self.asked.append(step)
        found: list[Group[Scored]] = [
            group([1.0, 1.0 if step in self.barren else 0.0], index=10 * step + index) for index in range(self.groups)
        ]
        found.append(group([0.5, 0.5], index=10 * step + 9))
        return Collected(
            groups=tuple(found), rejected=(), unfinished=(), failures=(), started=len(found),
            wait_reward_seconds=0.0, tokens=1,
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        return {"asked": list(self.asked)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.asked = list(state["asked"])


class FakeEngines:
    """Counts how often the policy was handed over."""

    def __init__(self) -> None:
        self.weights, self.state, self.behind = SimpleNamespace(version=0), FakeNotes(), True

    @contextmanager
    def sampling(self) -> Iterator[Metrics]:
        if self.behind:
            self.weights.version, self.behind = self.weights.version + 1, False
        yield {"sync/tensors_checked": Last(1.0)}


class FakePolicy:
    """Says a number that goes down with every question."""

    def __init__(self) -> None:
        self.questions = 0

    def __call__(self, samples: Sequence[TrainingSample]) -> FloatArray:
        self.questions += 1
        return np.array([-self.questions - len(sample.token_ids) / 7 for sample in samples], np.float32)


class FakeNotes:
    def __init__(self) -> None:
        self.figures: list[Metrics] = []
        self.collected: list[Collected] = []

    def note(self, figures: Metrics, collected: Collected | None = None) -> None:
        self.figures.append(figures)
        self.collected += [] if collected is None else [collected]


class Rig:
    """Sampled pairs with everything around them."""

    def __init__(self, rollouts: FakeRollouts | None = None, **pairs: Any) -> None:
        self.rollouts = rollouts or FakeRollouts()
        self.engines, self.policy = FakeEngines(), FakePolicy()
        self.notes = self.engines.state
        self.reference = RefreshedReference(self.policy)
        changes = {f"pairs__{name}": value for name, value in pairs.items()}
        self.pairs = SampledPairs(config(**changes), self.rollouts, self.engines, self.reference)

    def take(self, count: int = 2) -> list[int]:
        """The prompts of a step's pairs."""
        pairs = self.pairs.take(count)
        self.engines.behind = True  # it learns from them
        return [int(pair.chosen.token_ids[0]) for pair in pairs]


def test_an_iteration_lasts_its_epochs_and_then_the_newest_policy_samples_the_next() -> None:
    rig = Rig(epochs=2)
    steps = [rig.take() for _ in range(4)]
    assert rig.rollouts.asked == [0, 1]  # 2 epochs of 3 pairs, 2 a step: 3 steps
    assert sorted(prompt for step in steps[:3] for prompt in step) == [0, 0, 1, 1, 2, 2]
    assert set(steps[3]) <= {10, 11, 12}
    assert rig.engines.weights.version == 2
    assert rig.policy.questions == 2
    figures = reduce(merge(rig.notes.figures[:2]))
    assert (figures["iteration/number"], figures["iteration/steps"], figures["iteration/pairs"]) == (1, 3, 3)
    assert figures["iteration/without_pair"] == 0.25
    assert figures["rollout/reward/mean"] == 0.5
    assert figures["staleness/max"] == 1  # the fake's samples are of version 0
    assert len(rig.notes.collected) == 2


def test_curricula_count_steps_and_not_iterations() -> None:
    told: list[int] = []
    unused: Any = None
    plain = GroupSource(make_runner=unused, engines=unused, order=unused, accept=unused, begin_step=told.append)
    state: Any = SimpleNamespace(finished=0)
    source = in_steps_of(state, plain)

    class Rollouts(FakeRollouts):
        def collect(self, step: int) -> Collected:
            source.begin_step(step)
            return super().collect(step)

    rig = Rig(Rollouts(), epochs=2)
    for state.finished in range(7):
        rig.take()
    assert rig.rollouts.asked == [0, 1, 2]
    assert told == [0, 3, 6]


def test_an_iteration_lasts_its_steps_and_few_pairs_are_all_of_a_step() -> None:
    rig = Rig(steps=2)
    assert [sorted(rig.take(8)) for _ in range(3)] == [[0, 1, 2], [0, 1, 2], [10, 11, 12]]


def test_the_reference_is_asked_before_the_iteration_and_says_the_same_throughout() -> None:
    rig = Rig(epochs=2)
    first = rig.pairs.take(2)
    said = rig.reference(answers_of(first))
    assert said.tolist() == pytest.approx([-1 - 5 / 7, -1 - 6 / 7] * 2)
    again = [pair for _ in range(2) for pair in rig.pairs.take(2)]
    assert {tuple(rig.reference(answers_of([pair])).tolist()) for pair in again} == {tuple(said[:2].tolist())}
    assert rig.reference(answers_of(rig.pairs.take(1))).tolist() == pytest.approx([-2 - 5 / 7, -2 - 6 / 7])


@pytest.mark.parametrize("taken", range(6))
def test_a_resumed_run_goes_on_in_the_middle_of_an_iteration(taken: int) -> None:
    whole, begun, resumed = Rig(epochs=2), Rig(epochs=2), Rig(epochs=2)
    expected = [whole.take() for _ in range(8)]
    found = [begun.take() for _ in range(taken)]
    resumed.policy.questions = begun.policy.questions  # where its weights were
    resumed.pairs.load_state(json.loads(json.dumps(begun.pairs.state())))
    if taken % 3:
        held = begun.pairs._pairs
        assert resumed.reference(answers_of(held)).tolist() == begun.reference(answers_of(held)).tolist()
    assert found + [resumed.take() for _ in range(8 - taken)] == expected
    assert resumed.rollouts.asked == whole.rollouts.asked
    assert (
        resumed.reference(answers_of(resumed.pairs._pairs)).tolist()
        == whole.reference(answers_of(whole.pairs._pairs)).tolist()
    )


def test_pairs_without_their_reference_are_refused() -> None:
    rig = Rig(epochs=2)
    alone = SampledPairs(config(), rig.rollouts, rig.engines)
    alone.take(2)
    with pytest.raises(CheckpointError, match="no log-probabilities of the reference"):
        rig.pairs.load_state(alone.state())


def test_a_finished_iteration_leaves_no_pairs_in_checkpoints() -> None:
    rig = Rig()
    rig.take(2)
    assert rig.pairs.state()["pairs"]
    rig.take(2)
    assert rig.pairs.state()["pairs"] is None


def test_groups_without_a_pair_are_sampled_again_but_not_for_ever() -> None:
    rig = Rig(FakeRollouts(barren=[0, 1]))
    assert set(rig.take()) <= {20, 21, 22}
    figures = reduce(merge(rig.notes.figures))
    assert figures["iteration/without_pair"] == pytest.approx((4 + 4 + 1) / 12)
    assert (figures["iteration/number"], figures["iteration/pairs"]) == (1, 3)
    assert rig.engines.weights.version == 1  # nothing was learned in between
    with pytest.raises(GenerationError, match=rf"iteration 1 sampled {COLLECTIONS} times and no group gave a pair"):
        Rig(FakeRollouts(barren=range(9))).take()


class FakeGPUSharing:
    """Remembers what engines and policy are told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.pushed = False

    def wake(self) -> None:
        self.said.append("wake")

    def sleep(self) -> None:
        self.said.append("sleep")

    def policy_moves(self) -> None:
        self.pushed = False

    def push(self, weights: Any, policy: Any) -> SimpleNamespace:
        self.pushed = True
        weights.version += 1
        self.said.append(f"push {weights.version} of {policy}")
        metrics = {"time/sync_check": Last(0.0)}
        return SimpleNamespace(metrics=metrics, version=weights.version, not_read_back="two tensors")


def test_engines_get_weights_when_they_are_behind_and_sleep_between_samplings() -> None:
    gpu_sharing: Any = FakeGPUSharing()
    told: list[str] = []
    state: Any = SimpleNamespace(
        timer=lambda _: nullcontext(), interruptible=nullcontext, finished=0, metrics=SimpleNamespace(warn=told.append)
    )
    nothing: Any = None
    workers = Workers(state=state, model=nothing, runner=nothing, engines=nothing, gpu_sharing=gpu_sharing)
    policy: Any = "the policy"
    workers.actor, workers.weights = policy, WeightSync(nothing, nothing)
    for _ in range(2):
        with workers.sampling() as figures:
            gpu_sharing.said.append(f"sample {len(figures)}")
    for _ in range(3):
        with workers.training():
            state.finished += 1
    with workers.sampling():
        gpu_sharing.said.append("sample")
    assert gpu_sharing.said == [
        *("push 1 of the policy", "wake", "sample 1", "sleep"),
        *("wake", "sample 0", "sleep"),
        *("sleep", "sleep", "sleep"),
        *("push 2 of the policy", "wake", "sample", "sleep"),
    ]
    assert told == ["two tensors"]


class FakeEvaluator:
    def __init__(self, name: str, every: int, answers: Any = None) -> None:
        self.name, self.every, self.answers = name, every, answers

    def due(self, finished: int, total: int) -> bool:
        return finished % self.every == 0

    def evaluate(self) -> tuple[Metrics, Any]:
        return {self.name: Mean(1.0)}, self.answers

    def score(self, values: Mapping[str, float]) -> float | None:
        return values.get(self.name)


def test_each_evaluation_has_its_own_schedule_and_the_first_chooses_the_best() -> None:
    answers: Any = object()
    both = Evaluators([FakeEvaluator("eval/avg", 4, answers), FakeEvaluator("eval/accuracy", 6)])
    due = {}
    for finished in range(1, 13):
        if both.due(finished, 12):
            figures, collected = both.evaluate()
            due[finished] = sorted(figures)
            assert (collected is answers) == ("eval/avg" in figures)
    assert due == {4: ["eval/avg"], 6: ["eval/accuracy"], 8: ["eval/avg"], 12: ["eval/accuracy", "eval/avg"]}
    assert both.score({"eval/avg": 0.3, "eval/accuracy": 0.9}) == 0.3
    assert both.score({"eval/accuracy": 0.9}) == 0.9
    assert both.score({}) is None


def test_until_one_is_asked_whether_it_is_due_all_evaluations_are_run() -> None:
    figures, _ = Evaluators([FakeEvaluator("eval/avg", 4), FakeEvaluator("eval/accuracy", 6)]).evaluate()
    assert sorted(figures) == ["eval/accuracy", "eval/avg"]


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("by_reward", [True, False])
def test_a_model_is_measured_by_what_the_configuration_has(
    monkeypatch: pytest.MonkeyPatch, pairs: bool, by_reward: bool
) -> None:
    held: list[str] = []

    @contextmanager
    def measuring(measured: Any) -> Iterator[tuple[Any, Any]]:
        held.append(measured.model.path)
        yield None, None
        held.append("closed")

    def start(measured: Any, *_: Any) -> Any:
        section = "evaluation" if measured.pair_evaluation is None else "pair_evaluation"
        assert (measured.reference_model.path, measured.model.path) == ("org/model", "other")
        return SimpleNamespace(evaluate=lambda: ({f"eval/{section}": Mean(1.0)}, None))

    monkeypatch.setattr("roll_like.run.pipeline.measuring", measuring)
    monkeypatch.setattr(OnlineDPOPipeline, "start_evaluator", start)
    sources = {"sources": [{"path": "eval.jsonl"}]}
    run = config(**({"pair_evaluation": sources} if pairs else {}), **({"evaluation": sources} if by_reward else {}))
    if not pairs and not by_reward:
        with pytest.raises(ConfigError, match="neither an `evaluation` nor a `pair_evaluation` section"):
            OnlineDPOPipeline.evaluate(run, "other")
        return
    figures = OnlineDPOPipeline.evaluate(run, "other")
    assert sorted(figures) == ["eval/evaluation"] * by_reward + ["eval/pair_evaluation"] * pairs
    assert held == ["other", "closed"] * len(figures)  # one after the other: they take the same devices
