"""One way to replace what died: engines, judges, workers of rewards and environments, ranks of models.

    lost ──▶ pause ──▶ start ──▶ answers: replaced
               ▲         └─ fails ─┐
               └───────────────────┴──▶ once too often: given up

Each way out ends with one sentence and one event; a replacement counts in `health/restarts/<role>`. Roles differ in:

| what died | is started by | counts | if it is given up |
|---|---|---|---|
| an engine | `EnginePool` | in the role's budget | the others go on; without any the run ends |
| a judge's server | `JudgeKeeper` | in the role's budget | rewards that ask it fail |
| a worker of rewards or environments | `PoolRestarts` | in its own budget, new after finished work | the run ends |
| a rank of a frozen model | `TrainingEngine`, with all others | in the role's budget | the run ends |
| a rank of a trained model | `Recovery`, with those of all trained models | in the role's budget | the run ends |
| the run itself | `roll_like.run.supervise`, under `--restart` | in a budget, new after a checkpoint | it ends |
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from roll_like.errors import EngineError, GenerationError, RollLikeError, WorkerError

#: Pauses before the first replacement within a window, the second, …, in which a machine may recover; after the last
#: the cause does not pass by itself. Seconds.
PAUSES = (0.0, 2.0, 8.0, 30.0, 120.0)
WINDOW_SECONDS = 3600.0
#: What a start that may succeed later ends with.
_FAILED_STARTS = (WorkerError, GenerationError, EngineError)


class WorkerDied(WorkerError):
    """A worker's process is gone."""

    retry = True


class RestartCallback(Protocol):
    """Told about workers that were replaced, and about those that are not going to be."""

    def __call__(self, role: str, text: str, *, seconds: float | None) -> None:
        """Take a plain sentence, and the seconds from the death to the replacement; None if there is none."""


def to_stderr(role: str, text: str, *, seconds: float | None) -> None:
    """Report where there is no run: print the sentence."""
    del role, seconds
    print(text, file=sys.stderr)


def brief(error: RollLikeError) -> str:
    """Return the first line of an error's message, without what Ray has to say of a death."""
    return error.message.partition("\n")[0].partition(" (")[0].rstrip(": ")[:200]


class RestartBudget:
    """Grants replacements: as many within a window as there are pauses, which grow.

        >>> now = 0.0
        >>> budget = RestartBudget(clock=lambda: now)
        >>> [budget.take() for _ in range(6)]
        [0.0, 2.0, 8.0, 30.0, 120.0, None]
        >>> now = 3601.0
        >>> budget.take()
        0.0

    Args:
        pauses: Before each replacement. Seconds; default: `PAUSES`.
        window: How long one counts. Seconds.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        pauses: Sequence[float] | None = None,
        window: float = WINDOW_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pauses = PAUSES if pauses is None else pauses
        self._window = window
        self._clock = clock
        self._granted: deque[float] = deque()

    def take(self) -> float | None:
        """Return how long to pause before the next replacement, in seconds; None if there are to be no more."""
        now = self._clock()
        while self._granted and now - self._granted[0] >= self._window:
            self._granted.popleft()
        if len(self._granted) == len(self._pauses):
            return None
        self._granted.append(now)
        return self._pauses[len(self._granted) - 1]

    def worked(self) -> None:
        """Forget what was granted: what was replaced has finished something since."""
        self._granted.clear()


class Loss:
    """One loss, until the worker is replaced or given up.

    Args:
        who: Which of its workers ("engine 0").
        budget: Grants attempts.
        report: Told the end.
    """

    def __init__(
        self, role: str, who: str, error: RollLikeError, budget: RestartBudget, report: RestartCallback
    ) -> None:
        self.error = error  # the latest
        self._role, self._who, self._budget, self._report = role, who, budget, report
        self._cause = brief(error)
        self._began = time.monotonic()

    def pause(self) -> float:
        """Return the seconds to pause before the next attempt.

        Raises:
            RollLikeError: The latest error, if there are to be no more.
        """
        pause = self._budget.take()
        if pause is None:
            raise self.given_up("was lost too often and is not replaced again")
        return pause

    def replaced(self, again: str) -> None:
        """Report that another is in its place, and what is done again."""
        seconds = time.monotonic() - self._began
        text = f"{self._cause}; {self._who} was replaced in {seconds:.0f} s, and {again}"
        self._report(self._role, text, seconds=seconds)

    def given_up(self, why: str) -> RollLikeError:
        """Report that none will be, and why; return the latest error, which says so too."""
        self._report(self._role, f"{brief(self.error)}; {self._who} {why}", seconds=None)
        self.error.message += f"; {self._who} {why}"
        return self.error


class WorkerRestarts:
    """Replaces workers of a role, one loss after the other or several at a time.

    Args:
        again: What is done again when one was replaced, for the message: "its requests are sampled again".
        report: Told about each replacement.
        budget: Grants attempts.
    """

    def __init__(
        self, role: str, again: str, report: RestartCallback = to_stderr, budget: RestartBudget | None = None
    ) -> None:
        self._role, self._again, self._report = role, again, report
        self.budget = budget or RestartBudget()

    def replace(
        self,
        who: str,
        error: RollLikeError,
        start: Callable[[], str | None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Replace a worker, and return when the new one answers.

        Args:
            who: Which ("engine 0").
            start: Starts a new one and waits for its answer; may return what is done again.
            sleep: Waits for so many seconds.

        Raises:
            RollLikeError: The latest error, once the budget is spent; one of `start` that does not pass by itself.
        """
        loss = Loss(self._role, who, error, self.budget, self._report)
        while True:
            sleep(loss.pause())
            try:
                again = start()
            except _FAILED_STARTS as failed:
                loss.error = failed
            else:
                return loss.replaced(again or self._again)

    async def replace_async(self, who: str, error: RollLikeError, start: Callable[[], Awaitable[None]]) -> None:
        """Do as `replace`, beside others. Whatever ends this is a `RollLikeError`, and was reported."""
        loss = Loss(self._role, who, error, self.budget, self._report)
        while True:
            await asyncio.sleep(loss.pause())
            try:
                await start()
            except _FAILED_STARTS as failed:
                loss.error = failed
            except Exception as unexpected:
                raise loss.given_up(f"could not be replaced: {type(unexpected).__name__}: {unexpected}") from unexpected
            else:
                return loss.replaced(self._again)


