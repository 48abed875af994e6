r"""Where an assistant's turns are in what a chat template writes: exactly, or not at all.

A model is trained on what it would have to write for a conversation to go on as it did: everything from the end of its
prompt to the end-of-turn token, and nothing else. For every such turn the history before it is rendered with the
generation prompt, and with the turn itself:

    prompt   <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    shown    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
    trained                                                         ^^^^^^^^^^^^^^^

What the template writes after a turn's text is found by a rendering with a sentinel in place of that text: a text may
spell an end-of-turn token. A turn must stand in the rendering as it stands in the row, white space aside; where the
template writes something else (it drops the reasoning, repeats the text, or leaves it out) there is nothing that could
rightly be trained on. The same holds for tool calls, for reasoning in a field of its own, and for the row's tools: a
template that knows none of them leaves them out without a word. Where the template has `{% generation %}` blocks, only
what is in them is trained, and the end-of-turn token where it follows one. Where a turn ends by the next header alone
(GLM), the token that begins this header is the turn's last one.

**Cuts.** Some templates rewrite history: they drop the reasoning of earlier turns. Then the rendering of a later
turn does not begin with that of an earlier one, and the conversation becomes several sequences. Each holds the turns
that were written in its context, so that every turn is trained exactly once, in the context in which the model would
write it.

**Tokens.** A sequence is tokenised in pieces that end where a turn begins and where it ends, as an engine does that is
given a prompt and samples the rest: no token is half the model's and half the prompt's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from roll_like.data.bad_rows import BadRow, Problem
from roll_like.data.chat import ChatMessage, Renderer, UnseenImages, sentinel, squeezed
from roll_like.data.images import pictures_of
from roll_like.errors import EnvError
from roll_like.types import Picture

#: Characters `[begin, end)` of a text.
CharRange: TypeAlias = tuple[int, int]


class Piece(NamedTuple):
    """A part of a sequence.

    Attributes:
        text: What the template writes.
        trained: Whether its tokens are trained.
        pictures: The images in it, in order.
    """

    text: str
    trained: bool
    pictures: tuple[Picture, ...] = ()


#: Ends of turns that are remembered.
_MOST_ENDS = 1024
_PLAIN = {"role", "content", "name", "tool_calls"}
#: Fields of an assistant's message that hold its reasoning, by the names that templates and servers give them.
_REASONING = ("reasoning_content", "reasoning", "thinking")
_FIX = "change the row, or model.chat_template"


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """An assistant's turn in the rendering of the conversation up to it.

    Attributes:
        text: The rendering, without a generation prompt; with the next header's first token if that ends the turn.
        trained: Which characters of the text are trained: not empty, in order.
    """

    text: str
    trained: tuple[CharRange, ...]


def sequences(
    renderer: Renderer, messages: Sequence[ChatMessage], tools: Sequence[Any], turns: Sequence[int]
) -> list[list[Piece]]:
    """Return the sequences that train some turns of a conversation: one, unless the template rewrites history.

    Each ends with the last token that is trained.

    Args:
        turns: Indices of the messages to train on, in order; the assistant's.

    Raises:
        BadRow: The template refuses the messages, does not write one of these turns as it is, or writes no tools.
    """
    require_tools(renderer, messages, tools)
    found: list[list[Piece]] = []
    before, told = "", 0
    for at in turns:
        turn = find_turn(renderer, messages, at, tools)
        position = len(before)
        if not found or not turn.text.startswith(before):
            found.append([])
            position = told = 0
        pictures, told = pictures_of(messages[told:at]), at
        for begin, end in turn.trained:
            found[-1] += [Piece(turn.text[position:begin], False, pictures), Piece(turn.text[begin:end], True)]
            position, pictures = end, ()
        before = turn.text[:position]
    return found


def find_turn(renderer: Renderer, messages: Sequence[ChatMessage], at: int, tools: Sequence[Any]) -> RenderedTurn:
    """Return where the turn `messages[at]` is in the rendering of the conversation up to it.

    Raises:
        BadRow: The template refuses the messages, or does not write the turn as it is.
    """
    turn = messages[at]
    shown = render(renderer, messages[: at + 1], tools)
    require_written(renderer, messages, at, tools, shown)
    prompt = render(renderer, messages[:at], tools, generation_prompt=True) if at else None
    if turn.get("content"):
        begin, end = _of_text(renderer, messages, at, tools, shown, prompt)
    else:
        begin, end = _of_calls(renderer, at, shown, prompt)
    if not squeezed(shown[begin:end]):
        raise _rewritten(at, "writes nothing of it")
    if renderer.marks_generation:
        return RenderedTurn(shown, _marked(renderer, messages, at, tools, shown, (begin, end)))
    following = messages[at + 1]["role"] if at + 1 < len(messages) else "tool" if turn.get("tool_calls") else "user"
    header = renderer.header_after_turn(following)
    if header is not None and not shown[end:].strip():
        shown += renderer.decode([header])
        end = len(shown)
    return RenderedTurn(shown, ((begin, end),))


def require_tools(renderer: Renderer, messages: Sequence[ChatMessage], tools: Sequence[Any]) -> None:
    """Check that the template writes a row's tools.

    Raises:
        BadRow: It writes the same without them.
    """
    if not tools or renderer.writes_tools:
        return
    if render(renderer, messages, tools) == render(renderer, messages, ()):
        raise BadRow(
            Problem.TOOLS,
            "the row has tools, and the chat template writes none",
            fix="set model.chat_template to one that does, or, where the messages name the tools, `tools_field: none` "
            "of the source",
        )


def require_written(
    renderer: Renderer, messages: Sequence[ChatMessage], at: int, tools: Sequence[Any], shown: str
) -> None:
    """Check that the reasoning and the tool calls of the turn `messages[at]` are in the rendering up to it.

    Raises:
        BadRow: The template writes the same without them, or without the last of several calls, and the turn's text
            does not have them either.
    """
    turn = messages[at]
    said = squeezed(str(turn.get("content") or ""))
    for what, keys, bare in _parts(turn):
        try:
            same = renderer.render([*messages[:at], bare], tools, generation_prompt=False) == shown
        except EnvError:  # it refuses what says nothing
            continue
        if same and not _said(turn, keys, said):
            known = [key for key in _REASONING if keys and any(_reads(each, key) for each in renderer.templates)]
            reads = f"; it reads {' and '.join(map(repr, known))}" if known else ""
            raise _rewritten(at, f"does not write {what}{reads}")


def _parts(turn: ChatMessage) -> Iterator[tuple[str, list[str], ChatMessage]]:
    """Yield what a turn has beside its text, the fields of its reasoning, and the turn without it."""
    keys = [key for key in _REASONING if isinstance(turn.get(key), str) and turn[key].strip()]
    if keys:
        yield f"its {keys[0]!r}", keys, {key: value for key, value in turn.items() if key not in keys}
    calls = turn.get("tool_calls")
    if calls:
        rest = {key: value for key, value in turn.items() if key != "tool_calls"}
        what = "its tool calls" if len(calls) == 1 else f"all of its {len(calls)} tool calls"
        yield what, [], {**rest, "tool_calls": calls[:-1]} if len(calls) > 1 else rest


def _said(turn: ChatMessage, keys: Sequence[str], said: str) -> bool:
    """Return whether the turn's text, without white space, has its reasoning, or its calls."""
    if keys:
        return all(squeezed(turn[key]) in said for key in keys)
    functions = [call["function"] for call in turn["tool_calls"]]
    written = (function["arguments"] for function in functions)
    texts = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in written]
    return all(function["name"] in said for function in functions) and all(squeezed(text) in said for text in texts)


