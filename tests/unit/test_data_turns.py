"""Which tokens are the assistant's: exactly its turns, whatever the chat template does."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import numpy as np
import pytest
from chat_templates import WRITTEN, renderer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import make_tiny_tokenizer

from roll_like.data.bad_rows import BadRow, Problem
from roll_like.data.chat import Renderer
from roll_like.data.foreign import unbroken
from roll_like.data.turns import find_turn, sequences

#: What a template writes after an assistant's text, as part of the turn; these repeat the text word for word.
EXACT = {
    "chatml": "<|im_end|>",
    "newline before the end": "<|im_end|>",  # Jinja takes that newline away
    "no newline after the end": "<|im_end|>",
    "moves system messages": "<|im_end|>",
    "headers only": "<|im_start|>",  # of the next header: engines stop there
    "no special token": "",
    "SmolLM2": "<|im_end|>",
    "Qwen2.5": "<|im_end|>",
}

_words = st.sampled_from(
    [
        "left",
        " right",
        "\n",
        "\n\n",
        "  ",
        "é",
        "日本",
        "🦊",
        "<think>",
        "</think>",
        "{",
        "xq0turnqx",
        "\t",
        "<|im_end|>",
    ]
)
# SmolLM2's tokenizer has no tokens for some control characters and for unassigned planes
_characters = st.characters(max_codepoint=0xFFFF, exclude_categories=["Cc", "Cs"])
_texts = st.lists(_words, max_size=5).map("".join) | st.text(_characters, max_size=12)
_said = _texts.filter(lambda text: text.strip())
_messages = st.tuples(st.just("assistant"), _said) | st.tuples(
    st.sampled_from(["user", "user", "tool", "system"]), _texts
)
CONVERSATIONS = st.builds(
    lambda first, rest, last: [{"role": role, "content": text} for role, text in [*first, *rest, last]],
    st.lists(st.tuples(st.sampled_from(["system", "user"]), _texts), min_size=1, max_size=2),
    st.lists(_messages, max_size=5),
    st.tuples(st.just("assistant"), _said),
)
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
each = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def plain(text: str) -> str:
    """Qwen's tokenizers normalise texts to NFC."""
    return unicodedata.normalize("NFC", text)


def squeezed(text: str) -> str:
    return "".join(text.split())


def turns_of(messages: list[dict[str, str]]) -> list[int]:
    return [at for at, message in enumerate(messages) if message["role"] == "assistant"]


def trained_texts(render: Renderer, found: list[list[tuple[str, bool]]]) -> list[str]:
    """The text of every run of trained tokens, found by tokens alone; checks that tokens and pieces say the same."""
    texts = []
    for pieces in found:
        tokens = render.encode_pieces([(text, at == 0) for at, (text, *_) in enumerate(pieces)])
        assert plain(render.decode(np.concatenate(tokens))) == plain(unbroken("".join(text for text, *_ in pieces)))
        assert pieces[-1][1], "nothing is kept after the last trained token"
        texts += [plain(render.decode(ids)) for ids, piece in zip(tokens, pieces, strict=True) if piece.trained]
    return texts


def attempt(render: Renderer, messages: Any, places: list[int]) -> tuple[Any, Problem | None]:
    try:
        return sequences(render, messages, (), places), None
    except BadRow as bad:
        return [], bad.problem


@pytest.mark.parametrize("name", EXACT)
@each
@given(messages=CONVERSATIONS, with_tools=st.booleans())
def test_trained_tokens_are_exactly_the_assistants_turns(name: str, messages: Any, with_tools: bool) -> None:
    render = renderer(name)
    tools = [TOOL] if with_tools and render.writes_tools else []
    found = sequences(render, messages, tools, turns_of(messages))
    expected = [plain(messages[at]["content"] + EXACT[name]) for at in turns_of(messages)]
    assert trained_texts(render, found) == expected
    if name == "moves system messages":
        return
    assert len(found) == 1
    whole = render.render(messages, tools)
    assert whole.startswith("".join(text for text, *_ in found[0])), "what is not trained is what the template writes"
    prompt, (first, *_) = render.render(messages[: turns_of(messages)[0]], tools), found[0][0]
    assert first == prompt, "the first turn is trained after what an engine would be given"


