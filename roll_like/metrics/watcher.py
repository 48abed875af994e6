"""Follows a run from outside: shows what its process writes, until it ends.

Only files are read, so that a watcher neither needs nor disturbs the run, and may come and leave at any time. The end
of a run is known by its folder's lock: the process that runs holds it, and a killed one cannot.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from roll_like.config.evaluation import ScheduleConfig
from roll_like.errors import FAILED, OK, ConfigError, DataError
from roll_like.metrics import files
from roll_like.metrics.console import Console, Mode, make_console
from roll_like.metrics.progress import Progress
from roll_like.metrics.rollout_text import printable, sample_line
from roll_like.metrics.rollouts import read_rollouts
from roll_like.metrics.runs import is_running, read_config, read_run
from roll_like.metrics.summary import status_of, summarise

#: Seconds between looks at the files.
INTERVAL = 1.0
#: Steps, evaluations and warnings that were there before, and are shown when a watcher comes.
LAST_LINES, LAST_WARNINGS = 8, 3
_WATCHED = (files.METRICS, files.EVALUATIONS, files.EVENTS)


def watch(folder: Path, *, mode: Mode = "auto", wait: Callable[[float], None] = time.sleep) -> int:
    """Show a run until it ends, then its summary; Ctrl-C leaves it running.

    Args:
        mode: How steps are shown, as in `metrics.console`.
        wait: Waits between looks, in seconds.

    Returns:
        Exit code: 0 if the run finished, or is left; 1 if it failed, was stopped or was killed.

    Raises:
        DataError: The folder holds no run, or a file of it is damaged.
    """
    try:
        _await_start(folder, wait)
        if is_running(folder):
            _follow(folder, mode, wait)
    except KeyboardInterrupt:
        print(f"left {folder}; the run goes on")
        return OK
    return _show_end(folder)


def _await_start(folder: Path, wait: Callable[[float], None]) -> None:
    """Wait for `run.json`: a run opens its folder some seconds before its metrics."""
    announced = False
    while not (folder / files.RUN).is_file() and is_running(folder):
        if not announced:
            print(f"{folder}: the run is starting …", flush=True)
            announced = True
        wait(INTERVAL)


def _follow(folder: Path, mode: Mode, wait: Callable[[float], None]) -> None:
    """Show what is written, until its process releases the folder's lock. A run that is continued is shown anew."""
    while True:
        view = _View(folder, mode)
        try:
            while True:
                # asked before the files are read: what a process writes last is not missed
                running = is_running(folder)
                if not view.update() and running:
                    break
                if not running:
                    return
                wait(INTERVAL)
        finally:
            view.close()
        print(f"{folder}: the run goes on from its last checkpoint", flush=True)


