"""`roll-like rollouts`: what it finds, prints and says, through the command line on real files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from episodes import episode, rows
from rich.cells import cell_len
from tests_support import group, task

from roll_like import cli
from roll_like.errors import ConfigError
from roll_like.metrics import files
from roll_like.metrics.rollout_text import printable, wrapped
from roll_like.metrics.rollouts import with_ids
from roll_like.rollout.metrics import rollout_rows
from roll_like.viewer.browse import PIPE_WIDTH, read_range

CALL = {"name": "calculator", "arguments": {"expression": "1+1"}, "result": "2", "error": False}
BROKEN = {"name": "", "arguments": "calc(", "result": "cannot be read", "error": True}


def keep(run_dir: Path, step: int, kept: list[dict[str, Any]], kind: Any = "step") -> Path:
    path = files.rollouts_path(run_dir, step, kind=kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, with_ids(step, kind, kept))
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with an evaluation of single answers, and two steps of two episodes of each of two groups."""
    folder = tmp_path / "runs" / "demo"
    keep(folder, 0, rollout_rows([group(task(3), [1.0, 0.5])]), "eval")
    for step in (1, 12):
        walked = [episode(["left", f"right at {step}"]), episode(["up", "up", "down"], reward=-0.5, sample=1)]
        called = [
            episode(["calc", "<b>2</b>"], index=1, tool_calls=(CALL, BROKEN), invalid=True, reward=0.25),
            episode(["2"], index=1, sample=1),
        ]
        kept = rows(walked, called)
        for row in kept[2:]:
            row["domain"] = "tools"
        keep(folder, step, kept)
    files.replace(folder / files.RUN, [{"name": "demo"}])
    return folder


class Printed:
    """What a command printed."""

    def __init__(self, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._run_dir = run_dir
        self._capsys = capsys
        self.err = ""

    def __call__(self, *arguments: str, code: int = 0) -> list[str]:
        assert cli.main(["rollouts", str(self._run_dir), *arguments]) == code
        out, self.err = self._capsys.readouterr()
        return out.splitlines()

    def ids(self, *arguments: str) -> str:
        return " ".join(line.split()[0] for line in self(*arguments)[1:])


@pytest.fixture
def printed(run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Printed:
    monkeypatch.delenv("COLUMNS", raising=False)
    return Printed(run_dir, capsys)


def test_a_list_has_a_line_for_each_in_order(printed: Printed) -> None:
    head, *lines = printed()
    assert head.split() == ["id", "domain", "reward", "turns", "tokens", "solved", "first", "words"]
    fields = [line.split(maxsplit=6) for line in lines]
    assert fields[0] == ["eval0/0.0", "fake", "1", "3", "yes", "text"]  # a single answer has no turns
    assert fields[2] == ["1/0.0", "lake", "1", "2", "7", "yes", "left"]
    assert fields[3] == ["1/0.1", "lake", "-0.5", "3", "12", "no", "up"]
    assert [line[0] for line in fields] == [
        *("eval0/0.0", "eval0/0.1"),
        *("1/0.0", "1/0.1", "1/1.0", "1/1.1"),
        *("12/0.0", "12/0.1", "12/1.0", "12/1.1"),
    ]
    assert printed.err == ""


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ("--kind evaluate", "eval0/0.0 eval0/0.1"),
        ("--kind train --step 12", "12/0.0 12/0.1 12/1.0 12/1.1"),
        ("--step 0", "eval0/0.0 eval0/0.1"),
        ("--step :1 --domain lake", "1/0.0 1/0.1"),
        ("--step 2: --domain tools", "12/1.0 12/1.1"),
        ("--step 1:12 --reward=-1:0.25", "1/0.1 1/1.0 12/0.1 12/1.0"),
        ("--reward 0.5", "eval0/0.1"),
        ("--success --step 1", "1/0.0 1/1.1"),
        ("--failure --step 0:1", "eval0/0.1 1/0.1 1/1.0"),
        ("--failure --kind train --reward 0: --step 1", "1/1.0"),
    ],
)
def test_filters_leave_out_the_others(printed: Printed, filters: str, expected: str) -> None:
    assert printed.ids(*filters.split()) == expected


