"""Conversations of many turns, token-exact.

A policy is trained on the tokens that it sampled, in the context in which it sampled them. So a conversation is
one growing sequence of tokens: the rendered prompt, what was sampled, what the chat template writes between two
turns (the glue: end-of-turn token, headers, the environment's messages, the next generation prompt), what was
sampled next, and so on. Sampled tokens are never decoded and tokenised again.

    conversation = Conversation(Renderer(tokenizer))
    prompt_ids = conversation.start([{"role": "user", "content": "Which way?"}], tools)
    ...                                              # the engine samples from prompt_ids
    conversation.sampled(generation.token_ids, generation.logprobs, generation.segments)
    prompt_ids = conversation.observe([{"role": "user", "content": "You hit a wall."}])
    ...                                              # prompt_ids begins with all that came before
    conversation.segments()                          # what to train on

**The glue** is what the template writes after an assistant's turn. It is found by rendering the history with a
sentinel in place of the turn's text, because the template may trim or change that text. Where the glue begins with a
special token (all ChatML-like templates), its tokens are those that tokenising the whole rendered text would give: no
token reaches across a special token. Where it begins with ordinary text, it is tokenised on its own; the sequence is
still exactly what the engine saw, though the whole text's tokenisation may join characters across that border.

**Cuts.** Some templates rewrite history: they drop the reasoning of earlier turns, or move a message. Then the rendered
text no longer begins with what the engine saw. The sequence so far becomes a finished segment, and the next
one starts from a fresh rendering of the whole history, none of it trained on again. Segments of one episode share its
return. A template that only changes white space of a turn (trims it, for example) does not cut: tokens stay as sampled.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from roll_like.data.bad_rows import BadRow
from roll_like.data.chat import ChatMessage, Renderer, squeezed
from roll_like.data.foreign import broken, unbroken
from roll_like.data.images import images_within, pictures_of, shift_images
from roll_like.data.kept import joined_kept, kept_within
from roll_like.data.routes import continued
from roll_like.errors import DataError, EnvError
from roll_like.types import (
    BoolArray,
    FloatArray,
    IntArray,
    KeptTokens,
    Picture,
    PlacedImage,
    ReasoningTags,
    RouteArray,
    Segment,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segmented:
    """A part of a conversation in which every prompt extends the one before.

    Attributes:
        token_ids: What the engine saw and sampled, shape [T]; ends with a sampled token.
        sampled: True where the policy sampled the token, shape [T].
        logprobs: Behaviour log-probability of each sampled token in nats, 0 elsewhere, shape [T].
        turns: Index of the turn that sampled the token, counted through the conversation; -1 elsewhere, shape [T].
        segments: Which policy version sampled which tokens, if `Conversation.sampled` was given it.
        prompt_length: Tokens before the first sampled one.
        observed_from: From here on, what is not sampled was read for the first time, after a turn: in a history that
            was rendered again what follows the last turn, else what follows the prompt.
        cut: Why the next segment does not go on with this one; None for the last.
        images: The images among the tokens, in order.
        routes: The experts that the engine computed each token with, if `Conversation.sampled` was given them.
        kept: What each token was drawn from, if `Conversation.sampled` was given it.
    """

    token_ids: IntArray
    sampled: BoolArray
    logprobs: FloatArray
    turns: IntArray
    segments: tuple[Segment, ...]
    prompt_length: int
    observed_from: int
    cut: str | None
    images: tuple[PlacedImage, ...] = ()
    routes: RouteArray | None = None
    kept: KeptTokens | None = None


class Conversation:
    """One episode's messages and tokens. Synchronous; needs neither engine nor environment."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._messages: list[ChatMessage] = []  # without the turn that is being sampled
        self._prompt_text = ""  # the template's text of `_messages`, generation prompt included
        self._message: ChatMessage | None = None
        self._turn: list[int] | None = None  # tokens of the turn since the last prompt; None before the first
        self._turns = 0
        self._open = _Tokens()
        self._finished: list[Segmented] = []

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The history as the template is given it, the latest turn included."""
        return (*self._messages, *(() if self._turn is None else (self._assistant(self._turn),)))

    @property
    def tokens(self) -> IntArray:
        """Prompt of the next sample: everything of the current segment, shape [T]."""
        return self._open.token_ids

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """The images among `tokens`, in order."""
        return tuple(self._open.images)

    @property
    def reasoning(self) -> ReasoningTags | None:
        """What delimits reasoning in the turn that follows the latest prompt."""
        return self.renderer.reasoning_after(self._prompt_text)

    @property
    def turns(self) -> int:
        """Turns that the policy has taken."""
        return self._turns

    @property
    def cuts(self) -> int:
        """How often the template rewrote history."""
        return sum(segment.cut is not None for segment in self._finished)

    def start(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> IntArray:
        """Begin the conversation and return the first prompt, shape [T].

        Args:
            messages: Not empty; the template may add a system message of its own. An image is a part of a content,
                `{"type": "image", "image": Picture}`.
            tools: Function schemas in OpenAI's form, for the template to render.

        Raises:
            EnvError: The chat template or the model's image processor refuses the messages.
            ValueError: The conversation has begun already.
        """
        if self._messages:
            raise ValueError("the conversation has begun; use observe() to go on, or a new Conversation")
        if not messages:
            raise EnvError("an environment began a conversation without a message", fix="return a text from reset()")
        self._tools = tuple(tools)
        messages = self._without_placeholders(messages)
        self._prompt_text = self.renderer.render(messages, self._tools)
        ids, images = self._expanded(self.renderer.encode(self._prompt_text), pictures_of(messages))
        self._messages = list(messages)
        self._open.add(ids, images=images)
        return self.tokens

    def sampled(
        self,
        token_ids: npt.ArrayLike,
        logprobs: npt.ArrayLike,
        segments: Sequence[Segment] = (),
        *,
        message: ChatMessage | None = None,
        routes: RouteArray | None = None,
        kept: KeptTokens | None = None,
    ) -> None:
        """Append what the policy sampled after the latest prompt, exactly.

        A second call before `observe` goes on with the same turn: an aborted sample that was continued.

        Args:
            token_ids: Sampled tokens, shape [R]; with or without an end-of-turn token, possibly none.
            logprobs: Behaviour log-probability of each, shape [R].
            segments: Which policy version sampled which of `token_ids`, as in `Generation.segments`.
            message: The turn as later prompts shall show it, for example with `tool_calls`; default: the decoded
                text as `content`, tool calls as the policy wrote them, which templates repeat word for word.
                A message whose rendering differs from what was sampled by more than white space leads to a cut.
            routes: As in `Generation.routes`: of the prompt that `tokens` was, and of `token_ids`.
            kept: As in `Generation.kept`: what each of `token_ids` was drawn from.

        Raises:
            ValueError: Before `start`, or the arrays differ in length.
        """
        if not self._messages:
            raise ValueError("nothing can be sampled before start()")
        ids, logs = np.asarray(token_ids, np.int32).reshape(-1), np.asarray(logprobs, np.float32).reshape(-1)
        if ids.shape != logs.shape:
            raise ValueError(f"{len(ids)} sampled tokens came with {len(logs)} log-probabilities")
        if self._turn is None:
            self._turn = []
            self._turns += 1
        self._turn.extend(ids.tolist())
        self._message = message
        self._open.add(ids, logs, self._turns - 1, segments, kept)
        self._open.routes = continued(self._open.routes, routes)

    def observe(self, messages: Sequence[ChatMessage]) -> IntArray:
        """Append the template's glue and the environment's messages; return the next prompt, shape [T].

        It extends the previous sequence, unless the template rewrote history: then it starts a new segment.

        Raises:
            EnvError: The chat template or the model's image processor refuses the messages.
            ValueError: Nothing was sampled since the last prompt.
        """
        if self._turn is None:
            raise ValueError("observe() follows sampled(); nothing was sampled since the last prompt")
        turn, messages = self._assistant(self._turn), self._without_placeholders(messages)
        text = self.renderer.render([*self._messages, turn, *messages], self._tools)
        glue = self.renderer.glue(self._messages, turn, messages, self._tools)
        if glue is not None and self._goes_on(text, glue):
            written: IntArray | None = self.renderer.encode(glue)
        else:
            written = self._behind_turn(text)
        if written is None:
            text, turn = self._cut(text, glue, turn, messages)
        else:
            ids, images = self._expanded(self._after_turn(written), pictures_of(messages))
            self._open.add(ids, images=images)
        self._messages += [turn, *messages]
        self._prompt_text, self._turn, self._message = text, None, None
        return self.tokens

    def copy(self) -> Conversation:
        """Return an independent copy."""
        other = copy.copy(self)
        other._turn = None if self._turn is None else list(self._turn)
        other._messages, other._finished = list(self._messages), list(self._finished)
        other._open = self._open.copy()
        return other

    def segments(self, numbers: Sequence[int] | None = None) -> tuple[Segmented, ...]:
        """Return what to train on, in order: segments that hold at least one sampled token.

        What was observed after the last sampled token is left out.

        Args:
            numbers: Index of each turn for `Segmented.turns`, if they count through more than this conversation.
        """
        last = self._open.finish(cut=None)
        segments = (*self._finished, *(() if last is None else (last,)))
        if numbers is None:
            return segments
        numbers_N = np.array(numbers, np.int32)
        return tuple(replace(one, turns=np.where(one.sampled, numbers_N[one.turns], np.int32(-1))) for one in segments)

    def _assistant(self, turn: Sequence[int]) -> ChatMessage:
        return self._message if self._message is not None else {"role": "assistant", "content": self._turn_text(turn)}

    def _turn_text(self, turn: Sequence[int]) -> str:
        ended = bool(turn) and turn[-1] in self.renderer.end_ids
        return self.renderer.decode(turn[:-1] if ended else turn)

    def _goes_on(self, text: str, glue: str) -> bool:
        """Return whether `text` is the last prompt, the turn (white space aside) and the glue."""
        if not (text.startswith(self._prompt_text) and text.endswith(glue)):
            return False
        end = len(text) - len(glue)
        if end < len(self._prompt_text):
            return False
        shown, sampled = text[len(self._prompt_text) : end], self._turn_text(self._turn or ())
        return shown == sampled or squeezed(shown) == squeezed(sampled)

    def _behind_turn(self, text: str) -> IntArray | None:
        """Return the tokens behind the turn where it is written word for word, and one ends it; None elsewhere.

        Gemma 4's template writes results into the turn that called: `<tool_call|>` is followed by `<|tool_response>`.
        """
        seen = self._prompt_text + self._turn_text(self._turn or ())
        if not text.startswith(seen):
            return None
        behind = self.renderer.encode(text[len(seen) :])
        return behind if behind.size and int(behind[0]) in self.renderer.end_ids else None

    def _after_turn(self, glue: IntArray) -> IntArray:
        """Return the glue without an end-of-turn token that the policy has sampled already."""
        render = self.renderer
        at = render.first_special(glue)
        if not self._turn or at is None or self._turn[-1] != glue[at] or glue[at] not in render.end_ids:
            return glue
        # another end than the template's own is one at the very beginning alone: messages may have it, too
        ends = glue[at] == render.end_of_turn or not render.decode(glue[:at]).strip()
        return glue[at + 1 :] if ends else glue

    def _cut(
        self, text: str, glue: str | None, turn: ChatMessage, new: Sequence[ChatMessage]
    ) -> tuple[str, ChatMessage]:
        """Begin a new segment with the whole history; return its text, and the latest turn as it is shown there."""
        expected = self._prompt_text + self._turn_text(self._turn or ())
        cut = _difference(expected, text)
        if self.renderer.images is not None:  # placeholders that were sampled are text in a history that is read again
            self._messages = list(self._without_placeholders(self._messages))
            (turn,) = self._without_placeholders([turn])
            text = self.renderer.render([*self._messages, turn, *new], self._tools)
        written, shown = self.renderer.encode(text), pictures_of(new)
        prompt, images = self._expanded(written, (*pictures_of(self._messages), *shown))
        segment = self._open.finish(cut=cut)
        if segment is not None:
            self._finished.append(segment)
        self._open = _Tokens()
        self._open.add(prompt, images=images)
        if glue is not None and text.endswith(glue):
            after = self._after_turn(self.renderer.encode(glue))
            if np.array_equal(written[len(written) - len(after) :], after):
                self._open.observed_from = len(prompt) - len(self._expanded(after, shown)[0])
        return text, turn

    def _expanded(self, ids: IntArray, pictures: Sequence[Picture]) -> tuple[IntArray, tuple[PlacedImage, ...]]:
        """Return tokens with all placeholders of their images, and where these are.

        Raises:
            EnvError: The template did not write the images, or the model's processor refuses one.
        """
        try:
            return self.renderer.expanded(ids, pictures, "the conversation")
        except (DataError, BadRow) as error:
            raise EnvError(error.message, fix=error.fix) from error

    def _without_placeholders(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Return messages whose texts spell no placeholder of an image: only images are images."""
        pattern = self.renderer.placeholder
        return messages if pattern is None else [broken(one, pattern) for one in messages]


