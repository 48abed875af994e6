"""A run that is started again: when, how often, and what a scheduler is told at the end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from roll_like.run import supervise
from roll_like.run.supervise import PAUSES, Supervisor, supervised_command

#: Does what the next line of the script says, and makes a checkpoint first where that says so.
CHILD = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
lines = (folder / "script").read_text().splitlines()
(folder / "script").write_text("\\n".join(lines[1:]))
word, _, step = lines[0].partition(" ")
if step:
    (folder / "step").write_text(step)
if word == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if word == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
    sys.exit(0)
if word in {"hold", "work"}:
    import re
    from roll_like.run import supervise
    supervise.BEAT_SECONDS = 0.02
    supervise.beat()
    if word == "work":
        time.sleep(4)
        sys.exit(0)
    time.sleep(1)
    re.fullmatch("(a|a)*b", "a" * 99)  # takes for ever, and no other thread runs meanwhile
if word == "wait":
    def stop(number, frame):
        print("stopping", flush=True)
        sys.exit(75)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, stop)
    signal.signal(signal.SIGHUP, stop)
    (folder / "ready").touch()
    for _ in range(600):  # a signal right before a sleep is handled after it
        time.sleep(0.1)
sys.exit(int(word))
"""


class Rig:
    """A supervisor of a child that follows a script, with its messages and pauses."""

    def __init__(self, folder: Path, script: Sequence[str], restarts: int = 9) -> None:
        self.folder = folder
        (folder / "script").write_text("\n".join(script))
        self.said: list[str] = []
        self.pauses: list[float] = []
        self.supervisor = Supervisor(
            [sys.executable, "-c", CHILD, str(folder)],
            restarts,
            lambda: (folder, int(step.read_text())) if (step := folder / "step").exists() else None,
            self.said.append,
            self.pauses.append,
        )

    @property
    def attempts(self) -> list[tuple[int, int, int]]:
        lines = (self.folder / "attempts.jsonl").read_text().splitlines()
        return [(line["attempt"], line["exit"], line["checkpoint_step"]) for line in map(json.loads, lines)]


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_what_finished_or_cannot_succeed_is_not_started_again(tmp_path: Path, code: int) -> None:
    rig = Rig(tmp_path, [f"{code} 4"])
    assert rig.supervisor.run() == code
    assert (rig.attempts, rig.said) == ([(1, code, 4)], [])


def test_a_killed_run_and_one_that_lost_a_process_are_continued(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ["kill", "75 3", "kill 5", "0 9"], restarts=3)
    assert rig.supervisor.run() == 0
    assert rig.attempts == [(2, 75, 3), (3, -signal.SIGKILL, 5), (4, 0, 9)]  # the first left no folder to write to
    assert rig.said == [
        "attempt 1 was killed by SIGKILL; attempt 2 of 4 goes on from its first step in 10 s",
        "attempt 2 ended with exit code 75; attempt 3 of 4 goes on from the checkpoint of step 3 in 2 s",
        "attempt 3 was killed by SIGKILL; attempt 4 of 4 goes on from the checkpoint of step 5 in 2 s",
    ]
    assert rig.pauses == [PAUSES[1], PAUSES[0], PAUSES[0]]


def test_attempts_are_counted(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ["kill 1", "75 2", "kill 3", "0 4"], restarts=2)
    assert rig.supervisor.run() == 75  # to a scheduler: it may be started again
    assert rig.said[-1] == "attempt 3 was killed by SIGKILL; it was the last of 3 attempts (--restart 2)"


