"""The driver's handle on the ranks of a critic: the value function that an advantage estimator learns with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from roll_like.algorithms.aggregation import token_weights
from roll_like.algorithms.value_loss import explained_variance
from roll_like.cluster import Cluster
from roll_like.config.sections import CriticConfig
from roll_like.training.critic_worker import CriticWorker
from roll_like.training.handle import RanksHandle
from roll_like.training.layout import ValueBatch, micro_batches, per_sample, update_parts, value_batches
from roll_like.types import FloatArray, PolicySample
from roll_like.values import Mean, Metric, merge


class CriticEngine(RanksHandle[CriticWorker]):
    """Splits batches over the critic's ranks and runs them.

    Args:
        cluster: Started ranks.
        config: The `critic` section.
        timer: Times a named part of a step.
    """

    folder = "critic"

    def __init__(
        self,
        cluster: Cluster[CriticWorker],
        config: CriticConfig,
        *,
        timer: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        super().__init__(cluster)
        self._config = config
        self._timer = timer

    def values(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        """Return the value of the state before each token of each sample, shape [T], 0 where not sampled."""
        shards = micro_batches(
            samples,
            ranks=len(self.cluster),
            max_tokens=self._config.max_tokens_per_micro_batch,
            share_prompts=self._config.share_prompts,
        )
        with self._timer("critic"):
            return per_sample(samples, shards, self.cluster.scatter(CriticWorker.values, shards))

    def learn(
        self, samples: Sequence[PolicySample], values: Sequence[FloatArray], returns: Sequence[FloatArray]
    ) -> dict[str, Metric]:
        """Take `updates_per_step` optimizer steps over a step's samples.

        The loss is the mean over the sampled tokens of an update, of all ranks.

        Args:
            samples: A step's samples.
            values: What `values` returned for them before the step, one array [T] a sample.
            returns: Targets of the values, one array [T] a sample.

        Returns:
            `critic/…`; figures of values and returns are over the step's sampled tokens, before the update.
        """
        updates = [self._layout(samples, values, returns, part) for part in self._parts(samples)]
        updates = [update for update in updates if update[0]]
        if not updates:
            return {}
        shards = [[update[rank] for update in updates] for rank in range(len(self.cluster))]
        with self._timer("critic"):
            trained = self.cluster.scatter(CriticWorker.train, shards)
        return merge([_fit(samples, values, returns), *trained])

    def _parts(self, samples: Sequence[PolicySample]) -> list[list[int]]:
        return update_parts(samples, self._config.updates_per_step)

    def _layout(
        self,
        samples: Sequence[PolicySample],
        values: Sequence[FloatArray],
        returns: Sequence[FloatArray],
        part: Sequence[int],
    ) -> list[list[ValueBatch]]:
        chosen = [samples[index] for index in part]
        return value_batches(
            chosen,
            token_weights(chosen, "token_mean", max_response_tokens=1),
            [values[index] for index in part],
            [returns[index] for index in part],
            ranks=len(self.cluster),
            max_tokens=self._config.max_tokens_per_micro_batch,
            share_prompts=self._config.share_prompts,
        )


def _fit(
    samples: Sequence[PolicySample], values: Sequence[FloatArray], returns: Sequence[FloatArray]
) -> dict[str, Metric]:
    """Return how well values foretold returns, over the sampled tokens."""
    sampled = [sample.sampled for sample in samples]
    values_N = np.concatenate([array[mask] for array, mask in zip(values, sampled, strict=True)])
    returns_N = np.concatenate([array[mask] for array, mask in zip(returns, sampled, strict=True)])
    tokens = float(len(values_N))
    explained = explained_variance(values_N, returns_N)
    metrics: dict[str, Metric] = {
        "critic/value_mean": Mean(float(values_N.mean(dtype=np.float64)), tokens),
        "critic/return_mean": Mean(float(returns_N.mean(dtype=np.float64)), tokens),
    }
    if not math.isnan(explained):  # returns that are all equal have no variance to explain
        metrics["critic/explained_variance"] = Mean(explained, tokens)
    return metrics