@dataclass(slots=True)
class _Tokens:
    """A segment that grows."""

    ids: list[IntArray] = field(default_factory=list)
    logprobs: list[FloatArray] = field(default_factory=list)
    turns: list[IntArray] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    length: int = 0
    observed_from: int | None = None
    images: list[PlacedImage] = field(default_factory=list)
    routes: RouteArray | None = None
    kept: list[tuple[KeptTokens | None, int]] = field(default_factory=list)

    def add(
        self,
        ids: IntArray,
        logprobs: FloatArray | None = None,
        turn: int = -1,
        segments: Sequence[Segment] = (),
        kept: KeptTokens | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> None:
        """Append tokens: observed ones, with their images, or, with log-probabilities, those of a turn."""
        self.ids.append(ids)
        self.images += shift_images(images, self.length)
        self.logprobs.append(np.zeros(len(ids), np.float32) if logprobs is None else logprobs)
        self.turns.append(np.full(len(ids), turn, np.int32))
        self.segments += [segment.shifted(self.length) for segment in segments]
        self.length += len(ids)
        self.kept.append((kept, len(ids)))

    def copy(self) -> _Tokens:
        """Return an independent copy."""
        return replace(
            self,
            ids=list(self.ids),
            logprobs=list(self.logprobs),
            turns=list(self.turns),
            segments=list(self.segments),
            images=list(self.images),
            kept=list(self.kept),
        )

    @property
    def token_ids(self) -> IntArray:
        """Everything so far, shape [T]."""
        return np.concatenate(self.ids) if self.ids else np.zeros(0, np.int32)

    def finish(self, cut: str | None) -> Segmented | None:
        """Return the tokens up to the last sampled one, or None where there is none."""
        if not self.ids:
            return None
        turns_T = np.concatenate(self.turns)
        places = np.flatnonzero(turns_T >= 0)
        if not len(places):
            return None
        end = int(places[-1]) + 1
        return Segmented(
            token_ids=self.token_ids[:end],
            sampled=turns_T[:end] >= 0,
            logprobs=np.concatenate(self.logprobs)[:end],
            turns=turns_T[:end],
            segments=tuple(self.segments),
            prompt_length=int(places[0]),
            observed_from=int(places[0]) if self.observed_from is None else self.observed_from,
            cut=cut,
            images=images_within(self.images, 0, end),
            routes=None if self.routes is None else self.routes[:end],
            kept=kept_within(joined_kept(self.kept), 0, end),
        )


def _difference(expected: str, found: str) -> str:
    """Return where a rendering differs from what the engine saw."""
    expected, found = unbroken(expected), unbroken(found)
    pairs = zip(expected, found, strict=False)
    at = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(found)))
    was, became = (text[at : at + 40] + ("…" if len(text) > at + 40 else "") for text in (expected, found))
    return f"the chat template rewrote history at character {at}: {was!r} became {became!r}"