@pytest.mark.parametrize("name", ["trims", "opens reasoning", "drops reasoning", "Qwen3", "Qwen3, thinking off"])
@each
@given(messages=CONVERSATIONS)
def test_templates_that_change_turns_are_trained_on_what_they_write_or_not_at_all(name: str, messages: Any) -> None:
    render = renderer(name)
    places = turns_of(messages)
    said = [messages[at]["content"] for at in places]
    found, problem = attempt(render, messages, places)
    if problem is not None:
        assert problem is Problem.REWRITTEN
        assert name not in ("trims", "opens reasoning")
        assert any("think>" in text for text in said)
        return
    texts = trained_texts(render, found)
    assert len(texts) == len(said)
    for text, content in zip(texts, said, strict=True):
        assert text.endswith("<|im_end|>")
        body = text.removesuffix("<|im_end|>")
        if name == "trims":
            assert body == plain(content.strip())
        elif name == "opens reasoning":
            assert body == plain(content.removeprefix("<think>\n"))
        else:
            written = squeezed(body)
            assert written in (squeezed(plain(content)), "<think></think>" + squeezed(plain(content)))


@pytest.mark.parametrize("name", ["ignores answers", "repeats answers"])
def test_a_template_that_does_not_write_the_turn_is_refused(name: str) -> None:
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    with pytest.raises(BadRow, match=r"writes the text \d times") as caught:
        sequences(renderer(name), messages, (), [1])
    assert caught.value.problem is Problem.REWRITTEN


@pytest.mark.parametrize("name", ["sentencepiece", "chatml", "SmolLM2", "Qwen2.5"])
def test_the_tokens_are_those_of_the_whole_rendering(name: str) -> None:
    render = renderer(name)
    messages = [
        {"role": "user", "content": "the quick fox"},
        {"role": "assistant", "content": "jumps over"},
        {"role": "user", "content": "a dog"},
        {"role": "assistant", "content": "and a fox"},
    ]
    (pieces,) = sequences(render, messages, (), [1, 3])
    tokens = np.concatenate(render.encode_pieces([(text, at == 0) for at, (text, *_) in enumerate(pieces)]))
    whole = render.encode(render.render(messages, (), generation_prompt=False)).tolist()
    assert whole[: len(tokens)] == tokens.tolist()
    assert len(whole) - len(tokens) <= 1  # the line end after the last turn
    end = "</s>" if name == "sentencepiece" else "<|im_end|>"
    said = [text.strip() for text, trained, _ in pieces if trained]
    assert said == [f"jumps over{end}", f"and a fox{end}"]


def test_reasoning_that_history_drops_makes_a_sequence_for_each_turn() -> None:
    render = renderer("Qwen3")
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>\none more\n</think>\n\n2"},
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "<think>\ntwo more\n</think>\n\n3"},
    ]
    first, second = sequences(render, messages, (), [1, 3])
    assert [text for text, trained, _ in first if trained] == ["<think>\none more\n</think>\n\n2<|im_end|>"]
    assert [text for text, trained, _ in second if trained] == ["<think>\ntwo more\n</think>\n\n3<|im_end|>"]
    assert "one more" not in second[0][0], "the second turn is trained after the history that the model would see"
    (last,) = sequences(render, messages, (), [3])
    assert last == second


def test_reasoning_in_a_field_of_its_own() -> None:
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "one more"},
    ]
    ((_, said),) = sequences(renderer("Qwen3"), messages, (), [1])
    assert (said.text, said.trained) == ("<think>\none more\n</think>\n\n2<|im_end|>", True)
    with pytest.raises(BadRow, match="something else than its own generation prompt"):
        sequences(renderer("Qwen3, thinking off"), messages, (), [1])


