"""Datasets of preferences to pairs of whole conversations, as a reward model reads them.

Rows are those of `roll_like.data.pairs`. There a response is what a policy would have to write; here it is the whole
conversation, tokenised in one piece as the chat template writes it, closing tokens included: what the `reward_model`
reward gives to its model. The score is read at the last token, so a conversation is never cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roll_like.builtin.pipelines.reward_model.config import ScoredPairData, ScoredPairSource
from roll_like.data.bad_rows import BadRow, Problem
from roll_like.data.chat import Renderer
from roll_like.data.conversations import ConversationRow, require_words
from roll_like.data.messages import require_fields, short
from roll_like.data.pairs import PairReader, identical
from roll_like.data.rows import Row
from roll_like.data.samples import SampleSet, load_samples
from roll_like.data.turns import Piece, render, require_tools, require_written
from roll_like.errors import DataError
from roll_like.types import Pair, TrainingSample


def load_scored_pairs(data: ScoredPairData, renderer: Renderer, *, section: str = "data") -> SampleSet[Pair]:
    """Read pairs of conversations; arguments and errors are those of `load_samples`."""
    return load_samples(data, renderer, ScoredPairReader, section)


@dataclass(frozen=True, kw_only=True)
class ScoredPairReader(PairReader):
    """How rows become pairs of whole conversations; the last token of each is trained."""

    source: ScoredPairSource

    def pieces(self, renderer: Renderer, found: ConversationRow) -> list[Piece]:
        """Return the text of a conversation, in one piece."""
        return whole_conversation(renderer, found)

    def pair(self, row: Row, chosen: TrainingSample, rejected: TrainingSample) -> Pair:
        """Return both conversations with their margin."""
        if np.array_equal(chosen.token_ids, rejected.token_ids):
            raise identical()
        return self.join([read_at_its_end(chosen), read_at_its_end(rejected)], [_margin(row, self.source, self.key)])

    def values(self, sample: Pair) -> Sequence[float]:
        """Return the margin, which is kept beside the conversations."""
        return (sample.margin or 0.0,)

    def join(self, parts: Sequence[TrainingSample], values: Sequence[float]) -> Pair:
        """Return a pair of its conversations and its margin."""
        return Pair(chosen=parts[0], rejected=parts[1], margin=values[0])


def whole_conversation(renderer: Renderer, found: ConversationRow) -> list[Piece]:
    """Return the text of a conversation, in one piece.

    Raises:
        BadRow: It is empty, does not end with the assistant's message, or the chat template does not write all of it.
    """
    require_words(found.messages, found.assistant_turns())
    last = found.messages[-1]["role"]
    if last != "assistant":
        raise BadRow(
            Problem.NO_ASSISTANT,
            f"the last message is of {last!r}, expected the assistant's, which is what is scored",
            fix="take what comes after the assistant's last message out of the row",
        )
    text = render(renderer, found.messages, found.tools)
    require_tools(renderer, found.messages, found.tools)
    require_written(renderer, found.messages, len(found.messages) - 1, found.tools, text)
    # as the reward writes it: another model's answer that spells the end of its turn ends none
    return [Piece(renderer.render(found.messages, found.tools, generation_prompt=False, foreign_answers=True), False)]


def read_at_its_end(sample: TrainingSample) -> TrainingSample:
    """Return a conversation whose last token is trained."""
    return replace(sample, loss_mask=np.arange(len(sample)) == len(sample) - 1)


def number_in_field(value: Any) -> float | None:
    """Return the number that a field holds, also as a text of a table; None where it holds something else."""
    with suppress(ValueError, TypeError, OverflowError):
        if not isinstance(value, bool | None):
            number = float(value)
            return number if math.isfinite(number) else None
    return None


def _margin(row: Row, source: ScoredPairSource, key: str) -> float:
    if source.margin_field is None:
        return 0.0
    require_fields(row, {source.margin_field: f"{key}.margin_field"})
    value = row.fields[source.margin_field]
    margin = number_in_field(value)
    if margin is not None and margin >= 0:
        return margin
    raise DataError(
        f"{row.origin}: expected a number of at least 0 in {source.margin_field!r}, found {short(value)}",
        fix=f"correct the row, or {key}.margin_field",
    )