def test_steps_that_are_left_out_are_not_read(printed: Printed, run_dir: Path) -> None:
    files.rollouts_path(run_dir, 1).write_text("no JSON\n")
    assert printed.ids("--step", "12", "--success") == "12/0.0 12/1.1"
    assert printed.ids("--kind", "evaluate", "--limit", "1") == "eval0/0.0"


def test_a_long_list_ends_and_says_so(printed: Printed, run_dir: Path) -> None:
    keep(run_dir, 20, rows(*[[episode(["left"], index=index)] for index in range(60)]))
    assert len(printed("--step", "20")) == 51
    assert "the list ends after 50; --limit N lists more, --limit 0 all" in printed.err
    assert len(printed("--step", "20", "--limit", "0")) == 61
    assert printed.err == ""
    assert printed.ids("--step", "20", "--limit", "2") == "20/0.0 20/1.0"
    assert len(printed("--step", "20", "--json")) == 60  # a program wants all of them


def test_an_empty_list_says_what_there_is(printed: Printed) -> None:
    assert printed("--domain", "sokoban") == []
    assert printed.err == (
        "none of 10 rollouts is like that; their domains: fake, lake, tools; their rewards: -0.5 to 1\n"
    )
    assert printed("--step", "3:9") == []
    assert printed.err == "no rollout of these steps; there are: train 1 to 12, evaluate 0 to 0\n"


def test_an_episode_is_shown_turn_by_turn(printed: Printed) -> None:
    lines = printed("--show", "12/1.0")
    assert lines[:5] == [
        "rollout 12/1.0",
        "run demo, train step 12, domain tools, task lake/1, seed 1",
        "reward 0.25, not solved, 2 turns, 7 tokens, ended by stop, policy version 0",
        "rewards: r 0.25",
        "",
    ]
    assert lines[5].startswith("── turn 1: 3 tokens after 20; policy 0.50 s, environment 0.25 s ───")
    assert lines[6:] == [
        "system    Walk to G.",
        "user      You are at 0.",
        "          SF",
        "          FG",
        "policy    calc",
        "reward    0",
        lines[12],
        "user      You are at 1.",
        "          SF",
        "          FG",
        "policy    <b>2</b>",
        'call      calculator {"expression": "1+1"}',
        "          → 2",
        "call      unreadable (failed) calc(",
        "          → cannot be read",
        "invalid   there was no valid action in this turn",
        "reward    0.25",
        lines[23],
        "user      It is over.",
    ]
    assert lines[23].startswith("── the end ───")


def test_what_a_tool_message_says_is_not_told_twice(printed: Printed, run_dir: Path) -> None:
    (row,) = rows([episode(["calc"], tool_calls=(CALL,), after=({"role": "tool", "content": "2"},))])
    keep(run_dir, 13, [row])
    assert printed("--show", "13/0.0")[-4:-2] == ['call      calculator {"expression": "1+1"}', "reward    1"]
    assert printed("--show", "13/0.0")[-1] == "tool      2"


