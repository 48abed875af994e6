"""One rank of a model that learns from single answers, each liked or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from roll_like.algorithms.preference import (
    MismatchedResponses,
    PreferenceLoss,
    UnpairedInputs,
    UnpairedLoss,
    preference_objective,
)
from roll_like.errors import EngineError
from roll_like.training.language_model import computed
from roll_like.training.layout import MicroBatch
from roll_like.training.preference_worker import AnswersRank
from roll_like.types import BoolArray, FloatArray, IntArray
from roll_like.values import Metric, Metrics, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchedSums:
    """Log-probabilities of a step's answers after prompts that they do not answer, shape [M] each.

    Attributes:
        logprobs: Of the policy before the step, summed over each answer's tokens.
        reference: Of the reference model.
        tokens: How many tokens each answer has.
    """

    logprobs: FloatArray
    reference: FloatArray
    tokens: IntArray

    def on(self, device: torch.device) -> MismatchedResponses:
        """Return them as a loss takes them."""
        return MismatchedResponses(
            logprobs_M=torch.from_numpy(self.logprobs).to(device),
            reference_logprobs_M=torch.from_numpy(self.reference).to(device),
            tokens_M=torch.from_numpy(self.tokens).to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpairedBatch:
    """What is learned from single answers in one forward pass.

    Attributes:
        rows: The micro-batch; the answers of one prompt may share a row.
        desirable: Whether each answer is liked, in the order of sample ids, shape [R].
        reference_sums: Of the reference model, log-probability of each, shape [R]; empty where there is none.
    """

    rows: MicroBatch
    desirable: BoolArray
    reference_sums: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpairedShare:
    """What one rank trains on in one optimizer step.

    Attributes:
        batches: Its micro-batches.
        samples: Answers of the step, of all ranks.
        mismatched: What the whole step's baseline follows from; None where the loss has none.
    """

    batches: Sequence[UnpairedBatch]
    samples: int
    mismatched: MismatchedSums | None


class UnpairedWorker(AnswersRank):
    """Moves a policy by whether its answers are liked."""

    def train(self, share: UnpairedShare) -> dict[str, Metric]:
        """Take one optimizer step; return this rank's metrics, which merge over ranks."""
        loss = of_step(self._loss, share.mismatched, self._device)
        return self._step(share.batches, partial(self._objective, loss, share.samples))

    def _objective(self, loss: UnpairedLoss, samples: int, batch: UnpairedBatch) -> tuple[Tensor, Metrics]:
        found = self._sums(batch.rows, batch.reference_sums)
        inputs = UnpairedInputs(
            logprobs_S=found.logprobs_R,
            tokens_S=found.tokens_R,
            desirable_S=torch.from_numpy(batch.desirable).to(self._device),
            weights_S=found.counted_R.to(torch.float32) / samples,
            reference_logprobs_S=found.reference_R,
        )
        objective, metrics = preference_objective(inputs, loss)
        return objective, merge([metrics, computed(batch.rows)])


def of_step(loss: PreferenceLoss, mismatched: MismatchedSums | None, device: torch.device) -> UnpairedLoss:
    """Return a loss with the statistics of a whole optimizer step, where it has some.

    Raises:
        EngineError: It is a loss on pairs.
    """
    if not isinstance(loss, UnpairedLoss):
        raise EngineError(f"{type(loss).__name__} takes pairs, found single answers", fix="choose a loss on samples")
    return loss if mismatched is None else loss.of_batch(mismatched.on(device))


def unpaired_batch(rows: MicroBatch, desirable: BoolArray, reference_sums: FloatArray | None) -> UnpairedBatch:
    """Return a micro-batch with what is known of its answers.

    Args:
        rows: The micro-batch.
        desirable: Whether each answer of the whole step is liked.
        reference_sums: Log-probability of each under the reference model; None without.
    """
    answers = np.unique(rows.sample_ids)
    nothing = np.zeros(0, np.float32)
    return UnpairedBatch(
        rows=rows,
        desirable=desirable[answers],
        reference_sums=nothing if reference_sums is None else reference_sums[answers],
    )
