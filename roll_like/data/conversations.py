"""Datasets of conversations to samples: which tokens are the assistant's, which of them are trained.

Two kinds of rows, also mixed in one file:

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    {"prompt": "Hi", "completion": "Hello"}

A prompt and a completion are texts or lists of messages; either kind may have `tools`. Where the loss applies is
decided by the chat template, exactly: see `roll_like.data.turns`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll_like.config.data import ConversationData, ConversationSource
from roll_like.data.bad_rows import BadRow, Problem, RowCounter
from roll_like.data.chat import ChatMessage, Renderer
from roll_like.data.loss_flags import left_out, untrained
from roll_like.data.messages import (
    read_messages,
    read_prompt,
    read_tools,
    require_fields,
    says_nothing,
    short,
    with_lists,
    with_system,
)
from roll_like.data.reader import Reader
from roll_like.data.rows import Row
from roll_like.data.samples import SampleSet, load_samples
from roll_like.data.turns import Piece, sequences
from roll_like.errors import DataError
from roll_like.types import TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRow:
    """A row's messages, tools, and where its response begins (0 where the row does not say).

    Attributes:
        messages: The conversation.
        tools: Function schemas.
        response: Where the response begins.
        untrained: Places of the assistant's messages that the row leaves out of the loss.
    """

    messages: list[ChatMessage]
    tools: tuple[Mapping[str, Any], ...]
    response: int
    untrained: frozenset[int] = frozenset()

    def trained_turns(self, *, last: bool = False) -> list[int]:
        """Return the indices of the assistant's messages that are trained.

        Args:
            last: Whether that is the last one alone.

        Raises:
            BadRow: There is none.
        """
        turns = self.assistant_turns()[-1 if last else 0 :]
        trained = [at for at in turns if at not in self.untrained]
        if not trained:
            which = f"message {turns[0]}" if len(turns) == 1 else f"each of the messages {turns[0]} to {turns[-1]}"
            raise left_out(f"{which} is the assistant's, and")
        return trained

    def assistant_turns(self) -> list[int]:
        """Return the indices of the assistant's messages; of the response alone, where the row says what that is.

        Raises:
            BadRow: There is none.
        """
        turns = [at for at in range(self.response, len(self.messages)) if self.messages[at]["role"] == "assistant"]
        if turns:
            return turns
        roles = ", ".join(str(message["role"]) for message in self.messages)
        raise BadRow(
            Problem.NO_ASSISTANT, f"expected a message of the role 'assistant', found {roles}", fix="correct the row"
        )

    def sequences(self, renderer: Renderer, turns: Sequence[int]) -> list[list[Piece]]:
        """Return the texts to train the assistant's messages `turns` on, which `roll_like.data.turns.sequences` makes.

        Raises:
            BadRow: One of them is empty, or the chat template refuses the messages.
        """
        require_words(self.messages, turns)
        return sequences(renderer, self.messages, self.tools, turns)


def load_conversations(
    data: ConversationData, renderer: Renderer, *, section: str = "data"
) -> SampleSet[TrainingSample]:
    """Read conversations; arguments and errors are those of `load_samples`."""
    return load_samples(data, renderer, ConversationReader, section)


@dataclass(frozen=True, kw_only=True)
class ConversationReader(Reader[TrainingSample]):
    """How rows become conversations."""

    source: ConversationSource
    limits: ConversationData

    def draft(self, row: Row, renderer: Renderer) -> list[list[Piece]]:
        """Return the texts of a conversation."""
        found = read_conversation(row, self.source, self.key)
        return found.sequences(renderer, found.trained_turns(last=self.limits.train_on == "last"))

    def finish(self, _: Row, parts: list[TrainingSample], counter: RowCounter) -> list[TrainingSample]:
        """Return the parts of a conversation that fit."""
        kept = []
        for part in parts:
            try:
                kept.append(self.join([self.fit(usable(part), counter)], ()))
            except BadRow as bad:
                counter.leave(part.origin, bad)
        return kept

    def join(self, parts: Sequence[TrainingSample], values: Sequence[float]) -> TrainingSample:  # noqa: ARG002
        """Return a conversation, which is its one sequence."""
        return parts[0]


def whole(found: list[list[Piece]]) -> list[list[Piece]]:
    """Return the sequences of a response, of which there must be one.

    Raises:
        BadRow: The chat template rewrites history within the response.
    """
    if len(found) != 1:
        raise BadRow(
            Problem.REWRITTEN,
            f"the chat template rewrites history within the response, which makes {len(found)} sequences of it",
            fix="end the response with its first turn, or change model.chat_template",
        )
    return found


def usable(sample: TrainingSample) -> TrainingSample:
    """Return a sample of which something is trained.

    Raises:
        BadRow: Nothing is.
    """
    if sample.trained_tokens:
        return sample
    raise BadRow(
        Problem.REWRITTEN,
        "nothing stands before the assistant's only token, so nothing predicts it",
        fix="begin the conversation with a user's message",
    )


def read_conversation(row: Row, source: ConversationSource, key: str) -> ConversationRow:
    """Return a row's conversation, in whichever of the two forms it is told.

    Raises:
        DataError: A field is missing or holds something else.
        BadRow: There is nothing in it.
    """
    row = with_lists(row, source.messages_field, source.prompt_field, source.completion_field)
    tools = read_tools(row, source, key)
    in_two = source.prompt_field in row.fields or source.completion_field in row.fields
    # a table has every column in every row: what is null there may be told in the other form
    if not in_two or row.fields.get(source.messages_field) is not None:
        require_fields(row, {source.messages_field: f"{key}.messages_field, or prompt_field and completion_field,"})
        messages = read_messages(row, source.messages_field, "user", f"{key}.messages_field")
        whole = with_system(messages, row, source, key)
        left = _moved(untrained(row, source.messages_field, messages), len(whole) - len(messages))
        return ConversationRow(messages=whole, tools=tools, response=0, untrained=left)
    fields = {source.prompt_field: f"{key}.prompt_field", source.completion_field: f"{key}.completion_field"}
    require_fields(row, fields)
    prompt = with_system(read_prompt(row, source, key), row, source, key)
    response = read_response(row, source.completion_field, f"{key}.completion_field")
    left = _moved(untrained(row, source.completion_field, response), len(prompt))
    return ConversationRow(messages=[*prompt, *response], tools=tools, response=len(prompt), untrained=left)


def _moved(places: frozenset[int], by: int) -> frozenset[int]:
    return frozenset(at + by for at in places)


def read_response(row: Row, field: str, key: str) -> list[ChatMessage]:
    """Return the messages of a response: the assistant's first.

    Raises:
        DataError: The field holds neither text nor messages, or the first message is not the assistant's.
        BadRow: There is nothing in it.
    """
    if row.fields[field] in (None, []):
        raise BadRow(Problem.EMPTY, f"{field!r} is {short(row.fields[field])}", fix="correct the row")
    messages = read_messages(row, field, "assistant", key)
    if messages[0]["role"] != "assistant":
        raise DataError(
            f"{row.origin}: the first message in {field!r} is of {messages[0]['role']!r}, expected 'assistant'",
            fix="move what comes before it into the prompt",
        )
    return messages


def require_words(messages: Sequence[ChatMessage], turns: Sequence[int]) -> None:
    """Check that turns are not empty.

    Raises:
        BadRow: One has neither text nor calls.
    """
    for at in turns:
        if says_nothing(messages[at]):
            raise BadRow(Problem.EMPTY, f"message {at} is the assistant's and is empty", fix="correct the row")
