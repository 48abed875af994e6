"""What people see: lines, sparklines, a live view that gives the terminal back."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import textwrap

import pytest
from rich.console import Console as RichConsole

from roll_like.metrics.console import Console, LiveConsole, PlainConsole, make_console
from roll_like.metrics.progress import Progress, duration, format_number, sparkline, step_line

VALUES = {
    "rollout/reward/mean": 0.512,
    "rollout/response_length/mean": 31.24,
    "train/kl": 0.00123,
    "time/step": 6.0,
    "time/generate": 2.1,
    "time/train": 3.4,
    "time/idle": 0.5,
}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([1.0, float("nan"), 2.0, float("inf")]) == "▁ █ "
    assert sparkline([]) == ""
    assert len(sparkline(list(range(100)), width=24)) == 24


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.51234, "0.512"), (-0.5, "-0.500"), (31.24, "31.2"), (1834.2, "1834"), (0.00123, "0.0012"),
     (3e-7, "3.0e-07"), (float("nan"), "nan")],
)  # fmt: skip
def test_numbers(value: float, text: str) -> None:
    assert format_number(value) == text


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59.6, 190, 7260)] == ["0s", "1m00s", "3m10s", "2h01m"]


def test_a_plain_step_is_one_line() -> None:
    clock, out = Clock(), io.StringIO()
    console = PlainConsole(Progress(40, clock=clock), out)
    console.phase("starting engines")
    console.phase("starting engines", 1, 2)
    console.phase("generating", 0, 64)  # progress within a phase
    for step in range(1, 8):
        clock.now += 5
        console.step(step, {**VALUES, "rollout/reward/mean": 0.402 if step == 1 else 0.512 + (step == 7) / 100})
        console.phase("generating")
    console.warn("disk is nearly full")
    lines = out.getvalue().splitlines()
    assert lines[0] == "starting engines …"
    assert lines[7] == (
        "step  7/40  reward 0.522 (so far 0.475 → 0.515)  length 31.2  kl 0.0012  "
        "generate 2.1s (35%) train 3.4s (57%) idle 0.5s (8%)  about 2m45s left"
    )
    assert lines[8:] == ["warning: disk is nearly full"]


def test_asynchronous_rollouts_show_their_age_and_who_waits() -> None:
    progress = Progress(10)
    values = {"rollout/reward/mean": 0.5, "staleness/mean": 1.25, "util/engines": 0.9}
    progress.add(1, values)
    assert "staleness" not in step_line(progress, values)  # sampling and training take turns
    values |= {"util/trainer_wait": 0.25, "schedule/ready": 3.0, "time/blocked": 1.5}
    progress.add(2, values)
    line = step_line(progress, values)
    assert "staleness 1.250  ready 3.000  engines busy 0.900  trainer waits 0.250  blocked 1.500" in line


def test_plain_lines_say_what_was_learned_and_what_is_left() -> None:
    clock, out = Clock(), io.StringIO()
    console = PlainConsole(Progress(2, (0, 2), clock=clock), out)
    figures = {"eval/ifeval/strict": 0.4, "eval/domain/math/avg": 0.1, "time/evaluate": 20.0}
    clock.now += 70
    console.evaluation(0, {"eval/avg": 0.273, **figures})
    for step, reward in ((1, 0.25), (2, 0.75)):
        clock.now += 6
        console.step(step, {"rollout/reward/mean": reward, "time/step": 6.0})
    console.phase("evaluating")
    console.evaluation(2, {"eval/avg": 0.6, **figures})
    assert out.getvalue().splitlines() == [
        "evaluation before training  avg 0.273  domain/math/avg 0.100",
        "step 1/2  reward 0.250  about 26s left",
        "step 2/2  reward 0.250 → 0.750  about 20s left",
        "evaluating …",
        "evaluation after step 2  avg 0.273 → 0.600  domain/math/avg 0.100 → 0.100",
    ]


def test_evaluations_between_steps_are_no_part_of_a_step() -> None:
    clock = Clock()
    progress = Progress(6, (0, 2, 4, 6), clock=clock)
    progress.add_evaluation(0, {"eval/avg": 0.1, "time/evaluate": 30.0})
    for step in (1, 2):
        clock.now += 5
        progress.add(step, {"time/step": 5.0})
    assert progress.seconds_left() == 4 * 5 + 3 * 30
    clock.now += 30
    progress.add_evaluation(2, {"eval/avg": 0.2, "time/evaluate": 30.0})
    clock.now += 5
    progress.add(3, {"time/step": 5.0})
    assert progress.seconds_left() == 3 * 5 + 2 * 30


def test_time_left_ignores_start_up_and_earlier_processes() -> None:
    clock = Clock()
    progress = Progress(10, clock=clock)
    progress.add(1, VALUES, timed=False)
    assert progress.seconds_left() is None
    clock.now += 500
    progress.add(2, VALUES)
    assert progress.seconds_left() == 6.0 * 8
    for step in (3, 4, 5):
        clock.now += 4
        progress.add(step, VALUES)
    assert progress.seconds_left() == 4 * 5


def test_quiet_shows_only_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.step(1, VALUES)
    console.print("table")
    console.warn("careful")
    assert capsys.readouterr() == ("", "warning: careful\n")


def test_auto_is_plain_without_a_terminal() -> None:
    assert isinstance(make_console("auto", title="t", progress=Progress(1)), PlainConsole)


def test_the_live_view_shows_everything() -> None:
    screen = io.StringIO()
    rich = RichConsole(file=screen, force_terminal=True, width=90, color_system=None)
    console = LiveConsole("roll_like · demo", Progress(40), rich)
    try:
        console.step(1, {**VALUES, "rollout/reward/mean": 0.4})
        console.step(2, VALUES)
        console.evaluation(2, {"eval/avg": 0.7})
        console.phase("generating", 96, 128)
        for index in range(5):
            console.warn(f"warning number {index}")
    finally:
        console.close()
    console.warn("after the end")
    view = screen.getvalue().rpartition("╭─ roll_like · demo")[2]
    for text in ("step 2/40", "generating 96/128", "▁█", "0.400 → 0.512", "0.700", "left", "generate 2.1s (35%)",
                 "2 earlier warnings", "warning number 4", "warning: after the end"):  # fmt: skip
        assert text in view
    assert "warning number 1" not in view


@pytest.mark.parametrize("ending", ["raise RuntimeError('x')", "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"])
def test_the_cursor_comes_back(ending: str) -> None:
    code = f"""
        import os, signal, time
        from roll_like.metrics.console import make_console
        from roll_like.metrics.progress import Progress
        console = make_console("auto", title="t", progress=Progress(3))
        console.phase("working")
        {ending}
    """
    main, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=child, stdout=child, stderr=child, env=environment
    ) as process:
        os.close(child)
        output = b""
        while chunk := _read(main):
            output += chunk
        assert process.wait() in (1, -signal.SIGINT)
    os.close(main)
    assert b"\x1b[?25l" in output  # the live view hid it
    assert output.rfind(b"\x1b[?25h") > output.rfind(b"\x1b[?25l")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux says EIO when the other side is closed
        return b""
