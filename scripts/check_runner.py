"""Runs checks one after the other, each in a process group of its own with a time limit, and writes a report.

It needs only Python's standard library, so that it also runs where something is missing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
#: A check starts only if this share of its time limit is left of the budget.
LEAST_SHARE = 0.5
#: Seconds between SIGINT, at which Python says where it hangs, and SIGKILL.
GRACE = 5.0
#: How long GPU memory may take to come back after a check, in seconds, and how much may stay, in GiB.
MEMORY_SECONDS, MEMORY_SLACK = 20.0, 0.5

Status = Literal["passed", "failed", "out of time", "skipped"]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """One thing to find out.

    Attributes:
        name: How `--only` calls it.
        seconds: Time limit of all its commands together.
        about: What it shows.
        commands: Run in order, in the repository. `{out}` is a folder of its own.
        figures: Reads figures from that folder and from what was printed.
        needs: Python packages without which it is skipped.
        bounds: Figure → least and most; a missing figure, or one outside, fails the check.
    """

    name: str
    seconds: float
    about: str
    commands: Sequence[Sequence[str]]
    figures: Callable[[Path, str], Figures]
    needs: Sequence[str] = ()
    bounds: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)


@dataclass
class Result:
    """How a check ended."""

    name: str
    status: Status
    seconds: float = 0.0
    reason: str = ""
    peak_gib: float | None = None
    left_gib: float | None = None
    figures: Figures = field(default_factory=dict)


# ---- running ---------------------------------------------------------------------------------------


def run_checks(
    checks: Sequence[Check],
    out: Path,
    budget: float,
    *,
    machine: Mapping[str, Any],
    say: Callable[[str], None] = print,
    used_gib: Callable[[], float | None] = lambda: None,
) -> list[Result]:
    """Run checks one after the other; write the report after each.

    Args:
        checks: In order.
        out: Folder of report, logs and what the checks write.
        budget: Seconds for all of them, ending their processes included. The last one to start has what is left.
        machine: Goes into the report.
        say: Takes a line for each check.
        used_gib: Returns the memory in use on the GPU; None if unknown.
    """
    until = time.monotonic() + budget - GRACE - MEMORY_SECONDS
    at_start = used_gib()
    results: list[Result] = []
    write_report(out, machine, checks, results)
    for check in checks:
        left = until - time.monotonic()
        missing = [name for name in check.needs if importlib.util.find_spec(name) is None]
        if missing:
            results.append(
                Result(check.name, "skipped", reason=f"not installed: {', '.join(missing)}; see docs/gpu.md")
            )
        elif left < LEAST_SHARE * check.seconds:
            reason = f"{max(left, 0):.0f} s of the budget are left, and it may take {check.seconds:.0f}"
            results.append(Result(check.name, "skipped", reason=f"{reason}; raise --budget, or name it with --only"))
        else:
            say(f"{check.name}: {check.about} (at most {min(check.seconds, left):.0f} s)")
            results.append(run_check(check, out, min(check.seconds, left), used_gib=used_gib, at_start=at_start))
        say(line_of(results[-1]))
        write_report(out, machine, checks, results)
    return results


def run_check(
    check: Check, out: Path, seconds: float, *, used_gib: Callable[[], float | None], at_start: float | None
) -> Result:
    """Run one check's commands within a time limit."""
    folder, log = out / check.name, out / "logs" / f"{check.name}.txt"
    folder.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    status: Status = "passed"
    reason = ""
    with log.open("wb") as output, PeakMemory(used_gib) as memory:
        for command in check.commands:
            words = [word.replace("{out}", str(folder)) for word in command]
            code = run_command(words, output, began + seconds - time.monotonic())
            if code != 0:
                status = "out of time" if code is None else "failed"
                break
    took = time.monotonic() - began
    printed = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    try:
        figures = check.figures(folder, printed)
    except (OSError, ValueError, KeyError, ET.ParseError) as error:  # a run that was ended may leave half a file
        figures = {}
        reason = f"its figures cannot be read: {error}; "
        status = "failed" if status == "passed" else status
    if status != "passed":
        reason += cause(printed)
    elif figures.get("skipped") and not figures.get("passed"):
        status, reason = "skipped", str(figures.get("skipped_because"))
    else:
        reason = "; ".join(outside(figures, check.bounds))
        status = "failed" if reason else "passed"
    return Result(
        check.name,
        status,
        seconds=took,
        reason=reason,
        peak_gib=memory.peak,
        left_gib=left_gib(used_gib, at_start),
        figures=figures,
    )


def run_command(words: Sequence[str], output: Any, seconds: float) -> int | None:
    """Run a command in a process group of its own and return its exit code; None if it ran out of time."""
    process = subprocess.Popen(
        list(words),
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return None
    finally:  # also of what it started, and at Ctrl-C
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def environment() -> dict[str, str]:
    """Return the environment of checks: the repository's code, one GPU, no network."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": first_gpu(),
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


class PeakMemory:
    """Notes the most GPU memory in use, once a second.

    Args:
        used_gib: As `run_checks` takes it.
    """

    def __init__(self, used_gib: Callable[[], float | None]) -> None:
        self._used_gib = used_gib
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak: float | None = None

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            now = self._used_gib()
            if now is not None:
                self.peak = max(self.peak or 0.0, now)


def left_gib(used_gib: Callable[[], float | None], at_start: float | None) -> float | None:
    """Wait until GPU memory is back where it was; return how much more than that is in use then."""
    until = time.monotonic() + MEMORY_SECONDS
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
    waiting = [check.name for check in checks[len(results) :]]
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
