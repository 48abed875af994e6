"""Token-exactness over turns: what the trainer sees is what the engine saw, whatever the chat template does."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from chat_templates import REAL, WRITTEN, renderer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import make_tiny_tokenizer

from roll_like.agents.conversation import Conversation
from roll_like.data.chat import Renderer
from roll_like.data.foreign import unbroken
from roll_like.errors import EnvError
from roll_like.tools import ToolCall, parse_tool_calls
from roll_like.types import Segment

#: Templates that repeat an assistant's text word for word.
EXACT = (
    "chatml",
    "newline before the end",
    "no newline after the end",
    "headers only",
    "no special token",
    "SmolLM2",
    "Qwen2.5",
)
#: Templates that may rewrite history, or change white space.
OTHERS = ("trims", "drops reasoning", "moves system messages", "opens reasoning", "ignores answers", "repeats answers")
ALL = (*EXACT, *OTHERS, "Qwen3", "Qwen3, thinking off")

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class Turn:
    """What the policy samples in one turn, and what the environment says to it."""

    pieces: tuple[str | tuple[int, ...], ...]  # texts to tokenise, or token ids modulo the vocabulary
    end: str  # "sampled": its end-of-turn token; "missing": cut by length or a stop string
    parts: int  # in how many calls the tokens come
    observed: tuple[tuple[str, str], ...]


_words = st.sampled_from(
    ["left", " right", "\n", "\n\n", "  ", "é", "e\u0301", "日本", "🦊", "<think>", "</think>", "{", "xq0turnqx", "\t"]
)
# SmolLM2's tokenizer has no tokens for some control characters and for unassigned planes
_characters = st.characters(max_codepoint=0xFFFF, exclude_categories=["Cc", "Cs"])
_texts = st.lists(_words, max_size=6).map("".join) | st.text(_characters, max_size=12)
_pieces = _texts | st.lists(st.integers(0, 2**20), max_size=5).map(tuple)
_observed = st.tuples(st.sampled_from(["user", "user", "tool", "system"]), _texts)
TURNS = st.lists(
    st.builds(
        Turn,
        pieces=st.lists(_pieces, max_size=4).map(tuple),
        end=st.sampled_from(["sampled", "sampled", "missing"]),
        parts=st.integers(1, 2),
        observed=st.lists(_observed, min_size=1, max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=4,
)
FIRST = st.lists(st.tuples(st.sampled_from(["system", "user"]), _texts), min_size=1, max_size=2)


def messages(pairs: Any) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in pairs]


def tokens_of(turn: Turn, render: Renderer) -> np.ndarray:
    """The sampled tokens: texts and arbitrary ordinary ids, as a policy would mix them."""
    ordinary = [at for at in range(len(render.tokenizer)) if at not in render.special_ids]
    ids: list[int] = []
    for piece in turn.pieces:
        ids += render.encode(piece).tolist() if isinstance(piece, str) else [ordinary[i % len(ordinary)] for i in piece]
    ids = [token for token in ids if token not in render.special_ids]  # a text may spell one
    if turn.end == "sampled" and render.end_of_turn is not None:
        ids.append(render.end_of_turn)
    return np.asarray(ids, np.int32)


def plain(text: str) -> str:
    """Qwen's tokenizers normalise texts to NFC."""
    return unicodedata.normalize("NFC", text)


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=settings().max_examples, suppress_health_check=[HealthCheck.too_slow])
@given(first=FIRST, turns=TURNS, with_tools=st.booleans())
def test_what_was_sampled_is_what_is_trained_on(name: str, first: Any, turns: list[Turn], with_tools: bool) -> None:
    render = renderer(name)
    tools = [TOOL] if with_tools else []
    conversation = Conversation(render)
    prompt = conversation.start(messages(first), tools)
    assert prompt.tolist() == render.encode(render.render(messages(first), tools)).tolist()
    sampled_ids: list[int] = []
    sampled_logs: list[float] = []
    owners: list[int] = []
    for index, turn in enumerate(turns):
        ids = tokens_of(turn, render)
        logs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 8 - index
        before = conversation.tokens
        text_before = render.render(conversation.messages, tools)
        for part in np.array_split(np.arange(len(ids)), turn.parts):
            conversation.sampled(ids[part], logs[part])
        sampled_ids += ids.tolist()
        sampled_logs += logs.tolist()
        owners += [index] * len(ids)
        assert conversation.tokens.tolist() == [*before.tolist(), *ids.tolist()]
        seen, cuts = conversation.tokens, conversation.cuts
        sampled_text = conversation.messages[-1]["content"]
        prompt = conversation.observe(messages(turn.observed))
        text = render.render(conversation.messages, tools)
        goes_on = squeezed(text).startswith(squeezed(text_before + sampled_text))
        if prompt[: len(seen)].tolist() == seen.tolist() and conversation.cuts == cuts:
            assert goes_on
            check_glue(render, prompt, seen, text)
        else:
            # cut: finished as the engine saw it; then the whole history, rendered afresh
            assert name not in EXACT
            assert not goes_on or name in ("repeats answers", "ignores answers")
            assert prompt.tolist() == render.encode(text).tolist()
        if name in EXACT:
            assert plain(render.decode(prompt)) == plain(unbroken(text))

    segments = conversation.segments()
    assert [token for each in segments for token in each.token_ids[each.sampled].tolist()] == sampled_ids
    assert [log for each in segments for log in each.logprobs[each.sampled].tolist()] == sampled_logs
    assert [owner for each in segments for owner in each.turns[each.sampled].tolist()] == owners
    for each in segments:
        assert each.sampled[-1], "nothing observed after the last sampled token is kept"
        assert not each.logprobs[~each.sampled].any()
        assert (each.turns[~each.sampled] == -1).all()
        assert each.prompt_length == int(np.argmax(each.sampled))
        assert 0 < each.observed_from <= each.prompt_length


