"""Random numbers that belong to a token, not to the order in which tokens are computed.

A loss that picks tokens at random would otherwise give another update for every order of samples,
token budget or number of ranks. A draw is a hash: of the sample's tokens, and of the token's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from roll_like.types import FloatArray, IntArray

Seeds: TypeAlias = npt.NDArray[np.uint64]

# the constants of splitmix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195)
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def sample_seeds(token_ids: Sequence[IntArray]) -> Seeds:
    """Return a hash of each sample's tokens, shape [samples]."""
    return np.array(
        [xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids, np.int32).data) for ids in token_ids], np.uint64
    )


def uniform_draws(seeds_N: Seeds, places_N: IntArray) -> FloatArray:
    """Return a number in [0, 1) for each token, shape [N]: splitmix64 of its sample's seed at its place.

    Args:
        seeds_N: The seed of each token's sample.
        places_N: Index of each token within its sample.
    """
    state = seeds_N + (places_N.astype(np.uint64) + np.uint64(1)) * _STEP
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    state ^= state >> np.uint64(31)
    # 24 bits are what float32 holds exactly: none rounds up to 1
    draws: FloatArray = (state >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    return draws
