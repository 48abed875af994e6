"""Messages that say that they are not to be trained on; nulls of rows that mean something, and those of tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import CHAT_TEMPLATE, make_tiny_tokenizer

from roll_like.builtin.pipelines.dpo.config import LabelledData
from roll_like.builtin.pipelines.dpo.labelled_data import load_labelled
from roll_like.config.data import ConversationData, PairData
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.data.pairs import load_pairs
from roll_like.errors import DataError

CALLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }}]{{ call.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: As DeepSeek's: the arguments are added to a text.
AS_TEXT = CALLS.replace(
    "{{ call.function.arguments | tojson }}", "{{ '```json\n' + call.function.arguments + '\n```' }}"
)
#: As templates that print what they are given.
PRINTED = CALLS.replace("{{ call.function.arguments | tojson }}", "{{ call.function.arguments }}")


def renderer(template: str = CHAT_TEMPLATE) -> Renderer:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    return Renderer(tokenizer)


def talk(*answers: Any, **more: Any) -> dict[str, Any]:
    """A conversation whose answers are texts, or texts with a flag."""
    messages: list[dict[str, Any]] = []
    for answer in answers:
        text, flag = answer if isinstance(answer, tuple) else (answer, {})
        messages += [{"role": "user", "content": "?"}, {"role": "assistant", "content": text, **flag}]
    return {"messages": messages, **more}


def load(tmp_path: Path, *rows: Any, template: str = CHAT_TEMPLATE, **settings: Any) -> Any:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = ConversationData.model_validate({"sources": [{"path": str(file)}], **settings})
    return load_conversations(data, renderer(template))


def trained(tmp_path: Path, row: Any, **settings: Any) -> list[str]:
    (sample,) = load(tmp_path, row, **settings).samples
    text = renderer().decode(sample.token_ids[sample.loss_mask])
    return [part for part in text.split("<|im_end|>") if part]


@pytest.mark.parametrize(
    "flag",
    [
        {"weight": 0}, {"weight": 0.0}, {"weight": "0"}, {"loss_mask": 0}, {"train": False}, {"training": "false"},
        {"loss": False}, {"trainable": False}, {"masked": True}, {"weight": 0, "train": False},
        {"weight": 0, "loss": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_message_that_is_left_out_of_the_loss_is_context(tmp_path: Path, flag: dict[str, Any]) -> None:
    row = talk(("first", flag), "second")
    assert trained(tmp_path, row) == ["second"]
    (sample,) = load(tmp_path, row).samples
    # the flag is no part of what the template sees
    assert "first<|im_end|>" in renderer().decode(sample.token_ids)


@pytest.mark.parametrize("flag", [{"weight": 1}, {"train": True}, {"masked": False}, {"weight": None}, {}], ids=str)
def test_a_message_without_a_flag_against_it_is_trained(tmp_path: Path, flag: dict[str, Any]) -> None:
    assert trained(tmp_path, talk(("first", flag), "second")) == ["first", "second"]


def test_flags_of_completions_and_with_a_system_prompt_are_those_of_their_messages(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    completion = [
        {"role": "assistant", "content": "first", "weight": 0},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "second"},
    ]
    sharegpt = [
        {"from": "human", "value": "?"},
        {"from": "gpt", "value": "first", "weight": 0},
        {"from": "human", "value": "?"},
        {"from": "gpt", "value": "second", "weight": 1},
    ]
    rows = [{"prompt": "?", "completion": completion}, {"messages": sharegpt}]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = ConversationData.model_validate({"sources": [{"path": str(file), "system_prompt": "Be brief."}]})
    for sample in load_conversations(data, renderer()).samples:
        assert renderer().decode(sample.token_ids[sample.loss_mask]) == "second<|im_end|>"


def test_the_last_turn_is_not_another_one_because_it_is_left_out(tmp_path: Path) -> None:
    assert trained(tmp_path, talk(("first", {"weight": 0}), "second"), train_on="last") == ["second"]
    with pytest.raises(DataError, match=r"rows.jsonl:1: message 3 is the assistant's, and has a flag"):
        load(tmp_path, talk("first", ("second", {"weight": 0})), train_on="last")


def test_a_row_of_which_nothing_is_trained_is_bad(tmp_path: Path) -> None:
    nothing = talk(("first", {"weight": 0}), ("second", {"weight": 0}))
    with pytest.raises(DataError, match=r"each of the messages 1 to 3 is the assistant's"):
        load(tmp_path, nothing)
    samples = load(tmp_path, nothing, talk("third"), bad_rows="skip")
    assert len(samples) == 1
    assert "1 without a turn to be trained left out" in str(samples.report[0])


def test_what_is_left_out_may_be_empty(tmp_path: Path) -> None:
    assert trained(tmp_path, talk(("", {"weight": 0}), "second")) == ["second"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (talk(("a", {"weight": 0.5})), r"weight is 0.5; expected 1 or 0"),
        (talk(("a", {"train": "maybe"})), r"train is 'maybe'; expected 1 or 0"),
        (talk(("a", {"loss_mask": [0, 1]})), r"loss_mask is \[0, 1\]; expected 1 or 0"),
        (talk(("a", {"weight": 1, "train": False})), r"contradict each other: weight: 1, train: False"),
        (talk(("a", {"train_detail": [{"begin_offset": 0}]})), r"has 'train_detail'; a message is trained as a whole"),
        (talk(("a", {"loss_scale": 2.0})), r"has 'loss_scale'"),
        (
            {"messages": [{"role": "user", "content": "?", "train": True}, {"role": "assistant", "content": "a"}]},
            r"train is True, and the message is of the role 'user'",
        ),
    ],
)
def test_flags_that_cannot_be_obeyed_are_refused(tmp_path: Path, row: Any, problem: str) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: message \d in 'messages'.*" + problem):
        load(tmp_path, row, bad_rows="skip")


def test_a_mask_on_every_message_is_taken(tmp_path: Path) -> None:
    row = talk(("a", {"loss_mask": 1}))
    row["messages"][0]["loss_mask"] = 1
    assert trained(tmp_path, row) == ["a"]


def test_a_preference_is_about_the_whole_response(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    answer = {"role": "assistant", "content": "a", "weight": 0}
    file.write_text(json.dumps({"prompt": "?", "chosen": [answer], "rejected": "b"}))
    with pytest.raises(DataError, match="a message of the response in 'chosen' has a flag"):
        load_pairs(PairData.model_validate({"sources": [{"path": str(file)}]}), renderer())
    file.write_text(json.dumps({"prompt": "?", "completion": [answer], "label": True}))
    with pytest.raises(DataError, match="the labelled response has a flag"):
        load_labelled(LabelledData.model_validate({"sources": [{"path": str(file)}]}), renderer())


def call(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": None, "type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


def shown(source: Path, template: str) -> str:
    data = ConversationData.model_validate({"sources": [{"path": str(source)}]})
    (sample, *_) = load_conversations(data, renderer(template)).samples
    return renderer(template).decode(sample.token_ids)


SCHEMA = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": ["string", "null"], "default": None}, "b": {"enum": ["x", None]}},
        },
    },
}


@pytest.mark.parametrize("template", [CALLS, AS_TEXT, PRINTED], ids=["object", "text", "printed"])
@pytest.mark.parametrize("as_text", [False, True], ids=["object in the row", "text in the row"])
def test_nulls_that_a_row_means_are_kept(tmp_path: Path, template: str, as_text: bool) -> None:
    file = tmp_path / "rows.jsonl"
    arguments: Any = {"a": None, "d": {"k": None, "t": True}}
    row = {
        "messages": [{"role": "user", "content": "?"}, call(json.dumps(arguments) if as_text else arguments)],
        "tools": [SCHEMA],
    }
    file.write_text(json.dumps(row))
    text = shown(file, template)
    assert '{"a": null, "d": {"k": null, "t": true}}' in text
    assert '"default": null' in text
    assert '["x", null]' in text


def test_nulls_that_a_table_put_in_are_dropped(tmp_path: Path) -> None:
    import datasets

    other = {
        "type": "function",
        "function": {"name": "g", "parameters": {"type": "object", "properties": {"c": {"type": ["string"]}}}},
    }
    rows = [
        {"messages": [{"role": "user", "content": "?"}, call({"a": "x"})], "tools": [SCHEMA]},
        {"messages": [{"role": "user", "content": "?"}, call({"z": "y"})], "tools": [other]},
    ]
    file = tmp_path / "rows.parquet"
    rows[0]["tools"][0] = json.loads(json.dumps(SCHEMA))
    datasets.Dataset.from_list(rows).to_parquet(str(file))
    text = shown(file, CALLS)
    assert '[f]{"a": "x"}<' in text
    assert '"c"' not in text
    assert '"default": null' in text
    # as JSON text they are what the row says
    rows = [{"messages": [{"role": "user", "content": "?"}, call('{"a": null}')], "tools": json.dumps([SCHEMA])}]
    datasets.Dataset.from_list(rows).to_parquet(str(file))
    text = shown(file, CALLS)
    assert '[f]{"a": null}<' in text
    assert '"default": null' in text


@pytest.mark.parametrize("empty", [None, "", {}, "{}"])
def test_no_arguments_are_an_empty_object(tmp_path: Path, empty: Any) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "?"}, call(empty)]}))
    assert "[f]{}<" in shown(file, CALLS)
