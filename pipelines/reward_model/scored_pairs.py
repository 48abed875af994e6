"""Datasets of preferences to pairs of whole conversations, as a reward model reads them.

Rows are those of `roll_like.data.pairs`. There a response is what a policy would have to write; here it is the whole
conversation, tokenised in one piece as the chat template writes it, closing tokens included: what the `reward_model`
reward gives to its model. The score is read at the last token, so a conversation is never cut.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roll_like.builtin.pipelines.reward_model.config import ScoredPairData, ScoredPairSource
from roll_like.data.bad_rows import BadRow, Problem
from roll_like.data.chat import ChatMessage, Renderer
from roll_like.data.conversations import require_words
from roll_like.data.messages import require_fields, short
from roll_like.data.pairs import Pair, PairReader, identical, read_pairs
from roll_like.data.rows import Row
from roll_like.data.samples import ConversationSample, SampleSet
from roll_like.data.turns import Piece, render
from roll_like.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPair(Pair):
    """Two conversations that begin alike, the first of which is to be scored higher; their last tokens are trained.

    Attributes:
        margin: By how much the preferred one should score higher.
    """

    margin: float

    def content(self) -> bytes:
        """Return everything that training sees of it, for fingerprints."""
        return Pair.content(self) + struct.pack("<d", self.margin)


def load_scored_pairs(data: ScoredPairData, renderer: Renderer, *, section: str = "data") -> SampleSet[ScoredPair]:
    """Read pairs of conversations; arguments and errors are those of `load_conversations`."""
    return read_pairs(data.sources, data, renderer, section, ScoredPairReader)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPairReader(PairReader[ScoredPairSource, ScoredPair]):
    """How rows become pairs of whole conversations."""

    def pieces(
        self, renderer: Renderer, prompt: list[ChatMessage], response: list[ChatMessage], tools: Sequence[Any]
    ) -> list[Piece]:
        """Return the text of a conversation, in one piece."""
        return _whole(renderer, prompt, response, tools)

    def pair(self, row: Row, chosen: ConversationSample, rejected: ConversationSample) -> ScoredPair:
        """Return both conversations with their margin."""
        if np.array_equal(chosen.token_ids, rejected.token_ids):
            raise identical()
        return ScoredPair(
            chosen=_read_at_its_end(chosen),
            rejected=_read_at_its_end(rejected),
            margin=_margin(row, self.source, self.key),
            origin=row.origin,
        )

    def value(self, sample: ScoredPair) -> float:
        """Return the margin, which is kept beside the conversations."""
        return sample.margin

    def join(self, parts: Sequence[ConversationSample], value: float) -> ScoredPair:
        """Return a pair of its conversations and its margin."""
        chosen, rejected = parts
        return ScoredPair(chosen=chosen, rejected=rejected, margin=value, origin=chosen.origin)


def _whole(
    renderer: Renderer, prompt: Sequence[ChatMessage], response: Sequence[ChatMessage], tools: Sequence[Any]
) -> list[Piece]:
    messages = [*prompt, *response]
    require_words(messages, [len(prompt) + at for at, each in enumerate(response) if each["role"] == "assistant"])
    if messages[-1]["role"] != "assistant":
        raise BadRow(
            Problem.NO_ASSISTANT,
            f"the last message is of {messages[-1]['role']!r}, expected the assistant's, which is what is scored",
            fix="take what comes after the assistant's last message out of the row",
        )
    return [Piece(render(renderer, messages, tools), False)]


def _read_at_its_end(sample: ConversationSample) -> ConversationSample:
    return replace(sample, loss_mask=np.arange(len(sample)) == len(sample) - 1)


def _margin(row: Row, source: ScoredPairSource, key: str) -> float:
    if source.margin_field is None:
        return 0.0
    require_fields(row, {source.margin_field: f"{key}.margin_field"})
    value = row.fields[source.margin_field]
    if isinstance(value, str):  # of a table
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return float(value)
    raise DataError(
        f"{row.origin}: expected a number of at least 0 in {source.margin_field!r}, found {short(value)}",
        fix=f"correct the row, or {key}.margin_field",
    )
