"""What policy losses have in common: their inputs, tokens, and their output, a loss for each token.

Everything is flat: [N] holds the trained tokens of one micro-batch, whatever packing or padding the
engine used for its forward pass; [S] runs over its sequences. A loss of your own: `losses/__init__.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from roll_like.algorithms.base import Algorithm
from roll_like.algorithms.kl import MAX_LOG_RATIO
from roll_like.algorithms.lazy import torch
from roll_like.errors import EngineError
from roll_like.types import PolicySample

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The trained tokens of one micro-batch, shape [N] each.

    A micro-batch holds whole sequences, so a loss may reduce over `sequence_N` and `turn_N`. A turn is what the policy
    sampled in one go, between two prompts: a single answer is one turn, an episode has several.

    Attributes:
        logprobs_N: Of the policy being trained, with gradient.
        old_logprobs_N: Of the policy that ratios compare with, without gradient.
        behaviour_logprobs_N: Reported by the inference engine when it sampled the tokens.
        advantages_N: From the advantage estimator.
        weights_N: Weight of each token in the sum, from `token_weights`. 0 marks filler, which gives each rank the same
            number of micro-batches and changes neither gradient nor metrics.
        sequence_N: Index of each token's sequence, 0 ≤ index < `sequences`, int64.
        sequences: How many sequences the micro-batch holds.
        turn_N: Index of each token's turn, 0 ≤ index < `turns`, int64. A turn lies within one sequence. Masked tokens
            do not split a turn, and adjacent turns keep different indices.
        turns: How many turns the micro-batch holds.
        entropy_N: Of the policy's distribution at each token, in nats.
        draws_N: A number in [0, 1) computed from the sample's content and the token's position, for losses that pick
            tokens at random: it does not depend on the order of samples or on micro-batches.
        reference_logprobs_N: Of the reference model; None where there is none.
        replayed_N: Where an earlier policy sampled the token, bool: how far that is from this one says nothing of the
            engine. None: nowhere.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    behaviour_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    sequence_N: Tensor
    sequences: int
    turn_N: Tensor
    turns: int
    entropy_N: Tensor
    draws_N: Tensor
    reference_logprobs_N: Tensor | None = None
    replayed_N: Tensor | None = None

    def sequence_sum(self, values_N: Tensor) -> Tensor:
        """Return the sum of values over each sequence, at each of its tokens, shape [N]."""
        return _sums(values_N, self.sequence_N, self.sequences)

    def sequence_mean(self, values_N: Tensor) -> Tensor:
        """Return the mean of values over each sequence, at each of its tokens, shape [N]."""
        return self.sequence_sum(values_N) / self.sequence_sum(torch.ones_like(values_N))

    def sequence_max(self, values_N: Tensor) -> Tensor:
        """Return the largest value of each sequence, at each of its tokens, shape [N]."""
        return _largest(values_N, self.sequence_N, self.sequences)

    def turn_sum(self, values_N: Tensor) -> Tensor:
        """Return the sum of values over each turn, at each of its tokens, shape [N]."""
        return _sums(values_N, self.turn_N, self.turns)

    def turn_mean(self, values_N: Tensor) -> Tensor:
        """Return the mean of values over each turn, at each of its tokens, shape [N]."""
        return self.turn_sum(values_N) / self.turn_sum(torch.ones_like(values_N))

    def turn_max(self, values_N: Tensor) -> Tensor:
        """Return the largest value of each turn, at each of its tokens, shape [N]."""
        return _largest(values_N, self.turn_N, self.turns)


def _sums(values_N: Tensor, part_N: Tensor, parts: int) -> Tensor:
    return values_N.new_zeros(parts).index_add(0, part_N, values_N)[part_N]


def _largest(values_N: Tensor, part_N: Tensor, parts: int) -> Tensor:
    lowest = values_N.new_full((parts,), -torch.inf)
    return lowest.scatter_reduce(0, part_N, values_N, "amax")[part_N]


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """What a policy loss returns.

    Attributes:
        losses_N: Loss of each token, with gradient.
        metrics: Metrics of each token, shape [N], numbers or booleans; logged as means over tokens.
    """

    losses_N: Tensor
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTokens:
    """All tokens of one optimizer step with a weight, over all micro-batches and ranks, without gradient, shape [N].

    Attributes:
        logprobs_N: Of the policy being trained.
        old_logprobs_N: Of the policy that ratios compare with.
        advantages_N: From the advantage estimator.
        draws_N: As in `LossInputs`.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    draws_N: Tensor


class PolicyLoss(Algorithm, ABC):
    """Base of policy losses: from tokens to a loss for each token."""

    #: Whether it needs statistics of the whole optimizer batch (`of_batch`); costs one more forward pass.
    needs_batch: ClassVar[bool] = False
    #: Whether tokens of advantage 0 change the gradient or the statistics; if not, their forward pass is skipped.
    zero_advantage_moves: ClassVar[bool] = False
    #: Whether it is another loss where every ratio of new to old policy is 1; then refused.
    needs_ratio: ClassVar[bool] = False
    #: Whether it is the same whatever the advantages of the samples that it selects.
    ignores_advantages: ClassVar[bool] = False
    #: Its settings that act through the ratio of new to old policy: without effect where that ratio is always 1.
    ratio_settings: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def uses_old_policy(cls, config: Any) -> bool:  # noqa: ARG003  (for losses whose settings decide)
        """Return whether the gradient depends on the old policy, with an instance of `Config` as settings."""
        return True

    def selects(self, sample: PolicySample) -> bool:  # noqa: ARG002  (for losses that choose)
        """Return whether to train on a sample; the others do not count in the denominators."""
        return True

    def of_batch(self, batch: BatchTokens) -> PolicyLoss:
        """Return the loss for one optimizer step, with the statistics of its whole batch.

        Called if `needs_batch`, on every rank with the same tokens in any order.
        """
        raise EngineError(f"{type(self).__name__} has needs_batch, but no of_batch for {len(batch.logprobs_N)} tokens")

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> TokenLosses:
        """Return the loss of each token, before token weights and off-policy correction."""


def bounded_log_ratio(logprobs_N: Tensor, old_logprobs_N: Tensor) -> Tensor:
    """Return log π − log π_old with gradient, shape [N], bounded by ±20 so that its exponential stays finite."""
    return (logprobs_N - old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_ratio(logprobs_N: Tensor, old_logprobs_N: Tensor) -> Tensor:
    """Return π/π_old with gradient, shape [N]; the log-ratio is bounded by ±20."""
    return bounded_log_ratio(logprobs_N, old_logprobs_N).exp()
