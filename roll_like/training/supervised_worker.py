"""One rank of a model that learns from given answers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from roll_like.training.language_model import LanguageModelRank, computed
from roll_like.training.layout import MicroBatch
from roll_like.values import Max, Mean, Metric, Metrics, Sum, merge


class SupervisedWorker(LanguageModelRank):
    """Makes given tokens likelier: cross-entropy, weighted token by token."""

    def train(self, batches: Sequence[MicroBatch]) -> dict[str, Metric]:
        """Take one optimizer step over micro-batches whose weights divide by the whole global batch.

        Returns:
            This rank's metrics: `train/loss`, whose sum over ranks is that of the batch, and others.
        """
        started = time.perf_counter()
        update = self._update(batches, self._objective)
        return merge([update, {"time/train_compute": Max(time.perf_counter() - started)}, self._memory()])

    def _objective(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        logprobs_N, entropy_N = self._forward(batch)
        weights_N = self._tensor(batch.weights)
        loss = -(weights_N * logprobs_N).sum()
        counted = weights_N != 0
        tokens = int(counted.sum())
        entropy = float(entropy_N.detach()[counted].mean()) if tokens else 0.0
        metrics: Metrics = {
            "train/loss": Sum(float(loss.detach())),
            "train/entropy": Mean(entropy, tokens),
        }
        return loss, merge([metrics, computed(batch)])