class Pool(Protocol):
    """Workers that are asked and started anew one by one: a `Cluster`."""

    name: str
    start_timeout_seconds: float

    def __len__(self) -> int: ...

    def restart(self, rank: int) -> None:
        """Replace a worker by a fresh one at the same place."""

    async def ask(self, rank: int, method: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        """Await a method of one worker."""


class PoolRestarts:
    """Starts lost workers of a pool anew, while many use it.

    Workers of a pool run code of users, which may end any process: its sample or episode fails then, and failures have
    a limit of their own. So what counts are losses of a worker that has finished nothing since it was replaced.

    Args:
        probe: A method of theirs that answers when a worker has started.
        again: What is done again, for the message: "its groups are scored again".
        report: Told about each replacement.
    """

    def __init__(
        self,
        cluster: Pool,
        probe: Callable[[Any], Coroutine[Any, Any, Any]],
        again: str,
        report: RestartCallback = to_stderr,
    ) -> None:
        self._cluster, self._probe, self._again, self._report = cluster, probe, again, report
        #: How often each worker was replaced.
        self.generations = [0] * len(cluster)
        self._budgets = [RestartBudget() for _ in range(len(cluster))]
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._tasks = set[asyncio.Task[None]]()

    def replace(self, rank: int, generation: int, why: str, *, counted: bool = True) -> None:
        """Start a worker anew, at once or after a pause, unless that was done already.

        Args:
            generation: How often it had been replaced when it was used.
            why: The first words of the message: what was lost.
            counted: Whether it counts for the budget; not what one sample or episode is known to have done.

        Raises:
            WorkerDied: The worker was lost too often.
        """
        if self.generations[rank] != generation:
            return
        self.generations[rank] += 1
        error = WorkerDied(why)
        error.worker = (self._cluster.name, rank)
        loss = Loss(self._cluster.name, f"{self._cluster.name} {rank}", error, self._budgets[rank], self._report)
        if pause := loss.pause() if counted else 0.0:
            self._starting[rank] = asyncio.ensure_future(self._restart(rank, pause))
        else:
            self._cluster.restart(rank)
        task = asyncio.ensure_future(self._tell(rank, loss))
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
        self._budgets[rank].worked()

    async def _restart(self, rank: int, pause: float) -> None:
        try:
            await asyncio.sleep(pause)
            self._cluster.restart(rank)
        finally:
            self._starting.pop(rank, None)

    async def _tell(self, rank: int, loss: Loss) -> None:
        """Report a worker once it has started."""
        await self.started(rank)
        try:
            await asyncio.wait_for(self._cluster.ask(rank, self._probe), self._cluster.start_timeout_seconds)
        except (RollLikeError, TimeoutError):
            return  # who needs it will find it lost, and replace it
        loss.replaced(self._again)
