"""What was left of the vocabulary when tokens were sampled: `KeptTokens` of pieces, of parts, and out of many."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from roll_like.types import IntArray, KeptTokens


def kept_tokens(found: Sequence[Sequence[int] | npt.NDArray[np.integer]], sampled: Sequence[int]) -> KeptTokens:
    """Return what an engine told of each sampled token.

    Args:
        found: The tokens that were kept, for each of T; none where all were.

    Raises:
        ValueError: There are not T, or a token was sampled that was not kept.

    >>> kept_tokens([[1, 3], []], [3, 9])
    KeptTokens(ids=array([1, 3], dtype=int32), counts=array([2, 0], dtype=int32))
    """
    if len(found) != len(sampled):
        raise ValueError(f"it told what it kept for {len(found)} tokens, and sampled {len(sampled)}")
    counts_T = np.fromiter(map(len, found), np.int32, len(found))
    ids_M = np.fromiter(chain.from_iterable(found), np.int32, int(counts_T.sum()))
    there_M = ids_M == np.repeat(np.asarray(sampled, np.int32), counts_T)
    times_T = np.bincount(np.repeat(np.arange(len(counts_T)), counts_T)[there_M], minlength=len(counts_T))
    wrong = np.flatnonzero((times_T != 1) & (counts_T > 0))
    if len(wrong):
        place = int(wrong[0])
        raise ValueError(
            f"token {place} of the response is {sampled[place]}, which it kept {times_T[place]} times among "
            f"{counts_T[place]} tokens; once was expected"
        )
    return KeptTokens(ids=ids_M, counts=counts_T)


def kept_within(kept: KeptTokens | None, start: int, end: int) -> KeptTokens | None:
    """Return what the tokens `[start, end)` were drawn from."""
    if kept is None:
        return None
    first, last = (int(kept.counts[:place].sum()) for place in (start, end))
    return KeptTokens(ids=kept.ids[first:last], counts=kept.counts[start:end])


def joined_kept(pieces: Sequence[tuple[KeptTokens | None, int]]) -> KeptTokens | None:
    """Return what pieces one after another were drawn from; None where no piece says it.

    Args:
        pieces: Of each, and its number of tokens.
    """
    if all(kept is None for kept, _ in pieces):
        return None
    empty = np.zeros(0, np.int32)
    return KeptTokens(
        ids=np.concatenate([empty if kept is None else kept.ids for kept, _ in pieces]),
        counts=np.concatenate([np.zeros(length, np.int32) if kept is None else kept.counts for kept, length in pieces]),
    )


class KeptOfSamples:
    """What the tokens of a batch's samples were drawn from, laid end to end.

    Args:
        samples: Of each sample, and its number of tokens; at least one says it.
    """

    def __init__(self, samples: Sequence[tuple[KeptTokens | None, int]]) -> None:
        joined = joined_kept(samples)
        assert joined is not None, "a sample says it"
        self._joined = joined
        self._firsts = np.cumsum(joined.counts, dtype=np.int64) - joined.counts
        self._starts = np.cumsum([0, *(length for _, length in samples)])

    def at(self, sample_ids: IntArray, target_ids: IntArray) -> KeptTokens:
        """Return what some tokens were drawn from, N of them in any order."""
        places_N = self._starts[sample_ids] + target_ids
        counts_N = self._joined.counts[places_N]
        before_N = np.cumsum(counts_N, dtype=np.int64) - counts_N
        ids_M = np.repeat(self._firsts[places_N] - before_N, counts_N) + np.arange(int(counts_N.sum()))
        return KeptTokens(ids=self._joined.ids[ids_M], counts=counts_N)