def _reads(template: str, key: str) -> bool:
    return re.search(rf"""(\.|\[["']){key}\b""", template) is not None


def _of_text(
    renderer: Renderer, messages: Sequence[ChatMessage], at: int, tools: Sequence[Any], shown: str, prompt: str | None
) -> CharRange:
    """Return the range of a turn that has a text."""
    turn = messages[at]
    mark = sentinel(str((messages, tools)))
    marked = render(renderer, [*messages[:at], {**turn, "content": mark}], tools)
    if (count := marked.count(mark)) != 1:
        raise _rewritten(at, f"writes the text {count} times")
    before, _, after = marked.partition(mark)
    if not shown.endswith(after) or len(shown) < len(after):
        raise _rewritten(at, "ends it depending on its text")
    end_of_text = len(shown) - len(after)
    expected = squeezed(turn["content"])
    in_place = shown.startswith(before) and squeezed(shown[len(before) : end_of_text]) == expected
    end = end_of_text + _end_within(renderer, after, calls=bool(turn.get("tool_calls")))
    if prompt is not None and shown.startswith(prompt) and len(prompt) <= end_of_text:
        if not in_place and squeezed(shown[len(prompt) : end_of_text]) != expected:
            raise _rewritten(at, f"writes {_short(shown[len(prompt) : end_of_text])} for {_short(turn['content'])}")
        return len(prompt), end
    # the generation prompt is none of the conversation: it may open a reasoning block that this turn does not have
    if in_place and set(turn) <= _PLAIN:
        return len(before), end
    raise _rewritten(at, "writes something else than its own generation prompt and the turn")


