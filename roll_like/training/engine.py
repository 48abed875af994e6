"""The driver's handle on a cluster of DeepSpeed ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roll_like.algorithms.aggregation import token_weights
from roll_like.cluster import Cluster
from roll_like.config.rlvr import AlgorithmConfig
from roll_like.training.layout import MicroBatch, micro_batches
from roll_like.training.worker import DeepSpeedWorker
from roll_like.types import FloatArray, PolicySample, ReferencedSample
from roll_like.values import Mean, Metric, Sum, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """What one call of `train_step` did."""

    metrics: Mapping[str, Metric]


class TrainingEngine:
    """Splits batches over ranks and runs them.

    Args:
        cluster: Started ranks.
        algorithm: Loss, aggregation and number of updates.
        max_response_tokens: Constant length of the `token_sum_norm` aggregation.
        max_tokens_per_micro_batch: Budget of one forward pass, padding included.
        share_prompts: Whether a group's prompt is computed once.
        span: Times a named part of a step.
    """

    def __init__(
        self,
        cluster: Cluster[DeepSpeedWorker],
        *,
        algorithm: AlgorithmConfig,
        max_response_tokens: int,
        max_tokens_per_micro_batch: int,
        share_prompts: bool,
        span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        self.cluster = cluster
        self._algorithm = algorithm
        self._max_response_tokens = max_response_tokens
        self._max_tokens = max_tokens_per_micro_batch
        self._share_prompts = share_prompts
        self._span = span

    def train_step(self, samples: Sequence[PolicySample]) -> TrainReport:
        """Take `updates_per_step` optimizer steps over a step's samples.

        Samples whose gradient is zero whatever the policy (advantage 0, no KL or entropy term) count
        in the denominators and are not computed.
        """
        updates = [self._layout(part) for part in split_by_group(samples, self._algorithm.updates_per_step)]
        updates = [update for update in updates if update[0]]
        metrics: dict[str, Metric] = {"train/updates": Sum(float(len(updates)))}
        if updates:
            shards = [[update[rank] for update in updates] for rank in range(len(self.cluster))]
            metrics = merge([metrics, *self.cluster.scatter(DeepSpeedWorker.train, shards)])
            metrics = with_padding_fraction(metrics)
        return TrainReport(metrics=metrics)

    def logprobs(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        """Return each sample's log-probabilities under this engine's weights, shape [T], 0 where not sampled."""
        ones = [np.ones(len(sample.token_ids), np.float32) for sample in samples]
        shards = micro_batches(
            samples,
            ones,
            ranks=len(self.cluster),
            max_tokens=self._max_tokens,
            share_prompts=self._share_prompts,
        )
        with self._span("logprobs"):
            results = self.cluster.scatter(DeepSpeedWorker.logprobs, shards)
        filled = [np.zeros(len(sample.token_ids), np.float32) for sample in samples]
        for batches, values in zip(shards, results, strict=True):
            for batch, logprobs in zip(batches, values, strict=True):
                for sample_id in np.unique(batch.sample_ids):
                    mine = batch.sample_ids == sample_id
                    filled[sample_id][batch.target_ids[mine]] = logprobs[mine]
        return filled

    def save(self, directory: Path) -> None:
        """Write every rank's states under a directory that all ranks see."""
        self.cluster.everywhere(DeepSpeedWorker.save, str(directory))

    def load(self, directory: Path) -> None:
        """Take back what `save` wrote."""
        self.cluster.everywhere(DeepSpeedWorker.load, str(directory))

    def _layout(self, samples: Sequence[PolicySample]) -> list[list[MicroBatch]]:
        weights = token_weights(samples, self._algorithm.aggregation, max_response_tokens=self._max_response_tokens)
        if self._algorithm.kl.use != "loss" and self._algorithm.entropy_coefficient == 0:
            moving = [index for index, sample in enumerate(samples) if np.any(sample.advantages)]
            samples, weights = [samples[index] for index in moving], [weights[index] for index in moving]
        return micro_batches(
            samples,
            weights,
            ranks=len(self.cluster),
            max_tokens=self._max_tokens,
            share_prompts=self._share_prompts,
        )


def split_by_group(samples: Sequence[PolicySample], parts: int) -> list[list[PolicySample]]:
    """Cut a step's samples into `parts` optimizer batches without tearing groups apart, in order."""
    groups: dict[str, list[PolicySample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    cuts = np.array_split(np.arange(len(groups)), parts)
    ordered = list(groups.values())
    return [[sample for index in cut for sample in ordered[index]] for cut in cuts if len(cut)]


def with_reference(samples: Sequence[PolicySample], reference: TrainingEngine | None) -> Sequence[PolicySample]:
    """Return the samples with the reference model's log-probabilities, or as they are without one."""
    if reference is None:
        return samples
    return [
        ReferencedSample(
            group_id=sample.group_id,
            token_ids=sample.token_ids,
            prompt_length=sample.prompt_length,
            sampled=sample.sampled,
            behaviour_logprobs=sample.behaviour_logprobs,
            advantages=sample.advantages,
            reward=sample.reward,
            policy_version=sample.policy_version,
            reference_logprobs=logprobs,
        )
        for sample, logprobs in zip(samples, reference.logprobs(samples), strict=True)
    ]


def with_padding_fraction(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Add `train/padding_fraction`, the share of computed tokens that were padding."""
    computed = metrics["train/computed_tokens"].value
    fraction = metrics["train/padding_tokens"].value / computed if computed else 0.0
    return {**metrics, "train/padding_fraction": Mean(fraction, computed)}
