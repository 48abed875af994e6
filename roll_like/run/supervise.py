"""Starts a run again until it has finished: `roll-like run --restart N`.

The run itself is a child process with `--resume auto`, so that it may die in any way: by a signal, for want of memory,
with Ray's head. This process holds no GPU, no Ray and no thread.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import psutil

from roll_like.cluster.worker_restarts import RestartBudget
from roll_like.errors import FAILED, RETRY, STOPPING
from roll_like.run.signals import heeded

#: Before an attempt, by how many in a row have ended without a newer checkpoint than before; where the last was of no
#: use either, the cause is not one that passes. Seconds.
PAUSES = (2.0, 10.0, 60.0)
ATTEMPTS = "attempts.jsonl"
#: How often this process looks at the run, and how often the run gives a sign of life. Seconds.
LOOK_SECONDS, BEAT_SECONDS = 5.0, 5.0
#: After how long in which the run was stopped, or gave no sign of life, that is said, and after how long it is killed.
#: Seconds.
SAID_SECONDS, QUIET_SECONDS = 60.0, 600.0
#: Environment variable of the run: descriptor of a file in memory, to which it writes a byte as a sign of life.
HEARTBEAT = "ROLL_LIKE_HEARTBEAT"


class Child:
    """Runs commands, one at a time, and hands signals to stop on to them.

    Args:
        say: Called with one sentence for people.

    Attributes:
        stopping: The last signal to stop that has arrived, Ctrl-C included; None without one.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.stopping: int | None = None
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._pass_on) for number in heeded()}
        self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._leave_to_child)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str]) -> int:
        """Start a command, wait until it ends, and return its exit code; kill one that is quiet for too long.

        It is quiet while it is stopped, and while no thread of its interpreter runs, if it ever called `beat`. Where
        only its work hangs, it ends itself (`roll_like.cluster.watchdog`).
        """
        heartbeat = os.memfd_create("heartbeat")
        try:
            return self._run(command, heartbeat)
        finally:
            os.close(heartbeat)

    def _run(self, command: Sequence[str], heartbeat: int) -> int:
        environment = {**os.environ, HEARTBEAT: str(heartbeat)}
        self._process = process = subprocess.Popen(command, pass_fds=[heartbeat], env=environment)
        if self.stopping in STOPPING:  # it arrived while the process was made
            process.send_signal(self.stopping)
        quiet, said, beats = 0.0, False, 0
        who = f"the run (process {process.pid})"
        while True:
            began = time.monotonic()
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(LOOK_SECONDS)
                self._process = None
                return code
            # this process may have been stopped as well, by Ctrl-Z: that time does not count
            passed = min(time.monotonic() - began, 2 * LOOK_SECONDS)
            before, beats = beats, os.fstat(heartbeat).st_size
            status = _status(process.pid)
            stopped = status == psutil.STATUS_STOPPED
            # one that a debugger holds is left alone
            silent = 0 < beats == before and status != psutil.STATUS_TRACING_STOP
            quiet = quiet + passed if stopped or silent else 0.0
            if not quiet:
                said = False
            elif quiet >= QUIET_SECONDS:
                what = "was stopped" if stopped else "did not answer"
                self._say(f"{who} {what} for {quiet:.0f} s and is killed")
                process.kill()
                quiet = 0.0  # it may take a moment to be gone
            elif quiet >= SAID_SECONDS and not said:
                said = True
                if stopped:
                    what = f"is stopped; `kill -CONT {process.pid}` continues it, and"
                else:
                    what = "does not answer: native code holds Python's interpreter lock (GIL). Its stacks follow;"
                    process.send_signal(signal.SIGUSR2)
                self._say(f"{who} {what} after {QUIET_SECONDS:g} s it is killed")

    def _pass_on(self, number: int, frame: Any) -> None:
        del frame
        self.stopping = number
        if self._process is not None:
            self._process.send_signal(number)
            self._process.send_signal(signal.SIGCONT)  # a stopped one would not notice

    def _leave_to_child(self, number: int, frame: Any) -> None:
        """A terminal sends Ctrl-C to the child too."""
        del frame
        self.stopping = number


