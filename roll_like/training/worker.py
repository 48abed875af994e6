"""One rank of the policy, or of a frozen reference model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from roll_like.algorithms.correction import Correction, correction_from
from roll_like.algorithms.losses import KLTerm, LossInputs, PolicyLoss, policy_objective
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.registry import LOSSES
from roll_like.training.language_model import LanguageModelRank, LanguageModelSpec, computed
from roll_like.training.layout import PolicyBatch
from roll_like.training.whole_batch import tokens_of_all_ranks
from roll_like.values import Max, Metric, Metrics, Sum, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec(LanguageModelSpec):
    """What a rank of the policy, or of a reference model, needs to know.

    Attributes:
        algorithm: Loss, KL and correction. `temperature` is that of sampling.
    """

    algorithm: AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingShare:
    """What one rank trains on in one step.

    Attributes:
        updates: Micro-batches of each optimizer step.
        kl_coefficient: Weight of a KL penalty in the loss, in this step.
    """

    updates: Sequence[Sequence[PolicyBatch]]
    kl_coefficient: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Objective:
    """What is minimised in one update."""

    loss: PolicyLoss
    kl: KLTerm | None
    entropy_coefficient: float
    correction: Correction


class DeepSpeedWorker(LanguageModelRank):
    """Moves a policy by the advantages of what it sampled."""

    def __init__(self, spec: TrainerSpec, rank: int, world_size: int) -> None:
        super().__init__(spec, rank, world_size)
        self.spec = spec

    def train(self, share: TrainingShare) -> dict[str, Metric]:
        """Take one optimizer step for each of the share's updates; return this rank's metrics.

        Every rank gets the same number of micro-batches in each update.
        """
        started = time.perf_counter()
        old = self._old_logprobs(share.updates)
        old_seconds = time.perf_counter() - started
        algorithm, updates = self.spec.algorithm, len(share.updates)
        loss: PolicyLoss = LOSSES.get(algorithm.loss.type)(algorithm.loss)
        kl = KLTerm(algorithm.kl.estimator, share.kl_coefficient, algorithm.kl.straight_through)
        correction = correction_from(algorithm.correction)
        parts: list[Metrics] = []
        for batches, old_of_batches in zip(share.updates, old, strict=True):
            objective = _Objective(
                loss=self._bound(loss, batches, old_of_batches) if loss.needs_batch else loss,
                kl=kl if algorithm.kl.use == "loss" else None,
                entropy_coefficient=algorithm.entropy_coefficient,
                correction=correction,
            )
            update = self._update([*zip(batches, old_of_batches, strict=True)], partial(self._loss_of, objective))
            # a loss is a sum over the micro-batches and ranks of one update, and a mean over updates
            parts.append({name: _shared(name, metric, updates) for name, metric in update.items()})
        parts.append({"time/old_logprobs": Max(old_seconds), "time/train_compute": Max(time.perf_counter() - started)})
        parts.append(self._memory())
        return merge(parts)

    def _old_logprobs(self, updates: Sequence[Sequence[PolicyBatch]]) -> list[list[Tensor | None]]:
        how = self.spec.algorithm.old_logprobs
        if how == "recompute" or (how == "auto" and len(updates) > 1):
            return [[*self._logprobs_of(batches)] for batches in updates]
        if how == "behaviour":
            return [[self._tensor(batch.behaviour_logprobs) for batch in batches] for batches in updates]
        return [[None] * len(batches) for batches in updates]

    def _bound(self, loss: PolicyLoss, batches: Sequence[PolicyBatch], old: Sequence[Tensor | None]) -> PolicyLoss:
        """Return the loss with the statistics of an update's whole batch, under the weights before the update."""
        current = self._logprobs_of(batches)
        earlier = [now if before is None else before for now, before in zip(current, old, strict=True)]
        return loss.of_batch(tokens_of_all_ranks(batches, current, earlier))

    def _loss_of(self, what: _Objective, part: tuple[PolicyBatch, Tensor | None]) -> tuple[Tensor, Metrics]:
        batch, old = part
        logprobs, entropy = self._forward(batch)
        sequences, sequence_N = np.unique(batch.sample_ids, return_inverse=True)
        turns, turn_N = np.unique(_turn_keys(batch), return_inverse=True)
        inputs = LossInputs(
            logprobs_N=logprobs,
            old_logprobs_N=logprobs.detach() if old is None else old,
            behaviour_logprobs_N=self._tensor(batch.behaviour_logprobs),
            reference_logprobs_N=self._tensor(batch.reference_logprobs) if batch.reference_logprobs.size else None,
            entropy_N=entropy,
            advantages_N=self._tensor(batch.advantages),
            weights_N=self._tensor(batch.weights),
            sequence_N=torch.from_numpy(sequence_N).to(self._device),
            sequences=len(sequences),
            turn_N=torch.from_numpy(turn_N).to(self._device),
            turns=len(turns),
            draws_N=self._tensor(batch.draws),
        )
        loss, metrics = policy_objective(inputs, what.loss, what.kl, what.entropy_coefficient, what.correction)
        return loss, merge([metrics, computed(batch)])


def _turn_keys(batch: PolicyBatch) -> npt.NDArray[np.int64]:
    """Return a number of each target that those of the same sample and turn share, shape [N]."""
    stride = int(batch.turns.max(initial=0)) + 1
    return batch.sample_ids.astype(np.int64) * stride + batch.turns


def _shared(name: str, metric: Metric, updates: int) -> Metric:
    losses = {"train/loss", "train/policy_loss", "train/kl_loss"}
    return Sum(metric.value / updates) if name in losses else metric
