"""One rank of a student: a model that follows what teachers say of each token."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roll_like.algorithms.distillation import (
    DistillationLoss,
    Teacher,
    TeacherHead,
    TeacherTopK,
    distillation_losses,
    distillation_objective,
)
from roll_like.algorithms.losses.base import TokenLosses
from roll_like.config.base import PluginConfig
from roll_like.registry import DISTILLATION_LOSSES
from roll_like.training.language_model import LanguageModelRank, LanguageModelSpec, computed
from roll_like.training.layout import MicroBatch
from roll_like.training.policy import PolicyModule, TokenLogprobHead, tensors_of
from roll_like.training.taught import Answers, TopKAnswers
from roll_like.training.teacher_worker import Projection
from roll_like.values import Max, Metric, Metrics, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationSpec(LanguageModelSpec):
    """What a rank of a student needs to know.

    Attributes:
        loss: The distillation loss and its settings.
    """

    loss: PluginConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtBatch:
    """A micro-batch with what a teacher says of its targets.

    Attributes:
        batch: The rows; its weights divide by the whole global batch.
        teacher: The teacher's name.
        answers: Of each target.
    """

    batch: MicroBatch
    teacher: str
    answers: Answers


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the head of a student compares with."""

    teacher: Teacher
    loss: DistillationLoss
    weights_N: Tensor


class DistillationHead(TokenLogprobHead):
    """The head of a student: with a lesson, losses and figures instead of log-probabilities."""

    def forward(  # type: ignore[override]
        self, hidden_ND: Tensor, targets_N: Tensor, temperature: float, lesson: Lesson | None = None
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each target, shape [N], and figures of each; without a lesson what its base does."""
        if lesson is None:
            return super().forward(hidden_ND, targets_N, temperature)
        losses = distillation_losses(
            hidden_ND,
            self.weight,
            lesson.teacher,
            lesson.loss,
            chunk_tokens=self.chunk_tokens,
            chunk_vocab=self.chunk_vocab,
            bias=self.bias,
            targets_N=targets_N,
            weights_N=lesson.weights_N,
        )
        return losses.losses_N, dict(losses.metrics)


class DistillationWorker(LanguageModelRank):
    """Moves a student's distributions to those of its teachers."""

    def __init__(self, spec: DistillationSpec, rank: int, world_size: int) -> None:
        super().__init__(spec, rank, world_size)
        self._loss: DistillationLoss = DISTILLATION_LOSSES.get(spec.loss.type)(spec.loss)
        self._projections: dict[str, Projection] = {}

    def _module(self, causal_lm: Any) -> nn.Module:
        training = self._model_spec.training
        return PolicyModule(
            causal_lm,
            chunk_tokens=training.logprob_chunk_tokens,
            chunk_vocab=training.logprob_chunk_vocab,
            head=DistillationHead,
        )

    def take_projections(self, projections: Mapping[str, Projection]) -> None:
        """Keep the output projections of teachers that send hidden states, by their names."""
        self._projections = {
            name: Projection(
                weight_VE=each.weight_VE.to(self._device),
                bias_V=None if each.bias_V is None else each.bias_V.to(self._device),
            )
            for name, each in projections.items()
        }

    def train(self, batches: Sequence[TaughtBatch]) -> dict[str, Metric]:
        """Take one optimizer step; return this rank's metrics, which merge over ranks."""
        started = time.perf_counter()
        update = self._update(batches, self._objective)
        return merge([update, {"time/train_compute": Max(time.perf_counter() - started)}, self._memory()])

    @torch.no_grad()
    def measure(self, batches: Sequence[TaughtBatch]) -> dict[str, Metric]:
        """Return the metrics of micro-batches under the current weights, without a step."""
        return merge(self._objective(batch)[1] for batch in batches)

    def _objective(self, taught: TaughtBatch) -> tuple[Tensor, Metrics]:
        self._set_mode()
        batch = taught.batch
        weights_N = self._tensor(batch.weights)
        lesson = Lesson(self._teacher(taught), self._loss, weights_N)
        losses_N, figures = self._engine(*tensors_of(batch, self._device), 1.0, lesson)
        objective, metrics = distillation_objective(TokenLosses(losses_N, figures), weights_N)
        return objective, merge([metrics, computed(batch)])

    def _teacher(self, taught: TaughtBatch) -> Teacher:
        answers = taught.answers
        if isinstance(answers, TopKAnswers):
            return TeacherTopK(
                ids_NK=torch.from_numpy(answers.ids_NK).to(self._device),
                logprobs_NK=self._tensor(answers.logprobs_NK),
                temperature=self._loss.config.temperature,
                entropy_N=self._tensor(answers.entropy_N),
            )
        projection = self._projections[taught.teacher]
        # as precise as the teacher computed them
        hidden_NE = self._tensor(answers.hidden_NE).to(projection.weight_VE.dtype)
        return TeacherHead(hidden_NE=hidden_NE, weight_VE=projection.weight_VE, bias=projection.bias_V)
