"""Trained models that die in a run: they end as if nothing had been, and each step is sampled and logged once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_run_state import make, without_a_configuration

from roll_like.cluster import WorkerDied
from roll_like.config.training import CopySection
from roll_like.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    NonFiniteGradientError,
    RollLikeError,
    WorkerError,
)
from roll_like.inference.weight_transfer.sync import SyncReport, WeightSync
from roll_like.policy_gradient.workers import Workers
from roll_like.rollout.source import KeptRollouts
from roll_like.run.recovery import Recovery
from roll_like.training.engine import PolicyCopy, TrainingEngine
from roll_like.values import Mean

STEPS = 6
__all__ = ["without_a_configuration"]  # a fixture


def error_of(role: str, kind: type[WorkerError] = WorkerDied) -> WorkerError:
    error = kind(f"{role} worker 1 in forward_backward: its process is gone\nand its traceback")
    error.worker = (role, 1)
    return error


class Model(TrainingEngine[Any]):
    """Its weights are a number that depends on all that it learned, in order."""

    def __init__(self, name: str = "training", deaths: Mapping[int, RollLikeError] | None = None) -> None:
        self.cluster: Any = SimpleNamespace(name=name)
        self.weights = 1
        self.calls = 0
        self.rebuilt = 0
        self.deaths = dict(deaths or {})

    def call(self) -> None:
        """Be asked something; the n-th call may find it dead."""
        self.calls += 1
        if self.calls in self.deaths:
            self.weights = -1
            raise self.deaths[self.calls]

    def learn(self, batch: int) -> None:
        self.call()
        self.weights = (31 * self.weights + batch) % 1_000_003
        self.call()  # it may die after its weights have moved

    def move_copy(self, copy: str, share: float, *, reset_optimizer: bool = False) -> float:
        return 0.0

    def save(self, directory: Path) -> None:
        self.call()
        (directory / f"{self.cluster.name}.txt").write_text(str(self.weights))

    def load(self, directory: Path) -> None:
        self.weights = int((directory / f"{self.cluster.name}.txt").read_text())

    def rebuild(self) -> None:
        self.rebuilt += 1
        self.weights = 1


class Counting:
    """A part of the driver that changes with every step; and batches that are never the same twice."""

    def __init__(self) -> None:
        self.count = 0
        self.asked: list[int] = []

    def collect(self, step: int) -> Any:
        self.asked.append(step)
        return 7 * step + len(self.asked)

    def state(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


class Run:
    """The loop of a pipeline over fakes."""

    def __init__(self, folder: Path, model: Model, critic: Model, *, every: int = 2, replaces: bool = True) -> None:
        self.model, self.critic = model, critic
        self.data, self.order, self.sampled = Counting(), Counting(), Counting()
        self.state, self.metrics = make(folder, STEPS, every=every, at_end=True)
        rollouts: Any = self.sampled
        self.rollouts = KeptRollouts(rollouts, until_checkpoint=every > 0)
        self.copy = PolicyCopy(model, "reference", CopySection(sync_steps=4))
        self.state.keep([model, critic], order=self.order, rollouts=self.rollouts, reference=self.copy)
        self.recovery = Recovery(self.state, sleep=lambda seconds: None)
        self.replaces = replaces

    def run(self) -> None:
        for step in self.state.steps():
            batch: Any = self.rollouts.collect(step)
            self.order.count += batch
            self.critic.learn(batch)
            self.model.learn(batch + self.order.count)
            self.state.note({"noted": Mean(1.0)})
            self.state.log(step, {"train/loss": Mean(float(step))}, self.copy.follow(step + 1))

    def to_the_end(self) -> None:
        while True:
            try:
                self.run()
                break
            except RollLikeError as error:
                self.recovery.after(error)


Deaths = Mapping[int, RollLikeError]


def end_of(folder: Path, deaths: Deaths, of_critic: Deaths, every: int) -> Run:
    run = Run(folder, Model(deaths=deaths), Model("critic", of_critic), every=every)
    run.to_the_end()
    return run


@settings(max_examples=2 * settings().max_examples)
@given(
    st.sets(st.integers(1, 2 * STEPS), max_size=3),
    st.sets(st.integers(1, 2 * STEPS), max_size=2),
    st.integers(1, 7),
)
def test_weights_end_as_if_nothing_had_been(deaths: set[int], of_critic: set[int], every: int) -> None:
    # each failure of another kind: two of one kind in a step end the run
    kinds = [type(f"Died{number}", (WorkerDied,), {}) for number in range(5)]
    with TemporaryDirectory() as first, TemporaryDirectory() as second:
        expected = end_of(Path(first), {}, {}, every)
        run = end_of(
            Path(second),
            {call: error_of("training", kinds.pop()) for call in deaths},
            {call: error_of("critic", kinds.pop()) for call in of_critic},
            every,
        )
        assert (run.model.weights, run.critic.weights) == (expected.model.weights, expected.critic.weights)
        assert run.order.count == expected.order.count
        assert run.sampled.asked == list(range(STEPS)), "sampled once"
        assert [*run.metrics.logged] == list(range(1, STEPS + 1)), "logged once"
        assert all(values["noted"] == 1 for values in run.metrics.logged.values())
        assert {path.name for path in Path(first).glob("step_*")} <= {path.name for path in Path(second).glob("step_*")}


def test_what_happened_is_said_in_figures_and_a_sentence(tmp_path: Path) -> None:
    run = end_of(tmp_path, {13: error_of("training")}, {}, 2)
    assert (run.model.rebuilt, run.critic.rebuilt) == (1, 1)
    (warning,) = run.metrics.warnings
    assert warning == (
        "training worker 1 in forward_backward: its process is gone; every rank of the trained models was replaced in "
        "0 s, and step 5 is computed again from the checkpoint of step 4"
    )
    (figures,) = [values for values in run.metrics.logged.values() if "health/restarts/training" in values]
    assert figures["health/restarts/training"] == 1
    assert figures["health/steps_replayed"] == 1
    assert figures["health/recovery_seconds"] >= 0


def test_the_same_error_in_the_same_step_ends_the_run(tmp_path: Path) -> None:
    model = Model(deaths={3: error_of("training"), 6: error_of("training")})
    run = Run(tmp_path, model, Model("critic"), every=5)
    with pytest.raises(WorkerDied, match="its process is gone") as caught:
        run.to_the_end()
    assert caught.value.message.endswith("; step 2 ended like this twice, so it is not tried again")
    assert model.rebuilt == 1


def test_without_checkpoints_only_the_first_step_can_be_learned_again(tmp_path: Path) -> None:
    end_of(tmp_path / "first", {1: error_of("training")}, {}, 0)
    run = Run(tmp_path / "second", Model(deaths={3: error_of("training")}), Model("critic"), every=0)
    with pytest.raises(CheckpointError, match=r"start the trainer again from: 1 steps are lost(.|\n)*every_minutes"):
        run.to_the_end()


def test_restarts_are_bounded(tmp_path: Path) -> None:
    deaths = {call: error_of("training", type(f"Died{call}", (WorkerDied,), {})) for call in range(1, 9)}
    model = Model(deaths=deaths)
    run = Run(tmp_path, model, Model("critic"))
    with pytest.raises(WorkerDied) as caught:
        run.to_the_end()
    assert caught.value.message.endswith(
        "; every rank of the trained models was lost too often and is not replaced again"
    )
    assert model.rebuilt == 5


def test_gradients_that_are_not_finite_send_the_models_back_once(tmp_path: Path) -> None:
    model = Model(deaths={10: NonFiniteGradientError("too many were skipped")})
    run = Run(tmp_path, model, Model("critic"), every=3)
    saved = []
    save = model.save
    monkey: Any = model
    monkey.save = lambda directory: (save(directory), saved.append(model.weights))
    run.to_the_end()
    # steps 1 to 3, a checkpoint, step 4, and step 5 is left out
    assert [*run.metrics.logged] == list(range(1, STEPS + 1))
    assert run.sampled.asked == list(range(STEPS)), "the step after it has new samples"
    (rewound,) = [step for step, values in run.metrics.logged.items() if "health/rewinds" in values]
    assert rewound == 5
    assert saved[:2] == [saved[0]] * 2, "what is written after step 5 is what was written after step 3"
    assert (model.rebuilt, run.critic.rebuilt) == (1, 1)
    assert run.copy.state() == {"last_sync": 0}, "it moved after step 4, and is where it was after step 3"
    (warning,) = run.metrics.warnings
    assert warning.startswith("too many were skipped; after 0 s the models are where they were after step 3, step 5 is")


def test_gradients_that_stay_so_end_the_run(tmp_path: Path) -> None:
    errors = {call: NonFiniteGradientError("too many were skipped") for call in (8, 10)}
    run = Run(tmp_path, Model(deaths=errors), Model("critic"), every=3)
    with pytest.raises(NonFiniteGradientError, match=r"already rolled back at step 4; it did not help"):
        run.to_the_end()


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(tmp_path: Path) -> None:
    run = Run(tmp_path, Model(deaths={3: NonFiniteGradientError("too many")}), Model("critic"), every=0)
    with pytest.raises(NonFiniteGradientError, match=r"too many$"):
        run.to_the_end()


@pytest.mark.parametrize(
    ("error", "role"),
    [(ConfigError("wrong"), "training"), (EngineError("not finite"), "training"), (WorkerDied("gone"), "inference")],
)
def test_other_errors_end_the_run(tmp_path: Path, error: RollLikeError, role: str) -> None:
    error.worker = (role, 0)
    model = Model(deaths={3: error})
    with pytest.raises(type(error), match=error.message):
        Run(tmp_path, model, Model("critic")).to_the_end()
    assert model.rebuilt == 0


def test_ranks_that_do_not_start_at_once_are_started_again(tmp_path: Path) -> None:
    model = Model(deaths={3: error_of("training")})
    rebuild, failures = model.rebuild, [error_of("training"), error_of("training")]

    def fail() -> None:
        rebuild()
        if failures:
            raise failures.pop()

    model.rebuild = fail  # type: ignore[method-assign]
    run = Run(tmp_path, model, Model("critic"))
    run.to_the_end()
    assert model.rebuilt == 3
    assert len(run.metrics.warnings) == 1


class Pushes(WeightSync):
    def __init__(self) -> None:
        self.version = 0


class FakeGPUSharing:
    """Notes which weights engines get as which version."""

    def __init__(self, model: Model) -> None:
        self.model, self.got = model, list[tuple[int, int]]()

    def push(self, weights: WeightSync, policy: Any) -> SyncReport:
        self.model.call()
        weights.version += 1
        self.got.append((weights.version, self.model.weights))
        return SyncReport(
            version=weights.version, bytes=1, buckets=1, seconds=0, check_seconds=0, checked=1, unchecked=()
        )

    def sleep(self) -> None:
        pass

    policy_moves = sleep


class PushingRun(Run):
    """The same loop, with engines that get the weights after every step."""

    def __init__(self, folder: Path, model: Model) -> None:
        super().__init__(folder, model, Model("critic"))
        self.gpu_sharing: Any = FakeGPUSharing(model)
        self.published: list[int] = []
        nothing: Any = None
        self.workers = Workers(
            state=self.state, model=nothing, runner=nothing, engines=nothing, gpu_sharing=self.gpu_sharing,
            on_push=[self.published.append],
        )  # fmt: skip
        self.workers.actor, self.workers.weights = model, Pushes()
        self.versions: list[int] = []

    def run(self) -> None:
        self.workers.push()
        for step in self.state.steps():
            batch: Any = self.rollouts.collect(step)
            with self.workers.training():
                self.order.count += batch
                self.model.learn(batch + self.order.count)
            sync = self.workers.push()
            assert sync.version == step + 2
            self.state.log(step, {"train/loss": Mean(float(step))})


@pytest.mark.parametrize("call", range(1, 26))
def test_engines_get_each_version_with_its_weights_and_none_that_is_older(tmp_path: Path, call: int) -> None:
    expected = PushingRun(tmp_path / "expected", Model())
    expected.to_the_end()
    run = PushingRun(tmp_path / "run", Model(deaths={call: error_of("training")}))
    run.to_the_end()
    assert Counter(expected.gpu_sharing.got) == Counter(set(run.gpu_sharing.got)), "the same weights by version"
    versions = [version for version, _ in run.gpu_sharing.got]
    assert versions == sorted(versions), "never an older one"
    assert run.published == expected.published == list(range(1, STEPS + 2))
