"""One rank of a model that learns which answers are preferred, and one that learns it from pairs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from roll_like.algorithms.preference import PairInputs, PreferenceLoss, preference_objective, response_sums
from roll_like.config.base import PluginConfig
from roll_like.registry import PREFERENCE_LOSSES
from roll_like.training.language_model import LanguageModelRank, LanguageModelSpec, computed
from roll_like.training.layout import MicroBatch, PairBatch
from roll_like.types import FloatArray
from roll_like.values import Max, Metric, Metrics, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSpec(LanguageModelSpec):
    """What a rank needs to know that learns from preferences.

    Attributes:
        loss: The preference loss and its settings.
    """

    loss: PluginConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceShare:
    """What one rank trains on in one optimizer step.

    Attributes:
        batches: Its micro-batches; both answers of a pair are in one.
        pairs: Pairs of the step, of all ranks.
        chosen_tokens: Tokens of their chosen answers.
    """

    batches: Sequence[PairBatch]
    pairs: int
    chosen_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSums:
    """What a micro-batch's answers come to, in the order of their sample ids, shape [R] each.

    Attributes:
        logprobs_R: Log-probability of each answer, summed over its tokens, with gradient.
        tokens_R: How many they are.
        counted_R: False for answers that only fill up this rank's work.
        reference_R: What the reference model says; None where there is none.
    """

    logprobs_R: Tensor
    tokens_R: Tensor
    counted_R: Tensor
    reference_R: Tensor | None


PartT = TypeVar("PartT")


class AnswersRank(LanguageModelRank):
    """Moves a policy by the log-probabilities of whole answers."""

    def __init__(self, spec: PreferenceSpec, rank: int, world_size: int) -> None:
        super().__init__(spec, rank, world_size)
        self._loss: PreferenceLoss = PREFERENCE_LOSSES.get(spec.loss.type)(spec.loss)

    def _step(self, parts: Sequence[PartT], objective: Callable[[PartT], tuple[Tensor, Metrics]]) -> dict[str, Metric]:
        """Take one optimizer step; return this rank's metrics, which merge over ranks."""
        started = time.perf_counter()
        update = self._update(parts, objective)
        return merge([update, {"time/train_compute": Max(time.perf_counter() - started)}, self._memory()])

    def _sums(self, batch: MicroBatch, reference_sums: FloatArray) -> AnswerSums:
        """Run a forward pass over whole answers.

        Args:
            batch: Rows of whole answers.
            reference_sums: Of the reference model, in the order of sample ids, shape [R]; empty where there is none.
        """
        logprobs_N, _ = self._forward(batch)
        answers, answer_N = np.unique(batch.sample_ids, return_inverse=True)
        logprobs_R, tokens_R = response_sums(logprobs_N, torch.from_numpy(answer_N).to(self._device), len(answers))
        counted_R = torch.zeros(len(answers), dtype=torch.bool)
        counted_R[torch.from_numpy(answer_N[batch.weights != 0])] = True
        return AnswerSums(
            logprobs_R=logprobs_R,
            tokens_R=tokens_R,
            counted_R=counted_R.to(self._device),
            reference_R=self._tensor(reference_sums) if reference_sums.size else None,
        )


class PreferenceWorker(AnswersRank):
    """Moves a policy by how much likelier it finds chosen answers than rejected ones."""

    def train(self, share: PreferenceShare) -> dict[str, Metric]:
        """Take one optimizer step; return this rank's metrics, which merge over ranks."""
        return self._step(share.batches, partial(self._objective, share))

    @torch.no_grad()
    def measure(self, share: PreferenceShare) -> dict[str, Metric]:
        """Return the metrics of pairs under the current weights, without a step."""
        return merge(self._objective(share, batch)[1] for batch in share.batches)

    def _objective(self, share: PreferenceShare, batch: PairBatch) -> tuple[Tensor, Metrics]:
        found = self._sums(batch, batch.reference_sums)
        # answers are sorted: the chosen one of pair i is sample 2·i, the rejected one 2·i + 1
        weights_P = found.counted_R[::2].to(torch.float32)
        inputs = PairInputs(
            chosen_logprobs_P=found.logprobs_R[::2],
            rejected_logprobs_P=found.logprobs_R[1::2],
            chosen_tokens_P=found.tokens_R[::2],
            rejected_tokens_P=found.tokens_R[1::2],
            weights_P=weights_P / share.pairs,
            token_weights_P=weights_P / share.chosen_tokens,
            reference_chosen_logprobs_P=None if found.reference_R is None else found.reference_R[::2],
            reference_rejected_logprobs_P=None if found.reference_R is None else found.reference_R[1::2],
        )
        objective, metrics = preference_objective(inputs, self._loss)
        return objective, merge([metrics, computed(batch)])
