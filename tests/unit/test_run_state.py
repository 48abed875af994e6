"""What a part notes within a step is logged with that step, and its samples are kept."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_rollout_source import collected
from tests_support import group, task

from roll_like.cluster import Hang
from roll_like.cluster.spans import SPANS
from roll_like.config.run import GuardsConfig, ProfileConfig
from roll_like.errors import CheckpointError, ConfigError, DiskFullError, GuardError, PluginError
from roll_like.metrics.callbacks import StopWhen
from roll_like.metrics.profiles import read_profiles
from roll_like.run.checkpoint import Checkpoint, CheckpointClock, CheckpointStore, read_checkpoint
from roll_like.run.signals import StopSignal
from roll_like.run.snapshots import Snapshots
from roll_like.run.state import RunState
from roll_like.types import Callbacks, StopRun
from roll_like.values import Mean, Metrics, Sum, merge, reduce


class FakeMetrics:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.logged: dict[int, dict[str, float]] = {}
        self.rollouts: list[tuple[int, int]] = []
        self.warnings: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.history: list[tuple[int, dict[str, float]]] = []
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.console = SimpleNamespace(print=print)

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        pass

    def started(self) -> None:
        pass

    def log(self, step: int, *parts: Metrics) -> dict[str, float]:
        self.logged[step] = reduce(merge(parts))
        return self.logged[step]

    def log_rollouts(self, step: int, rows: list[Any], kind: str = "step") -> None:
        self.rollouts.append((step, len(rows)))

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def event(self, kind: str, **content: Any) -> None:
        self.events.append((kind, content))

    def state(self) -> dict[str, Any]:
        return {}

    def close(self, status: str) -> None:
        self.warnings.append(status)


@pytest.fixture(autouse=True)
def without_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll_like.run.state.dump_config", lambda config: "")


class Disk:
    """An engine that is saved, and a disk that is full for some attempts."""

    def __init__(self, *full: int, kind: type[Exception] = OSError) -> None:
        self.attempts = 0
        self._full = full
        self._kind = kind

    def save(self, directory: Path) -> None:
        self.attempts += 1
        if self.attempts in self._full:
            raise self._kind("No space left on device")

    def load(self, directory: Path) -> None:
        raise AssertionError("nothing is resumed")


def make(
    tmp_path: Path,
    steps: int,
    *,
    guards: Any = None,
    profiled: tuple[int, ...] = (),
    history: Sequence[dict[str, float]] = (),
    memory: Path | None = None,
    resumed: Checkpoint | None = None,
    stop_when: Sequence[dict[str, Any]] = (),
    given: Callbacks | None = None,
    **checkpoint: Any,
) -> tuple[RunState, Any]:
    metrics: Any = FakeMetrics()
    metrics.history = list(enumerate(history, 1))
    settings = {"every": 0, "every_minutes": 0, "at_end": False, "export": False, **checkpoint}
    config: Any = SimpleNamespace(
        total_steps=steps,
        checkpoint=SimpleNamespace(**settings),
        guards=GuardsConfig(**(guards or {})),
        profile=ProfileConfig(steps=profiled),
        callbacks=tuple(StopWhen.Config(**one) for one in stop_when),
    )
    store = CheckpointStore(tmp_path, keep=99, keep_best=False, warn=print)
    state = RunState(
        directory=tmp_path,
        config=config,
        metrics=metrics,
        signal=StopSignal(),
        store=store,
        snapshots=Snapshots(memory, store, durable=True, warn=print),
        resumed=resumed,
        callbacks=given,
    )
    return state, metrics


def run(state: RunState, figures: Metrics | None = None) -> None:
    for step in state.steps():
        state.log(step, figures or {"train/loss": Mean(float(step))})


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step_*"))


def test_a_checkpoint_with_other_parts_is_refused(tmp_path: Path) -> None:
    """Of another pipeline the start refuses it before anything is loaded; this is for pipelines of users."""
    checkpoint = Checkpoint(path=tmp_path / "step_000001", step=1, state={"metrics": {}, "examples": {}})
    state, _ = make(tmp_path, 2, resumed=checkpoint)
    with pytest.raises(CheckpointError, match="it holds the state of examples, and this run has pairs"):
        state.keep([], pairs=Disk())  # type: ignore[arg-type]


def test_a_full_disk_is_tried_again_when_the_next_checkpoint_is_due(tmp_path: Path) -> None:
    state, metrics = make(tmp_path, 4, every=1)
    state.keep([Disk(1, 2)])
    run(state)
    assert written(tmp_path) == ["step_000003", "step_000004"]
    assert [text.partition(" cannot")[0] for text in metrics.warnings] == [
        "the checkpoint of step 1",
        "the checkpoint of step 2",
    ]
    assert all("No space left on device; the run goes on, and tries again" in text for text in metrics.warnings)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, []),  # a run of no time
        ({"export": False}, [2]),  # its only result
        ({"at_end": True}, [2]),
        ({"at_end": False, "export": False}, []),
        ({"every_minutes": 0}, [2]),
        ({"every": 3}, [2]),
        ({"every": 1}, [1, 2]),
    ],
)
def test_a_short_run_whose_model_is_exported_writes_no_checkpoint(
    tmp_path: Path, settings: dict[str, Any], steps: list[int]
) -> None:
    state, _ = make(tmp_path, 2, **{"every_minutes": 10, "at_end": "auto", "export": True, **settings})
    state.keep([Disk()])
    run(state)
    assert written(tmp_path) == [f"step_{step:06d}" for step in steps]


def test_a_run_that_wrote_a_checkpoint_writes_one_at_its_end(tmp_path: Path) -> None:
    state, _ = make(tmp_path, 2, every_minutes=10, at_end="auto", export=True)
    state.keep([Disk()])
    for step in state.steps():
        state.log(step, {})
        if step == 0:
            state.write_checkpoint()
    assert written(tmp_path) == ["step_000001", "step_000002"]


def test_the_third_full_disk_in_a_row_ends_the_run(tmp_path: Path) -> None:
    state, metrics = make(tmp_path, 9, every=1)
    disk = Disk(1, 3, 4, 5)
    state.keep([disk])
    with pytest.raises(DiskFullError, match="the checkpoint of step 5 cannot be written"):
        run(state)
    assert (disk.attempts, len(metrics.warnings), written(tmp_path)) == (5, 3, ["step_000002"])


def test_a_full_disk_at_the_end_is_an_error(tmp_path: Path) -> None:
    state, _ = make(tmp_path, 1, at_end=True)
    state.keep([Disk(1)])
    with pytest.raises(DiskFullError, match="the checkpoint of step 1 cannot be written"):
        run(state)


def test_what_leaves_ranks_out_of_step_ends_the_run(tmp_path: Path) -> None:
    state, _ = make(tmp_path, 3, every=1)
    state.keep([Disk(1, kind=CheckpointError)])
    with pytest.raises(CheckpointError, match="No space left on device"):
        run(state)


def test_a_checkpoint_is_written_by_the_clock_and_its_cost_and_age_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("roll_like.run.state.CheckpointClock", lambda minutes: CheckpointClock(minutes, lambda: now))
    state, metrics = make(tmp_path, 6, every_minutes=1)
    state.keep([])
    for step in state.steps():
        now += 25.0
        state.log(step, {})
    assert written(tmp_path) == ["step_000003", "step_000006"]
    assert [values["checkpoint/age_seconds"] for values in metrics.logged.values()] == [25, 50, 75, 25, 50, 75]
    assert [step for step, values in metrics.logged.items() if "checkpoint/stall_seconds" in values] == [4]


def test_a_guard_warns_and_its_checkpoints_are_unhealthy(tmp_path: Path) -> None:
    state, metrics = make(tmp_path, 5, every=1)
    state.keep([])
    for step in state.steps():
        state.log(step, {"mismatch/kl": Mean(2.0 if step < 4 else 0.1)})
    assert [text.partition(",")[0] for text in metrics.warnings] == ["step 3: mismatch/kl is 2 nats"]
    healthy = [read_checkpoint(tmp_path / f"step_{step:06}").healthy for step in range(1, 6)]
    assert healthy == [True, True, False, False, True]


def test_skipped_updates_are_warned_of_each_time_and_leave_checkpoints_healthy(tmp_path: Path) -> None:
    state, metrics = make(tmp_path, 4, every=1)
    state.keep([])
    skipped: dict[int, Metrics] = {
        1: {"train/skipped_updates": Sum(1.0), "train/grad_norm": Mean(math.nan)},
        2: {"critic/skipped_updates": Sum(2.0), "critic/grad_norm": Mean(math.inf), "train/grad_norm": Mean(1.0)},
    }
    for step in state.steps():
        state.log(step, skipped.get(step, {"train/grad_norm": Mean(1.0)}))
    found = [text.partition(", also when")[0] for text in metrics.warnings]
    assert found == [
        "step 2: train/skipped_updates is 1: the gradient was not finite (train/grad_norm is nan)",
        "step 3: critic/skipped_updates is 2: the gradient was not finite (critic/grad_norm is inf)",
    ]
    assert all(read_checkpoint(tmp_path / f"step_{step:06}").healthy for step in range(1, 5))


def test_a_guard_that_may_stop_ends_the_run_also_after_a_resumption(tmp_path: Path) -> None:
    state, metrics = make(tmp_path, 5, guards={"stop": ["mismatch"]}, history=[{"mismatch/kl": 2.0}] * 2)
    state.keep([])
    with pytest.raises(GuardError, match=r"after step 1 the guard 'mismatch' ended the run: mismatch/kl is 2 nats"):
        run(state, {"mismatch/kl": Mean(2.0)})
    assert len(metrics.warnings) == 1


def test_a_profiled_step_that_a_guard_ends_the_run_after_has_a_trace(tmp_path: Path) -> None:
    state, _ = make(tmp_path, 5, guards={"stop": ["mismatch"]}, profiled=(2,), history=[{"mismatch/kl": 2.0}])
    state.keep([])
    with pytest.raises(GuardError, match="after step 2"):
        run(state, {"mismatch/kl": Mean(2.0)})
    assert [profile["step"] for profile in read_profiles(tmp_path)] == [2]


def test_a_profiled_step_that_the_run_is_stopped_in_is_said(tmp_path: Path) -> None:
    state, metrics = make(tmp_path, 5, profiled=(2,))
    state.keep([])
    for step in state.steps():
        if step == 1:
            break
        state.log(step, {})
    state.stop()
    assert metrics.warnings[-2:] == ["step 2 was left while it was profiled: there is no trace of it", "stopped"]
    assert not SPANS.on


def test_hangs_are_told_and_counted_whichever_thread_finds_them(tmp_path: Path) -> None:
    state, metrics = make(tmp_path, 30)
    state.keep([])
    hang = Hang("training", (0, 1), "save", 60.0, stopped=False, to_kill=frozenset(), witnesses=frozenset())
    finding = threading.Thread(target=lambda: [state.note_hang(hang, "it hung") for _ in range(200)])
    finding.start()
    for step in state.steps():
        state.log(step, {})
        if step == 28:  # the last step has what came after the others
            finding.join()
    assert sum(values.get("health/hangs/training", 0) for values in metrics.logged.values()) == 400
    assert metrics.warnings == ["it hung"] * 200
    assert metrics.events == [("hang", {"role": "training", "ranks": (0, 1), "phase": "save", "seconds": 60.0})] * 200


def test_what_is_noted_belongs_to_the_step_under_way(tmp_path: Path) -> None:
    state, metrics = make(tmp_path, 3)
    for step in state.steps():
        if step == 1:
            state.note({"iteration/margin": Mean(1.0, 3)}, collected([group(task(0), [0.0, 1.0])]))
            state.note({"iteration/margin": Mean(5.0, 1)}, collected([group(task(1), [0.0, 1.0, 1.0])]))
            state.note({"iteration/pairs": Sum(2.0)})
        state.log(step, {"train/loss": Mean(float(step))})
    assert [logged["train/loss"] for logged in metrics.logged.values()] == [0, 1, 2]
    assert (metrics.logged[2]["iteration/margin"], metrics.logged[2]["iteration/pairs"]) == (2.0, 2.0)
    assert not any("iteration/margin" in metrics.logged[step] for step in (1, 3))
    assert metrics.rollouts == [(2, 5)]  # once: a second writing would replace the first


def test_checkpoints_come_to_disk_from_memory_while_steps_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[str] = []
    copy = CheckpointStore.copy
    monkeypatch.setattr(
        CheckpointStore,
        "copy",
        lambda store, path: (writers.append(threading.current_thread().name), copy(store, path))[1],
    )
    state, metrics = make(tmp_path / "run", 5, every=2, memory=tmp_path / "memory")
    state.keep([Disk()])
    run(state)
    state.write_checkpoint()
    assert written(tmp_path / "run") == ["step_000002", "step_000004", "step_000005"]
    assert [name.partition("_")[0] for name in writers] == ["checkpoint", "checkpoint"]
    assert all("checkpoint/stall_seconds" in metrics.logged[step] for step in (3, 5))
    assert metrics.warnings == []


def test_a_disk_that_is_full_for_copies_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []
    copy = CheckpointStore.copy

    def full_at_first(store: CheckpointStore, path: Path) -> Path:
        attempts.append(1)
        if len(attempts) < 3:
            raise DiskFullError("the checkpoint cannot be written: No space left on device")
        return copy(store, path)

    monkeypatch.setattr(CheckpointStore, "copy", full_at_first)
    state, metrics = make(tmp_path / "run", 5, every=1, memory=tmp_path / "memory")
    state.keep([Disk()])
    run(state)
    state.write_checkpoint()
    assert len(metrics.warnings) == 2
    assert written(tmp_path / "run")[-1] == "step_000005"


def test_an_unhealthy_step_is_on_disk_and_not_in_memory(tmp_path: Path) -> None:
    state, _ = make(tmp_path / "run", 3, every=1, memory=tmp_path / "memory")
    state.keep([])
    for step in state.steps():
        state.log(step, {"mismatch/kl": Mean(2.0)})
    assert [path.name for path in (tmp_path / "memory").iterdir()] == ["step_000002"]
    assert read_checkpoint(tmp_path / "run" / "step_000002").healthy
    assert not read_checkpoint(tmp_path / "run" / "step_000003").healthy


LOSSES = [0.0, 1.0, 2.0, 0.5, 3.0, 4.0, 5.0]


def logged_until_the_end(state: RunState) -> list[int]:
    finished = []
    for step in state.steps():
        state.log(step, {"train/loss": Mean(LOSSES[step])})
        finished.append(state.finished)
    return finished


@pytest.mark.parametrize(
    ("bound", "last"),
    [
        ({"above": 1.5}, 3),
        ({"above": 1.5, "patience": 2}, 6),
        ({"above": 9, "below": 0.25}, 1),
        ({"above": 5.0}, 7),  # not above: the run comes to its own end
    ],
)
def test_a_metric_beyond_its_bound_ends_the_run_after_the_step(tmp_path: Path, bound: Any, last: int) -> None:
    state, metrics = make(tmp_path, 7, stop_when=[{"metric": "train/loss", **bound}], at_end=True)
    assert logged_until_the_end(state) == list(range(1, last + 1))
    assert written(tmp_path) == [f"step_{last:06d}"]
    assert len(metrics.warnings) == (last < 7)
    if last == 3:
        assert metrics.warnings == ["a callback ends the run after step 3: train/loss is 2, above 1.5"]


def test_a_function_ends_the_run_and_the_last_step_is_evaluated(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []

    class Evaluator:
        def due(self, finished: int, total: int) -> bool:
            asked.append((finished, total))
            return False

    def twice(step: int, figures: Mapping[str, float]) -> None:
        if figures["train/loss"] == 1.0:
            raise StopRun

    state, metrics = make(tmp_path, 7, given=Callbacks(on_step=twice))
    for step in state.steps():
        state.log(step, {"train/loss": Mean(LOSSES[step])})
        state.evaluate(Evaluator())  # type: ignore[arg-type]
    assert asked == [(1, 7), (2, 2)]
    assert metrics.warnings == ["a callback ends the run after step 2: a callback raised StopRun"]


def test_a_run_that_a_callback_has_ended_stays_ended_when_it_is_resumed(tmp_path: Path) -> None:
    bound = [{"metric": "train/loss", "above": 1.5}]
    state, metrics = make(tmp_path, 7, stop_when=bound, at_end=True)
    assert logged_until_the_end(state) == [1, 2, 3]
    (kind, content) = metrics.events[-1]
    (tmp_path / "events.jsonl").write_text(json.dumps({"kind": kind, **content}) + "\n")
    (checkpoint,) = tmp_path.glob("step_*")
    for callbacks, steps in ((bound, []), ([], [4, 5, 6, 7])):
        state, _ = make(tmp_path, 7, stop_when=callbacks, resumed=read_checkpoint(checkpoint))
        assert logged_until_the_end(state) == steps


def test_patience_counts_on_after_a_resumption(tmp_path: Path) -> None:
    history = [{"train/loss": loss} for loss in LOSSES[:5]]
    resumed: Any = SimpleNamespace(step=5, path=tmp_path, state={"metrics": {}})
    bound = [{"metric": "train/loss", "above": 1.5, "patience": 2}]
    state, _ = make(tmp_path, 7, stop_when=bound, resumed=resumed, history=history)
    assert logged_until_the_end(state) == [6]


def test_a_metric_that_is_not_there_is_named_with_what_it_may_be(tmp_path: Path) -> None:
    state, _ = make(tmp_path, 7, stop_when=[{"metric": "train/los", "above": 1}])
    with pytest.raises(ConfigError, match="no metric 'train/los' in step 1; did you mean 'train/loss'"):
        run(state)
    state, _ = make(tmp_path / "2", 7, stop_when=[{"metric": "train/kl", "above": 1}])
    assert logged_until_the_end(state) == [*range(1, 8)]  # it exists: a step may lack it


def test_callbacks_of_a_configuration_are_named_when_they_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StopWhen, "on_step", lambda *_: 1 / 0)
    state, _ = make(tmp_path, 7, stop_when=[{"metric": "train/loss", "above": 1}])
    with pytest.raises(PluginError, match="the callback 'stop_when' failed after step 1: ZeroDivisionError"):
        run(state)


def test_metrics_of_evaluations_are_looked_at_after_evaluations(tmp_path: Path) -> None:
    del tmp_path
    callback = StopWhen(StopWhen.Config(metric="eval/avg", above=0.5))
    callback.on_step(1, {"train/loss": 1.0})
    callback.on_evaluation(1, {"eval/avg": 0.5})
    with pytest.raises(StopRun, match=r"eval/avg is 0.6, above 0.5"):
        callback.on_evaluation(2, {"eval/avg": 0.6})
    with pytest.raises(ValueError, match="set above, below, or both"):
        StopWhen.Config(metric="eval/avg")
