"""Finds workers that hang, keeps evidence of them and kills them: a process that is dead is noticed by everybody.

A worker hangs if it is stopped, or if it is busy and its page (`roll_like.cluster.progress`) stands still for much
longer than work of this kind ever did.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import ray

from roll_like.cluster.address import node_address
from roll_like.cluster.cluster import Cluster, ClusterHandle
from roll_like.cluster.node_watch import FOLDER_PREFIX, NodeWatch, RoleMemory, Sighting
from roll_like.cluster.progress import Work
from roll_like.cluster.resources import ResourceManager
from roll_like.cluster.session import SHARED_MEMORY, RayProcesses
from roll_like.cluster.worker_restarts import WorkerDied
from roll_like.errors import RETRY, WorkerError

#: Seconds between two looks.
LOOK_SECONDS = 2.0
#: How long a process may be stopped. Seconds.
STOPPED_SECONDS = 15.0
#: Least time that a busy process may stand still, by device. On CPU roles share cores. Seconds.
LEAST_SECONDS = {"cuda": 60.0, "cpu": 120.0}
#: Most time that it may; time-outs of collectives are longer (`COLLECTIVE_TIMEOUT`). Seconds.
MOST_SECONDS = 1800.0
#: How long neither the driver nor any worker may go on, until the driver ends. Waits for workers have shorter deadlines
#: of their own; this is for those in a tracker, a library or a file system. Seconds.
DRIVER_SECONDS = 7200.0
#: How long its thread may take to end: it may be keeping evidence. Seconds.
END_SECONDS = 60.0
#: How long the watchdog's actor on another node may take to answer. Seconds.
ANSWER_SECONDS = 60.0
#: How often progress was seen in a phase before its own gaps say how long it may stand still, and how many times the
#: longest one that is.
ENOUGH_GAPS, TIMES_LONGEST = 3, 5.0
#: Phases that read and write files: how long the first ones take depends on the disk. A `Cluster` limits starts itself.
FILE_PHASES = frozenset({"start", "save", "load", "export"})

R = TypeVar("R")


class Deadlines:
    """How long the phases of roles may stand still.

    Of a phase that is known, some times the longest gap that was ever seen in it. An old one is not forgotten: kernels
    are compiled at a phase's first use, and again for a new shape.

    Args:
        device: `cpu` or `cuda`.
        start_timeout_seconds: What a phase may take that is not known yet.
    """

    def __init__(self, device: str, start_timeout_seconds: float) -> None:
        self._least = LEAST_SECONDS[device]
        self._unknown = start_timeout_seconds
        self._seen: dict[tuple[str, str], tuple[int, float]] = {}

    def progressed(self, role: str, phase: str, gap: float) -> None:
        """Learn that a process of a role went on after a gap. Seconds."""
        count, longest = self._seen.get((role, phase), (0, 0.0))
        self._seen[role, phase] = (count + 1, max(longest, gap))

    def of(self, role: str, phase: str) -> float:
        """Return how long a process of a role may stand still in a phase. Seconds."""
        count, longest = self._seen.get((role, phase), (0, 0.0))
        seconds = TIMES_LONGEST * longest
        if count < ENOUGH_GAPS:
            seconds = max(seconds, MOST_SECONDS if phase in FILE_PHASES else self._unknown)
        return min(max(seconds, self._least), MOST_SECONDS)


@dataclass(frozen=True, slots=True)
class Hang:
    """Workers of a role that hang.

    Attributes:
        role: The role.
        ranks: The workers that are to be killed.
        phase: What they were asked to do; empty if nothing.
        seconds: How long they have been stopped, or have stood still.
        stopped: Whether they are stopped.
        to_kill: Pages of these workers' processes.
        witnesses: Pages of all processes of the role.
    """

    role: str
    ranks: tuple[int, ...]
    phase: str
    seconds: float
    stopped: bool
    to_kill: frozenset[str]
    witnesses: frozenset[str]

    def text(self, stacks: Path, left: Sequence[int]) -> str:
        """Return what a person reads.

        Args:
            stacks: Where the evidence is.
            left: Ids of processes that SIGKILL did not end.
        """
        who = f"{self.role} {' and '.join(map(str, self.ranks))}"
        phase = f" in {self.phase}" if self.phase else ""
        what = (
            f"{who} was stopped{phase} for {self.seconds:.0f} s"
            if self.stopped
            else f"{who} hung{phase}: no progress for {self.seconds:.0f} s"
        )
        end = "killed"
        if left:
            end += f", but still there: process {', '.join(map(str, left))}, which waits for a disk or a device"
        return f"{what}; {end}; stacks in {stacks}"


@dataclass(frozen=True, slots=True)
class _Followed:
    """A process, and for how many seconds it has not moved and has been stopped."""

    now: Sighting
    still: float = 0.0
    stopped: float = 0.0


class Hangs:
    """Follows processes from look to look, and says which hang."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._followed: dict[str, _Followed] = {}
        self._found: set[str] = set()

    def look(self, sightings: Sequence[Sighting], passed: float) -> list[Hang]:
        """Return what hangs, each process once.

        Args:
            passed: Seconds since the last look.
        """
        self._found &= {one.name for one in sightings}  # process ids come again
        self._followed = {one.name: self._follow(one, passed) for one in sightings if one.name not in self._found}
        roles: dict[str, list[_Followed]] = defaultdict(list)
        for one in self._followed.values():
            roles[one.now.role].append(one)
        hangs = [hang for role, processes in roles.items() if (hang := self._judge(role, processes))]
        for hang in hangs:
            self._found |= hang.to_kill
            # the others waited for these; they get time to notice
            for name in hang.witnesses:
                self._followed[name] = replace(self._followed[name], still=0.0)
        return hangs

    def _follow(self, now: Sighting, passed: float) -> _Followed:
        before = self._followed.get(now.name)
        if before is None:
            return _Followed(now)
        still, page = before.still + passed, before.now.page
        if now.page.events != page.events:
            if page.work in (Work.OWN, Work.SHARED):
                self._deadlines.progressed(now.role, page.phase, still)
            still = 0.0
        return _Followed(now, still, before.stopped + passed if now.state == "T" else 0.0)

    def _judge(self, role: str, processes: Sequence[_Followed]) -> Hang | None:
        stopped = [one for one in processes if one.stopped >= STOPPED_SECONDS]
        guilty = stopped or self._late(role, processes)
        if not guilty:
            return None
        ranks = tuple(sorted({one.now.rank for one in guilty}))
        return Hang(
            role=role,
            ranks=ranks,
            phase=next((one.now.page.phase for one in processes if one.now.rank in ranks and one.now.page.phase), ""),
            seconds=max(one.stopped if stopped else one.still for one in guilty),
            stopped=bool(stopped),
            to_kill=frozenset(one.now.name for one in processes if one.now.rank in ranks),
            witnesses=frozenset(one.now.name for one in processes),
        )

    def _late(self, role: str, processes: Sequence[_Followed]) -> list[_Followed]:
        """Return the processes that hang although they run."""
        late = [one for one in processes if one.now.page.work is Work.OWN and self._is_late(role, one, one.still)]
        if any(one.now.page.work is Work.ELSEWHERE for one in processes):
            return late
        # ranks wait for the last one: nobody hangs as long as one of them moves
        still = min(one.still for one in processes)
        sharing = [one for one in processes if one.now.page.work is Work.SHARED and self._is_late(role, one, still)]
        least = min((one.now.page.ticks for one in sharing), default=0)
        return late + [one for one in sharing if one.now.page.ticks == least]

    def _is_late(self, role: str, one: _Followed, still: float) -> bool:
        return still >= self._deadlines.of(role, one.now.page.phase)


