"""Runs checks, one after the other or side by side, each in a process group of its own with a time limit.

It needs only Python's standard library, so that it also runs where something is missing.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import runpy
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
#: Finds and ends processes by a variable in their environment; run by itself, it needs no package.
_GUARDIAN = runpy.run_path(str(ROOT / "roll_like" / "cluster" / "guardian.py"))
#: A check starts only if this share of its time limit is left of the budget.
LEAST_SHARE = 0.5
#: Seconds for stacks at a time limit, from SIGINT to SIGKILL, and until processes in other groups have ended.
GRACE = 5.0
#: Seconds between starts side by side, between looks at what has been found, and between looks at processes.
STAGGER, LOOK, TICK = 4.0, 3.0, 0.05
ALWAYS = math.inf
#: How long GPU memory may take to come back after a check, in seconds, and how much may stay, in GiB.
MEMORY_SECONDS, MEMORY_SLACK = 20.0, 0.5
#: By this variable a check's processes are found; at this signal, which no library uses, they write their stacks.
MARKER, STACKS = "GPU_CHECK_RUN", signal.SIGRTMIN + 7

Status = Literal["passed", "failed", "out of time", "skipped", "running"]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """One thing to find out.

    Attributes:
        name: How `--only` calls it.
        seconds: Time limit of all its commands together, while other checks wait.
        about: What it shows.
        commands: Run in order, in the repository. `{out}` is a folder of its own.
        figures: Reads figures from that folder and from what was printed; also while it runs.
        needs: Python packages without which it is skipped.
        bounds: Figure → least and most; a missing figure, or one outside, fails the check.
        alone: For so many seconds from its start nothing else runs. 0: it also starts beside others.
        every_gpu: Whether it sees all visible GPUs; else the first one.
    """

    name: str
    seconds: float
    about: str
    commands: Sequence[Sequence[str]]
    figures: Callable[[Path, str], Figures]
    needs: Sequence[str] = ()
    bounds: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    alone: float = 0.0
    every_gpu: bool = False


@dataclass
class Result:
    """How a check ended, or what is known while it is `running`."""

    name: str
    status: Status
    seconds: float = 0.0
    reason: str = ""
    peak_gib: float | None = None
    left_gib: float | None = None
    figures: Figures = field(default_factory=dict)


# ---- the order -------------------------------------------------------------------------------------


@dataclass
class Schedule:
    """Runs checks in their order, and keeps the report up to date meanwhile.

    Attributes:
        checks: In the order of their worth: what the budget does not suffice for is left out.
        out: Folder of report, logs and what the checks write.
        budget: Seconds for all of them, ending their processes included. What nothing waits for has what is left.
        machine: Goes into the report.
        say: Takes the lines for the terminal.
        used_gib: Returns the memory in use on the GPU; None if unknown.
        beside: How many may run at a time.
    """

    checks: Sequence[Check]
    out: Path
    budget: float
    machine: Mapping[str, Any]
    say: Callable[[str], None] = print
    used_gib: Callable[[], float | None] = lambda: None
    beside: int = 1

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.budget
        self._until = self._end - 3 * GRACE
        self._at_start = self.used_gib()
        self._waiting = list(self.checks)
        self._running: dict[Future[Result], Run] = {}
        self._results: list[Result] = []
        self._looked = -math.inf

    def run(self) -> list[Result]:
        """Return the results in the order in which they were known."""
        self._drop(missing)
        self._write()
        with ThreadPoolExecutor(max(len(self.checks), 1)) as pool:
            try:
                while self._waiting or self._running:
                    self._drop(self._too_late)
                    if self._waiting and self._may_start(self._waiting[0]):
                        self._start(self._waiting.pop(0), pool)
                    self._collect()
                    self._look()
                    time.sleep(TICK)
            finally:  # also at Ctrl-C
                for run in self._running.values():
                    run.stopped = True
        return self._results

    def _drop(self, why: Callable[[Check], str]) -> None:
        for check in list(self._waiting):
            if reason := why(check):
                self._waiting.remove(check)
                self._note(Result(check.name, "skipped", reason=reason))

    def _too_late(self, check: Check) -> str:
        left = self._until - time.monotonic()
        reason = f"{max(left, 0):.0f} s of the budget are left, and it may take {check.seconds:.0f}"
        return f"{reason}; raise --budget, or name it with --only" * (left < LEAST_SHARE * check.seconds)

    def _may_start(self, check: Check) -> bool:
        now = time.monotonic()
        calm = all(now - run.began >= max(run.check.alone, STAGGER) for run in self._running.values())
        return not self._running or (not check.alone and len(self._running) < self.beside and calm)

    def _start(self, check: Check, pool: ThreadPoolExecutor) -> None:
        run = Run(check, self.out)
        left = self._until - run.began
        self.say(f"{check.name}: {check.about} (at most {min(check.seconds, left) if self._waiting else left:.0f} s)")
        self._running[pool.submit(run.carry_out)] = run
        self._write()

    def _collect(self) -> None:
        """Extend what nothing waits for to the budget's end, and note what has ended."""
        for future, run in list(self._running.items()):
            run.until = min(self._until, run.began + run.check.seconds) if self._waiting else self._until
            if future.done():
                del self._running[future]
                result = future.result()
                result.peak_gib = run.peak
                if not self._running:
                    result.left_gib = left_gib(self.used_gib, self._at_start, self._end)
                self._note(result)

    def _look(self) -> None:
        """Now and then, note the memory in use and what running checks have found."""
        if self._running and time.monotonic() - self._looked > LOOK:
            now = self.used_gib()
            for run in self._running.values():
                run.peak = run.peak if now is None else max(run.peak or 0.0, now)
            self._write()
            self._looked = time.monotonic()

    def _note(self, result: Result) -> None:
        self._results.append(result)
        self.say(line_of(result))
        if result.figures:
            self.say(json.dumps({"check": result.name, **result.figures}))
        self._write()

    def _write(self) -> None:
        running = [run.so_far() for run in self._running.values()]
        write_report(self.out, self.machine, self.checks, [*self._results, *running])


