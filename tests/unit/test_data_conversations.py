"""Rows of conversations: what they become, what is refused or left out, and what the report says."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import renderer
from tiny_model import make_tiny_tokenizer

from roll_like.builtin.pipelines.dpo.config import LabelledData
from roll_like.builtin.pipelines.dpo.labelled_data import load_labelled
from roll_like.config.data import ConversationData
from roll_like.data.bad_rows import BadRow, Problem
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.errors import DataError

HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello"}
FINE = {"messages": [HI, HELLO]}


@pytest.fixture(scope="module")
def render() -> Renderer:
    return Renderer(make_tiny_tokenizer())


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def load(path: Path, render: Renderer, source: dict[str, Any] | None = None, **settings: Any) -> Any:
    data = ConversationData.model_validate({"sources": [{"path": str(path), **(source or {})}], **settings})
    return load_conversations(data, render)


def trained(render: Renderer, sample: Any) -> str:
    return render.decode(sample.token_ids[sample.loss_mask])


def test_messages_and_prompt_with_completion_are_the_same_sample(tmp_path: Path, render: Renderer) -> None:
    file = write_lines(
        tmp_path / "talk.jsonl",
        FINE,
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": [HI], "completion": [HELLO], "messages": None},
    )
    samples = load(file, render).samples
    assert [sample.origin for sample in samples] == [f"{file}:{line}" for line in (1, 2, 3)]
    assert len({sample.content() for sample in samples}) == 1
    first = samples[0]
    assert render.decode(first.token_ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>"
    assert trained(render, first) == "Hello<|im_end|>"
    assert (first.token_ids.dtype, first.loss_mask.dtype) == (np.int32, np.bool_)
    assert first.loss_mask.tolist() == [False] * first.first_trained + [True] * first.trained_tokens


LONGER = {"messages": [HI, HELLO, {"role": "user", "content": "How?"}, {"role": "assistant", "content": "Well"}, HI]}


def test_conversations_of_a_table_are_json_text(tmp_path: Path, render: Renderer) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    with (tmp_path / "talk.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["messages"], [json.dumps(said)]])
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    (table,), (lines,) = (load(tmp_path / name, render).samples for name in ("talk.csv", "talk.jsonl"))
    assert table.token_ids.tolist() == lines.token_ids.tolist()
    assert table.loss_mask.tolist() == lines.loss_mask.tolist()
    (tmp_path / "repr.jsonl").write_text(json.dumps({"messages": str(said)}) + "\n")
    with pytest.raises(DataError, match="'messages' is the text of a list of messages, and no JSON"):
        load(tmp_path / "repr.jsonl", render)
    flagged = json.dumps([{**HI, "weight": 0}, {**HELLO, "weight": 0}, HI, HELLO])
    (kept,) = load(write_lines(tmp_path / "flags.jsonl", {"messages": flagged}), render).samples
    assert trained(render, kept) == "Hello<|im_end|>"
    row = {"prompt": json.dumps([HI]), "completion": json.dumps([HELLO])}
    (two,) = load(write_lines(tmp_path / "two.jsonl", row), render).samples
    assert trained(render, two) == "Hello<|im_end|>"


@pytest.mark.parametrize("prompt", ["{} Who greets?", "Say: {}", "[{{'role': 'user'}}, 1]", '[{{"role": "user"'])
def test_a_text_that_quotes_messages_is_a_text(prompt: str, tmp_path: Path, render: Renderer) -> None:
    said = json.dumps([HI, HELLO])
    answer = {"role": "assistant", "content": said}
    row = {"prompt": prompt.format(said), "completion": [answer]}
    (shown,) = load(write_lines(tmp_path / "shown.jsonl", row), render).samples
    assert row["prompt"] in render.decode(shown.token_ids)
    assert trained(render, shown) == said + "<|im_end|>"


def test_all_turns_or_the_last(tmp_path: Path, render: Renderer) -> None:
    file = write_lines(tmp_path / "talk.jsonl", LONGER)
    (every,) = load(file, render)
    (last,) = load(file, render, train_on="last")
    assert trained(render, every) == "Hello<|im_end|>Well<|im_end|>"
    assert trained(render, last) == "Well<|im_end|>"
    assert every.token_ids.tolist() == last.token_ids.tolist()


def test_of_a_prompt_and_a_completion_only_the_completion_is_trained(tmp_path: Path, render: Renderer) -> None:
    row = {"prompt": LONGER["messages"][:3], "completion": [LONGER["messages"][3], HI, HELLO]}
    (sample,) = load(write_lines(tmp_path / "talk.jsonl", row), render)
    assert trained(render, sample) == "Well<|im_end|>Hello<|im_end|>"
    assert render.decode(sample.token_ids).count("Hello") == 2


def test_a_system_prompt_and_tools(tmp_path: Path) -> None:
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}, "id": None}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "description": None}}]
    messages = [
        HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        HELLO,
    ]
    file = write_lines(
        tmp_path / "calls.jsonl",
        {"messages": messages, "tools": tools},
        {"messages": messages, "tools": json.dumps(tools)},
    )
    qwen = renderer("Qwen2.5")
    first, second = load(file, qwen, {"system_prompt": "Be brief."})
    assert first.content() == second.content()
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>Hello<|im_end|>'
    assert trained(qwen, first) == said
    text = qwen.decode(first.token_ids)
    assert text.startswith("<|im_start|>system\nBe brief.")
    assert '"name": "add", "parameters"' in text


def test_parquet_gives_every_row_the_fields_of_any(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    call = {"id": "1", "function": {"name": "add", "arguments": "{}"}}
    rows = [
        {"messages": [HI, HELLO]},
        {
            "messages": [HI, {**HELLO, "tool_calls": [call]}],
            "tools": [{"type": "function", "function": {"name": "add"}}],
        },
        {"prompt": "Hi", "completion": "Hello"},
    ]
    columns = dict.fromkeys(("messages", "tools", "prompt", "completion"))
    pq.write_table(pa.Table.from_pylist([{**columns, **row} for row in rows]), tmp_path / "talk.parquet")
    samples = load(tmp_path / "talk.parquet", renderer("Qwen2.5")).samples
    assert [sample.origin for sample in samples] == [f"{tmp_path / 'talk.parquet'}:{row}" for row in (1, 2, 3)]
    assert samples[0].content() == samples[2].content()


def test_a_template_that_rewrites_history_cuts_a_conversation_into_parts(tmp_path: Path) -> None:
    qwen = renderer("Qwen3")
    file = write_lines(tmp_path / "talk.jsonl", LONGER, FINE)
    samples = load(file, qwen)
    assert [(sample.origin[-1], sample.part) for sample in samples] == [("1", 0), ("1", 1), ("2", 0)]
    (report,) = samples.report
    assert (report.rows, report.kept, report.samples) == (2, 2, 3)
    assert "2 of 2 rows as 3 samples" in str(report)


BAD = [
    ({"messages": [HI]}, Problem.NO_ASSISTANT, "expected a message of the role 'assistant', found user"),
    ({"messages": [HI, {"role": "assistant", "content": " \n"}]}, Problem.EMPTY, "is empty"),
    ({"prompt": "Hi", "completion": ""}, Problem.EMPTY, "is empty"),
    ({"prompt": "Hi", "completion": None}, Problem.EMPTY, "'completion' is NoneType None"),
    ({"prompt": "Hi", "completion": []}, Problem.EMPTY, "'completion' is list"),
]


@pytest.mark.parametrize(("row", "problem", "message"), BAD)
def test_bad_rows_are_refused_or_counted_with_the_first_of_them(
    tmp_path: Path, render: Renderer, row: Any, problem: Problem, message: str
) -> None:
    file = write_lines(tmp_path / "talk.jsonl", FINE, row, FINE, row)
    with pytest.raises(DataError) as caught:
        load(file, render)
    assert caught.value.message.startswith(f"{file}:2: ")
    assert message in caught.value.message
    assert "data.bad_rows: skip" in (caught.value.fix or "")
    samples = load(file, render, bad_rows="skip")
    assert [sample.origin for sample in samples] == [f"{file}:1", f"{file}:3"]
    (report,) = samples.report
    (left,) = report.left_out
    assert (report.rows, report.kept, left.problem, left.count) == (4, 2, problem, 2)
    assert left.first.startswith(f"{file}:2 (")
    assert f"2 {problem} left out, first {file}:2" in str(report)


def test_an_earlier_turn_that_says_nothing_is_no_matter_where_it_is_not_trained(
    tmp_path: Path, render: Renderer
) -> None:
    row = {"messages": [HI, {"role": "assistant", "content": ""}, HI, HELLO]}
    assert len(load(write_lines(tmp_path / "talk.jsonl", row), render, train_on="last")) == 1


@pytest.mark.parametrize(
    ("template", "row", "problem"),
    [
        ("wants tool calls", {"messages": [HI, {"role": "tool", "content": "2"}, HELLO]}, Problem.ROLES),
        ("repeats answers", FINE, Problem.REWRITTEN),
    ],
)
def test_rows_that_the_template_spoils(tmp_path: Path, template: str, row: Any, problem: Problem) -> None:
    file = write_lines(tmp_path / "talk.jsonl", row, row)
    with pytest.raises(DataError, match=r"talk\.jsonl:1: (.|\n)*model\.chat_template(.|\n)*data\.bad_rows"):
        load(file, renderer(template))
    with pytest.raises(DataError, match=rf"none of 2 rows can be trained on: 2 {problem}, first .*talk\.jsonl:1"):
        load(file, renderer(template), bad_rows="skip")


@pytest.mark.parametrize(
    ("row", "message", "fix"),
    [
        ({"text": "a"}, "no field 'messages'; it has 'text'", "data.sources.0.messages_field"),
        ({"prompt": "a"}, "no field 'completion'; it has 'prompt'", "data.sources.0.completion_field"),
        ({"messages": None}, "expected a text or a list of messages in 'messages', found NoneType", "messages_field"),
        ({"messages": 3}, "expected a text or a list of messages in 'messages', found int 3", "messages_field"),
        ({"messages": ["a"]}, "message 0 in 'messages': expected {role, content}, found str 'a'", "correct the row"),
        ({"messages": [{"content": "a"}]}, "expected a text in 'role'", "correct the row"),
        (
            {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
            "expected parts {type: text, text: …} or {type: image_url, image_url: …} in 'content', found dict",
            "messages are texts and images",
        ),
        ({"messages": [HI, {**HELLO, "tool_calls": ["add"]}]}, "in 'tool_calls', found str 'add'", "correct the row"),
        ({"prompt": [HI, HELLO], "completion": "a"}, "nothing is left to answer", "move"),
        ({"prompt": " ", "completion": "a"}, "found str ' '", "data.sources.0.prompt_field"),
        ({"prompt": "a", "completion": [HI]}, "is of 'user', expected 'assistant'", "into the prompt"),
        ({**FINE, "tools": 3}, "expected a list of function schemas in 'tools', found int 3", "tools_field"),
        ({**FINE, "tools": "no json"}, "found str 'no json'", "tools_field"),
    ],
)
def test_rows_of_another_shape_are_always_refused(
    tmp_path: Path, render: Renderer, row: Any, message: str, fix: str
) -> None:
    file = write_lines(tmp_path / "talk.jsonl", FINE, row)
    with pytest.raises(DataError) as caught:
        load(file, render, bad_rows="skip")
    assert caught.value.message.startswith(f"{file}:2: ")
    assert message in caught.value.message
    assert fix in (caught.value.fix or "")


def test_two_system_messages_and_two_sources_of_one_name(tmp_path: Path, render: Renderer) -> None:
    file = write_lines(tmp_path / "talk.jsonl", {"messages": [{"role": "system", "content": "a"}, HI, HELLO]})
    assert len(load(file, render)) == 1
    with pytest.raises(DataError, match="system message of its own"):
        load(file, render, {"system_prompt": "b"})
    twice = ConversationData.model_validate({"sources": [{"path": str(file)}] * 2})
    with pytest.raises(DataError, match="two sources are called 'talk'"):
        load_conversations(twice, render)


def long(words: int) -> dict[str, str]:
    return {"prompt": "Hi", "completion": "word " * words}


def test_long_samples_are_left_out_cut_or_refused(tmp_path: Path, render: Renderer) -> None:
    file = write_lines(tmp_path / "talk.jsonl", long(1), long(40), long(2), long(50))
    samples = load(file, render, max_tokens=40)
    (report,) = samples.report
    (left,) = report.left_out
    assert [sample.origin[-1] for sample in samples] == ["1", "3"]
    assert (left.problem, left.count) == (Problem.TOO_LONG, 2)
    assert left.first.startswith(f"{file}:2 (")
    assert report.longest > 40

    whole = load(file, render).samples
    samples = load(file, render, max_tokens=40, too_long="cut")
    (report,) = samples.report
    assert [len(sample) for sample in samples] == [len(whole[0]), 40, len(whole[2]), 40]
    for sample, full in zip(samples, whole, strict=True):
        assert sample.token_ids.tolist() == full.token_ids[: len(sample)].tolist()
        assert sample.loss_mask.tolist() == full.loss_mask[: len(sample)].tolist()
    assert (report.shortened, report.left_out) == (2, ())
    assert report.first_shortened == f"{file}:2 ({len(whole[1])} tokens)"
    assert "; 2 shortened, first" in str(report)

    with pytest.raises(
        DataError, match=rf"talk\.jsonl:2: {len(whole[1])} tokens, the limit is 40(.|\n)*data\.max_tokens"
    ):
        load(file, render, max_tokens=40, too_long="refuse")


def test_a_cut_sample_ends_with_a_trained_token_or_is_left_out(tmp_path: Path, render: Renderer) -> None:
    prompt = len(render.encode(render.render([HI], ())))
    file = write_lines(tmp_path / "talk.jsonl", LONGER, FINE)
    first = len(load(write_lines(tmp_path / "fine.jsonl", FINE), render).samples[0])
    samples = load(file, render, max_tokens=first + 3, too_long="cut").samples
    assert [len(sample) for sample in samples] == [first, first]  # the limit is in the second question
    with pytest.raises(DataError, match=r"none of 2 rows can be trained on: 2 over the limit of tokens"):
        load(file, render, max_tokens=prompt, too_long="cut")


def test_a_part_that_is_too_long_is_left_out_alone(tmp_path: Path) -> None:
    qwen = renderer("Qwen3")
    file = write_lines(tmp_path / "talk.jsonl", LONGER)
    lengths = [len(sample) for sample in load(file, qwen)]
    samples = load(file, qwen, max_tokens=min(lengths))
    (report,) = samples.report
    assert [len(sample) for sample in samples] == [min(lengths)]
    assert (report.rows, report.kept, report.left_out[0].count) == (1, 1, 1)


def test_the_report_counts_tokens(tmp_path: Path, render: Renderer) -> None:
    samples = load(write_lines(tmp_path / "talk.jsonl", FINE, LONGER), render)
    (report,) = samples.report
    assert report.tokens == sum(len(sample) for sample in samples)
    assert report.trained == sum(sample.trained_tokens for sample in samples)
    assert str(report) == f"talk: 2 of 2 rows, {report.trained} of {report.tokens} tokens trained"


def test_an_empty_file(tmp_path: Path, render: Renderer) -> None:
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(DataError, match="holds no rows"):
        load(tmp_path / "none.jsonl", render)


def test_the_order_is_weighted_seeded_and_resumable(tmp_path: Path, render: Renderer) -> None:
    write_lines(tmp_path / "a.jsonl", *(long(n) for n in range(1, 6)))
    write_lines(tmp_path / "b.jsonl", *(long(n) for n in range(6, 9)))
    sources = [{"path": str(tmp_path / "a.jsonl"), "weight": 2}, {"path": str(tmp_path / "b.jsonl")}]
    samples = load_conversations(ConversationData.model_validate({"sources": sources}), render)
    order = samples.order(seed=0)
    drawn = [order.next().origin for _ in range(9)]
    assert [Path(origin).name[0] for origin in drawn] == ["a", "b", "a", "a", "b", "a", "a", "b", "a"]
    state, rest = json.loads(json.dumps(order.state())), [order.next().origin for _ in range(7)]
    resumed = samples.order(seed=0)
    resumed.load_state(state)
    assert resumed.drawn == 9
    assert [resumed.next().origin for _ in range(7)] == rest
    assert samples.order(seed=1).state() != order.state()


def test_the_fingerprint_is_of_what_is_trained(tmp_path: Path, render: Renderer) -> None:
    file = write_lines(tmp_path / "talk.jsonl", LONGER)
    every, last = load(file, render), load(file, render, train_on="last")
    assert every.fingerprint == load(file, render).fingerprint
    assert every.fingerprint != last.fingerprint


def test_verdicts(tmp_path: Path, render: Renderer) -> None:
    row = {"prompt": "Hi", "completion": "Hello"}
    file = write_lines(
        tmp_path / "votes.jsonl",
        {**row, "label": True},
        {**row, "label": 0},
        {**LONGER, "label": 1},
        {**row, "label": "x"},
    )
    data = LabelledData.model_validate({"sources": [{"path": str(file)}]})
    with pytest.raises(DataError, match=r"votes\.jsonl:4: expected true or false \(or 1 or 0\) in 'label', found str"):
        load_labelled(data, render)
    write_lines(file, {**row, "label": True}, {**row, "label": 0}, {**LONGER, "label": 1})
    samples = load_labelled(data, render).samples
    assert [sample.desirable for sample in samples] == [True, False, True]
    assert [trained(render, sample) for sample in samples] == [*["Hello<|im_end|>"] * 2, "Well<|im_end|>"]
    assert samples[0].content() != samples[1].content()
    write_lines(file, {**row, "label": 2.0})
    with pytest.raises(DataError, match="found float"):
        load_labelled(data, render)
    write_lines(file, row)
    with pytest.raises(DataError, match=r"no field 'label'(.|\n)*data\.sources\.0\.label_field"):
        load_labelled(data, render)


def test_a_verdict_on_a_response_that_the_template_cuts(tmp_path: Path) -> None:
    row = {"prompt": "Hi", "completion": [HELLO, HI, HELLO], "label": True}
    data = LabelledData.model_validate({"sources": [{"path": str(write_lines(tmp_path / "v.jsonl", row))}]})
    with pytest.raises(DataError, match=r"v\.jsonl:1: the chat template rewrites history within the response"):
        load_labelled(data, renderer("Qwen3"))


def test_a_bad_row_survives_pickling() -> None:
    bad = pickle.loads(pickle.dumps(BadRow(Problem.EMPTY, "nothing", "write")))
    assert (bad.problem, bad.message, bad.fix) == (Problem.EMPTY, "nothing", "write")
