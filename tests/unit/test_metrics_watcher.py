"""`roll-like watch`: what it shows of a run that goes on, how it knows the end, and that it disturbs nothing."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole
from run_folders import answer, make_run

from roll_like import cli
from roll_like.errors import DataError
from roll_like.metrics import files
from roll_like.metrics.console import LiveConsole
from roll_like.metrics.progress import Progress
from roll_like.metrics.rollout_text import ANSWER_CHARACTERS, sample_line
from roll_like.metrics.runs import is_running
from roll_like.metrics.watcher import LAST_LINES, Tail, watch
from roll_like.run.folder import locked

pytestmark = pytest.mark.usefixtures("plain_curves")


def step(number: int, **values: Any) -> dict[str, Any]:
    reward = {"rollout/reward/mean": number / 10, "time/step": 5.0}
    return {"step": number, "time": 0.0, "elapsed": 60.0 + 5 * number, **reward, **values}


def write(path: Path, text: str) -> None:
    """Add a part of a line."""
    with path.open("a") as file:
        file.write(text)


class Script:
    """A process that runs in a folder: does one thing each time that the watcher waits, and then ends."""

    def __init__(self, folder: Path, *actions: Callable[[], object]) -> None:
        self._lock = ExitStack()
        self._lock.enter_context(locked(folder))
        self._actions = iter([*actions, self._lock.close])

    def __call__(self, seconds: float) -> None:
        next(self._actions)()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run of four steps that has done two, and evaluates before, after and every two steps."""
    folder = make_run(
        tmp_path / "demo", steps=4, end=None, config={"evaluation": {"every": 2, "before": True, "after": True, "x": 1}}
    )
    (folder / files.EVENTS).unlink(missing_ok=True)
    files.replace(folder / files.METRICS, [step(1), step(2)])
    files.replace(folder / files.EVALUATIONS, [{"step": 0, "elapsed": 60.0, "eval/avg": 0.2, "time/evaluate": 20.0}])
    for path in (folder / files.ROLLOUTS).glob("step_*"):
        path.unlink()
    return folder


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_steps_are_shown_as_they_are_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = answer("three\x1b[31m\nof them", 0.5, reference="3\x07", id="3/0.0")
    script = Script(
        run,
        lambda: files.append(run / files.EVENTS, [{"kind": "warning", "step": 2, "elapsed": 71, "text": "hot\x1b[2J"}]),
        lambda: (
            files.append(run / files.METRICS, [step(3)]),
            files.replace(files.rollouts_path(run, 3), [hostile]),
        ),
        lambda: write(run / files.METRICS, json.dumps(step(4))[:20]),
        lambda: None,
        lambda: write(run / files.METRICS, json.dumps(step(4))[20:] + "\n"),
        lambda: files.append(run / files.EVALUATIONS, [{"step": 4, "elapsed": 90.0, "eval/avg": 0.6}]),
        lambda: files.append(
            run / files.EVENTS, [{"kind": "end", "elapsed": 95.0, "status": "finished", "failures": {}}]
        ),
    )
    assert watch(run, wait=script) == 0
    shown = lines(capsys)
    end = next(index for index, line in enumerate(shown) if "demo: 4 steps, 1m35s" in line)
    assert shown[:end] == [
        "evaluation before training  avg 0.200",
        "step 1/4  reward 0.100  about 55s left",
        "step 2/4  reward 0.100 → 0.200  about 50s left",
        "warning: hot\\x1b[2J",
        "step 3/4  reward 0.100 → 0.300  about 25s left",  # a step of 5 s and an evaluation of 20 s
        "  sample 3/0.0: reward 0.500, reference 3\\x07: three\\x1b[31m of them",
        "step 4/4  reward 0.400 (so far 0.150 → 0.350)  about 20s left",
        "finishing …",
        "evaluation after step 4  avg 0.200 → 0.600",
    ]
    assert any(line.startswith("finished; ") for line in shown)