def _of_calls(renderer: Renderer, at: int, shown: str, prompt: str | None) -> CharRange:
    """Return the range of a turn that has no text: it calls tools."""
    if prompt is None or not shown.startswith(prompt):
        raise _rewritten(at, "writes something else than its own generation prompt and the calls")
    ended = "" if renderer.end_of_turn is None else renderer.decode([renderer.end_of_turn])
    place = shown.rfind(ended, len(prompt)) if ended else -1
    return len(prompt), len(shown.rstrip()) if place < 0 else place + len(ended)


def _end_within(renderer: Renderer, after: str, *, calls: bool) -> int:
    """Return how many characters of what follows a turn's text are still the turn: through its end-of-turn token."""
    if (after, calls) not in renderer.ends:  # most turns end alike
        if len(renderer.ends) >= _MOST_ENDS:
            renderer.ends.clear()
        renderer.ends[after, calls] = _found_end(renderer, after, calls=calls)
    return renderer.ends[after, calls]


def _found_end(renderer: Renderer, after: str, *, calls: bool) -> int:
    ids = renderer.encode(after)
    special = [int(token) for token in ids if int(token) in renderer.special_ids]
    if not special:
        return len(after.rstrip()) if calls else 0
    # calls may be opened by special tokens of their own; the last one ends the turn
    ended = renderer.decode([special[-1] if calls else special[0]])
    place = after.rfind(ended) if calls else after.find(ended)
    return place + len(ended) if place >= 0 else 0


def _marked(
    renderer: Renderer, messages: Sequence[ChatMessage], at: int, tools: Sequence[Any], shown: str, turn: CharRange
) -> tuple[CharRange, ...]:
    """Return what of a turn the template's generation blocks hold, and the end-of-turn token that follows them."""
    begin, end = turn
    clipped = [(max(one, begin), min(other, end)) for one, other in renderer.generated(messages[: at + 1], tools)]
    ranges = [one for one in clipped if one[0] < one[1]]
    if not ranges:
        raise _rewritten(at, "has none of it in a {% generation %} block")
    left = renderer.encode(shown[ranges[-1][1] : end])
    text = "".join(renderer.decode([token]) for token in left if int(token) not in renderer.special_ids)
    if not squeezed(text):
        ranges[-1] = (ranges[-1][0], end)
    return tuple(ranges)


def render(
    renderer: Renderer, messages: Sequence[ChatMessage], tools: Sequence[Any], *, generation_prompt: bool = False
) -> str:
    """Return the template's text of a row's messages.

    Raises:
        BadRow: The template refuses them.
    """
    try:
        return renderer.render(messages, tools, generation_prompt=generation_prompt)
    except EnvError as error:
        if isinstance(error, UnseenImages):
            raise BadRow(Problem.ROLES, error.message, fix=error.fix) from error
        raise BadRow(Problem.ROLES, error.message, fix="change the row's roles, or model.chat_template") from error


def _rewritten(at: int, what: str) -> BadRow:
    return BadRow(Problem.REWRITTEN, f"message {at} is the assistant's, and the chat template {what}", fix=_FIX)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:39] + "…")
