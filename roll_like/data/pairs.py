"""Datasets of preferences to pairs of samples that share a prompt.

Three kinds of rows:

    {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"}
    {"prompt": [message, …], "chosen": [message, …], "rejected": [message, …]}
    {"chosen": [message, …], "rejected": [message, …]}

Responses given as messages may begin with the prompt. Without a prompt, what both conversations begin with alike is the
prompt, up to the assistant's message in which they part. Only turns of the responses are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from roll_like.config.data import PairData, PairSource
from roll_like.data.bad_rows import BadRow, Problem, RowCounter
from roll_like.data.chat import ChatMessage, Renderer
from roll_like.data.conversations import ConversationRow, read_response, whole
from roll_like.data.loss_flags import require_trained
from roll_like.data.messages import read_messages, read_prompt, read_tools, require_fields, with_lists, with_system
from roll_like.data.reader import Reader
from roll_like.data.rows import Row
from roll_like.data.samples import SampleSet, load_samples
from roll_like.data.turns import Piece
from roll_like.errors import DataError
from roll_like.types import Pair, TrainingSample


def load_pairs(data: PairData, renderer: Renderer, *, section: str = "data") -> SampleSet[Pair]:
    """Read pairs; arguments and errors are those of `load_samples`."""
    return load_samples(data, renderer, PairReader, section)


@dataclass(frozen=True, kw_only=True)
class PairReader(Reader[Pair]):
    """How rows become pairs that a policy compares: only turns of the responses are trained."""

    source: PairSource

    width: ClassVar[int] = 2

    def draft(self, row: Row, renderer: Renderer) -> list[list[Piece]]:
        """Return the texts of both responses."""
        prompt, *responses = pair_messages(row, self.source, self.key)
        tools = read_tools(row, self.source, self.key)
        both = (ConversationRow(messages=[*prompt, *each], tools=tools, response=len(prompt)) for each in responses)
        return [self.pieces(renderer, each) for each in both]

    def pieces(self, renderer: Renderer, found: ConversationRow) -> list[Piece]:
        """Return the text of a response as a policy would have to write it, after its prompt."""
        (pieces,) = whole(found.sequences(renderer, found.assistant_turns()))
        return pieces

    def finish(self, row: Row, parts: list[TrainingSample], counter: RowCounter) -> list[Pair]:
        """Return the pair."""
        chosen, rejected = (self.fit(part, counter) for part in parts)
        return [self.pair(row, chosen, rejected)]

    def pair(self, row: Row, chosen: TrainingSample, rejected: TrainingSample) -> Pair:  # noqa: ARG002
        """Return a pair of a row's two responses, which are within the limits."""
        # after the cut at the limit, which may take away what they differ in
        same_mask = np.array_equal(chosen.loss_mask, rejected.loss_mask)
        if same_mask and np.array_equal(chosen.token_ids, rejected.token_ids):
            raise identical()
        length = chosen.first_trained
        shared = np.array_equal(chosen.token_ids[:length], rejected.token_ids[:length])
        if length != rejected.first_trained or not shared:
            raise BadRow(
                Problem.NO_SHARED_PROMPT,
                "the chat template writes one prompt before chosen and another before rejected",
                fix="change the row, or model.chat_template",
            )
        return Pair(chosen=chosen, rejected=rejected)

    def join(self, parts: Sequence[TrainingSample], values: Sequence[float]) -> Pair:  # noqa: ARG002
        """Return a pair of its two sequences."""
        return Pair(chosen=parts[0], rejected=parts[1])


def identical() -> BadRow:
    """Return what is wrong with a pair of two equal responses."""
    return BadRow(Problem.IDENTICAL, "chosen and rejected are the same tokens", fix="correct the row")


def pair_messages(
    row: Row, source: PairSource, key: str
) -> tuple[list[ChatMessage], list[ChatMessage], list[ChatMessage]]:
    """Return the prompt and the two responses of a row.

    Raises:
        DataError: They are not there, or not in a form that is read.
        BadRow: A response is empty, both are alike, or they have no common prompt.
    """
    keys = {source.chosen_field: f"{key}.chosen_field", source.rejected_field: f"{key}.rejected_field"}
    require_fields(row, keys)
    row = with_lists(row, source.prompt_field, *keys)
    if row.fields.get(source.prompt_field) is None:
        prompt, chosen, rejected = _parted(row, source, key)
    else:
        prompt = read_prompt(row, source, key)
        chosen, rejected = (_after(prompt, row, field, keys[field], source) for field in keys)
    require_trained(row, source.chosen_field, chosen)
    require_trained(row, source.rejected_field, rejected)
    return with_system(prompt, row, source, key), chosen, rejected


def _after(prompt: list[ChatMessage], row: Row, field: str, key: str, source: PairSource) -> list[ChatMessage]:
    """Return a response, without the prompt where it begins with that."""
    value = row.fields[field]
    if isinstance(value, list) and value:
        messages = read_messages(row, field, "assistant", key)
        if messages[0]["role"] != "assistant":
            # the prompt may be told without the system message that the conversation begins with
            system = messages[:1] if messages[0]["role"] == "system" and prompt[0]["role"] != "system" else []
            begun = [*system, *prompt]
            if messages[: len(begun)] != begun or len(messages) == len(begun):
                raise DataError(
                    f"{row.origin}: {field!r} does not begin with the messages of {source.prompt_field!r} and go on",
                    fix=f"correct the row, or take {source.prompt_field!r} out of it",
                )
            prompt[:] = begun
            return messages[len(begun) :]
    return read_response(row, field, key)


def _parted(row: Row, source: PairSource, key: str) -> tuple[list[ChatMessage], list[ChatMessage], list[ChatMessage]]:
    """Return what two conversations begin with alike, and how each goes on from there."""
    both = []
    for field, name in ((source.chosen_field, "chosen_field"), (source.rejected_field, "rejected_field")):
        if not isinstance(row.fields[field], list):
            raise DataError(
                f"{row.origin}: the row has no {source.prompt_field!r}, and {field!r} is not a list of messages, "
                "whose beginning would be the prompt",
                fix=f"add the prompt to the row, or set {key}.prompt_field to the field that has it, or, for texts "
                f"with `Human:` and `Assistant:`, {key}.transcripts: true",
            )
        if not row.fields[field]:
            raise BadRow(Problem.EMPTY, f"{field!r} has no messages", fix="correct the row")
        both.append(read_messages(row, field, "assistant", f"{key}.{name}"))
    chosen, rejected = both
    if chosen == rejected:
        raise identical()
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    prompt, responses = chosen[:shared], (chosen[shared:], rejected[shared:])
    if not prompt or not all(response and response[0]["role"] == "assistant" for response in responses):
        raise BadRow(
            Problem.NO_SHARED_PROMPT,
            f"chosen and rejected part at message {shared}, expected both to go on with the assistant's there",
            fix="correct the row",
        )
    return prompt, *responses