@pytest.mark.parametrize("content", ["", "Let me add. <|im_end|>"])
@pytest.mark.parametrize("value", ["1", "<|im_end|>"])
def test_tool_calls_are_trained_and_their_results_are_not(content: str, value: str) -> None:
    render = renderer("Qwen2.5")
    function = {"name": "add", "arguments": {"a": value, "b": 1}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "secret"},
        {"role": "assistant", "content": "2"},
    ]
    (pieces,) = sequences(render, messages, [TOOL], [1, 3])
    said = [text for text, trained, _ in pieces if trained]
    call = f"<tool_call>\n{json.dumps(function)}\n</tool_call><|im_end|>"
    assert said == [f"{content}\n{call}" if content else call, "2<|im_end|>"]


ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ASKED = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", ["SmolLM2", "Qwen3"])
def test_reasoning_that_the_template_does_not_write_is_a_bad_row(name: str, key: str) -> None:
    messages = [ASKED, {"role": "assistant", "content": "Yes", key: "Because."}]
    if (name, key) == ("Qwen3", "reasoning_content"):
        assert "Because." in trained_texts(renderer(name), sequences(renderer(name), messages, (), [1]))[0]
        return
    with pytest.raises(BadRow, match=f"does not write its '{key}'") as raised:
        sequences(renderer(name), messages, (), [1])
    assert ("; it reads 'reasoning_content'" in raised.value.message) == (name == "Qwen3")
    assert sequences(renderer(name), [ASKED, {**messages[1], key: " "}], (), [1])
    assert sequences(renderer(name), [*messages, ASKED, messages[0] | {"role": "assistant"}], (), [3]), "not trained"


@pytest.mark.parametrize("content", ["", "I add."])
def test_tool_calls_that_the_template_does_not_write_are_a_bad_row(content: str) -> None:
    messages = [ASKED, {"role": "assistant", "content": content, "tool_calls": [ADD]}]
    with pytest.raises(BadRow, match="does not write its tool calls"):
        sequences(renderer("SmolLM2"), messages, (), [1])
    assert '"add"' in trained_texts(renderer("Qwen2.5"), sequences(renderer("Qwen2.5"), messages, (), [1]))[0]


def test_reasoning_and_calls_that_stand_in_the_text_too_are_no_loss() -> None:
    render = renderer("SmolLM2")
    for content, more in (
        ("<think>\nWe add.\n</think>\n\n4", {"reasoning_content": "We  add."}),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', {"tool_calls": [ADD]}),
    ):
        messages = [ASKED, {"role": "assistant", "content": content, **more}]
        assert content in trained_texts(render, sequences(render, messages, (), [1]))[0]
    other = {"role": "assistant", "content": '{"name": "add", "arguments": {"a": 2}}', "tool_calls": [ADD]}
    with pytest.raises(BadRow, match="does not write its tool calls"):
        sequences(render, [ASKED, other], (), [1])


def test_a_template_that_writes_tools_beside_a_system_message_alone_writes_them() -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "{% if message.role == 'system' and tools %}{{ tools | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    render = Renderer(tokenizer)
    messages = [{"role": "system", "content": "Tools:"}, ASKED, {"role": "assistant", "content": "Yes"}]
    assert sequences(render, messages, [TOOL], [2])
    with pytest.raises(BadRow, match="the chat template writes none") as raised:
        sequences(render, messages[1:], [TOOL], [1])
    assert "tools_field: none" in str(raised.value.fix)


def test_a_template_that_writes_one_of_several_tool_calls_is_refused() -> None:
    render = renderer("Qwen2.5")
    first = "{{ message.content }}{% if message.tool_calls %}{{ message.tool_calls[0] | tojson }}{% endif %}"
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n" + first + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [ASKED, {"role": "assistant", "content": "I add.", "tool_calls": [ADD, ADD]}]
    with pytest.raises(BadRow, match="does not write all of its 2 tool calls"):
        sequences(Renderer(tokenizer), messages, (), [1])
    assert trained_texts(render, sequences(render, messages, (), [1]))[0].count('"add"') == 2


def test_tools_that_the_template_does_not_write_are_a_bad_row() -> None:
    messages = [ASKED, {"role": "assistant", "content": "Yes"}]
    with pytest.raises(BadRow, match="the row has tools, and the chat template writes none") as raised:
        sequences(renderer("SmolLM2"), messages, [TOOL], [1])
    assert raised.value.problem is Problem.TOOLS
    assert sequences(renderer("Qwen2.5"), messages, [TOOL], [1])


