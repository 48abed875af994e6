"""What is lost is replaced after a pause, reported in one form, and given up where that does not help."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from roll_like.cluster import worker_restarts
from roll_like.cluster.worker_restarts import RestartBudget, WorkerDied, WorkerRestarts
from roll_like.errors import CheckpointError, EngineError, GenerationError, RollLikeError, WorkerError

DEATH = "engine worker 1 in poll: its process is gone (a long story)\nwith a traceback"


class Role:
    """A role whose starts end as a test says; pauses are noted, and not waited for."""

    def __init__(self, *starts: Exception | None) -> None:
        self.starts, self.pauses = list(starts), list[float]()
        self.told: list[tuple[str, str, bool]] = []
        self.restarts = WorkerRestarts("inference", "its requests are sampled again", self.report)

    def report(self, role: str, text: str, *, seconds: float | None) -> None:
        self.told.append((role, text, seconds is not None))

    def start(self) -> None:
        if self.starts and (error := self.starts.pop(0)) is not None:
            raise error

    def replace(self) -> None:
        self.restarts.replace("engine 1", WorkerDied(DEATH), self.start, self.pauses.append)

    def replace_beside_others(self) -> None:
        async def start() -> None:
            self.start()

        asyncio.run(self.restarts.replace_async("engine 1", WorkerDied(DEATH), start))


@pytest.fixture(params=["replace", "replace_beside_others"])
def replace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Role], None]:
    monkeypatch.setattr(worker_restarts, "PAUSES", (0.0, 0.001, 0.002))
    return getattr(Role, request.param)


def test_a_replacement_is_one_sentence_and_one_event(replace: Callable[[Role], None]) -> None:
    role = Role(GenerationError("no memory"), EngineError("no answer"))
    replace(role)
    text = (
        "engine worker 1 in poll: its process is gone; engine 1 was replaced in 0 s, and its requests are sampled again"
    )
    assert role.told == [("inference", text, True)]


def test_a_budget_that_is_spent_is_said_with_the_latest_error(replace: Callable[[Role], None]) -> None:
    role = Role(None, WorkerError("first"), WorkerError("second"))
    replace(role)
    with pytest.raises(WorkerError, match="second; engine 1 was lost too often and is not replaced again"):
        replace(role)
    assert role.told[1:] == [("inference", "second; engine 1 was lost too often and is not replaced again", False)]


def test_what_does_not_pass_by_itself_is_not_tried_again() -> None:
    role = Role(CheckpointError("no checkpoint"))
    with pytest.raises(CheckpointError, match=r"^no checkpoint$"):
        role.replace()
    assert role.told == []
    role = Role(OSError("Ray is gone"))
    with pytest.raises(RollLikeError, match="engine 1 could not be replaced: OSError: Ray is gone"):
        role.replace_beside_others()
    assert role.told[0][1].endswith("its process is gone; engine 1 could not be replaced: OSError: Ray is gone")


def test_pauses_grow_within_the_window_and_begin_anew_after_work() -> None:
    now = 0.0
    budget = RestartBudget((1.0, 2.0), 10.0, clock=lambda: now)
    assert [budget.take(), budget.take(), budget.take()] == [1.0, 2.0, None]
    now = 10.0
    assert budget.take() == 1.0
    budget.worked()
    assert budget.take() == 1.0