def test_attempts_without_progress_end_the_run(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ["75 2", "kill", "75", "75", "0"])
    assert rig.supervisor.run() == 1
    assert rig.said[-1] == (
        "attempt 4 ended with exit code 75; 3 attempts in a row ended without a new checkpoint, so the run is given up"
    )
    assert rig.pauses == [PAUSES[0], PAUSES[1], PAUSES[2]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_stop_goes_to_the_run_which_is_not_started_again(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    rig = Rig(tmp_path, ["wait 1", "0"])

    def stop() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    assert rig.supervisor.run() == 75
    thread.join()
    assert (rig.attempts, rig.said) == ([(1, 75, 1)], [])
    assert signal.getsignal(number) == before


def test_a_signal_that_arrives_while_a_run_is_made_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = subprocess.Popen

    def slow(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        os.kill(os.getpid(), signal.SIGTERM)
        return make(command, **options)

    monkeypatch.setattr(subprocess, "Popen", slow)
    with supervise.Child(print) as child:
        assert child.run([sys.executable, "-c", "import time; time.sleep(600)"]) == -signal.SIGTERM


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and wait for a moment only."""
    monkeypatch.setattr(supervise, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(supervise, "SAID_SECONDS", 0.05)
    monkeypatch.setattr(supervise, "QUIET_SECONDS", 0.2)


@pytest.mark.usefixtures("impatient")
def test_a_run_that_is_stopped_is_killed_and_started_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ["stop 1", "0 2"])
    assert rig.supervisor.run() == 0
    assert rig.attempts == [(1, -signal.SIGKILL, 1), (2, 0, 2)]
    first, second, third = rig.said
    assert re.fullmatch(
        r"the run \(process (\d+)\) is stopped; `kill -CONT \1` continues it, and after 0\.2 s .*", first
    )
    assert second.endswith("s and is killed")
    assert third == "attempt 1 was killed by SIGKILL; attempt 2 of 10 goes on from the checkpoint of step 1 in 2 s"


@pytest.mark.usefixtures("impatient")
def test_a_run_that_is_continued_goes_on(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ["stop 1"])

    def go_on(text: str) -> None:
        rig.said.append(text)
        os.kill(int(text.split("kill -CONT ")[1].split("`", maxsplit=1)[0]), signal.SIGCONT)

    rig.supervisor.say = go_on
    assert rig.supervisor.run() == 0
    assert len(rig.said) == 1


@pytest.mark.usefixtures("impatient")
def test_a_run_whose_interpreter_is_held_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervise, "SAID_SECONDS", 2.0)
    monkeypatch.setattr(supervise, "QUIET_SECONDS", 3.0)
    rig = Rig(tmp_path, ["hold 1", "work 2"])
    assert rig.supervisor.run() == 0
    assert rig.attempts == [(1, -signal.SIGKILL, 1), (2, 0, 2)]
    first, second, third = rig.said
    assert re.fullmatch(r"the run \(process \d+\) does not answer: native code holds .* after 3 s it is killed", first)
    assert "did not answer for" in second
    assert third == "attempt 1 was killed by SIGKILL; attempt 2 of 10 goes on from the checkpoint of step 1 in 2 s"
    assert "in fullmatch" in capfd.readouterr().err  # the stacks


def test_a_run_gives_signs_of_life(tmp_path: Path) -> None:
    heartbeat = os.memfd_create("heartbeat")
    command = [sys.executable, "-m", "roll_like.cli", "run", "--config", str(tmp_path / "none.yaml")]
    environment = {**os.environ, supervise.HEARTBEAT: str(heartbeat)}
    assert subprocess.run(command, pass_fds=[heartbeat], env=environment, check=False).returncode == 2
    assert os.fstat(heartbeat).st_size
    os.close(heartbeat)


@pytest.mark.usefixtures("impatient")
def test_a_signal_to_stop_reaches_a_run_that_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "QUIET_SECONDS", 60.0)
    rig = Rig(tmp_path, ["stop 1"])
    rig.supervisor.say = lambda text: os.kill(os.getpid(), signal.SIGTERM)
    assert rig.supervisor.run() == 75
    assert rig.attempts == [(1, -signal.SIGTERM, 1)]


#: A supervisor of a process that is busy for a moment, in a group of their own.
SUSPENDED = """
import sys
from pathlib import Path
from roll_like.run import supervise
supervise.LOOK_SECONDS, supervise.SAID_SECONDS, supervise.QUIET_SECONDS = 0.02, 0.1, 0.2
folder = Path(sys.argv[1])
child = "import pathlib, sys, time; pathlib.Path(sys.argv[1], 'ready').touch(); time.sleep(1)"
run = supervise.Supervisor([sys.executable, "-c", child, str(folder)], 0, lambda: None, print)
sys.exit(run.run())
"""


def test_a_run_that_is_suspended_with_its_supervisor_is_left_alone(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SUSPENDED, tmp_path], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGSTOP)  # as Ctrl-Z does
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGCONT)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "")


def test_a_signal_between_two_attempts_ends_the_run(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ["kill 1", "0"])
    rig.supervisor.wait = lambda seconds: os.kill(os.getpid(), signal.SIGTERM)
    assert rig.supervisor.run() == 75
    assert rig.attempts == [(1, -signal.SIGKILL, 1)]


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["--restart", "3"], []),
        (["--restart=3", "steps=5"], ["steps=5"]),
        (["a=1", "--restart", "12", "--debug"], ["a=1", "--debug"]),
    ],
)
def test_an_attempt_has_the_same_command_line(arguments: list[str], kept: list[str]) -> None:
    start = ["-X", "dev", "run_pipeline.py", "--config", "a.yaml"]
    command = supervised_command(["python", *start, *arguments])
    assert command == [sys.executable, *start, *kept, "--resume", "auto"]
