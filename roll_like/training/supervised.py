"""The driver's handle on the ranks of a model that learns from given answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from roll_like.cluster import Cluster
from roll_like.config.sections import TrainingConfig
from roll_like.training.engine import with_padding_fraction
from roll_like.training.handle import RanksHandle
from roll_like.training.layout import MicroBatch, micro_batches, per_sample
from roll_like.training.supervised_worker import SupervisedWorker
from roll_like.types import FloatArray, TrainingSample
from roll_like.values import Last, Mean, Metric, Sum, merge


class SupervisedEngine(RanksHandle[SupervisedWorker]):
    """Splits batches of given answers over ranks and runs them.

    Args:
        cluster: Started ranks.
        training: The `training` section.
        packing: Whether several samples share a row; the numbers are the same, with less padding.
        timer: Times a named part of a step.
    """

    def __init__(
        self,
        cluster: Cluster[SupervisedWorker],
        training: TrainingConfig,
        *,
        packing: bool,
        timer: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        super().__init__(cluster)
        self._training = training
        self._packing = packing
        self._timer = timer

    def train_step(self, samples: Sequence[TrainingSample]) -> Mapping[str, Metric]:
        """Take one optimizer step: the mean negative log-likelihood of all trained tokens of the batch, in nats.

        Returns:
            `train/…`; the loss is that before the step.
        """
        tokens = sum(int(sample.sampled.sum()) for sample in samples)
        weights = [np.where(sample.sampled, np.float32(1 / tokens), np.float32(0)) for sample in samples]
        shards = self._micro_batches(samples, weights)
        metrics = merge([{"train/updates": Sum(1.0)}, *self.cluster.scatter(SupervisedWorker.train, shards)])
        perplexity = math.exp(min(metrics["train/loss"].value, 700.0))  # beyond, there is no such float
        return {**with_padding_fraction(metrics), "train/perplexity": Last(perplexity)}

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Return each sample's log-probabilities under this engine's weights, shape [T], 0 where not trained."""
        shards = self._micro_batches(samples)
        with self._timer("logprobs"):
            results = self.cluster.scatter(SupervisedWorker.logprobs, shards)
        return per_sample(samples, shards, results)

    def _micro_batches(
        self, samples: Sequence[TrainingSample], weights: Sequence[FloatArray] | None = None
    ) -> list[list[MicroBatch]]:
        return micro_batches(
            samples,
            weights,
            ranks=len(self.cluster),
            max_tokens=self._training.max_tokens_per_micro_batch,
            share_prompts=False,
            packing=self._packing,
        )


def likelihood_metrics(
    samples: Sequence[TrainingSample], logprobs: Sequence[FloatArray], names: Sequence[str]
) -> dict[str, Metric]:
    """Return `eval/loss` and `eval/perplexity` over all trained tokens, and the loss of each source.

    Args:
        samples: What was evaluated.
        logprobs: Of each sample, shape [T], 0 where not trained.
        names: The source of each sample.
    """
    losses = [-float(each.sum(dtype=np.float64)) for each in logprobs]
    counts = [int(sample.sampled.sum()) for sample in samples]
    total = sum(losses) / max(sum(counts), 1)
    metrics: dict[str, Metric] = {
        "eval/loss": Mean(total, sum(counts)),
        "eval/perplexity": Last(math.exp(min(total, 700.0))),
        "eval/tokens": Sum(float(sum(counts))),
    }
    sources = sorted(set(names))
    for source in sources if len(sources) > 1 else ():
        chosen = [index for index, name in enumerate(names) if name == source]
        tokens = sum(counts[index] for index in chosen)
        metrics[f"eval/source/{source}/loss"] = Mean(sum(losses[index] for index in chosen) / tokens, tokens)
    return metrics
