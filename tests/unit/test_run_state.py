"""What a part notes within a step is logged with that step, and its samples are kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from test_rollout_source import collected
from tests_support import group, task

from roll_like.run.checkpoint import CheckpointStore
from roll_like.run.signals import StopSignal
from roll_like.run.state import RunState
from roll_like.values import Mean, Metrics, Sum, merge, reduce


class FakeMetrics:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.logged: dict[int, dict[str, float]] = {}
        self.rollouts: list[tuple[int, int]] = []

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        pass

    def log(self, step: int, *parts: Metrics) -> dict[str, float]:
        self.logged[step] = reduce(merge(parts))
        return self.logged[step]

    def log_rollouts(self, step: int, rows: list[Any], kind: str = "step") -> None:
        self.rollouts.append((step, len(rows)))

    def state(self) -> dict[str, Any]:
        return {}


def test_what_is_noted_belongs_to_the_step_under_way(tmp_path: Path) -> None:
    metrics: Any = FakeMetrics()
    config: Any = SimpleNamespace(total_steps=3, checkpoint=SimpleNamespace(every=0, at_end=False))
    store = CheckpointStore(tmp_path, keep=1, keep_best=False, warn=print)
    state = RunState(directory=tmp_path, config=config, metrics=metrics, signal=StopSignal(), store=store, resumed=None)
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
