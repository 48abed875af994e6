"""The driver's handle on the ranks of a policy, or of a frozen reference model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from roll_like.algorithms.aggregation import token_weights
from roll_like.algorithms.kl import KLController
from roll_like.algorithms.losses import PolicyLoss
from roll_like.cluster import Cluster
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.registry import LOSSES
from roll_like.training.handle import RanksHandle
from roll_like.training.layout import PolicyBatch, micro_batches, per_sample, policy_batches, update_parts
from roll_like.training.worker import DeepSpeedWorker, TrainingShare
from roll_like.types import FloatArray, PolicySample, ReferencedSample
from roll_like.values import Last, Mean, Metric, Sum, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """What one call of `train_step` did."""

    metrics: Mapping[str, Metric]


class TrainingEngine(RanksHandle[DeepSpeedWorker]):
    """Splits batches over ranks and runs them.

    Args:
        cluster: Started ranks.
        algorithm: Loss, aggregation and number of updates.
        max_response_tokens: Constant length of the `token_sum_norm` aggregation.
        max_tokens_per_micro_batch: Budget of one forward pass, padding included.
        share_prompts: Whether a group's prompt is computed once.
        kl_controller: Sets the weight of a KL penalty in the loss, and follows what a step measured; default: one of
            its own, as configured.
        timer: Times a named part of a step.
    """

    def __init__(
        self,
        cluster: Cluster[DeepSpeedWorker],
        *,
        algorithm: AlgorithmConfig,
        max_response_tokens: int,
        max_tokens_per_micro_batch: int,
        share_prompts: bool,
        kl_controller: KLController | None = None,
        timer: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        super().__init__(cluster)
        self._algorithm = algorithm
        self._loss: PolicyLoss = LOSSES.get(algorithm.loss.type)(algorithm.loss)
        self._max_response_tokens = max_response_tokens
        self._max_tokens = max_tokens_per_micro_batch
        self._share_prompts = share_prompts
        self._kl_controller = kl_controller or KLController(algorithm.kl)
        self._timer = timer

    def train_step(self, samples: Sequence[PolicySample]) -> TrainReport:
        """Take `updates_per_step` optimizer steps over a step's samples; none where there are no samples.

        Samples that the loss turns down are left out. Samples whose gradient is zero whatever the policy
        (advantage 0, no KL or entropy term) count in the denominators and are not computed.
        """
        selected = [sample for sample in samples if self._loss.selects(sample)]
        parts = update_parts(selected, self._algorithm.updates_per_step)
        updates = [self._layout([selected[index] for index in part]) for part in parts]
        updates = [update for update in updates if update[0]]
        metrics: dict[str, Metric] = {"train/updates": Sum(float(len(updates)))}
        if updates:
            metrics = merge([metrics, *self._train(updates, len(selected))])
            metrics = with_padding_fraction(metrics)
        return TrainReport(metrics=metrics)

    def logprobs(self, samples: Sequence[PolicySample], *, adapters: bool = True) -> list[FloatArray]:
        """Return each sample's log-probabilities under this engine's weights, shape [T], 0 where not sampled.

        Args:
            samples: What was sampled.
            adapters: Whether with the model's adapters, where it has some, or as if it had none.
        """
        shards = micro_batches(
            samples, ranks=len(self.cluster), max_tokens=self._max_tokens, share_prompts=self._share_prompts
        )
        with self._timer("logprobs"):
            worker = DeepSpeedWorker.logprobs if adapters else DeepSpeedWorker.base_logprobs
            results = self.cluster.scatter(worker, shards)
        return per_sample(samples, shards, results)

    def _train(self, updates: Sequence[Sequence[Sequence[PolicyBatch]]], samples: int) -> list[dict[str, Metric]]:
        """Run updates on the ranks; the KL penalty's weight of the next step follows from this one's divergence."""
        coefficient = self._kl_controller.coefficient
        shares = [
            TrainingShare(updates=[update[rank] for update in updates], kl_coefficient=coefficient)
            for rank in range(len(self.cluster))
        ]
        parts = self.cluster.scatter(DeepSpeedWorker.train, shares)
        if self._algorithm.kl.use != "loss":
            return parts
        measured = merge({"train/kl": part["train/kl"]} for part in parts if "train/kl" in part)
        if measured:
            self._kl_controller.update(float(measured["train/kl"].value), samples)
        return [*parts, {"train/kl_coefficient": Last(coefficient)}]

    def _layout(self, samples: Sequence[PolicySample]) -> list[list[PolicyBatch]]:
        weights = token_weights(samples, self._algorithm.aggregation, max_response_tokens=self._max_response_tokens)
        regularised = self._algorithm.kl.use == "loss" or self._algorithm.entropy_coefficient != 0
        if not regularised and not self._loss.zero_advantage_moves:
            moving = [index for index, sample in enumerate(samples) if np.any(sample.advantages)]
            samples, weights = [samples[index] for index in moving], [weights[index] for index in moving]
        return policy_batches(
            samples,
            weights,
            ranks=len(self.cluster),
            max_tokens=self._max_tokens,
            share_prompts=self._share_prompts,
        )


class Reference(Protocol):
    """What KL terms compare the policy with."""

    def logprobs(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        """Return each sample's log-probabilities, shape [T], 0 where not sampled."""


class WithoutAdapters:
    """The model that training started from: the policy with its adapters switched off.

    Args:
        policy: Its ranks.
    """

    def __init__(self, policy: TrainingEngine) -> None:
        self._policy = policy

    def logprobs(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        """Return each sample's log-probabilities, shape [T], 0 where not sampled."""
        return self._policy.logprobs(samples, adapters=False)


def with_reference(samples: Sequence[PolicySample], reference: Reference | None) -> Sequence[PolicySample]:
    """Return the samples with the reference model's log-probabilities, or as they are without one."""
    return samples if reference is None else with_logprobs(samples, reference.logprobs(samples))


def with_logprobs(samples: Sequence[PolicySample], reference_logprobs: Sequence[FloatArray]) -> list[ReferencedSample]:
    """Return the samples with log-probabilities to compare with, one array [T] each."""
    return [
        ReferencedSample(
            group_id=sample.group_id,
            token_ids=sample.token_ids,
            prompt_length=sample.prompt_length,
            sampled=sample.sampled,
            turns=sample.turns,
            behaviour_logprobs=sample.behaviour_logprobs,
            advantages=sample.advantages,
            reward=sample.reward,
            policy_version=sample.policy_version,
            reference_logprobs=logprobs,
        )
        for sample, logprobs in zip(samples, reference_logprobs, strict=True)
    ]


def with_padding_fraction(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Add `train/padding_fraction`, the share of computed tokens that were padding."""
    computed = metrics["train/computed_tokens"].value
    fraction = metrics["train/padding_tokens"].value / computed if computed else 0.0
    return {**metrics, "train/padding_fraction": Mean(fraction, computed)}