def check_glue(render: Renderer, prompt: np.ndarray, seen: np.ndarray, text: str) -> None:
    """The glue is what tokenising the whole rendered text gives there, where its border is a special token."""
    glue = prompt[len(seen) :].tolist()
    ended = seen[-1] == render.end_of_turn
    if ended or (glue and glue[0] == render.end_of_turn):
        whole = render.encode(text).tolist()
        assert whole[len(whole) - len(glue) :] == glue
        assert not ended or whole[len(whole) - len(glue) - 1] == render.end_of_turn


@pytest.mark.parametrize("name", ["Qwen3", "drops reasoning"])
def test_dropped_reasoning_cuts_once_a_turn_that_had_some(name: str) -> None:
    render = renderer(name)
    conversation = Conversation(render)
    conversation.start(messages([("user", "go")]))
    first = sample(conversation, "<think>\nhm\n</think>\n\nleft")
    conversation.observe(messages([("user", "a wall")]))
    second = sample(conversation, "right")
    conversation.observe(messages([("user", "an exit")]))
    third = sample(conversation, "out")

    dropped, rest = conversation.segments()
    assert render.decode(dropped.token_ids[dropped.sampled]) == "<think>\nhm\n</think>\n\nleft<|im_end|>"
    assert dropped.token_ids[dropped.sampled].tolist() == first
    assert dropped.cut is not None
    assert "became" in dropped.cut
    assert rest.cut is None
    assert rest.token_ids[rest.sampled].tolist() == [*second, *third]
    assert "hm" not in render.decode(rest.token_ids)
    assert set(rest.turns.tolist()) == {-1, 1, 2}


@pytest.mark.parametrize("name", ["drops reasoning", "Qwen3, thinking off"])
def test_what_a_rewritten_history_tells_anew_follows_its_last_turn(name: str) -> None:
    render = renderer(name)
    conversation = Conversation(render)
    conversation.start(messages([("user", "go")]))
    for text, seen in (("<think>hm</think>left", "a wall"), ("<think>oh</think>right", "an exit")):
        sample(conversation, text)
        conversation.observe(messages([("user", seen)]))
    sample(conversation, "out")

    first, *rewritten = conversation.segments()
    assert first.observed_from == first.prompt_length
    told = [render.decode(each.token_ids[each.observed_from : each.prompt_length]) for each in rewritten]
    header = render.decode(conversation.tokens).rpartition("an exit")[2].removesuffix("out<|im_end|>")
    assert told == [f"\n<|im_start|>user\n{seen}{header}" for seen in ("a wall", "an exit")]