@dataclass
class Supervisor:
    """Starts a command, and starts it again where that may help.

    Attributes:
        command: The run, with `--resume auto`.
        restarts: Further attempts after the first.
        progress: Returns the folder of the run and the step of its newest checkpoint; None before there is a folder.
        say: Called with one sentence for people.
        wait: Waits between attempts, in seconds.
    """

    command: Sequence[str]
    restarts: int
    progress: Callable[[], tuple[Path, int] | None]
    say: Callable[[str], None]
    wait: Callable[[float], None] = time.sleep

    def run(self) -> int:
        """Return the exit code of the last attempt; that of a killed one is `RETRY`, as a scheduler needs it."""
        with Child(self.say) as child:
            return self._attempts(child)

    def _attempts(self, child: Child) -> int:
        attempt, budget = 1, RestartBudget(PAUSES, math.inf)
        budget.take()  # the first attempt may be without progress too
        while True:
            before = self._step()
            if child.stopping is not None:
                return RETRY
            code = self._attempt(child, attempt)
            after = self._step()
            if after > before:
                budget.worked()
            again = code < 0 or code == RETRY
            if not again or child.stopping is not None:
                return RETRY if code < 0 else code
            ended = f"attempt {attempt} {_described(code)}"
            if attempt > self.restarts:
                self.say(f"{ended}; it was the last of {attempt} attempts (--restart {self.restarts})")
                return RETRY
            pause = budget.take()
            if pause is None:
                idle = len(PAUSES)
                self.say(f"{ended}; {idle} attempts in a row ended without a new checkpoint, so the run is given up")
                return FAILED
            attempt += 1
            found = f"the checkpoint of step {after}" if after else "its first step"
            self.say(f"{ended}; attempt {attempt} of {self.restarts + 1} goes on from {found} in {pause:g} s")
            self.wait(pause)

    def _attempt(self, child: Child, number: int) -> int:
        began, clock = datetime.now(UTC), time.monotonic()
        code = child.run(self.command)
        found = self.progress()
        if found is not None:
            record = {
                "attempt": number,
                "began": began.isoformat(timespec="seconds"),
                "seconds": round(time.monotonic() - clock, 1),
                "exit": code,
                "checkpoint_step": found[1],
            }
            with (found[0] / ATTEMPTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        return code

    def _step(self) -> int:
        found = self.progress()
        return 0 if found is None else found[1]


def supervised_command(arguments: Sequence[str]) -> list[str]:
    """Return this process's command line as that of one attempt.

    Args:
        arguments: `sys.orig_argv`.

    >>> supervised_command(["python", "run_pipeline.py", "--config", "a.yaml", "--restart", "3"])[1:]
    ['run_pipeline.py', '--config', 'a.yaml', '--resume', 'auto']
    """
    kept: list[str] = []
    skip = False
    for text in arguments[1:]:
        if skip:
            skip = False
        elif text == "--restart":
            skip = True
        elif not text.startswith("--restart="):
            kept.append(text)
    return [sys.executable, *kept, "--resume", "auto"]


def beat() -> None:
    """Show a parent that is a `Child` from now on that this process's interpreter runs; without one do nothing.

    SIGUSR2 then writes the stacks of all threads, which needs no interpreter.
    """
    number = os.environ.pop(HEARTBEAT, None)  # not for children of this process
    if number is None:
        return
    heartbeat = int(number)
    os.set_inheritable(heartbeat, False)
    faulthandler.register(signal.SIGUSR2, file=2)

    def beating() -> None:
        while True:
            os.write(heartbeat, b".")
            time.sleep(BEAT_SECONDS)

    threading.Thread(target=beating, name="heartbeat", daemon=True).start()


def _status(pid: int) -> str:
    """Return a process's status as `psutil` names it; that of one that has just ended is `dead`."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)


def _described(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
