"""Typed groups of worker actors."""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar, overload

import ray
from ray.exceptions import (
    ActorDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from roll_like.cluster import guardian
from roll_like.cluster.node_watch import page_prefix
from roll_like.cluster.progress import PROGRESS, VARIABLE
from roll_like.cluster.resources import Placement
from roll_like.cluster.worker_restarts import WorkerDied
from roll_like.errors import RollLikeError, WorkerError

W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

# Ray would hide all GPUs from an actor that reserves none; the placement group reserved them already.
_KEEP_VISIBLE_DEVICES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


#: Added to the limit of a start: a worker that limits its own start knows more about the reason. Seconds.
START_GRACE = 5.0
#: How long the processes of a worker that was killed may take to end by themselves. Seconds.
FENCE_SECONDS = 1.0
#: How long after an error the death of another worker may become known, which is its cause then. Seconds.
SETTLING_SECONDS = 3.0
#: A worker's process is gone; Ray may have ended it because its machine was short of memory.
_DEATHS = (RayActorError, ActorDiedError, OutOfMemoryError, NodeDiedError)
#: Held while a call goes out to all workers of a role.
_CALLING = threading.Lock()


@dataclass(frozen=True, slots=True)
class _StartLimit:
    """How long the workers of a role may take to start, from `began` on the monotonic clock."""

    began: float
    seconds: float

    def left(self) -> float:
        """Return the seconds that are left."""
        return max(0.0, self.began + self.seconds + START_GRACE - time.monotonic())

    def exceeded(self, role: str, late: Sequence[int]) -> WorkerError:
        """Return the error of workers that have not answered."""
        workers = f"{'worker' if len(late) == 1 else 'workers'} {', '.join(map(str, late))}"
        return WorkerError(
            f"{role}: {workers} did not start within {self.seconds:g} s",
            fix="raise resources.start_timeout_seconds if loading takes that long here; otherwise see the workers' "
            "logs in `logs/` of the run's folder for what holds them up",
        )


class ClusterHandle(Generic[W]):
    """A group of running workers that can be called; travels to other actors.

    The worker's own method is passed, so that editors find it and types are checked:

        logprobs = trainers.scatter(TrainingRank.forward, shards)

    Args:
        name: The role, for messages ("training").
        actors: One a worker, by rank.
        ranks: Their ranks, for messages, where they are some of a role's workers.
    """

    def __init__(self, name: str, actors: Sequence[Any], ranks: Sequence[int] | None = None) -> None:
        self.name = name
        self._actors = list(actors)
        self._ranks = list(range(len(actors))) if ranks is None else list(ranks)
        self._limit: _StartLimit | None = None  # none once all workers have answered

    def __len__(self) -> int:
        return len(self._actors)

    def only(self, ranks: Sequence[int], *, within: float | None = None) -> ClusterHandle[W]:
        """Return what some of the workers can be called by, as they are now: they are its 0th, 1st and so on.

        Args:
            within: How long they may take to answer for the first time. Seconds.
        """
        handle = ClusterHandle[W](self.name, [self._actors[rank] for rank in ranks], ranks)
        if within is not None:
            handle._limit = _StartLimit(time.monotonic(), within)
        return handle

    @overload
    def everywhere(
        self, method: Callable[Concatenate[W, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...

    @overload
    def everywhere(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]: ...

    def everywhere(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on every worker with the same arguments; return the results by rank.

        Raises:
            WorkerError: A worker raised or died. Errors of this package arrive as themselves.
        """
        # one copy in the object store instead of one a worker
        shared = [ray.put(arg) for arg in args] if len(self) > 1 else list(args)
        refs = self._call_all([shared] * len(self), method, **kwargs)
        results = self._gather(refs, method, limit=self._limit)
        self._limit = None
        return results

    def begin(self, method: Callable[Concatenate[W, P], Any], *args: P.args, **kwargs: P.kwargs) -> Callable[[], None]:
        """Start a method on every worker and return at once; calling what comes back waits for the end.

        Raises:
            WorkerError: When waiting: a worker raised or died.
        """
        refs = self._call_all([args] * len(self), method, **kwargs)
        limit = self._limit

        def wait() -> None:
            self._gather(refs, method, limit=limit)
            self._limit = None

        return wait

    def scatter(self, method: Callable[[W, S], R], shards: Sequence[S]) -> list[R]:
        """Call a method on every worker with its own argument; return the results by rank.

        Raises:
            ValueError: There are more or fewer shards than workers.
            WorkerError: A worker raised or died.
        """
        if len(shards) != len(self):
            raise ValueError(f"{self.name}: {len(shards)} shards for {len(self)} workers")
        return self._gather(self._call_all([(shard,) for shard in shards], method), method)

    def on(self, rank: int, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method on one worker."""
        refs = [self._call(rank, method, *args, **kwargs)]
        result: R = self._gather(refs, method, ranks=[rank], limit=self._limit)[0]
        return result

    async def ask(
        self,
        rank: int,
        method: Callable[Concatenate[W, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Await an asynchronous method of one worker."""
        try:
            result: R = await self._call(rank, method, *args, **kwargs)
        except RayError as error:
            raise self._explain(error, rank, method) from None
        return result

    def _call_all(self, arguments: Sequence[Sequence[Any]], method: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Call every worker with its arguments, as if at once: two threads' calls come in one order everywhere.

        Ranks that met in two collectives at a time would wait for each other for ever.
        """
        with _CALLING:
            return [self._call(rank, method, *each, **kwargs) for rank, each in enumerate(arguments)]

    def _call(self, rank: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(self._actors[rank], method.__name__).remote(*args, **kwargs)

    def _gather(
        self,
        refs: Sequence[Any],
        method: Callable[..., Any],
        *,
        ranks: Sequence[int] | None = None,
        limit: _StartLimit | None = None,
    ) -> list[Any]:
        try:
            # one failed rank leaves the others waiting in a collective: the first error must win
            waiting = list(refs)
            while waiting:
                done, waiting = ray.wait(waiting, num_returns=1, timeout=None if limit is None else limit.left())
                if limit is not None and not done:
                    late = [refs.index(ref) for ref in waiting]
                    raise limit.exceeded(self.name, [self._ranks[ranks[index] if ranks else index] for index in late])
                ray.get(done)
            return list(ray.get(list(refs)))
        except RayError as error:
            failed, cause = _cause(refs, refs.index(done[0]), error)
            raise self._explain(cause, ranks[failed] if ranks else failed, method) from None

    def _explain(self, error: RayError, rank: int, method: Callable[..., Any]) -> RollLikeError:
        explained = self._explained(error, f"{self.name} worker {self._ranks[rank]} in {method.__name__}")
        # a worker that called another one hands that one's death on
        explained.worker = explained.worker or (self.name, self._ranks[rank])
        return explained

    def _explained(self, error: RayError, where: str) -> RollLikeError:
        if isinstance(error, RayTaskError):
            cause = error.cause
            if isinstance(cause, RollLikeError):
                cause.add_note(f"raised by {where}:\n{error}")
                return cause
            return WorkerError(f"{where} raised {type(cause).__name__}: {cause}\n{error}")
        if isinstance(error, RayActorError) and error.actor_init_failed:
            return WorkerDied(f"{where}: it could not start: {_constructor_error(str(error))}")
        if isinstance(error, _DEATHS):
            return WorkerDied(
                f"{where}: its process is gone ({' '.join(str(error).split())[:600]})",
                fix="look for an out-of-memory kill (dmesg); lower training.max_tokens_per_micro_batch or "
                "inference.max_running, or give the run more memory",
            )
        return WorkerError(f"{where}: {type(error).__name__}: {error}")


def _constructor_error(text: str) -> str:
    """Return what a worker's constructor raised, without the traceback that Ray puts before it."""
    lines = text.rstrip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    # after the last frame and its source comes the error, of one line or several
    after = [number for number in range(frames[-1] + 1, len(lines)) if lines[number][:1].strip()] if frames else []
    return "\n".join(lines[after[0] :] if after else lines[-1:])


def _cause(refs: Sequence[Any], failed: int, error: RayError) -> tuple[int, RayError]:
    """Return which call failed first, and how: a process that dies leaves errors of its peers behind.

    Peers notice a lost connection within milliseconds, and their error may arrive before Ray's that a process is gone.
    It may be one of this package: start, load and save say what they could not do because of it.
    """
    cause = error.cause if isinstance(error, RayTaskError) else None
    known = isinstance(cause, RollLikeError) and (cause.retry or cause.worker is not None)
    others = {index: ref for index, ref in enumerate(refs) if index != failed}
    if known or isinstance(error, _DEATHS) or not others:
        return failed, error
    ended, _ = ray.wait(list(others.values()), num_returns=len(others), timeout=SETTLING_SECONDS)
    for index, ref in others.items():
        if ref in ended:
            try:
                ray.get(ref)
            except _DEATHS as death:
                return index, death
            except RayError:
                continue
    return failed, error


class Cluster(ClusterHandle[W]):
    """Workers of one class, one actor a placement.

    Until all workers have answered a call of `everywhere` or `begin`, calls fail when the placements' time to start is
    over.

    Args:
        name: The role, for messages ("training").
        worker_class: A plain class; each actor hosts one instance.
        placements: One a worker; its index is the worker's rank.
        arguments: Constructor arguments of each rank.
        environment: Environment variables of each rank, set before its process imports anything.
        concurrency: Calls that an asynchronous worker runs at a time.
    """

    #: Folder for the pages of workers that start now (`roll_like.cluster.progress`); None while nobody watches them.
    pages: ClassVar[Path | None] = None

    def __init__(
        self,
        name: str,
        worker_class: type[W],
        placements: Sequence[Placement],
        *,
        arguments: Callable[[int], tuple[Any, ...]],
        environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
        concurrency: int | None = None,
    ) -> None:
        self._class = worker_class
        self._placements = list(placements)
        self._arguments = arguments
        self._environment = environment
        self._concurrency = concurrency
        self._id = uuid.uuid4().hex
        super().__init__(name, [])
        self._actors = [self._start(rank) for rank in range(len(self._placements))]
        self._ranks = list(range(len(self._placements)))
        self.start_timeout_seconds = min(placement.start_timeout_seconds for placement in self._placements)
        self._limit = _StartLimit(time.monotonic(), self.start_timeout_seconds)

    def restart(self, rank: int) -> None:
        """Replace a worker by a fresh one at the same place."""
        ray.kill(self._actors[rank])
        self._actors[rank] = self._start(rank)

    def fence(self, rank: int) -> None:
        """End a worker's processes, and wait until those of this machine are gone, with all that they hold.

        A stopped process lives on for seconds after Ray has ended it, and one that hangs may wake up.
        """
        ray.kill(self._actors[rank])
        guardian.sweep(self._marker(rank), name=guardian.WORKER_MARKER, patience=FENCE_SECONDS)
        guardian.remove_semaphores(self._marker(rank))

    def rebuild(self) -> None:
        """Replace all workers by fresh ones at the same places."""
        for rank in range(len(self)):
            self.fence(rank)
        self._actors = [self._start(rank) for rank in range(len(self._placements))]
        self._limit = _StartLimit(time.monotonic(), self.start_timeout_seconds)

    def close(self, method: Callable[[W], Any] | None = None, *, timeout_seconds: float = 20.0) -> None:
        """Let workers run `method` to clean up, then end their processes. Dead ones are passed over."""
        if method is not None:
            refs = [self._call(rank, method) for rank in range(len(self))]
            for ref in refs:
                try:
                    ray.get(ref, timeout=timeout_seconds)
                except RayTaskError as error:
                    print(f"{self.name}: error while closing: {error}")
                except RayError:
                    continue  # gone, or stuck: it is killed below either way
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _marker(self, rank: int) -> str:
        return f"{self.name} {rank} {self._id}"

    def _start(self, rank: int) -> Any:
        placement = self._placements[rank]
        environment = {
            **_KEEP_VISIBLE_DEVICES,
            "PYTHONPATH": python_path(),
            guardian.WORKER_MARKER: self._marker(rank),
            **_temporary_files(),
            **self._environment(rank),
        }
        if placement.accelerator_ids:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(placement.accelerator_ids)
        if self.pages is not None:
            environment[VARIABLE] = page_prefix(self.pages, self.name, rank)
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": placement.strategy(),
            "runtime_env": {"env_vars": environment},
            "max_restarts": 0,
        }
        if self._concurrency is not None:
            options["max_concurrency"] = self._concurrency
        actor = ray.remote(self._class).options(**options).remote(*self._arguments(rank))
        actor.__ray_call__.remote(_open_page)
        return actor


def _open_page(worker: object) -> None:
    del worker
    PROGRESS.open()


def _temporary_files() -> dict[str, str]:
    """Return where workers make temporary files: in the folder of the local Ray, which goes when the run has ended.

    Killed processes leave theirs behind, such as vLLM's sockets. Where `TMPDIR` is set already it stays.
    """
    folder = guardian.session_folder()
    return {"TMPDIR": str(folder)} if folder is not None and "TMPDIR" not in os.environ else {}


def python_path() -> str:
    """Return a PYTHONPATH with which a worker imports what the driver can.

    What users import from their working directory must be there when Ray unpickles a configuration.
    Our own packages come first: a user's folder called `envs` or `rewards` must not take their place.
    """
    own = str(Path(__file__).resolve().parents[2])
    installed = (sys.prefix, sys.base_prefix)
    entries = [Path(entry) for entry in sys.path if Path(entry).is_dir()]
    users = [entry for entry in entries if not any(entry.is_relative_to(prefix) for prefix in installed)]
    return os.pathsep.join(dict.fromkeys([own, *(str(entry.resolve()) for entry in users)]))


def thread_environment(threads: int) -> dict[str, str]:
    """Return variables that keep one worker to its share of the cores, and its allocator fast.

    Idle OpenMP threads soon sleep instead of spinning, so colocated roles do not steal cores from each other.
    Large pages, and keeping freed memory, spare a worker the page faults of every micro-batch.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        # about 50 µs: longer than the gap between two kernels, too short to take a core from anyone
        "GOMP_SPINCOUNT": "1000",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "GLIBC_TUNABLES": os.environ.get(
            "GLIBC_TUNABLES",
            "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=17179869184",
        ),
    }