def test_a_single_answer_is_shown(printed: Printed, run_dir: Path) -> None:
    (row,) = rollout_rows([group(task(3), [0.5])])
    row |= {"rewards": {"form": 0.5, "length": 0.0}, "details": {"strict": 1.0, "guarded": 0.0}}
    keep(run_dir, 13, [row])
    lines = printed("--show", "13/0.0")
    assert lines[2:5] == [
        "reward 0.5, not solved, 3 tokens, ended by stop, policy version 0",
        "rewards: form 0.5, length 0",
        "details: strict 1",
    ]
    assert [line for line in lines[6:] if not line.startswith("──")] == [
        "user      task 3",
        "policy    text",
        "reward    0.5",
    ]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_nothing_is_wider_than_the_terminal(
    printed: Printed, run_dir: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    long = "many words " * 40 + "x" * 300 + " 彼は氷の上を歩く" * 30
    keep(run_dir, 13, rows([episode([long, long]), episode([long, "short"], sample=1)]))
    whole = printed("--show", "13/0.0")
    lines = [*whole, *printed("--step", "13")]
    assert max(map(cell_len, lines)) <= width
    said = "".join(line[10:] for line in whole[9:]).replace(" ", "")
    assert said.count(long.replace(" ", "")) == 2  # wrapped, not cut


def test_json_is_one_object_a_line(printed: Printed) -> None:
    whole = [json.loads(line) for line in printed("--json")]
    assert [(row["id"], row["step"], row["kind"]) for row in whole][:3] == [
        ("eval0/0.0", 0, "evaluate"),
        ("eval0/0.1", 0, "evaluate"),
        ("1/0.0", 1, "train"),
    ]
    (one,) = map(json.loads, printed("--json", "--show", "12/0.1"))
    assert [turn["text"] for turn in one["turns"]] == ["up", "up", "down"]
    assert [json.loads(line)["id"] for line in printed("--json", "--diff", "12/0.1", "1/0.0")] == ["12/0.1", "1/0.0"]


def test_a_run_is_found_by_name_or_folder(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_dir.parent.parent)
    for arguments in (["demo"], ["runs/demo"], ["demo", "--output-dir", str(run_dir.parent)]):
        assert cli.main(["rollouts", *arguments, "--step", "1", "--limit", "1"]) == 0
        assert "1/0.0" in capsys.readouterr().out
    assert cli.main(["rollouts", "demmo"]) == 2
    assert "one of runs: demo;" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ("--show 12/0.7", 2, "there is no rollout 12/0.7\n  fix: near it: 12/0.0, 12/0.1, 12/1.0"),
        ("--show 10/1.1", 2, "nothing was written of train step 10\n  fix: near it: 12/1.1, 12/1.0"),
        ("--show eval4/0.1", 2, "nothing was written of evaluate step 4\n  fix: near it: eval0/0.1, eval0/0.0"),
        ("--show 12/1", 2, "'12/1' is not a rollout's id, expected STEP/GROUP.SAMPLE\n  fix: near it: 12/1.0, 12/1.1"),
        ("--diff 1/0.0 what", 2, "'what' is not a rollout's id"),
        ("--step 5:2", 2, "--step 5:2: expected a whole number"),
        ("--step 1.5", 2, "--step 1.5: expected a whole number"),
        ("--step :", 2, "--step :: expected"),
        ("--reward high", 2, "--reward high: expected a number"),
        ("--reward nan", 2, "--reward nan: expected a number"),
        ("--limit -3", 2, "--limit -3: expected a number of rollouts"),
        ("--show 1/0.0 --success", 2, "--show and --diff name their rollouts by id"),
    ],
)
def test_what_is_wrong_is_said(printed: Printed, arguments: str, code: int, told: str) -> None:
    assert printed(*arguments.split(), code=code) == []
    assert told in printed.err


def test_a_run_without_rollouts_says_when_there_are_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files.replace(tmp_path / files.RUN, [{"name": "young"}])
    assert cli.main(["rollouts", str(tmp_path)]) == 1
    assert "wait for the first step" in capsys.readouterr().err
    (tmp_path / files.RUN).unlink()
    assert cli.main(["rollouts", str(tmp_path)]) == 1
    assert "name the folder of a run" in capsys.readouterr().err


def test_a_half_written_last_line_is_left_out_and_told(printed: Printed, run_dir: Path) -> None:
    path = files.rollouts_path(run_dir, 12)
    path.write_bytes(path.read_bytes()[:-40])
    assert printed.ids("--step", "12") == "12/0.0 12/0.1 12/1.0"
    assert printed.err == f"warning: the last line of {path} is half written and was left out\n"
    assert printed("--show", "12/1.1", code=2) == []
    assert "near it: 12/1.0" in printed.err


