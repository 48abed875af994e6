"""Pairs and samples of a few numbers, for tests of preference losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roll_like.algorithms.preference.base import (
    MismatchedResponses,
    PairedLoss,
    PairInputs,
    PreferenceLoss,
    UnpairedInputs,
    UnpairedLoss,
)
from roll_like.registry import PREFERENCE_LOSSES


def loss_of(name: str, **settings: Any) -> Any:
    """The loss called `name`; what takes a batch is not bound."""
    plugin = PREFERENCE_LOSSES.get(name)
    made: PreferenceLoss = plugin(plugin.Config(**settings))
    assert isinstance(made, PairedLoss | UnpairedLoss)
    return made


def kto(baseline: float = 0.0, **settings: Any) -> UnpairedLoss:
    """`kto` whose step had one mismatched response of one token, with that log-ratio."""
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64)
    batch = MismatchedResponses(logprobs_M=zero + baseline, reference_logprobs_M=zero, tokens_M=one)
    bound: UnpairedLoss = loss_of("kto", **settings).of_batch(batch)
    return bound


def make_pairs(
    chosen: Sequence[float],
    rejected: Sequence[float],
    *,
    reference: tuple[Sequence[float], Sequence[float]] | None = None,
    tokens: tuple[Sequence[int], Sequence[int]] | None = None,
    weights: Sequence[float] | None = None,
    token_weights: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float64,
    requires_grad: bool = True,
) -> PairInputs:
    """Pairs with weight 1; one token a response, and a reference of log-probability 0, where none are given."""
    count = len(chosen)
    reference = reference or ([0.0] * count, [0.0] * count)
    tokens = tokens or ([1] * count, [1] * count)
    ones = [1.0] * count
    return PairInputs(
        chosen_logprobs_P=torch.tensor(chosen, dtype=dtype, requires_grad=requires_grad),
        rejected_logprobs_P=torch.tensor(rejected, dtype=dtype, requires_grad=requires_grad),
        chosen_tokens_P=torch.tensor(tokens[0]),
        rejected_tokens_P=torch.tensor(tokens[1]),
        weights_P=torch.tensor(weights or ones, dtype=torch.float64),
        token_weights_P=torch.tensor(token_weights or ones, dtype=torch.float64),
        reference_chosen_logprobs_P=torch.tensor(reference[0], dtype=dtype),
        reference_rejected_logprobs_P=torch.tensor(reference[1], dtype=dtype),
    )


def make_samples(
    logprobs: Sequence[float],
    desirable: Sequence[bool],
    *,
    reference: Sequence[float] | None = None,
    tokens: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> UnpairedInputs:
    """Samples with weight 1; one token a response, and a reference of log-probability 0, where none are given."""
    count = len(logprobs)
    return UnpairedInputs(
        logprobs_S=torch.tensor(logprobs, dtype=dtype, requires_grad=True),
        tokens_S=torch.tensor(tokens or [1] * count),
        desirable_S=torch.tensor(desirable),
        weights_S=torch.tensor(weights or [1.0] * count, dtype=torch.float64),
        reference_logprobs_S=torch.tensor(reference or [0.0] * count, dtype=dtype),
    )