def test_qwen3_keeps_reasoning_between_tool_calls() -> None:
    conversation = Conversation(renderer("Qwen3"))
    conversation.start(messages([("user", "what is 2 + 3?")]), [TOOL])
    thought = '<think>\nI add.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    sample(conversation, thought)
    conversation.observe(messages([("tool", "5")]))
    sample(conversation, "<think>\nEasy.\n</think>\n\n5")
    (only,) = conversation.segments()
    text = conversation.renderer.decode(only.token_ids)
    assert thought + "<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n" in text


def test_each_token_by_hand() -> None:
    render = renderer("chatml")
    conversation = Conversation(render)
    start, end = render.encode("<|im_start|>")[0], render.encode("<|im_end|>")[0]
    newline, user, assistant = (render.encode(text).tolist() for text in ("\n", "user\n", "assistant\n"))
    go, wall, left = (render.encode(text).tolist() for text in ("go", "wall", "left"))
    prompt = [start, *render.encode("user\ngo").tolist(), end, *newline, start, *assistant]
    assert conversation.start(messages([("user", "go")])).tolist() == prompt
    assert (user, go) == (render.encode("user\n").tolist(), prompt[len(user) + 1 : len(user) + 1 + len(go)])
    conversation.sampled(
        [*left, end], [-1.0] * (len(left) + 1), [Segment(start=0, end=len(left) + 1, policy_version=4)]
    )
    glue = [*newline, start, *user, *wall, end, *newline, start, *assistant]
    assert conversation.observe(messages([("user", "wall")])).tolist() == [*prompt, *left, end, *glue]
    conversation.sampled(left, [-2.0] * len(left), [Segment(start=0, end=len(left), policy_version=5)])

    (only,) = conversation.segments()
    assert only.token_ids.tolist() == [*prompt, *left, end, *glue, *left]
    assert only.prompt_length == len(prompt)
    turns = [-1] * len(prompt) + [0] * (len(left) + 1) + [-1] * len(glue) + [1] * len(left)
    assert only.turns.tolist() == turns
    assert only.sampled.tolist() == [turn >= 0 for turn in turns]
    assert only.logprobs.tolist() == [(0.0, -1.0, -2.0)[turn + 1] for turn in turns]
    assert [(one.start, one.end, one.policy_version) for one in only.segments] == [
        (len(prompt), len(prompt) + len(left) + 1, 4),
        (len(only.token_ids) - len(left), len(only.token_ids), 5),
    ]


def test_a_missing_end_of_turn_is_observed() -> None:
    render = renderer("chatml")
    conversation = Conversation(render)
    conversation.start(messages([("user", "go")]))
    sample(conversation, "<action>left</action>", end=False)  # what a stop string leaves
    conversation.observe(messages([("user", "wall")]))
    sample(conversation, "right")
    (only,) = conversation.segments()
    text = render.decode(only.token_ids)
    assert text.endswith(
        "left</action><|im_end|>\n<|im_start|>user\nwall<|im_end|>\n<|im_start|>assistant\nright<|im_end|>"
    )
    ends = only.token_ids == render.end_of_turn
    assert only.sampled[ends].tolist() == [False, False, False, True]


def test_an_end_token_that_is_not_the_templates_stays_and_the_turn_is_closed() -> None:
    render = renderer("Qwen2.5")
    eos = render.encode("<|endoftext|>")
    conversation = Conversation(render)
    conversation.start(messages([("user", "go")]))
    ids = np.concatenate([render.encode("left"), eos])
    conversation.sampled(ids, np.zeros(len(ids)))
    prompt = conversation.observe(messages([("user", "wall")]))
    assert "left<|endoftext|><|im_end|>\n<|im_start|>user\nwall" in render.decode(prompt)
    assert conversation.cuts == 0
    sample(conversation, "right")
    (only,) = conversation.segments()
    assert only.sampled[only.token_ids == eos[0]].tolist() == [True]


@pytest.mark.parametrize("name", [*REAL, "chatml", "sentencepiece"])
def test_the_whole_sequence_is_what_tokenising_the_rendering_gives(name: str) -> None:
    render = renderer(name)
    conversation = Conversation(render)
    conversation.start(messages([("user", "the quick fox")]))
    sample(conversation, " jumps" if name == "sentencepiece" else "jumps")
    prompt = conversation.observe(messages([("user", "over a dog")]))
    assert prompt.tolist() == render.encode(render.render(conversation.messages, ())).tolist()