def test_a_damaged_file_is_named(printed: Printed, run_dir: Path) -> None:
    path = files.rollouts_path(run_dir, 12)
    whole = path.read_text()
    path.write_text("[1]\n" + whole)
    printed("--step", "12", code=1)
    assert f"{path}:1: expected one JSON object per line" in printed.err
    path.write_text('{"task_id": "a", "text": "t"}\n' + whole)
    printed("--step", "12", code=1)
    assert f"{path}: rollout 1 has no prompt, reward" in printed.err


def test_a_reward_of_minus_nothing_is_nothing(printed: Printed, run_dir: Path) -> None:
    keep(run_dir, 13, rows([episode(["left"], reward=-0.0)]))
    assert printed("--step", "13")[1].split()[2] == "0"
    assert "reward    0" in printed("--show", "13/0.0")


def test_figures_that_json_lacks_and_rows_of_older_files(printed: Printed, run_dir: Path) -> None:
    old = {"task_id": "a:1", "source": "form", "prompt": "p", "text": "t", "reward": float("nan")}
    files.replace(files.rollouts_path(run_dir, 13), [old, {**old, "reward": float("inf")}])
    assert [line.split() for line in printed("--step", "13")[1:]] == [
        ["13/0.0", "form", "nan", "no", "t"],
        ["13/0.1", "form", "inf", "yes", "t"],
    ]
    assert printed.ids("--step", "13", "--reward", "0:") == "13/0.1"
    assert "user" not in " ".join(printed("--show", "13/0.0"))


def test_what_was_written_cannot_move_the_cursor(printed: Printed, run_dir: Path) -> None:
    hostile = "red \x1b[31m\x07 \r over \u202e back \ud83d"
    (row,) = rows([episode([hostile], tool_calls=({**CALL, "name": hostile, "arguments": {"a": hostile}},))])
    keep(run_dir, 13, [{**row, "domain": hostile, "task_id": hostile}])
    for arguments in (["--step", "13"], ["--show", "13/0.0"]):
        text = "\n".join(printed(*arguments))
        assert "red \\x1b[31m\\x07" in text
        assert not set(text) & set("\x1b\x07\r\u202e\ud83d")
    (back,) = map(json.loads, printed("--json", "--show", "13/0.0"))
    assert back["text"].startswith("‹ red")


def test_a_reader_that_stops_is_no_error(run_dir: Path) -> None:
    keep(run_dir, 14, rows(*[[episode(["left " * 200], index=index)] for index in range(400)]))
    for flag in ("--limit=0", "--json"):
        command = [sys.executable, "-m", "roll_like.cli", "rollouts", str(run_dir), flag]
        reader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert reader.stdout is not None
        assert reader.stderr is not None
        reader.stdout.readline()
        reader.stdout.close()
        told = reader.stderr.read()
        reader.stderr.close()
        assert (told, reader.wait(60)) == (b"", 0)


def test_colour_is_for_terminals(run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    arguments = ["rollouts", str(run_dir), "--show", "1/0.1"]
    cli.main(arguments)
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    cli.main(arguments)
    coloured = capsys.readouterr().out
    assert "\x1b[" in coloured
    assert max(map(len, plain.splitlines())) <= PIPE_WIDTH


def test_ranges() -> None:
    assert read_range("--reward", "-0.5") == (-0.5, -0.5)
    assert read_range("--reward", "-1:") == (-1, float("inf"))
    with pytest.raises(ConfigError, match="--step 3:x"):
        read_range("--step", "3:x", int)


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("S F\n  G", 10, ["S F", "  G"]),
        ("one two three", 8, ["one two", "three"]),
        ("one two three", 7, ["one two", "three"]),
        ("  indented line", 8, ["  indent", "ed line"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("日本語日本", 4, ["日本", "語日", "本"]),
        ("", 5, [""]),
        ("a\n\nb", 5, ["a", "", "b"]),
    ],
)
def test_lines_are_broken_at_spaces_where_there_are_some(text: str, width: int, lines: list[str]) -> None:
    assert wrapped(text, width) == lines


def test_printable_keeps_lines_and_widens_tabs() -> None:
    assert printable("a\tb\r\nc\x00") == "a   b\nc\\x00"
