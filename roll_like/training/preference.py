"""The driver's handle on the ranks of a model that learns from preferences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import numpy as np

from roll_like.cluster import Cluster
from roll_like.config.sections import TrainingConfig
from roll_like.training.engine import with_padding_fraction
from roll_like.training.handle import RanksHandle
from roll_like.training.layout import micro_batches, pair_batches, per_sample
from roll_like.training.preference_worker import AnswersRank, PreferenceShare, PreferenceWorker
from roll_like.types import FloatArray, TrainingSample
from roll_like.values import Metric, Sum, merge

AnswersT = TypeVar("AnswersT", bound=AnswersRank)


class AnswersEngine(RanksHandle[AnswersT], ABC):
    """Splits batches of answers over ranks and runs them.

    Args:
        cluster: Started ranks.
        training: The `training` section.
        timer: Times a named part of a step.
    """

    def __init__(
        self,
        cluster: Cluster[AnswersT],
        training: TrainingConfig,
        *,
        timer: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        super().__init__(cluster)
        self._training = training
        self._timer = timer

    @abstractmethod
    def train_step(self, samples: Sequence[TrainingSample], reference_sums: FloatArray | None) -> Mapping[str, Metric]:
        """Take one optimizer step.

        Args:
            samples: What it is over; what they are is the engine's own.
            reference_sums: Log-probability of each under the reference model; None where the loss has none.
        """

    @abstractmethod
    def measure(self, samples: Sequence[TrainingSample], reference_sums: FloatArray | None) -> dict[str, Metric]:
        """Return the figures of samples under the current weights, without a step."""

    def sums(self, samples: Sequence[TrainingSample], *, adapters: bool = True) -> FloatArray:
        """Return the log-probability of each answer under this engine's weights, shape [len(samples)].

        Args:
            samples: The answers.
            adapters: Whether with the model's adapters, where it has some, or as if it had none.
        """
        shards = micro_batches(
            samples,
            ranks=len(self.cluster),
            max_tokens=self._training.max_tokens_per_micro_batch,
            share_prompts=True,
            packing=True,
        )
        with self._timer("logprobs"):
            worker = AnswersRank.logprobs if adapters else AnswersRank.base_logprobs
            results = self.cluster.scatter(worker, shards)
        logprobs = per_sample(samples, shards, results)
        return np.array([float(each.sum(dtype=np.float64)) for each in logprobs], np.float32)


class PreferenceEngine(AnswersEngine[PreferenceWorker]):
    """Learns from pairs.

    A batch of pairs is a list of samples, chosen and rejected answers in turn, with the answers of a pair in one group.
    """

    def train_step(self, samples: Sequence[TrainingSample], reference_sums: FloatArray | None) -> Mapping[str, Metric]:
        """Take one optimizer step over pairs.

        Args:
            samples: Pairs, as described above.
            reference_sums: Log-probability of each answer under the reference model; None where the loss has none.
        """
        parts = self.cluster.scatter(PreferenceWorker.train, self._shares(samples, reference_sums))
        return with_padding_fraction(merge([{"train/updates": Sum(1.0)}, *parts]))

    def measure(self, samples: Sequence[TrainingSample], reference_sums: FloatArray | None) -> dict[str, Metric]:
        """Return the figures of pairs under the current weights, without a step."""
        return merge(self.cluster.scatter(PreferenceWorker.measure, self._shares(samples, reference_sums)))

    def _shares(self, samples: Sequence[TrainingSample], reference_sums: FloatArray | None) -> list[PreferenceShare]:
        shards = pair_batches(
            samples,
            reference_sums,
            ranks=len(self.cluster),
            max_tokens=self._training.max_tokens_per_micro_batch,
        )
        chosen = sum(int(sample.sampled.sum()) for sample in samples[::2])
        return [PreferenceShare(batches=batches, pairs=len(samples) // 2, chosen_tokens=chosen) for batches in shards]