def test_trimming_keeps_the_tokens_as_sampled() -> None:
    render = renderer("trims")
    conversation = Conversation(render)
    conversation.start(messages([("user", "go")]))
    sample(conversation, "  left \n\n")
    prompt = conversation.observe(messages([("user", "wall")]))
    assert conversation.cuts == 0
    assert "assistant\n  left \n\n<|im_end|>\n<|im_start|>user\nwall" in render.decode(prompt)
    assert "assistant\nleft<|im_end|>" in render.render(conversation.messages, ())


@pytest.mark.parametrize(
    ("written", "cuts"), [('{"a": 1, "b": [2]}', 0), ('{"a":1,"b":[2]}', 0), ('{"b": [2], "a": 1}', 1)]
)
def test_tool_calls_told_in_structure_are_compared_with_what_was_sampled(written: str, cuts: int) -> None:
    render = renderer("Qwen2.5")
    conversation = Conversation(render)
    conversation.start(messages([("user", "add")]), [TOOL])
    text = f'I add.\n<tool_call>\n{{"name": "add", "arguments": {written}}}\n</tool_call>'
    ids = np.concatenate([render.encode(text), [render.end_of_turn]])
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
    told = {"role": "assistant", "content": "I add.", "tool_calls": [call]}
    conversation.sampled(ids, np.zeros(len(ids)), message=told)
    assert conversation.messages[-1] == told
    prompt = conversation.observe(messages([("tool", "3")]))
    assert conversation.cuts == cuts
    answered = "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    assert render.decode(prompt).endswith(answered + "<|im_start|>assistant\n")
    assert (written in render.decode(prompt)) is (cuts == 0)


def test_a_template_that_wants_tool_calls_in_structure_gets_them() -> None:
    render = renderer("wants tool calls")
    conversation = Conversation(render)
    conversation.start(messages([("user", "add")]))
    text = '<call>{"name": "add", "arguments": {}}</call>'
    ids = np.concatenate([render.encode(text), [render.end_of_turn]])
    call = {"function": {"name": "add", "arguments": {}}}
    conversation.sampled(ids, np.zeros(len(ids)), message={"role": "assistant", "content": "", "tool_calls": [call]})
    prompt = conversation.observe(messages([("tool", "3")]))
    assert conversation.cuts == 0
    assert render.decode(prompt).endswith(f"{text}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n")

    refused = Conversation(render)
    refused.start(messages([("user", "add")]))
    sample(refused, text)
    with pytest.raises(EnvError, match="refuses messages with the roles user, assistant, tool"):
        refused.observe(messages([("tool", "3")]))


def test_a_message_that_the_template_cannot_write_is_named_by_its_role() -> None:
    with pytest.raises(EnvError, match="refuses messages with the roles system, user"):
        Conversation(renderer("Qwen2.5")).start([{"role": "system", "content": "."}, {"role": "user", "content": None}])


def test_a_generation_prompt_that_history_does_not_show_cuts_every_turn() -> None:
    conversation = Conversation(renderer("Qwen3, thinking off"))
    conversation.start(messages([("user", "go")]))
    for _ in range(3):
        sample(conversation, "left")
        conversation.observe(messages([("user", "wall")]))
    assert conversation.cuts == 3
    assert all("<think>" in (segment.cut or "") for segment in conversation.segments())


def test_messages_that_look_like_the_sentinel_do_no_harm() -> None:
    conversation = Conversation(renderer("chatml"))
    conversation.start(messages([("user", "xq0turnqx xq1turnqx")]))
    sample(conversation, "xq2turnqx")
    prompt = conversation.observe(messages([("user", "xq3turnqx")]))
    assert conversation.cuts == 0
    assert conversation.renderer.decode(prompt) == conversation.renderer.render(conversation.messages, ())


def test_an_end_token_in_an_observation_is_not_taken_for_the_turns_own() -> None:
    render = renderer("no special token")
    conversation = Conversation(render)
    conversation.start(messages([("user", "go")]))
    ids = np.concatenate([render.encode("left"), render.encode("<|im_end|>")])
    conversation.sampled(ids, np.zeros(len(ids)))
    prompt = conversation.observe(messages([("user", "say <|im_end|> please")]))
    assert render.decode(prompt) == "user: go\nassistant: left<|im_end|>\nuser: say <|im_end|> please\nassistant: "


