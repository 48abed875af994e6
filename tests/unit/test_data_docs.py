"""What docs/data.md says of data is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tiny_model import make_tiny_tokenizer

from roll_like.builtin.pipelines.dpo.config import LabelledData
from roll_like.builtin.pipelines.dpo.labelled_data import load_labelled
from roll_like.builtin.pipelines.reward_model.config import ScoredAnswerData
from roll_like.builtin.pipelines.reward_model.scored_answers import load_scored_answers
from roll_like.config.data import ConversationData, DataSource, PairData
from roll_like.data.bad_rows import BadRow, LeftOut, Problem, RowCounter
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.data.pairs import load_pairs
from roll_like.data.tasks import load_tasks
from roll_like.types import TrainingSample

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.M | re.S)[number]


def test_the_python_works(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    exec(block("python").replace("path/to/a/model", str(tiny_model)).replace("=128", "=1024"), names)
    (report,) = names["samples"].report
    assert capsys.readouterr().out == f"{report}\n"
    assert names["sample"].loss_mask.any()


def test_the_rows_are_read(tmp_path: Path) -> None:
    render = Renderer(make_tiny_tokenizer())
    rows = [json.loads(line) for line in block("json").splitlines()]
    samples = []
    for number, row in enumerate(rows):
        file = tmp_path / f"{number}.jsonl"
        file.write_text(json.dumps(row))
        data = {"sources": [{"path": str(file)}]}
        if "chosen" in row:
            samples += load_pairs(PairData.model_validate(data), render).samples
        elif "label" in row:
            samples += load_labelled(LabelledData.model_validate(data), render).samples
        elif "score" in row:  # of the whole conversation the last token is trained
            (scored,) = load_scored_answers(ScoredAnswerData.model_validate(data), render, loss="bce").samples
            assert scored.score == row["score"]
        else:
            samples += load_conversations(ConversationData.model_validate(data), render).samples
    assert len({TrainingSample.content(sample.sequences[0]) for sample in samples}) == 1
    assert samples[3].content() == samples[4].content()


def test_the_prompts_are_read(tmp_path: Path) -> None:
    render = Renderer(make_tiny_tokenizer())
    table = PAGE.partition("| rows | settings of the source |\n|---|---|\n")[2].partition("\n\n")[0]
    tasks = []
    for row, line in zip(block("json", 1).splitlines(), table.splitlines(), strict=True):
        file = tmp_path / "prompts.jsonl"
        file.write_text(row)
        settings = dict(span.split(": ") for span in re.findall(r"`(.+?)`", line))
        tasks += load_tasks([DataSource(path=str(file), **settings)], render, 1024).tasks
    assert {(str(task.messages), task.answer) for task in tasks} == {(str(tasks[0].messages), "42")}
    assert len(tasks) == 3


def test_every_reason_is_explained() -> None:
    table = PAGE.partition("| reason in the report | row |\n|---|---|\n")[2].partition("\n\n")[0]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()] == list(Problem)


def test_the_report_is_worded_so() -> None:
    counter = RowCounter("skip", "data")
    empty = BadRow(Problem.EMPTY, "message 1 is the assistant's and is empty")
    for line in (7, 12, 13):
        counter.leave(f"talk.jsonl:{line}", empty)
    counter.leave("talk.jsonl:40", BadRow(Problem.TOO_LONG, "160 tokens, the limit is 128"))
    counter.rows, counter.kept, counter.samples, counter.tokens, counter.trained = 100, 96, 96, 20384, 5120
    report = counter.report("talk")
    assert report.left_out[0] == LeftOut(problem=Problem.EMPTY, count=3, first=f"talk.jsonl:7 ({empty.message})")
    assert f"\n{report}\n" in PAGE