class ManyNodes:
    """The processes of several nodes, each with an actor that watches them; has the methods of `NodeWatch`.

    A node that is lost is left out, and so is one whose actor does not answer.

    Args:
        watches: One a node.
        warn: Called with a sentence about an actor that does not answer.
    """

    def __init__(self, watches: Cluster[NodeWatch], warn: Callable[[str], None]) -> None:
        self._watches = watches
        self._warn = warn
        self._ranks = list(range(len(watches)))

    def look(self) -> list[Sighting]:
        """Return the processes that live."""
        found = self._each(lambda node: node.on(0, NodeWatch.look))
        # two of Ray's nodes may be one machine
        return list({one.name: one for sightings in found for one in sightings}.values())

    def evidence(self, names: Collection[str]) -> dict[str, str]:
        """Return what can be known of processes, by the names of their pages."""
        found = self._each(lambda node: node.on(0, NodeWatch.evidence, names))
        return {name: text for texts in found for name, text in texts.items()}

    def end(self, names: Collection[str]) -> list[int]:
        """Kill processes and their children; return the ids of those that are still there."""
        left = self._each(lambda node: node.on(0, NodeWatch.end, names))
        return [pid for pids in left for pid in pids]

    def memory(self) -> dict[str, RoleMemory]:
        """Return what each role's processes hold at most, those of all nodes together."""
        held: dict[str, RoleMemory] = {}
        for node in self._each(lambda node: node.on(0, NodeWatch.memory)):
            for role, memory in node.items():
                held[role] = held.get(role, RoleMemory(0, 0)) + memory
        return held

    def _each(self, ask: Callable[[ClusterHandle[NodeWatch]], R]) -> list[R]:
        answers = []
        for rank in list(self._ranks):
            try:
                answers.append(ask(self._watches.only([rank], within=ANSWER_SECONDS)))
            except WorkerError as error:
                with suppress(ValueError):  # another thread may have left it out
                    self._ranks.remove(rank)
                if not isinstance(error, WorkerDied):
                    self._warn(f"workers of node {rank} that hang are not noticed any more: {error}")
        return answers


