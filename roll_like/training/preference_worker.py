"""One rank of a model that learns which of two answers is preferred."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from roll_like.algorithms.preference import PairInputs, PreferenceLoss, preference_objective, response_sums
from roll_like.config.base import PluginConfig
from roll_like.registry import PREFERENCE_LOSSES
from roll_like.training.language_model import LanguageModelRank, LanguageModelSpec, computed
from roll_like.training.layout import PairBatch
from roll_like.types import FloatArray
from roll_like.values import Max, Metric, Metrics, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSpec(LanguageModelSpec):
    """What a rank needs to know that learns from pairs.

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


class PreferenceWorker(LanguageModelRank):
    """Moves a policy by how much likelier it finds chosen answers than rejected ones."""

    def __init__(self, spec: PreferenceSpec, rank: int, world_size: int) -> None:
        super().__init__(spec, rank, world_size)
        self._loss: PreferenceLoss = PREFERENCE_LOSSES.get(spec.loss.type)(spec.loss)

    def train(self, share: PreferenceShare) -> dict[str, Metric]:
        """Take one optimizer step; return this rank's metrics, which merge over ranks."""
        started = time.perf_counter()
        update = self._update(share.batches, partial(self._objective, share))
        return merge([update, {"time/train_compute": Max(time.perf_counter() - started)}, self._memory()])

    @torch.no_grad()
    def measure(self, share: PreferenceShare) -> dict[str, Metric]:
        """Return the metrics of pairs under the current weights, without a step."""
        return merge(self._objective(share, batch)[1] for batch in share.batches)

    def _objective(self, share: PreferenceShare, batch: PairBatch) -> tuple[Tensor, Metrics]:
        logprobs_N, _ = self._forward(batch)
        answers, answer_N = np.unique(batch.sample_ids, return_inverse=True)
        sums_R, tokens_R = response_sums(logprobs_N, torch.from_numpy(answer_N).to(self._device), len(answers))
        # answers are sorted: the chosen one of pair i is sample 2·i, the rejected one 2·i + 1
        counted = torch.zeros(len(answers), dtype=torch.bool)
        counted[torch.from_numpy(answer_N[batch.weights != 0])] = True
        weights_P = counted[::2].to(self._device, torch.float32)
        reference_R = self._reference(batch.reference_sums)
        inputs = PairInputs(
            chosen_logprobs_P=sums_R[::2],
            rejected_logprobs_P=sums_R[1::2],
            chosen_tokens_P=tokens_R[::2],
            rejected_tokens_P=tokens_R[1::2],
            weights_P=weights_P / share.pairs,
            token_weights_P=weights_P / share.chosen_tokens,
            reference_chosen_logprobs_P=None if reference_R is None else reference_R[::2],
            reference_rejected_logprobs_P=None if reference_R is None else reference_R[1::2],
        )
        objective, metrics = preference_objective(inputs, self._loss)
        return objective, merge([metrics, computed(batch)])

    def _reference(self, sums: FloatArray) -> Tensor | None:
        return self._tensor(sums) if sums.size else None
