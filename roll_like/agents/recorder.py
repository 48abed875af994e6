"""From an agent's requests to token-exact conversations.

A request of an agent holds a whole history, but no id of the conversation that it continues. The recorder finds it:
the conversation whose history, with the answer as it was returned, is the longest beginning of the request's. What
follows is observed, so that the tokens go on exactly as they were sampled. Where there is none, a new conversation
begins in the same episode, and its tokens become further parts of the same trajectory:

* the first request, and a sub-agent with other messages or other tools;
* a history that the agent edited, shortened or summed up;
* a fork: a second request that goes on from the same answer. Its prompt is rendered afresh, and the answer that it
  shares with the first is part of its prompt, where it is not trained on again.

A request is drafted first and becomes part of the episode with `commit`; a draft that is dropped leaves no trace, and
neither does a turn that is taken back because its answer never arrived.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll_like.agents.chat_api import read_arguments
from roll_like.agents.conversation import Conversation, Segmented
from roll_like.data.chat import ChatMessage, Renderer
from roll_like.data.images import as_text, images_within
from roll_like.errors import EnvError
from roll_like.inference.interface import Generation
from roll_like.types import IntArray, Picture, PlacedImage, ReasoningTags


@dataclass(slots=True, eq=False)
class RecordedTurn:
    """One answer of the policy.

    Attributes:
        shown: Messages that it was shown since its last turn in this conversation.
        generation: What was sampled.
        message: The answer as it was returned.
        prompt_tokens: Tokens of its prompt.
        state: Key of what it was shown.
        reasoning: What delimits reasoning in the answer; None where there is none.
        began: When it was requested. Unix seconds.
        sampled: When the sample was back. Unix seconds.
        ended: When the conversation went on. Unix seconds.
        reward: What it earned so far.
        results: Answers of the tools that it called, by the call's id.
    """

    shown: tuple[ChatMessage, ...]
    generation: Generation
    message: ChatMessage
    prompt_tokens: int
    state: str
    reasoning: ReasoningTags | None
    began: float
    sampled: float
    ended: float
    reward: float = 0.0
    results: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _RecordedConversation:
    """A conversation after its latest answer.

    Attributes:
        conversation: Its tokens.
        turns: Its turns.
        key: Of its history, the latest answer included.
        before: What it was before that answer, until it goes on; None for a new one.
    """

    conversation: Conversation
    turns: tuple[RecordedTurn, ...]
    key: bytes
    before: _RecordedConversation | None


@dataclass(slots=True, eq=False)
class Draft:
    """A request whose answer is being sampled.

    Attributes:
        prompt_ids: What to sample from, shape [T].
        images: The images among these tokens.
        new: Messages since the conversation's last turn.
        state: Key of what is new.
        reasoning: What delimits reasoning in the answer; None where there is none.
    """

    prompt_ids: IntArray
    images: tuple[PlacedImage, ...]
    new: tuple[ChatMessage, ...]
    state: str
    reasoning: ReasoningTags | None
    _conversation: Conversation
    _history: bytes
    _from: _RecordedConversation | None


class Recorder:
    """The conversations of one episode."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        # by their key; those that are being continued are not in here
        self._idle: dict[bytes, list[_RecordedConversation]] = {}
        self._recorded: dict[RecordedTurn, _RecordedConversation] = {}  # by their latest turn
        self.turns: list[RecordedTurn] = []

    def draft(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> Draft:
        """Return the prompt of a request. Either `commit` or `drop` it.

        Raises:
            EnvError: The chat template refuses the messages.
        """
        keys = _keys(messages, tools)
        length, recorded = self._take(messages, keys)
        new = tuple(messages[length:])
        try:
            if recorded is None:
                conversation = Conversation(self._renderer)
                prompt_ids = conversation.start(new, tools)
            else:
                conversation, prompt_ids = _observed(recorded, new)
        except EnvError:
            self._put_back(recorded)
            raise
        state = _digest(b"", *map(_canonical, new)).hex()
        reasoning = conversation.reasoning
        return Draft(prompt_ids, conversation.images, new, state, reasoning, conversation, keys[-1], recorded)

    def drop(self, draft: Draft) -> None:
        """Forget a draft; its conversation can be continued by another request."""
        self._put_back(draft._from)

    def commit(
        self, draft: Draft, generation: Generation, message: ChatMessage, *, began: float, sampled: float
    ) -> RecordedTurn:
        """Add what was sampled for a draft.

        Args:
            draft: The request.
            message: The answer as it is returned to the agent.
            began: When it was requested. Unix seconds.
            sampled: When the sample was back. Unix seconds.
        """
        draft._conversation.sampled(
            generation.token_ids,
            generation.logprobs,
            generation.segments,
            routes=generation.routes,
            kept=generation.kept,
        )
        turn = RecordedTurn(
            shown=draft.new,
            generation=generation,
            message=message,
            prompt_tokens=len(draft.prompt_ids),
            state=draft.state,
            reasoning=draft.reasoning,
            began=began,
            sampled=sampled,
            ended=sampled,
        )
        before = draft._from
        if before is not None:
            latest = before.turns[-1]
            latest.ended = sampled
            latest.results |= {
                str(message["tool_call_id"]): as_text(message["content"])
                for message in draft.new
                if message["role"] == "tool" and "tool_call_id" in message
            }
            del self._recorded[latest]
            before.before = None  # its answer has arrived
        turns = (turn,) if before is None else (*before.turns, turn)
        recorded = _RecordedConversation(
            draft._conversation, turns, _digest(draft._history, _canonical(message)), before
        )
        self.turns.append(turn)
        self._recorded[turn] = recorded
        self._idle.setdefault(recorded.key, []).append(recorded)
        return turn

    def take_back(self, turn: RecordedTurn) -> bool:
        """Remove a turn whose answer never arrived; return False where its conversation has gone on."""
        recorded = self._recorded.get(turn)
        if recorded is None or recorded not in self._idle.get(recorded.key, ()):
            return False
        self._idle[recorded.key].remove(recorded)
        del self._recorded[turn]
        self.turns.remove(turn)
        if recorded.before is not None:
            self._recorded[recorded.before.turns[-1]] = recorded.before
            self._put_back(recorded.before)
        return True

    def segments(self) -> list[Segmented]:
        """Return all sequences that the engine saw, turns counted through the episode in order of time.

        Sequences are in the order of their latest turns, so that what an episode earned at its end comes after
        everything that was sampled, also where conversations went on side by side.
        """
        numbers = {turn: number for number, turn in enumerate(self.turns)}
        segments: list[Segmented] = []
        for recorded in self._recorded.values():
            segments += recorded.conversation.segments([numbers[turn] for turn in recorded.turns])
        return sorted(segments, key=lambda segment: int(segment.turns.max()))

    @property
    def first_prompt(self) -> tuple[tuple[ChatMessage, ...], IntArray, tuple[PlacedImage, ...]]:
        """Return what the episode began with: the messages that its first turn was shown, their tokens and images."""
        first = self.turns[0]
        recorded = next(recorded for recorded in self._recorded.values() if recorded.turns[0] is first)
        segments = recorded.conversation.segments()
        if not segments:
            return first.shown, np.zeros(0, np.int32), ()
        length = first.prompt_tokens
        return first.shown, segments[0].token_ids[:length], images_within(segments[0].images, 0, length)

    @property
    def cuts(self) -> int:
        """How often the chat template rewrote history."""
        return sum(recorded.conversation.cuts for recorded in self._recorded.values())

    @property
    def conversations(self) -> int:
        """How many conversations there are."""
        return len(self._recorded)

    def _take(self, messages: Sequence[ChatMessage], keys: Sequence[bytes]) -> tuple[int, _RecordedConversation | None]:
        """Take the conversation with the longest history out of those that may go on; and return that length."""
        for length in range(len(messages), 0, -1):
            latest = messages[length - 1]
            if latest["role"] == "assistant" and (idle := self._idle.get(keys[length])):
                # of equal answers the one with the reasoning that came back, if any did
                told = latest.get("reasoning_content")
                alike = [each for each in idle if told and each.turns[-1].message.get("reasoning_content") == told]
                found = (alike or idle)[-1]
                idle.remove(found)
                return length, found
        return 0, None

    def _put_back(self, recorded: _RecordedConversation | None) -> None:
        if recorded is not None:
            self._idle.setdefault(recorded.key, []).append(recorded)


def _observed(recorded: _RecordedConversation, new: Sequence[ChatMessage]) -> tuple[Conversation, IntArray]:
    """Return a copy of a conversation that was shown new messages, and its prompt."""
    conversation = recorded.conversation.copy()
    try:
        return conversation, conversation.observe(new)
    except EnvError:
        message = recorded.turns[-1].message
        if not message.get("tool_calls"):
            raise
        # a template may want the calls in structure where tools answer; the text has them as the policy wrote them
        conversation = recorded.conversation.copy()
        conversation.sampled((), (), message=_with_objects(message))
        return conversation, conversation.observe(new)


def _with_objects(message: ChatMessage) -> ChatMessage:
    """Return a message with the arguments of its calls as objects, as templates take them."""
    calls = [
        {**call, "function": {**call["function"], "arguments": read_arguments(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": message["content"] or "", "tool_calls": calls}


def _keys(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the key of each beginning of a history, the empty one first."""
    keys = [_digest(b"", json.dumps(list(tools), sort_keys=True).encode())]
    for message in messages:
        keys.append(_digest(keys[-1], _canonical(message)))
    return keys


def _canonical(message: ChatMessage) -> bytes:
    """Return what makes two messages the same one.

    Of an answer that comes back, text and calls count: agents add fields, leave out empty ones, write JSON with other
    spaces, and trim.
    """
    if message["role"] != "assistant":
        return json.dumps(dict(message), sort_keys=True, default=_pixels).encode()
    calls = [
        [call["id"], call["function"]["name"], read_arguments(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    return json.dumps(["assistant", (message["content"] or "").strip(), calls], sort_keys=True).encode()


def _pixels(picture: Picture) -> str:
    """Return what makes two images the same one."""
    return picture.digest.hex()


def _digest(start: bytes, *parts: bytes) -> bytes:
    digest = hashlib.blake2b(start, digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()