def missing(check: Check) -> str:
    """Return why a check cannot run with what is installed; empty if it can."""
    names = [name for name in check.needs if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(names)}; see docs/gpu.md" if names else ""


# ---- one check -------------------------------------------------------------------------------------


class Run:
    """A check under way: `until` may be changed meanwhile, and once `stopped` is set nothing is asked for stacks."""

    def __init__(self, check: Check, out: Path) -> None:
        self.check = check
        self.began = time.monotonic()
        self.until = self.began + check.seconds
        self.peak: float | None = None
        self._folder, self._log = out / check.name, out / "logs" / f"{check.name}.txt"
        self._stacks = out / "logs" / f".{check.name}"
        self._marker, self._figures = secrets.token_hex(8), Figures()
        self.stopped, self._hung = False, ""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stacks.mkdir(parents=True, exist_ok=True)
        self._log.write_bytes(b"")

    def so_far(self) -> Result:
        """Return what is known by now."""
        with suppress(OSError, ValueError, KeyError):  # what is just being written
            self._figures = self.check.figures(self._folder, self._printed())
        return Result(self.check.name, "running", time.monotonic() - self.began, "", self.peak, None, self._figures)

    def carry_out(self) -> Result:
        """Run the commands within the time limit."""
        status: Status = "passed"
        reason = ""
        for command in self.check.commands:
            code = self._execute([word.replace("{out}", str(self._folder)) for word in command])
            if code != 0:
                status = "out of time" if code is None else "failed"
                break
        shutil.rmtree(self._stacks, ignore_errors=True)
        took = time.monotonic() - self.began
        printed = self._printed()
        try:
            figures = self.check.figures(self._folder, printed)
        except (OSError, ValueError, KeyError) as error:  # a run that was ended may leave half a file
            figures = self._figures
            reason = f"its figures cannot be read: {error}; "
            status = "failed" if status == "passed" else status
        if status != "passed":
            reason += self._hung or cause(printed)
        elif figures.get("skipped") and not figures.get("passed"):
            status, reason = "skipped", str(figures.get("skipped_because"))
        else:
            reason = "; ".join(outside(figures, self.check.bounds))
            status = "failed" if reason else "passed"
        return Result(self.check.name, status, seconds=took, reason=reason, figures=figures)

    def _printed(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self._log.read_text(errors="replace"))

    def _execute(self, words: Sequence[str]) -> int | None:
        """Run a command in a process group of its own and return its exit code; None if it ran out of time."""
        own = {MARKER: self._marker, "GPU_CHECK_SIGNAL": str(int(STACKS)), "GPU_CHECK_STACKS": str(self._stacks)}
        with self._log.open("ab") as output:  # appending, as its processes' stacks are
            process = subprocess.Popen(
                list(words),
                cwd=ROOT,
                env=environment(every_gpu=self.check.every_gpu) | own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            while (code := process.poll()) is None and not self.stopped and time.monotonic() < self.until:
                time.sleep(TICK)
            if code is None and not self.stopped:
                said = cause(self._printed())
                self._hung = f"it was in {'; '.join(self._write_stacks()) or 'no Python code'}. Last lines: {said}"
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
            return code
        finally:  # also of what it started, in whatever group
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            # a run's guardian ends its workers and removes its files by itself
            _GUARDIAN["sweep"](self._marker, name=MARKER, patience=GRACE)

    def _write_stacks(self) -> list[str]:
        """Have all Python processes of the run write their stacks, bring them into the log; return where they are."""
        titles: dict[Path, str] = {}
        for pid in sorted(_GUARDIAN["marked"](self._marker, MARKER)):
            if (file := self._stacks / str(pid)).exists():  # else the signal would end it
                with suppress(OSError):  # it has just ended
                    words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").split()
                    titles[file] = " ".join(words).removeprefix(f"{Path(sys.executable).parent}/")[:80]
                    os.kill(pid, STACKS)
        until, before, sizes = time.monotonic() + GRACE, [-1], [0]
        while (0 in sizes or sizes != before) and time.monotonic() < until:  # until they do not grow any more
            time.sleep(2 * TICK)
            before, sizes = sizes, [file.stat().st_size for file in titles]
        found: dict[str, str] = {}
        with self._log.open("a") as log:
            for file, title in titles.items():
                stacks = file.read_text(errors="replace")
                log.write(f"\n---- Python stacks of process {file.name}: {title}\n{stacks}")
                if where := place_of(stacks):
                    found.setdefault(where, f"{where} [{file.name} {title[:40]}]")
        # Ray's own processes last
        return sorted(found.values(), key=lambda where: (where.startswith(("ray/", "/")), "ray::" not in where))[:6]


def place_of(stacks: str) -> str:
    """Return where a process is: its innermost line of this repository, else of a package, main thread first."""
    threads = reversed(re.split(r"most recent call", stacks))  # the main thread's comes last
    frames = [frame for thread in threads for frame in re.findall(r'File "(.+?)", line (\d+) in (.+)', thread)]
    packages = [frame for frame in frames if "/site-packages/" in frame[0]]
    own = [frame for frame in frames if frame[0].startswith(f"{ROOT}/") and frame not in packages]
    file, line, name = next(iter(own or packages or frames), ("", "", ""))
    return file and f"{file.split('/site-packages/')[-1].removeprefix(f'{ROOT}/')}:{line} in {name}"


def environment(*, every_gpu: bool = False) -> dict[str, str]:
    """Return the environment of checks: the repository's code, stacks by a signal, one GPU or every one, no network."""
    paths = [str(ROOT / "scripts" / "stacks"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        # a process that gives itself a title, as vLLM's do, would hide its environment, by which it is found
        "SPT_NOENV": "1",
        **({} if every_gpu else {"CUDA_VISIBLE_DEVICES": first_gpu()}),
        # numbers of GPUs mean the same to CUDA as to nvidia-smi, which tells the memory in use
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


def first_gpu() -> str:
    """Return the first visible GPU, by number or by UUID."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def outside(figures: Figures, bounds: Mapping[str, tuple[float | None, float | None]]) -> list[str]:
    """Return what is missing, or not within its bounds, in words."""
    found = []
    for name, (least, most) in bounds.items():
        value = figures.get(name)
        expected = " and ".join(
            f"{word} {bound:g}" for word, bound in (("at least", least), ("at most", most)) if bound is not None
        )
        if value is None:
            found.append(f"no figure {name} ({expected} was expected)")
        elif not ((least is None or value >= least) and (most is None or value <= most)):  # NaN is outside
            found.append(f"{name} is {value:.4g}, {expected} was expected")
    return found


def cause(printed: str) -> str:
    """Return the lines that say most: the last errors, else the last lines."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"Error\b|Exception\b|error:|fix:|out of memory|^FAILED|^E  ", line)]
    return " | ".join(line[:300] for line in (errors or lines)[-4:])


def left_gib(used_gib: Callable[[], float | None], at_start: float | None, end: float) -> float | None:
    """Wait until GPU memory is back where it was, but not beyond `end`; return how much more is in use then."""
    until = min(time.monotonic() + MEMORY_SECONDS, end)
    while at_start is not None and (now := used_gib()) is not None:
        if now - at_start < MEMORY_SLACK or time.monotonic() > until:
            return max(now - at_start, 0.0)
        time.sleep(1.0)
    return None


def used_gpu_memory() -> float | None:
    """Return the memory in use on the GPU that checks use, by all processes, in GiB."""
    command = ["nvidia-smi", "-i", first_gpu(), "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return int(done.stdout.split()[0]) / 1024
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


# ---- the report ------------------------------------------------------------------------------------


def write_report(out: Path, machine: Mapping[str, Any], checks: Sequence[Check], results: Sequence[Result]) -> None:
    """Write `report.json` and `report.md`, each in one go."""
    out.mkdir(parents=True, exist_ok=True)
    abouts = {check.name: check.about for check in checks}
    order = list(abouts)
    results = sorted(results, key=lambda result: order.index(result.name))
    waiting = [name for name in order if name not in {result.name for result in results}]
    content = {
        "machine": machine,
        "checks": [{**asdict(result), "about": abouts[result.name]} for result in results],
        "not_run": waiting,
    }
    rows = [f"- {name}: {value}" for name, value in machine.items()]
    rows += ["", "| check | result | s | peak GiB | left GiB | figures |", "|---|---|---|---|---|---|"]
    for result in results:
        figures = ", ".join(f"{name} {_short(value)}" for name, value in result.figures.items())
        cells = [result.name, result.status, f"{result.seconds:.0f}", _short(result.peak_gib), _short(result.left_gib)]
        told = f"{result.reason}. {figures}" if result.reason else figures
        rows.append("| " + " | ".join([*cells, told.replace("|", "/").replace("\n", " ")]) + " |")
    rows += [f"| {name} | not run |  |  |  | {abouts[name]} |" for name in waiting]
    for name, text in (("report.json", json.dumps(content, indent=1)), ("report.md", "\n".join(rows))):
        new = out / f".{name}"
        new.write_text(text + "\n", encoding="utf-8")
        new.replace(out / name)


def _short(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def line_of(result: Result) -> str:
    """Return a check's line on the terminal."""
    return f"{result.name:10} {result.status:12} {result.seconds:5.0f} s  {result.reason}".rstrip()
