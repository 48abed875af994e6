"""Supervised fine-tuning: cross-entropy of given tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from roll_like.training.interface import Engine, RankModel, Update, computed
from roll_like.training.language_model import LanguageModelObjective
from roll_like.training.layout import MicroBatch, micro_batches
from roll_like.types import FloatArray, TrainingSample
from roll_like.values import Last, Mean, Metric, Metrics, Sum, merge


@dataclass(frozen=True, kw_only=True)
class SupervisedObjective(LanguageModelObjective[Sequence[TrainingSample], MicroBatch]):
    """The mean negative log-likelihood of all trained tokens of a step, in nats."""

    drops: ClassVar[bool] = True

    @property
    def row_sharing(self) -> str | None:
        return "data.packing" if self.packing else None

    def updates(self, step: Sequence[TrainingSample], engine: Engine) -> Iterator[Update[MicroBatch]]:
        tokens = sum(int(sample.loss_mask.sum()) for sample in step)
        weights = [np.where(sample.loss_mask, np.float32(1 / tokens), np.float32(0)) for sample in step]
        yield Update(shards=micro_batches(step, weights, **engine.layout))

    def loss(self, model: RankModel, batch: MicroBatch, shared: None) -> tuple[Tensor, Metrics]:  # noqa: ARG002
        logprobs_N, entropy_N = self.logprobs(model, batch)
        weights_N = model.tensor(batch.weights)
        loss = -(weights_N * logprobs_N).sum()
        counted = weights_N != 0
        tokens = int(counted.sum())
        entropy = float(entropy_N.detach()[counted].mean()) if tokens else 0.0
        metrics: Metrics = {"train/loss": Sum(float(loss.detach())), "train/entropy": Mean(entropy, tokens)}
        return loss, merge([metrics, computed(batch, model)])

    def report(self, step: Sequence[TrainingSample], metrics: Mapping[str, Metric], updates: int) -> dict[str, Metric]:
        """Return a step's metrics with the perplexity."""
        completed = super().report(step, metrics, updates)
        if not updates:
            return completed
        perplexity = math.exp(min(metrics["train/loss"].value, 700.0))  # beyond, there is no such float
        return {**completed, "train/perplexity": Last(perplexity)}


def likelihood_metrics(
    samples: Sequence[TrainingSample], logprobs: Sequence[FloatArray], names: Sequence[str]
) -> dict[str, Metric]:
    """Return `eval/loss` and `eval/perplexity` over all trained tokens, and the loss of each source.

    Args:
        logprobs: Of each sample, shape [T], 0 where not trained.
        names: The source of each sample.
    """
    losses = [-float(each.sum(dtype=np.float64)) for each in logprobs]
    counts = [int(sample.loss_mask.sum()) for sample in samples]
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
