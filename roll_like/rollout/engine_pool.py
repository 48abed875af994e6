"""The inference engines of a run: which of them serve, and new ones in the place of those that died.

What follows a death:

1. The call that meets it raises `ReplicaLost`. The router queues the engine's requests again, for the others
   (`Router._lose`), and the pool notes it: `_lost`.
2. `_replace_or_retire` starts a new process at the same place. How often, with which pauses, and what is reported:
   `WorkerRestarts` (`cluster/worker_restarts.py`), as for every role.
3. The new engine has the weights of the model's files. `catch_up` sends it the policy's, and `synced` lets it serve.
4. One that was lost too often is retired. The run ends when none is left (`Router.give_up`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from roll_like.cluster import Cluster, ClusterHandle, WorkerDied
from roll_like.cluster.driver_loop import DriverLoop
from roll_like.cluster.spans import SPANS
from roll_like.cluster.worker_restarts import RestartCallback, WorkerRestarts, to_stderr
from roll_like.config.inference import EngineConfig
from roll_like.config.rollout import GroupRolloutConfig
from roll_like.errors import RollLikeError, WorkerError
from roll_like.inference.interface import EngineDied, FailedGeneration, GenerateRequest, Generation, InferenceEngine
from roll_like.rollout.router import ReplicaLost, Router, all_gone

#: Polling interval before a restart, in seconds.
TURN_SECONDS = 0.2
#: How long engines may take to tell their metrics; Prometheus waits 10 s by default. Seconds.
METRICS_SECONDS = 3.0
P = ParamSpec("P")
R = TypeVar("R")
ArgumentT = TypeVar("ArgumentT")


class ActorReplica:
    """An inference engine, as the scheduler sees it.

    Args:
        engine: The engine alone; not one that is started in its place later.
        lost: Told when its process is gone.
    """

    def __init__(
        self, engine: ClusterHandle[InferenceEngine], lost: Callable[[RollLikeError], None] = lambda error: None
    ) -> None:
        self._engine = engine
        self._lost = lost

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Start generating."""
        await self._ask(InferenceEngine.submit, requests)

    async def poll(self, timeout: float) -> Sequence[Generation | FailedGeneration]:
        """Return what finished since the last call."""
        return await self._ask(InferenceEngine.poll, timeout)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; they come out of `poll` with their tokens so far."""
        await self._ask(InferenceEngine.abort, request_ids)

    async def _ask(
        self, method: Callable[[InferenceEngine, ArgumentT], Coroutine[Any, Any, R]], argument: ArgumentT
    ) -> R:
        try:
            return await self._engine.ask(0, method, argument)
        except (WorkerDied, EngineDied) as error:
            self._lost(error)
            raise ReplicaLost(str(error)) from error


class ReplicaState(StrEnum):
    """What becomes of an engine.

        SERVING ──died──▶ RESTARTING ──started──▶ STALE ──has the policy's weights──▶ SERVING
                              └──once too often──▶ RETIRED

    An engine that was started anew has the weights of the model's files. It gets requests only after a weight sync,
    which compares fingerprints.
    """

    SERVING = "serving"
    RESTARTING = "restarting"
    STALE = "stale"
    RETIRED = "retired"


class EnginePool:
    """Speaks to the engines that are there, and replaces those whose process is gone.

    Methods may be called from any thread. Engines are replaced on the driver's event loop, while the others go on.

    Args:
        engines: All engines; none has died yet.
        report: Told what was done.
        follows: Whether the engines sample with weights that a trainer sends, and must get them before they serve.
        takes_adapters: Whether what a trainer sends are adapters alone.
    """

    def __init__(
        self,
        engines: Cluster[InferenceEngine],
        runner: DriverLoop,
        *,
        report: RestartCallback = to_stderr,
        follows: bool = True,
        takes_adapters: bool = False,
    ) -> None:
        self.cluster = engines
        self.takes_adapters = takes_adapters
        #: Sends the policy's weights to stale engines, if they can be sent now.
        self.catch_up: Callable[[], None] = lambda: None
        self.runner = runner
        self._follows = follows
        self._worker_restarts = WorkerRestarts(engines.name, "its requests are sampled again", report)
        self._states = [ReplicaState.SERVING] * len(engines)
        self._restarts = [0] * len(engines)
        self._changed = threading.Condition(threading.RLock())
        self._routers: list[Router] = []
        self._addressed: set[tuple[int, int]] | None = None
        self._starting: set[int] = set()
        self._asked = 0
        self._may_start = True
        self._error: RollLikeError | None = None

    # ---- who is there --------------------------------------------------------------------------

    def reachable(self) -> list[int]:
        """Return the ranks of engines that can be called, stale ones included."""
        with self._changed:
            alive, addressed = self._of(ReplicaState.SERVING, ReplicaState.STALE), self._addressed
            return [rank for rank in alive if addressed is None or (rank, self._restarts[rank]) in addressed]

    def engines(self) -> ClusterHandle[InferenceEngine]:
        """Return a handle on the engines that can be called now."""
        return self.cluster.only(self.reachable())

    @property
    def membership(self) -> tuple[tuple[int, int], ...]:
        """Which engines can be called: rank, and how often it was replaced."""
        return tuple((rank, self._restarts[rank]) for rank in self.reachable())

    def router(self, engine: EngineConfig, rollout: GroupRolloutConfig) -> Router:
        """Return a router of requests to these engines, and to those that take their place.

        Args:
            engine: The `inference` section.
            rollout: The `rollout` section.
        """
        with self._changed:
            serving = self._of(ReplicaState.SERVING)
            router = Router(
                [self._replica(rank) for rank in serving],
                max_running=engine.max_running,
                max_in_flight=rollout.max_in_flight,
                retries=rollout.retries,
                awaits_more=self._awaits_more,
            )
            self._routers.append(router)
            SPANS.watch(router)
        return router

    def _replica(self, rank: int) -> ActorReplica:
        return ActorReplica(self.cluster.only([rank]), partial(self._lost, rank, self._restarts[rank]))

    def _of(self, *states: ReplicaState) -> list[int]:
        return [rank for rank, state in enumerate(self._states) if state in states]

    def _awaits_more(self) -> bool:
        with self._changed:
            return any(state is not ReplicaState.RETIRED for state in self._states)

    # ---- calls ---------------------------------------------------------------------------------

    def begin(
        self, method: Callable[Concatenate[InferenceEngine, P], Any], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], None]:
        """Start a method on every engine; calling what comes back waits for the end."""
        return self.cluster.begin(method, *args, **kwargs)

    def everywhere(
        self,
        method: Callable[Concatenate[InferenceEngine, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Call a method of every engine that is there.

        Raises:
            WorkerDied: One of them died; `replace_dead` has it replaced.
            EngineDied: The same, of an engine whose worker lives.
        """
        return self.engines().everywhere(method, *args, **kwargs)

    async def ask_everywhere(self, method: Callable[[InferenceEngine], Coroutine[Any, Any, None]]) -> None:
        """Call a method of every engine that is there. Those that have died are replaced; the others are waited for."""
        with self._changed:
            engines, called = self.engines(), set(self.membership)
        calls = [engines.ask(place, method) for place in range(len(engines))]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, RollLikeError):
                self._replace_dead(outcome, called)
            elif outcome is not None:
                raise outcome

    async def ask_one(
        self,
        method: Callable[Concatenate[InferenceEngine, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Await a method of one engine that serves, each in turn; of another one where that dies meanwhile.

        Raises:
            ReplicaLost: None is left, and none will be started.
        """
        while True:
            with self._changed:
                serving = self._of(ReplicaState.SERVING)
                if not serving and self._error is not None and not self._awaits_more():
                    raise all_gone(self._error)
                self._asked += 1
                rank = serving[self._asked % len(serving)] if serving else None
                restarts = 0 if rank is None else self._restarts[rank]
            if rank is None:
                await asyncio.sleep(TURN_SECONDS)
                continue
            try:
                return await self.cluster.only([rank]).ask(0, method, *args, **kwargs)
            except (WorkerDied, EngineDied) as error:
                self._lost(rank, restarts, error)

    def metrics(self) -> dict[int, str]:
        """Return what each engine's library counts, in Prometheus's text format, by rank; from any thread.

        Those that are starting, and those that do not answer in `METRICS_SECONDS`, are left out.
        """
        return self.runner.run(self._metrics())

    async def _metrics(self) -> dict[int, str]:
        ranks = self.reachable()
        told = await asyncio.gather(*map(self._metrics_of, ranks))
        return {rank: text for rank, text in zip(ranks, told, strict=True) if text}

    async def _metrics_of(self, rank: int) -> str:
        with suppress(RollLikeError, TimeoutError):  # its death shows where it samples
            async with asyncio.timeout(METRICS_SECONDS):
                return await self.cluster.ask(rank, InferenceEngine.metrics)
        return ""

    @contextmanager
    def addressing(self, *states: ReplicaState) -> Iterator[bool]:
        """Let a weight sync call no engines but those that are in one of these states now; yield whether there are any.

        An engine that is started meanwhile must not get half a weight update.
        """
        with self._changed:
            self._addressed = {(rank, self._restarts[rank]) for rank in self._of(*states)}
        try:
            yield bool(self._addressed)
        finally:
            with self._changed:
                self._addressed = None

    # ---- death and replacement -----------------------------------------------------------------

    def replace_dead(self, error: RollLikeError) -> None:
        """Have the engine replaced that an error of a weight sync speaks of; raise the error if it speaks of none."""
        with self._changed:
            self._replace_dead(error, set(self.membership) if self._addressed is None else self._addressed)

    def _replace_dead(self, error: RollLikeError, called: Collection[tuple[int, int]]) -> None:
        """Do so where these were called: rank, and how often it was replaced. It may have been replaced since."""
        role, rank = error.worker or ("", 0)
        if not isinstance(error, (WorkerDied, EngineDied)) or role != self.cluster.name:
            raise error
        for each, restarts in called:
            if each == rank:
                self._lost(rank, restarts, error)

    def wait_for_one(self) -> None:
        """Wait until an engine can be called.

        Raises:
            ReplicaLost: None is left, and none will be started.
        """
        with self._changed:
            while not self.reachable():
                if self._error is not None and not self._awaits_more():
                    raise all_gone(self._error)
                self._changed.wait()

    def hold_starts(self) -> None:
        """Wait until no engine is just starting, and let none start until `allow_starts`: others need the memory."""
        with self._changed:
            self._may_start = False
            while self._starting:
                self._changed.wait()

    def allow_starts(self) -> None:
        """Let engines start again in the place of those that died."""
        with self._changed:
            self._may_start = True

    def synced(self) -> None:
        """Note that the engines that were called last have the policy's weights: they serve from now on."""
        with self._changed:
            fresh = [rank for rank in self.reachable() if self._states[rank] is ReplicaState.STALE]
            for rank in fresh:
                self._serve(rank)
            self.runner.go_on()

    def _lost(self, rank: int, restarts: int, error: RollLikeError) -> None:
        """Begin to replace an engine, unless that has begun since it was started the `restarts`-th time."""
        with self._changed:
            if self._restarts[rank] != restarts or rank not in self._of(ReplicaState.SERVING, ReplicaState.STALE):
                return
            self._states[rank] = ReplicaState.RESTARTING
        self.runner.spawn(self._replace_or_retire(rank, error))

    async def _replace_or_retire(self, rank: int, error: RollLikeError) -> None:
        try:
            await self._worker_restarts.replace_async(f"engine {rank}", error, partial(self._start, rank))
        except RollLikeError as last:
            with self._changed:
                self._states[rank] = ReplicaState.RETIRED
                self._error = last
                if not self._awaits_more():
                    for router in self._routers:
                        self.runner.call(partial(router.give_up, last))
                self._changed.notify_all()

    async def _start(self, rank: int) -> None:
        await asyncio.to_thread(self.cluster.fence, rank)
        await self._turn(rank)
        limit = self.cluster.start_timeout_seconds
        try:
            self.cluster.restart(rank)
            async with asyncio.timeout(limit):
                await self.cluster.ask(rank, InferenceEngine.start)
        except TimeoutError:
            raise WorkerError(f"inference worker {rank} did not start within {limit:g} s") from None
        finally:
            with self._changed:
                self._starting.discard(rank)
                self._changed.notify_all()
        await self._started(rank)

    async def _turn(self, rank: int) -> None:
        """Wait until an engine may start."""
        while True:
            with self._changed:
                if self._may_start:
                    self._starting.add(rank)
                    self._restarts[rank] += 1
                    return
            await asyncio.sleep(TURN_SECONDS)

    async def _started(self, rank: int) -> None:
        with self._changed:
            self._states[rank] = ReplicaState.STALE
            if not self._follows:
                self._serve(rank)
            self._changed.notify_all()
        if self._follows:
            try:
                await asyncio.to_thread(self.catch_up)
            except RollLikeError as error:
                # the trainer's own: who calls it next will meet it, unless all wait for this engine
                with self._changed:
                    if not self._of(ReplicaState.SERVING):
                        self.runner.interrupt(error)

    def _serve(self, rank: int) -> None:
        self._states[rank] = ReplicaState.SERVING
        for router in self._routers:
            self.runner.call(partial(router.admit, self._replica(rank)))
