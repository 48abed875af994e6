"""Files as people have them: JSON, CSV, ShareGPT's and OpenAI's conversations, for every pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import make_tiny_tokenizer

from roll_like.builtin.pipelines.dpo.config import LabelledData
from roll_like.builtin.pipelines.dpo.labelled_data import load_labelled
from roll_like.builtin.pipelines.reward_model.config import ScoredPairData
from roll_like.builtin.pipelines.reward_model.scored_pairs import load_scored_pairs
from roll_like.config.sections import DataSource
from roll_like.config.training_data import ConversationData, PairData
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.data.pairs import load_pairs
from roll_like.data.rows import read_rows
from roll_like.data.tasks import load_tasks
from roll_like.errors import DataError


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(make_tiny_tokenizer())


def rows(path: Path) -> list[tuple[dict[str, Any], str]]:
    return [
        (row.fields, row.origin.removeprefix(f"{path.parent}/")) for row in read_rows(DataSource(path=str(path)), "s")
    ]


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_cells_of_a_table_stay_texts(tmp_path: Path) -> None:
    text = 'prompt,answer,note\r\n"Add 1, and\r\n""2""",007,\r\n\r\nnext,0.50,\u2028x\r\n'
    assert rows(write(tmp_path / "a.csv", text)) == [
        ({"prompt": 'Add 1, and\n"2"', "answer": "007", "note": None}, "a.csv:2"),
        ({"prompt": "next", "answer": "0.50", "note": "\u2028x"}, "a.csv:5"),
    ]
    assert rows(write(tmp_path / "b.tsv", b"\xef\xbb\xbfprompt\tanswer\na, b\t1\n")) == [
        ({"prompt": "a, b", "answer": "1"}, "b.tsv:2")
    ]
    assert rows(write(tmp_path / "c.csv", f"prompt\n{'x' * 200_000}\n"))[0][0] == {"prompt": "x" * 200_000}
    assert rows(write(tmp_path / "d.csv", "")) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n3\n", "t.csv:3: expected 2 cells, as in the first line, found 1"),
        ("a,b\n1,2,3\n", "t.csv:2: expected 2 cells, as in the first line, found 3"),
        ("a,a\n1,2\n", "t.csv:1: two columns are called 'a'"),
        ('a,b\n"1,2\n', "t.csv:2: not a table: unexpected end of data"),
        (b"a,b\n\xff,1\n", "t.csv:2: the byte 0xff is not UTF-8"),
    ],
)
def test_what_is_no_table(text: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        rows(write(tmp_path / "t.csv", text))
    assert str(caught.value).startswith(f"{tmp_path}/{message}")


@pytest.mark.parametrize(
    "text",
    [
        '[{"a": 1}, {"a": 2}]',
        '{"version": "1", "data": [{"a": 1}, {"a": 2}]}',
        '{"a": 1}\n{"a": 2}\n',
        '\ufeff[{"a": 1}, {"a": 2}]',
    ],
)
def test_json_as_a_list_or_one_object_a_line(text: str, tmp_path: Path) -> None:
    assert rows(write(tmp_path / "a.json", text)) == [({"a": 1}, "a.json:1"), ({"a": 2}, "a.json:2")]


def test_one_object_is_one_row(tmp_path: Path) -> None:
    assert rows(write(tmp_path / "a.json", '{"messages": ["x"]}')) == [({"messages": ["x"]}, "a.json:1")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "a.json:1: expected a JSON object, found int"),
        ("3", "a.json: expected a list of JSON objects, found int"),
        ('[{"a": 1},\n{"a" 2}]', "a.json:2: not JSON: Expecting ':' delimiter"),
    ],
)
def test_what_is_no_json(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        rows(write(tmp_path / "a.json", text))
    assert str(caught.value).startswith(f"{tmp_path}/{message}")


def test_a_directory_of_several_kinds(tmp_path: Path) -> None:
    write(tmp_path / "b.csv", "a\n1\n")
    write(tmp_path / "a.jsonl", '{"a": 0}\n')
    write(tmp_path / "dataset_infos.json", '{"description": "not a row"}')
    found = [row.fields for row in read_rows(DataSource(path=str(tmp_path)), "s")]
    assert found == [{"a": 0}, {"a": "1"}]


SHAREGPT = [
    {"from": "system", "value": "Be short."},
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello"},
]
OPENAI = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
    {"role": "assistant", "content": "Hello"},
]


