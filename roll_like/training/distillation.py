"""The driver's handles on the ranks of a student, and of a teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roll_like.cluster import Cluster
from roll_like.config.sections import TrainingConfig
from roll_like.training.distillation_worker import DistillationWorker, TaughtBatch
from roll_like.training.engine import with_padding_fraction
from roll_like.training.handle import RanksHandle
from roll_like.training.layout import micro_batches
from roll_like.training.taught import Answers, Targets, assembled, chosen
from roll_like.training.teacher_worker import Projection, TeacherWorker
from roll_like.types import TrainingSample
from roll_like.values import Metric, Sum, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """Samples with what one teacher says of their targets.

    Attributes:
        teacher: The teacher's name.
        samples: What both read.
        answers: Of each target, in the samples' order.
    """

    teacher: str
    samples: Sequence[TrainingSample]
    answers: Answers


class TeacherEngine(RanksHandle[TeacherWorker]):
    """Splits samples over the ranks of a teacher.

    Args:
        cluster: Started ranks.
        max_tokens_per_micro_batch: Budget of one forward pass, padding included.
    """

    def __init__(self, cluster: Cluster[TeacherWorker], *, max_tokens_per_micro_batch: int) -> None:
        super().__init__(cluster)
        self._max_tokens = max_tokens_per_micro_batch

    def answers(self, samples: Sequence[TrainingSample]) -> Answers:
        """Return the answers for all targets, in the samples' order."""
        shards = micro_batches(
            samples, ranks=len(self.cluster), max_tokens=self._max_tokens, share_prompts=False, packing=True
        )
        targets = Targets(samples)
        parts = [
            (targets.of(batch), answers)
            for batches, said in zip(shards, self.cluster.scatter(TeacherWorker.answers, shards), strict=True)
            for batch, answers in zip(batches, said, strict=True)
        ]
        return assembled(targets.count, parts)

    def projection(self) -> Projection:
        """Return the output projection, for students that compute the whole distribution."""
        return self.cluster.on(0, TeacherWorker.projection)


class DistillationEngine(RanksHandle[DistillationWorker]):
    """Splits batches of taught samples over the ranks of a student.

    Args:
        cluster: Started ranks.
        training: The `training` section.
        packing: Whether several samples share a row; the numbers are the same, with less padding.
    """

    def __init__(self, cluster: Cluster[DistillationWorker], training: TrainingConfig, *, packing: bool) -> None:
        super().__init__(cluster)
        self._training = training
        self._packing = packing

    def take_projections(self, projections: Mapping[str, Projection]) -> None:
        """Give every rank the output projections of teachers that send hidden states."""
        self.cluster.everywhere(DistillationWorker.take_projections, projections)

    def train_step(self, lessons: Sequence[Taught]) -> Mapping[str, Metric]:
        """Take one optimizer step: the mean loss of all targets of the step.

        Returns:
            `train/…` and `distill/…`; the loss is that before the step.
        """
        parts = self.cluster.scatter(DistillationWorker.train, self._batches(lessons))
        return with_padding_fraction(merge([{"train/updates": Sum(1.0)}, *parts]))

    def measure(self, lessons: Sequence[Taught]) -> dict[str, Metric]:
        """Return the figures of samples under the current weights, without a step."""
        return merge(self.cluster.scatter(DistillationWorker.measure, self._batches(lessons)))

    def _batches(self, lessons: Sequence[Taught]) -> list[list[TaughtBatch]]:
        """Return each rank's micro-batches; a micro-batch has one teacher."""
        count = sum(int(sample.sampled.sum()) for lesson in lessons for sample in lesson.samples)
        budget = self._training.max_tokens_per_micro_batch
        shards: list[list[TaughtBatch]] = [[] for _ in range(len(self.cluster))]
        for lesson in lessons:
            targets = Targets(lesson.samples)
            weights = [np.where(sample.sampled, np.float32(1 / count), np.float32(0)) for sample in lesson.samples]
            spread = micro_batches(
                lesson.samples,
                weights,
                ranks=len(shards),
                max_tokens=budget,
                share_prompts=False,
                packing=self._packing,
            )
            for shard, batches in zip(shards, spread, strict=True):
                shard += [
                    TaughtBatch(batch=batch, teacher=lesson.teacher, answers=chosen(lesson.answers, targets.of(batch)))
                    for batch in batches
                ]
        return shards