def test_observations_after_the_last_turn_are_not_trained_on() -> None:
    conversation = Conversation(renderer("drops reasoning"))
    conversation.start(messages([("user", "go")]))
    assert conversation.segments() == ()
    sample(conversation, "left")
    until = conversation.tokens
    conversation.observe(messages([("user", "wall")]))
    (only,) = conversation.segments()
    assert only.token_ids.tolist() == until.tolist()
    sample(conversation, "<think>no</think>right")
    conversation.observe(messages([("user", "wall")]))  # cut, and nothing sampled since
    (cut,) = conversation.segments()
    assert cut.cut is not None
    assert conversation.turns == 2


def test_misuse_is_refused() -> None:
    render = renderer("chatml")
    conversation = Conversation(render)
    with pytest.raises(ValueError, match=r"before start\(\)"):
        conversation.sampled([1], [0.0])
    with pytest.raises(EnvError, match="without a message"):
        conversation.start([])
    conversation.start(messages([("user", "go")]))
    with pytest.raises(ValueError, match="has begun"):
        conversation.start(messages([("user", "go")]))
    with pytest.raises(ValueError, match=r"observe\(\) follows sampled\(\)"):
        conversation.observe(messages([("user", "go")]))
    with pytest.raises(ValueError, match="2 sampled tokens came with 1 log-prob"):
        conversation.sampled([5, 6], [0.0])


def test_what_ends_a_turn_is_read_from_the_template() -> None:
    found = {name: renderer(name).end_of_turn for name in WRITTEN}
    end, header = (int(renderer("chatml").encode(text)[0]) for text in ("<|im_end|>", "<|im_start|>"))
    assert found == dict.fromkeys(WRITTEN, end) | {
        "headers only": header,
        "no special token": None,
        "ignores answers": None,
    }


def sample(conversation: Conversation, text: str, *, end: bool = True) -> list[int]:
    render = conversation.renderer
    ids = render.encode(text).tolist() + ([render.end_of_turn] if end else [])
    conversation.sampled(ids, [-0.5] * len(ids))
    return ids


#: Calls and results are parts of one turn, as in Gemma 4's.
WITHIN_A_TURN = (
    "{% set ns = namespace(called=false) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "<|tool_response>response:f{value:{{ m.content }}}<tool_response|>{% else %}"
    "{% if not ns.called %}<|turn>{{ m.role }}\n{% endif %}{% set ns.called = false %}"
    "{% for call in m.tool_calls or [] %}{% set ns.called = true %}<|tool_call>call:{{ call.function.name }}{{ '{' }}"
    "{% for key, x in call.function.arguments | dictsort %}{{ key }}:{{ x }}{{ ',' if not loop.last }}{% endfor %}"
    "}<tool_call|>{% endfor %}{{ m.content }}{% if not ns.called %}<turn|>\n{% elif loop.last %}<|tool_response>"
    "{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt and not ns.called %}<|turn>assistant\n{% endif %}"
)


@pytest.mark.parametrize("ended", [True, False])
def test_results_within_the_turn_that_called_go_on_without_a_cut(ended: bool) -> None:
    tokenizer = make_tiny_tokenizer()
    marks = ["<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = WITHIN_A_TURN
    end, close = tokenizer.convert_tokens_to_ids(["<|tool_response>", "<turn|>"])
    render = Renderer(tokenizer, stated_ends=[end, close])
    assert set(marks[2:4]) <= set(render.kept_tokens)
    conversation = Conversation(render)
    conversation.start([{"role": "user", "content": "go"}])
    prompt = ""
    for number in range(2):
        said = f"<|tool_call>call:f{{a:{number},b:x}}<tool_call|>" + ("<|tool_response>" if ended else "")
        _, (call,) = parse_tool_calls(said, "gemma")
        assert isinstance(call, ToolCall)
        function = {"name": call.name, "arguments": dict(call.arguments)}
        turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        ids = render.encode(said)
        conversation.sampled(ids, [-1.0] * len(ids), message=turn)
        prompt = render.decode(conversation.observe([{"role": "tool", "content": "5<turn|>"}]))
    assert conversation.cuts == 0
    shown = "".join(
        f"<|tool_call>call:f{{a:{number},b:x}}<tool_call|><|tool_response>response:f{{value:5<turn|>}}<tool_response|>"
        for number in range(2)
    )
    assert prompt == f"<|turn>user\ngo<turn|>\n<|turn>assistant\n{shown}"
    assert conversation.tokens.tolist().count(close) == 1
