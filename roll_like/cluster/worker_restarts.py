"""New workers in the place of those of a pool that were lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from roll_like.cluster.cluster import Cluster, WorkerDied
from roll_like.cluster.health import RestartBudget, RestartCallback, to_stderr
from roll_like.errors import RollLikeError

W = TypeVar("W")


class WorkerRestarts(Generic[W]):
    """Starts lost workers of a pool anew and tells about it; pauses where one is lost again and again.

    Workers of a pool run code of users, which may end any process: its sample or episode fails then, and failures have
    a limit of their own. So what counts are losses of a worker that has finished nothing since it was replaced.

    Args:
        cluster: The workers.
        probe: A method of theirs that answers when a worker has started.
        again: What is done again, for the message: "its groups are scored again".
        report: Told about each replacement.
    """

    def __init__(
        self,
        cluster: Cluster[W],
        probe: Callable[[W], Coroutine[Any, Any, Any]],
        again: str,
        report: RestartCallback = to_stderr,
    ) -> None:
        self._cluster = cluster
        self._probe = probe
        self._again = again
        self._report = report
        self._budgets = [RestartBudget() for _ in range(len(cluster))]
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._tasks = set[asyncio.Task[None]]()

    def replace(self, rank: int, why: str, *, counted: bool = True) -> None:
        """Start a worker anew, at once or after a pause.

        Args:
            rank: Which.
            why: The first words of the message: what was lost.
            counted: Whether it counts for the budget; not what one sample or episode is known to have done.

        Raises:
            WorkerDied: The worker was lost too often.
        """
        pause = self._budgets[rank].take() if counted else 0.0
        why = why.partition("\n")[0].partition(" (")[0].rstrip(": ")[:200]
        if pause is None:
            self._report(self._cluster.name, f"{why}; it was lost too often and is not replaced again", seconds=None)
            error = WorkerDied(f"{why}; it was replaced too often in an hour without having finished anything")
            error.worker = (self._cluster.name, rank)
            raise error
        began = time.monotonic()
        if pause:
            self._starting[rank] = asyncio.ensure_future(self._restart(rank, pause))
        else:
            self._cluster.restart(rank)
        task = asyncio.ensure_future(self._tell(rank, why, began))
        self._tasks.add(task)  # asyncio has weak references to tasks only
        task.add_done_callback(self._tasks.discard)

    async def started(self, rank: int) -> None:
        """Wait for the end of a pause before a worker is started anew."""
        while (task := self._starting.get(rank)) is not None:
            await asyncio.wait({task})

    def pausing(self, rank: int) -> bool:
        """Return whether a worker is not there, because it is to be started anew after a pause."""
        return rank in self._starting

    def worked(self, rank: int) -> None:
        """Note that a worker has finished something."""
        self._budgets[rank] = RestartBudget()

    async def _restart(self, rank: int, pause: float) -> None:
        try:
            await asyncio.sleep(pause)
            self._cluster.restart(rank)
        finally:
            self._starting.pop(rank, None)

    async def _tell(self, rank: int, why: str, began: float) -> None:
        """Report a worker once it has started."""
        await self.started(rank)
        try:
            await asyncio.wait_for(self._cluster.ask(rank, self._probe), self._cluster.start_timeout_seconds)
        except (RollLikeError, TimeoutError):
            return  # who needs it will find it lost, and replace it
        seconds = time.monotonic() - began
        text = f"{why}; it was replaced in {seconds:.0f} s, and {self._again}"
        self._report(self._cluster.name, text, seconds=seconds)
