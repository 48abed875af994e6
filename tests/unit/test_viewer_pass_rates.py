"""`roll-like pass-rates`: what a run solved, beside the rows, and read by the next run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_files import MINIMAL, changed  # type: ignore[import-not-found]
from tiny_model import make_tiny_tokenizer  # type: ignore[import-not-found]

from roll_like import cli
from roll_like.config.data import DataSource
from roll_like.data.chat import Renderer
from roll_like.data.tasks import load_tasks
from roll_like.metrics.files import rollouts_path

ROWS = [{"prompt": f"sum {n}", "reward_model": {"ground_truth": str(n)}, "instructions": []} for n in range(5)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two steps and one evaluation of the same rows; its last row was never drawn."""
    monkeypatch.chdir(tmp_path)
    Path("sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), "utf-8")
    source = {"path": "sums.jsonl", "answer_field": "reward_model.ground_truth"}
    values = changed(MINIMAL, data__sources=[source], evaluation={"sources": [source]})
    folder = tmp_path / "runs" / "first"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    keep(folder, 1, "step", {1: [0, 0], 2: [1, 0], 3: [1, 1]})
    keep(folder, 2, "step", {2: [0.7 + 0.2 + 0.1, 1], 4: [0.5, -1]})
    keep(folder, 0, "eval", {1: [1, 1, 1, 0]})
    return folder


def keep(folder: Path, step: int, kind: str, rewards: dict[int, list[float]]) -> None:
    rows = [
        {"task_id": f"sums:{number}", "sample_index": at, "prompt": "", "text": "", "reward": reward}
        for number, of_task in rewards.items()
        for at, reward in enumerate(of_task)
    ]
    rollouts_path(folder, step, kind=kind).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def rates(path: Path) -> list[Any]:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [{name: row[name] for name in ROWS[0]} for row in rows] == ROWS
    assert set(rows[0]) == {*ROWS[0], "pass_rate", "attempts"}
    return [(row["pass_rate"], row["attempts"]) for row in rows]


def test_shares_of_right_answers_by_hand(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pass-rates", "first", "-o", "rated"]) == 0
    assert rates(Path("rated/sums.jsonl")) == [(0.0, 2), (0.75, 4), (1.0, 2), (0.0, 2), (None, 0)]
    said = "written: rated/sums.jsonl: 4 of 5 rows were sampled; solved never 2, sometimes 1, always 1\n"
    assert capsys.readouterr().out == said
    assert cli.main(["pass-rates", "first", "-o", "half", "--solved-at", "0.5"]) == 0
    assert [rate for rate, _ in rates(Path("half/sums.jsonl"))] == [0.0, 0.75, 1.0, 0.5, None]
    assert cli.main(["pass-rates", str(run), "-o", "measured", "--kind", "evaluate"]) == 0
    assert rates(Path("measured/sums.jsonl")) == [(0.75, 4), *[(None, 0)] * 4]


def test_the_next_run_keeps_a_band_of_them(run: Path) -> None:
    assert cli.main(["pass-rates", "first", "-o", "rated"]) == 0
    source = DataSource(path="rated/sums.jsonl", where={"pass_rate": {"low": 0.1, "high": 0.9}})
    tasks = load_tasks([source], Renderer(make_tiny_tokenizer()), 200)
    assert [task.metadata["reward_model"] for task in tasks] == [{"ground_truth": "1"}]


def test_what_has_no_rates_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run / "rollouts").iterdir():
        path.unlink()
    assert cli.main(["pass-rates", "first", "-o", "rated"]) == 2
    assert "has no rollouts of data.sources" in capsys.readouterr().err
    assert not Path("rated").exists()


def test_groups_that_were_not_recorded_are_not_guessed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["rollout"] |= {"drop_zero_variance_groups": True, "max_oversampling": 2.0}
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    assert cli.main(["pass-rates", "first", "-o", "rated"]) == 2
    assert "the rates of training would be wrong" in capsys.readouterr().err
    assert cli.main(["pass-rates", "first", "-o", "rated", "--kind", "evaluate"]) == 0


def written(run: Path, rows: list[dict[str, Any]], **settings: Any) -> list[Any]:
    """The rows of a run with others in place of its own."""
    Path("sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["data"]["sources"] = [{"path": "sums.jsonl", **settings}]
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    assert cli.main(["pass-rates", "first", "-o", "rated"]) == 0
    return [json.loads(line) for line in Path("rated/sums.jsonl").read_text("utf-8").splitlines()]


def test_rows_stand_as_in_the_file(run: Path) -> None:
    """A flattened table has columns with dots; a transcript stays a text; a path adds no column."""
    flat = [{"prompt": f"s{n}", "reward_model.ground_truth": str(n)} for n in range(4)]
    rows = written(run, flat, answer_field="reward_model.ground_truth")
    assert rows == [row | rate for row, rate in zip(flat, map(rate_of, rows), strict=True)]
    talks = [{"prompt": "\n\nHuman: Hi\n\nAssistant:", "more": {"answer": str(n)}} for n in range(4)]
    rows = written(run, talks, answer_field="more.answer", transcripts=True)
    assert rows == [row | rate for row, rate in zip(talks, map(rate_of, rows), strict=True)]


def rate_of(row: dict[str, Any]) -> dict[str, Any]:
    return {"pass_rate": row["pass_rate"], "attempts": row["attempts"]}


def test_rows_that_were_not_sampled_keep_their_rate(run: Path) -> None:
    rows = [{"prompt": f"s{n}", "pass_rate": 0.5, "attempts": 6} for n in range(5)]
    rows += [{"prompt": "s5", "pass_rate": 0.25}, {"prompt": "s6"}]
    assert [(row["pass_rate"], row["attempts"]) for row in written(run, rows)] == [
        *((0.0, 2), (0.75, 4), (1.0, 2), (0.0, 2)),
        *((0.5, 6), (0.25, 0), (None, 0)),
    ]


def test_no_file_is_written_where_a_source_is_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("sums.jsonl").read_text("utf-8")
    assert cli.main(["pass-rates", "first", "-o", "."]) == 2
    said = capsys.readouterr().err
    assert "sums.jsonl would be written where the source 'sums' is read: sums.jsonl" in said
    assert "fix: name another directory with -o" in said
    assert Path("sums.jsonl").read_text("utf-8") == before
    # nor into a directory that is read whole
    Path("eval").mkdir()
    Path("eval/some.jsonl").write_text(before, "utf-8")
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["evaluation"] = {"sources": [{"path": "eval", "answer_field": "reward_model.ground_truth"}]}
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    assert cli.main(["pass-rates", "first", "-o", "eval/rated"]) == 2
    assert "is read: eval\n" in capsys.readouterr().err
    assert not Path("eval/rated").exists()