class Watchdog:
    """Looks at all processes every two seconds, in a thread, while it is entered.

    Time in which it cannot look does not count for anybody: a machine that was suspended finds its run alive.

    Args:
        stacks: Folder for evidence; made when there is some.
        step: Returns the number of the step under way, for names of files.
        moves: Returns how often the driver has gone on to something else.
        report: Called in the thread with what hung, once it is gone, and a sentence.
        warn: Called in the thread if the watchdog itself fails, which ends it.
        ended: Called with the reason before the driver's process is ended; it must wait for no lock.
        ray_failure: Is told the seconds since the last look and those that a process may be stopped; says what is wrong
            with a process of Ray that the run cannot do without: calls would wait for ever.
        end: Ends the driver's process, which hangs, with an exit code.
    """

    def __init__(
        self,
        nodes: NodeWatch | ManyNodes,
        deadlines: Deadlines,
        *,
        stacks: Path,
        step: Callable[[], int],
        moves: Callable[[], int],
        report: Callable[[Hang, str], None],
        warn: Callable[[str], None],
        ended: Callable[[str], None] = lambda why: None,
        ray_failure: Callable[[float, float], str | None] = lambda passed, patience: None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._nodes = nodes
        self._hangs = Hangs(deadlines)
        self._stacks = stacks
        self._step = step
        self._moves = moves
        self._report = report
        self._warn = warn
        self._ended = ended
        self._ray_failure = ray_failure
        self._end_driver = end
        self._still = 0.0
        self._last: object = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        try:
            last = time.monotonic()
            while not self._done.wait(LOOK_SECONDS):
                now = time.monotonic()
                passed = min(now - last, 2 * LOOK_SECONDS)
                if (failure := self._ray_failure(passed, STOPPED_SECONDS)) is not None:
                    self._give_up(failure)
                sightings = self._nodes.look()
                for hang in self._hangs.look(sightings, passed):
                    self._end(hang)
                self._watch_driver(sightings, passed)
                last = now
        except Exception as error:  # noqa: BLE001 - a run does without it rather than end because of it
            self._warn(f"hanging workers are not noticed any more: {type(error).__name__}: {error}")

    def _watch_driver(self, sightings: Sequence[Sighting], passed: float) -> None:
        now = (self._moves(), {one.name: one.page.events for one in sightings})
        self._still = self._still + passed if now == self._last else 0.0
        self._last = now
        if self._still < DRIVER_SECONDS:
            return
        self._stacks.mkdir(parents=True, exist_ok=True)
        with (self._stacks / f"{self._step()}-driver.txt").open("a") as file:
            faulthandler.dump_traceback(file)
        minutes = self._still / 60
        self._give_up(
            f"the driver hung: neither it nor any worker has gone on for {minutes:.0f} minutes; its stacks are in "
            f"{self._stacks}"
        )

    def _give_up(self, why: str) -> None:
        print(f"{why}; the run ends, and --resume continues it", file=sys.stderr, flush=True)
        self._ended(why)
        self._end_driver(RETRY)

    def _end(self, hang: Hang) -> None:
        try:
            self._keep(self._nodes.evidence(hang.witnesses))
        except OSError as error:
            self._warn(f"stacks of {hang.role} cannot be kept: {error}")
        left = self._nodes.end(hang.to_kill)
        self._report(hang, hang.text(self._stacks, left))

    def _keep(self, texts: dict[str, str]) -> None:
        """Write evidence, all of a worker into one file."""
        self._stacks.mkdir(parents=True, exist_ok=True)
        for name, text in sorted(texts.items()):
            rank, _, rest = name.partition(".")
            with (self._stacks / f"{self._step()}-{rest.rpartition('.')[0]}-{rank}.txt").open("a") as file:
                file.write(text + "\n")


@contextmanager
def watching(
    resources: ResourceManager,
    folder: Path | None,
    *,
    stacks: Path,
    step: Callable[[], int],
    moves: Callable[[], int],
    report: Callable[[Hang, str], None],
    warn: Callable[[str], None],
    ended: Callable[[str], None] = lambda why: None,
) -> Iterator[NodeWatch | ManyNodes]:
    """Watch every worker that a `Cluster` starts meanwhile, and hand out what can be asked about them.

    Args:
        resources: The run's nodes, which are reserved. If any of Ray's is another machine, each of them gets an actor.
        folder: Where the pages go: in memory, because nobody is to wait for a disk. None: a new folder of `/dev/shm`.
        step: Returns the number of the step under way.
        moves: See `Watchdog`.
        report: See `Watchdog`.
        warn: See `Watchdog`.
        ended: See `Watchdog`.
    """
    config = resources.config
    folder = folder or Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=SHARED_MEMORY))
    with ExitStack() as stack:
        here = NodeWatch(folder)
        stack.callback(here.close)

        def end(code: int) -> None:
            try:
                here.close()
            finally:
                os._exit(code)

        nodes: NodeWatch | ManyNodes = here
        if any(node["Alive"] and node["NodeManagerAddress"] != node_address() for node in ray.nodes()):
            watches = Cluster("watchdog", NodeWatch, resources.beside(config.nodes), arguments=lambda rank: (folder,))
            stack.callback(watches.close, NodeWatch.close)
            watches.everywhere(NodeWatch.look)  # workers need the folder
            nodes = ManyNodes(watches, warn)
        deadlines = Deadlines(config.device, config.start_timeout_seconds)
        processes = RayProcesses()
        stack.enter_context(
            Watchdog(
                nodes,
                deadlines,
                stacks=stacks,
                step=step,
                moves=moves,
                report=report,
                warn=warn,
                ended=ended,
                ray_failure=processes.failure,
                end=end,
            )
        )
        Cluster.pages = folder
        try:
            yield nodes
        finally:
            Cluster.pages = None
