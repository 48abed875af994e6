"""Rows as sequences: each branch of a row with its own queries and gathered keys.

A row that shares a prompt P among responses A and B is two sequences:

    tokens     P P P A A B B B
    queries    P P P A A | B B B
    keys       P P P A A | P P P B B B

The last query of a sequence stands at its last key, and a query sees what is before it. Keys of a sequence are one
sample, in order, so a sliding window needs no positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll_like.training.rows import PADDING, PREFIX_STRIDE
from roll_like.types import IntArray


@dataclass(frozen=True, eq=False, slots=True)
class SampleRows:
    """The samples of rows, each as a row of its own; S samples of at most K tokens.

    Attributes:
        tokens_SK: Where each token of a sample is in the flattened rows [B·L]; −1 for padding, which follows it.
        own_SK: Which of them are the sample's alone, or read from this sample where several share them: each token of
            the rows is in one place.
    """

    tokens_SK: Tensor
    own_SK: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Sequences:
    """The sequences of a micro-batch whose rows are joined to T tokens without padding; K keys in all.

    Attributes:
        kept_T: Where each token is in the flattened rows [B·L].
        place_BL: Where each token of the flattened rows is among the T; any number for padding.
        keys_K: Which of the T tokens each key is; None where keys are the tokens themselves.
        query_ends: Where the queries of each sequence begin, and T, shape [S + 1].
        key_ends: The same of its keys, and K.
        query_ends_S: `query_ends` on the device.
        key_ends_S: `key_ends` on the device.
    """

    kept_T: Tensor
    place_BL: Tensor
    keys_K: Tensor | None
    query_ends: tuple[int, ...]
    key_ends: tuple[int, ...]
    query_ends_S: Tensor
    key_ends_S: Tensor

    @classmethod
    def of(cls, segment_ids_BL: Tensor) -> Sequences:
        """Return the sequences of rows with these segments (`rows.py`)."""
        device = segment_ids_BL.device
        rows: IntArray = segment_ids_BL.cpu().numpy()
        queries, keys, start = [], [], 0
        for row in rows:
            length = int((row != PADDING).sum())
            if not length:
                continue
            for query_length, pieces in _row_sequences(row[:length]):
                queries.append(query_length)
                keys.append(np.concatenate([np.arange(begin, end) for begin, end in pieces]) + start)
            start += length
        joined = np.concatenate(keys)
        kept = np.flatnonzero(rows.reshape(-1) != PADDING)
        query_ends = (0, *np.cumsum(queries).tolist())
        key_ends = (0, *np.cumsum([len(each) for each in keys]).tolist())

        def there(numbers: Any, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.as_tensor(numbers, dtype=dtype).to(device)

        return cls(
            kept_T=there(kept),
            place_BL=there(np.cumsum(rows.reshape(-1) != PADDING) - 1),
            keys_K=there(joined) if len(joined) > start else None,
            query_ends=query_ends,
            key_ends=key_ends,
            query_ends_S=there(query_ends, torch.int32),
            key_ends_S=there(key_ends, torch.int32),
        )

    @property
    def longest(self) -> tuple[int, int]:
        """Most queries and most keys of a sequence."""
        return int(np.diff(self.query_ends).max()), int(np.diff(self.key_ends).max())

    def as_rows(self) -> SampleRows:
        """Return the samples as rows; queries of a sequence are the tokens of its own."""
        keys_K = torch.arange(len(self.kept_T), device=self.kept_T.device) if self.keys_K is None else self.keys_K
        count, longest = len(self.key_ends) - 1, self.longest[1]
        begins, ends = self.key_ends_S[:-1, None].long(), self.key_ends_S[1:, None].long()
        queries = (self.query_ends_S[1:] - self.query_ends_S[:-1])[:, None].long()
        place_SK = begins + torch.arange(longest, device=keys_K.device).expand(count, longest)
        inside_SK = place_SK < ends
        tokens_SK = self.kept_T[keys_K[place_SK.clamp(max=len(keys_K) - 1)]]
        return SampleRows(tokens_SK.where(inside_SK, -1), inside_SK & (place_SK >= ends - queries))

    def gathered(self, tokens_TGD: Tensor) -> Tensor:
        """Return keys or values of all sequences, shape [K, G, D]."""
        return tokens_TGD if self.keys_K is None else tokens_TGD.index_select(0, self.keys_K)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Yield where the queries of each sequence are, and its keys."""
        for index in range(len(self.query_ends) - 1):
            yield (
                slice(self.query_ends[index], self.query_ends[index + 1]),
                slice(self.key_ends[index], self.key_ends[index + 1]),
            )


def _row_sequences(segments: IntArray) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield the sequences of a row without padding: the number of queries, and [begin, end) of each piece of keys.

    A segment right after what it continues goes on in the same sequence.

        segments  0 0 1 1 2  →  4 queries, keys [0, 2) [2, 4);  1 query, keys [0, 2) [4, 5)
    """
    cuts = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
    spans = {int(segments[begin]): (begin, end) for begin, end in pairwise(cuts) if end > begin}
    queries = 0
    pieces: list[tuple[int, int]] = []
    for number, span in spans.items():
        prefix = number // PREFIX_STRIDE
        continued = [spans[each] for each in dict.fromkeys((0, prefix)) if each != number and each in spans]
        if pieces and continued != pieces:
            yield queries, pieces
            queries = 0
        pieces = [*continued, span]
        queries += span[1] - span[0]
    yield queries, pieces