def test_a_run_that_has_ended_is_summarised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "demo")
    assert cli.main(["watch", "demo", "--output-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "demo: 4 steps" in out
    assert "step 1/4" not in out
    files.append(folder / files.EVENTS, [{"kind": "end", "elapsed": 95.0, "status": "failed", "failures": {}}])
    assert watch(folder) == 1
    assert "failed; " in capsys.readouterr().out


def test_a_killed_run_is_told_from_one_that_goes_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert watch(run, wait=Script(run, lambda: files.append(run / files.METRICS, [step(3)]))) == 1
    out = capsys.readouterr().out
    assert "step 3/4" in out
    assert "the run was killed; roll-like run --config FILE --resume continues it" in out
    # an end of an earlier life, and a process now
    files.append(run / files.EVENTS, [{"kind": "end", "elapsed": 80.0, "status": "stopped", "failures": {}}])
    assert watch(run, wait=Script(run, lambda: files.append(run / files.METRICS, [step(4)]))) == 1
    out = capsys.readouterr().out
    assert "step 4/4" in out
    assert "stopped; " in out


def test_a_late_watcher_sees_the_last_lines_and_warnings(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warnings = [{"kind": "warning", "step": 0, "elapsed": 1.0 + n, "text": f"warning {n}"} for n in range(5)]
    files.append(run / files.EVENTS, warnings)
    record = json.loads((run / files.RUN).read_text())
    files.replace(run / files.RUN, [{**record, "total_steps": 40}])
    files.replace(run / files.METRICS, [step(number) for number in range(1, 21)])
    files.replace(files.rollouts_path(run, 20), [answer("x" * 1000, 0.0, id=f"20/{n}.0") for n in range(3)])
    watch(run, wait=Script(run))
    shown = lines(capsys)
    assert shown[:4] == [*(f"warning: warning {n}" for n in (2, 3, 4)), shown[3]]
    assert shown[3].startswith("step 13/40  reward 1.300 (so far 0.200 → 1.200)")
    steps = [line for line in shown if line.startswith("step ")]
    assert len(steps) == LAST_LINES
    assert steps[-1] == "step 20/40  reward 2.000 (so far 0.200 → 1.900)  about 5m20s left"  # and 11 evaluations
    assert f"  sample 20/2.0: reward 0: {'x' * ANSWER_CHARACTERS}…" in shown


def test_a_run_that_is_continued_is_shown_anew(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(
        run,
        lambda: files.cut_after(run / files.METRICS, 1),
        lambda: files.append(run / files.METRICS, [step(2), step(3)]),
    )
    watch(run, wait=script)
    shown = lines(capsys)
    again = shown.index(f"{run}: the run goes on from its last checkpoint")
    assert [line.split()[1] for line in shown[:again] if line.startswith("step ")] == ["1/4", "2/4"]
    assert [line.split()[1] for line in shown[again:] if line.startswith("step ")] == ["1/4", "2/4", "3/4"]


def test_a_starting_run_is_waited_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (run / files.RUN).read_text()
    for name in (files.RUN, files.METRICS, files.EVALUATIONS):
        (run / name).unlink()
    script = Script(run, lambda: None, lambda: (run / files.RUN).write_text(text), lambda: None)
    assert watch(run, wait=script) == 1
    shown = lines(capsys)
    assert shown[:2] == [f"{run}: the run is starting …", "waiting for the first step …"]
    assert "the run was killed" in shown[2]
    files.append(run / files.EVENTS, [{"kind": "end", "elapsed": 5.0, "status": "failed", "failures": {}}])
    assert watch(run) == 1
    assert lines(capsys) == [f"{run}: the run ended before its first step: failed; its output is in logs/"]


def test_leaving_does_not_end_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert watch(run, wait=Script(run, interrupt)) == 0
    assert lines(capsys)[-1] == f"left {run}; the run goes on"
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {path: text for path, text in after.items() if path.name != ".lock"} == before


def test_wrong_folders_are_refused(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no run\.json"):
        watch(tmp_path / "empty")
    assert cli.main(["watch", "dem", "--output-dir", str(tmp_path)]) == 2
    assert "watch dem: there is no run in" in capsys.readouterr().err
    script = Script(run, lambda: write(run / files.METRICS, "no JSON\n"))
    with pytest.raises(DataError, match=r"metrics\.jsonl: expected one JSON object per line, found b'no JSON'"):
        watch(run, wait=script)


def test_the_lock_says_whether_a_run_goes_on(tmp_path: Path) -> None:
    assert not is_running(tmp_path)  # a copy has none
    with locked(tmp_path):
        assert is_running(tmp_path)
    assert not is_running(tmp_path)
    with locked(tmp_path):  # asking has not taken it
        pass


def test_a_tail_reads_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    tail = Tail(path)
    assert tail.read() == ([], False)
    path.write_text('{"a": 1}\n{"a":')
    assert tail.read() == ([{"a": 1}], False)
    assert tail.read() == ([], False)
    with path.open("a") as file:
        file.write(' 2}\n{"a": "\u2028"}\n')
    assert tail.read() == ([{"a": 2}, {"a": "\u2028"}], False)
    files.replace(path, [{"a": 1}])
    assert tail.read() == ([{"a": 1}], True)
    path.unlink()
    assert tail.read() == ([], True)
    assert tail.read() == ([], False)


def test_a_sample_is_one_line() -> None:
    row = {"id": "3/0.1", "reward": 0.25, "text": " \n a\n\n b ", "reference": None}
    assert sample_line(row) == "3/0.1: reward 0.250: a b"
    assert sample_line({**row, "text": "", "reference": "x\ny"}) == "3/0.1: reward 0.250, reference x y: (empty)"


def test_the_live_view_has_the_runs_time_and_an_answer() -> None:
    rich = RichConsole(file=io.StringIO(), width=80, color_system=None)
    console = LiveConsole("demo", Progress(4), rich, elapsed=lambda: 3720.0)
    console.sample("3/0.0: reward 1.000: [red]three[/red]")
    rich.begin_capture()
    rich.print(console.render())
    drawn = rich.end_capture()
    console.close()
    assert "1h02m" in drawn
    assert "sample 3/0.0: reward 1.000: [red]three[/red]" in drawn