class _View:
    """A run on a console.

    Raises:
        DataError: The folder holds no run.
    """

    def __init__(self, folder: Path, mode: Mode) -> None:
        info = read_run(folder).info
        self._folder = folder
        self._elapsed = 0.0
        total = int(info["total_steps"])
        # the run's own clock: a watcher that comes late sees all steps at once
        self._progress = Progress(total, _evaluations(folder, total), clock=lambda: self._elapsed)
        self._console: Console = make_console(
            mode, title=f"roll_like · {printable(str(info['name']))}", progress=self._progress, elapsed=self._clock
        )
        self._tails = {name: Tail(folder / name) for name in _WATCHED}
        self._sampled = 0
        self._first = True

    def _clock(self) -> float:
        return self._elapsed

    def update(self) -> bool:
        """Show what is new; return False if the run has begun its files anew, so that this view is out of date."""
        found: list[tuple[str, dict[str, Any]]] = []
        for name, tail in self._tails.items():
            records, replaced = tail.read()
            if replaced:
                return False
            found += [(name, record) for record in records]
        found.sort(key=lambda one: float(one[1].get("elapsed", 0.0)))
        earlier = max(0, len(found) - LAST_LINES) if self._first else 0
        self._keep(found[:earlier])
        for name, record in found[earlier:]:
            self._show(name, record)
        self._first = False
        self._console.phase(self._phase())
        self._show_sample()
        return True

    def _phase(self) -> str:
        if self._progress.step == 0:
            return "waiting for the first step"
        return "finishing" if self._progress.step == self._progress.total_steps else "running"

    def close(self) -> None:
        """Give the terminal back."""
        self._console.close()

    def _keep(self, found: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Take what was there before without a line for each, but for the last warnings."""
        for name, record in found:
            self._elapsed = float(record.get("elapsed", self._elapsed))
            if name == files.METRICS:
                self._progress.add(int(record["step"]), files.values_of(record))
            elif name == files.EVALUATIONS:
                self._progress.add_evaluation(int(record["step"]), files.values_of(record))
        warnings = [record for name, record in found if name == files.EVENTS and record["kind"] == "warning"]
        for record in warnings[-LAST_WARNINGS:]:
            self._show(files.EVENTS, record)

    def _show(self, name: str, record: Mapping[str, Any]) -> None:
        self._elapsed = float(record.get("elapsed", self._elapsed))
        if name == files.METRICS:
            self._console.step(int(record["step"]), files.values_of(record))
        elif name == files.EVALUATIONS:
            self._console.evaluation(int(record["step"]), files.values_of(record))
        elif record["kind"] == "warning":
            self._console.warn(printable(str(record.get("text", ""))))

    def _show_sample(self) -> None:
        """Show one answer of the last step; its reward plays no part in the choice."""
        step = self._progress.step
        if step == self._sampled or not files.rollouts_path(self._folder, step).is_file():
            return
        try:
            rows = read_rollouts(self._folder, step, "step")
        except (ValueError, KeyError) as error:
            self._console.warn(f"the rollouts of step {step} cannot be read: {error}")
            rows = []
        if rows:
            self._console.sample(sample_line(rows[step % len(rows)]))
        self._sampled = step


def _evaluations(folder: Path, total: int) -> list[int]:
    """Return after how many steps a run evaluates, as far as its configuration says."""
    section = read_config(folder).get("evaluation")
    if not isinstance(section, Mapping):
        return []
    try:
        schedule = ScheduleConfig(**{key: section[key] for key in ScheduleConfig.model_fields if key in section})
    except ConfigError:
        return []
    return schedule.steps_due(total)


def _show_end(folder: Path) -> int:
    run = read_run(folder)
    console = make_console("plain", title=run.name, progress=Progress(int(run.info["total_steps"])))
    status = status_of(run)
    if run.steps or run.evaluations:
        try:
            console.print(*summarise(run).tables())
        except (ValueError, KeyError) as error:
            raise DataError(
                f"the rollouts of {folder} cannot be read: {error}", fix="move the damaged file out of rollouts/"
            ) from error
    if status in ("unfinished", "killed"):
        print(f"{folder}: the run was killed; roll-like run --config FILE --resume continues it")
    elif not (run.steps or run.evaluations):
        print(f"{folder}: the run ended before its first step: {status}; its output is in logs/")
    return OK if status == "finished" else FAILED


class Tail:
    """The lines of a file of JSON that were not read yet.

    A half-written last line is left for the next time. A run that is continued replaces its files by shorter ones: they
    are read anew.

    Args:
        path: The file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._offset = 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the new lines, and whether they are those of another file than before.

        Raises:
            DataError: A whole line is not a JSON object.
        """
        try:
            with self._path.open("rb") as file:
                status = self._path.stat()
                found = (status.st_dev, status.st_ino)
                replaced = self._file is not None and (found != self._file or status.st_size < self._offset)
                if replaced:
                    self._offset = 0
                self._file = found
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:  # not written yet, or moved aside by a new run of the same folder
            replaced, self._file, self._offset = self._file is not None, None, 0
            return [], replaced
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [self._record(line) for line in whole.splitlines() if line.strip()], replaced

    def _record(self, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise DataError(
                f"{self._path}: expected one JSON object per line, found {line[:60]!r}",
                fix="restore the file, or remove the damaged line",
            )
        return record