def test_a_header_that_ends_a_turn_is_trained_as_its_last_token() -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|observation|>"]})
    tokenizer.chat_template = (  # of GLM's kind: reasoning before the last question is dropped
        "{% set last = messages | map(attribute='role') | list %}{% for message in messages %}"
        "<|{{ 'observation' if message.role == 'tool' else message.role }}|>\n"
        "{{ message.content.split('</think>')[-1] if 'user' in last[loop.index:] else message.content }}"
        "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }}</call>{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    ends = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>f?</think>", "tool_calls": calls},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "It is 7"},
        {"role": "user", "content": "Again"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    render = Renderer(tokenizer, stated_ends=ends)
    found = sequences(render, messages, (), [1, 3, 5])
    assert trained_texts(render, found) == [
        "<think>f?</think><call>f</call><|observation|>",
        "It is 7<|user|>",
        "<call>f</call><|observation|>",
    ]
    assert [len([piece for piece in each if piece.trained]) for each in found] == [2, 1]
    not_said = sequences(Renderer(tokenizer), messages, (), [1])
    assert trained_texts(render, not_said) == ["<think>f?</think><call>f</call>"], "no engine would stop there"


def with_template(template: str) -> Renderer:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    return Renderer(tokenizer)


def blocks(inside: str, after: str) -> Renderer:
    return with_template(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
        "{% generation %}" + inside + "{% endgeneration %}" + after
        + "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("inside", "after"),
    [("{{ message.content }}<|im_end|>", ""), ("{{ message.content }}", "<|im_end|>")],
    ids=["the end inside", "the end after"],
)
@each
@given(messages=CONVERSATIONS)
def test_generation_blocks_say_what_is_trained(inside: str, after: str, messages: Any) -> None:
    render = blocks(inside, after)
    found = sequences(render, messages, (), turns_of(messages))
    assert trained_texts(render, found) == [plain(messages[at]["content"]) + "<|im_end|>" for at in turns_of(messages)]


def test_white_space_before_the_end_is_the_turns() -> None:
    render = with_template(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{{ '\n' }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (pieces,) = sequences(render, messages, (), [1])
    assert [text for text, trained, _ in pieces if trained] == ["Hello\n<|im_end|>"], "a model has to write it"


def test_generation_blocks_can_leave_parts_of_a_turn_out() -> None:
    render = blocks("{{ message.content }}", " (a machine wrote this)<|im_end|>")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (pieces,) = sequences(render, messages, (), [1])
    assert [text for text, trained, _ in pieces if trained] == ["Hello"]
    silent = blocks("", "{{ message.content }}<|im_end|>")
    with pytest.raises(BadRow, match=r"has none of it in a .* generation .* block"):
        sequences(silent, messages, (), [1])


def test_a_generation_block_around_the_header_does_not_train_the_header() -> None:
    render = with_template(
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}<|im_start|>assistant\n"
        "{{ message.content }}<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>user\n{{ message.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    turn = find_turn(render, messages, 1, ())
    assert [turn.text[begin:end] for begin, end in turn.trained] == ["Hello<|im_end|>"]


def test_a_conversation_that_the_assistant_begins() -> None:
    messages = [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Hi"}]
    (pieces,) = sequences(renderer("chatml"), messages, (), [0])
    assert [tuple(piece[:2]) for piece in pieces] == [("<|im_start|>assistant\n", False), ("Hello<|im_end|>", True)]


def test_refused_roles_are_a_bad_row() -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    with pytest.raises(BadRow, match=r"refuses .* roles user, tool, assistant: a tool answered") as caught:
        sequences(renderer("wants tool calls"), messages, (), [2])
    assert caught.value.problem is Problem.ROLES


def test_every_written_template_is_looked_at() -> None:
    others = {"trims", "opens reasoning", "drops reasoning", "ignores answers", "repeats answers", "wants tool calls"}
    assert set(WRITTEN) <= set(EXACT) | others