@pytest.mark.parametrize(("field", "messages"), [("conversations", SHAREGPT), ("messages", OPENAI)])
def test_conversations_of_others_are_those_with_roles(
    field: str, messages: list[dict[str, Any]], renderer: Renderer, tmp_path: Path
) -> None:
    file = write(tmp_path / "a.json", json.dumps([{field: messages}]))
    plain = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    expected = write(tmp_path / "b.jsonl", json.dumps({"prompt": plain, "completion": "Hello"}))
    data = ConversationData(
        sources=[{"path": str(file), "messages_field": field}, {"path": str(expected)}], max_tokens=99
    )
    found = load_conversations(data, renderer)
    (one,), (other,) = (source.samples for source in found.sources)
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.trained.tolist() == other.trained.tolist()
    (task,) = load_tasks(
        [DataSource(path=str(write(tmp_path / "c.json", json.dumps([{field: messages[:2]}]))), prompt_field=field)],
        renderer,
        99,
    ).tasks
    assert list(task.messages) == plain


def test_preferences_of_sharegpt(renderer: Renderer, tmp_path: Path) -> None:
    row = {"conversations": SHAREGPT[:2], "chosen": SHAREGPT[2], "rejected": {"from": "gpt", "value": "No"}}
    file = write(tmp_path / "a.json", json.dumps([row]))
    data = PairData(sources=[{"path": str(file), "prompt_field": "conversations"}], max_tokens=99)
    (pair,) = load_pairs(data, renderer).sources[0].samples
    decode = renderer.tokenizer.decode
    assert decode(pair.chosen.token_ids).endswith("<|im_start|>assistant\nHello<|im_end|>")
    assert decode(pair.rejected.token_ids).endswith("<|im_start|>assistant\nNo<|im_end|>")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            {"from": "narrator", "value": "x"},
            "expected one of human, user, gpt, assistant, system, tool, observation in 'from'",
        ),
        ({"from": "human"}, "expected a text in 'content', found NoneType None"),
        ({"role": "user", "content": [{"type": "audio"}]}, "expected parts {type: text, text: …} or {type: image_url"),
    ],
)
def test_messages_that_cannot_be_read(message: dict[str, Any], text: str, renderer: Renderer, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", json.dumps({"prompt": [message]}))
    with pytest.raises(DataError) as caught:
        load_tasks([DataSource(path=str(file))], renderer, 99)
    assert text in str(caught.value)


def test_tables_for_every_kind_of_row(renderer: Renderer, tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.csv",
        "prompt,completion,chosen,rejected,label,margin\nHi,Hello,Hello,No,True,0.5\nHo,Hello,Hello,No,0,1\n",
    )
    sources = [{"path": str(file)}]
    (first, second) = load_tasks([DataSource(path=str(file), answer_field="completion")], renderer, 99).tasks
    assert (first.answer, first.metadata["margin"], second.origin) == ("Hello", "0.5", f"{file}:3")
    assert len(load_conversations(ConversationData(sources=sources, max_tokens=99), renderer).sources[0].samples) == 2
    assert len(load_pairs(PairData(sources=sources, max_tokens=99), renderer).sources[0].samples) == 2
    labelled = load_labelled(LabelledData(sources=sources, max_tokens=99), renderer).sources[0].samples
    assert [each.label for each in labelled] == [True, False]
    scored = load_scored_pairs(
        ScoredPairData(sources=[{"path": str(file), "margin_field": "margin"}], max_tokens=99), renderer
    )
    assert [pair.margin for pair in scored.sources[0].samples] == [0.5, 1.0]
