"""One rank of the critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roll_like.algorithms.value_loss import value_loss
from roll_like.config.sections import CriticConfig
from roll_like.errors import EngineError
from roll_like.training.layout import MicroBatch, ValueBatch
from roll_like.training.policy import tensors_of
from roll_like.training.rank import DeepSpeedRank, RankSpec
from roll_like.training.value import ValueModule
from roll_like.types import FloatArray
from roll_like.values import Mean, Metric, Metrics, Sum, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSpec(RankSpec):
    """What a rank of the critic needs to know.

    Attributes:
        critic: The `critic` section.
    """

    critic: CriticConfig


class CriticWorker(DeepSpeedRank):
    """Computes values and learns from returns."""

    section = "critic"
    metric_prefix = "critic"
    memory_name = "critic"

    def __init__(self, spec: CriticSpec, rank: int, world_size: int) -> None:
        super().__init__(spec, spec.critic, rank, world_size)
        self.spec = spec

    def _module(self, causal_lm: Any) -> nn.Module:
        return ValueModule(causal_lm)

    @torch.no_grad()
    def values(self, batches: Sequence[MicroBatch]) -> list[FloatArray]:
        """Return the value of the state before every target of every micro-batch, shape [N] each.

        Raises:
            EngineError: A value is not finite.
        """
        values = []
        for batch in batches:
            values_N = self._forward(batch)
            if not values_N.isfinite().all():
                raise EngineError(
                    "the critic's values hold infinities or NaN; finite numbers were expected",
                    fix="lower critic.optimizer.lr, or check critic.path",
                )
            values.append(values_N.cpu().numpy())
        return values

    def train(self, updates: Sequence[Sequence[ValueBatch]]) -> dict[str, Metric]:
        """Take one optimizer step for each element of `updates`; return this rank's metrics.

        Every rank gets the same number of micro-batches in each update.
        """
        parts: list[Metrics] = [self._memory()]
        for batches in updates:
            update = self._update(batches, self._objective)
            # a loss is a sum over the micro-batches and ranks of one update, and a mean over updates
            parts.append({**update, "critic/loss": Sum(update["critic/loss"].value / len(updates))})
        return merge(parts)

    def _objective(self, batch: ValueBatch) -> tuple[Tensor, Metrics]:
        weights_N = self._tensor(batch.weights)
        losses_N, clipped_N = value_loss(
            self._forward(batch),
            self._tensor(batch.old_values),
            self._tensor(batch.returns),
            self.spec.critic.value_clip,
        )
        loss = (losses_N * weights_N).sum()
        counted = weights_N != 0
        count = int(counted.sum())
        clipped = float(clipped_N[counted].float().mean()) if count else 0.0
        return loss, {"critic/loss": Sum(float(loss.detach())), "critic/clip_fraction": Mean(clipped, count)}

    def _forward(self, batch: MicroBatch) -> Tensor:
        tokens_BL, positions_BL, branches_BL, sources_N, _ = tensors_of(batch, self._device)
        values_N: Tensor = self._engine(tokens_BL, positions_BL, branches_BL, sources_N)
        return values_N
