"""Distillation: what a teacher says of each token, and a student that follows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from roll_like.algorithms.distillation.base import DistillationLoss
from roll_like.algorithms.distillation.objective import distillation_losses, distillation_objective
from roll_like.algorithms.distillation.teacher import Teacher, TeacherHead, TeacherTopK, teacher_topk
from roll_like.algorithms.distillation.texts import TeacherTexts
from roll_like.algorithms.kept import KeptIds
from roll_like.algorithms.logprobs import EveryToken
from roll_like.algorithms.losses.base import TokenLosses
from roll_like.builtin.pipelines.distill.answers import (
    Answers,
    HiddenAnswers,
    OwnTopKAnswers,
    Targets,
    TextAnswers,
    assembled,
    chosen,
)
from roll_like.builtin.pipelines.distill.other_tokens import Translation
from roll_like.config.base import PluginConfig
from roll_like.config.teachers import teacher_key
from roll_like.errors import ConfigError
from roll_like.registry import DISTILLATION_LOSSES
from roll_like.training.engine import TrainingEngine
from roll_like.training.interface import BatchT, Engine, RankModel, StepT, Update, computed
from roll_like.training.language_model import LanguageModelObjective
from roll_like.training.layout import MicroBatch, micro_batches
from roll_like.training.policy import TokenLogprobHead, kept_ids, tensors_of
from roll_like.training.rank import TrainingRank
from roll_like.types import IntArray, LogitTransform, TopKAnswers, TrainingSample
from roll_like.values import Metrics, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A teacher's output projection: from hidden states [N, E] to logits [N, V].

    Attributes:
        weight_VE: In the teacher's precision.
        bias_V: None where it has none.
        logits: What the teacher does to the products.
    """

    weight_VE: Tensor
    bias_V: Tensor | None
    logits: LogitTransform

    def to(self, device: torch.device | str) -> Projection:
        """Return it on another device."""
        bias_V = None if self.bias_V is None else self.bias_V.to(device)
        return replace(self, weight_VE=self.weight_VE.to(device), bias_V=bias_V)


@dataclass(frozen=True, slots=True)
class TopKRequest:
    """What a teacher's head is asked for.

    Attributes:
        k: How many of the most likely tokens.
        temperature: Of their log-probabilities.
        own: Whether the targets' own log-probabilities too, at the temperature of the forward pass.
        kept: What those are normalised over; None for the whole vocabulary.
    """

    k: int
    temperature: float
    own: bool
    kept: KeptIds | None = None

    def select(self, rows_N: Tensor) -> TopKRequest:
        """Return it for the rows where `rows_N` is true."""
        return self if self.kept is None else replace(self, kept=self.kept.select(rows_N))


class TopKHead(TokenLogprobHead):
    """The head of a teacher: log-probabilities of targets, or its most likely tokens."""

    def forward(
        self,
        hidden_ND: Tensor,
        targets_N: Tensor,
        temperature: float,
        more: KeptIds | EveryToken | TopKRequest | None = None,
    ) -> tuple[Tensor, ...]:
        """Return log-probabilities and entropies; or ids, log-probabilities, entropy, and the targets' own if asked."""
        if not isinstance(more, TopKRequest):
            return super().forward(hidden_ND, targets_N, temperature, more)
        found = teacher_topk(
            *self.factors(hidden_ND),
            more.k,
            temperature=more.temperature,
            chunk_tokens=self.chunk_tokens,
            chunk_vocab=self.chunk_vocab,
            bias=self.own(self.bias),
            logits=self.logits,
            divided=self.divided,
        )
        assert found.entropy_N is not None, "computed with the top-k"
        told = (found.ids_NK, found.logprobs_NK.float(), found.entropy_N.float())
        if not more.own:
            return told
        return *told, super().forward(hidden_ND, targets_N, temperature, more.kept)[0].float()


@dataclass(frozen=True, kw_only=True)
class TopKObjective(LanguageModelObjective[StepT, BatchT]):
    """A language model that, as a teacher, tells its most likely tokens: a frozen one, or a policy that teaches itself.

    Attributes:
        top_k: How many.
        loss_temperature: Of their log-probabilities; None for `temperature`, that of the samples' own tokens.
        tells_own: Whether the log-probabilities of the samples' own tokens are sent too.
    """

    top_k: int | None
    loss_temperature: float | None = None
    tells_own: bool = False

    def head(self) -> type[TokenLogprobHead]:
        return TopKHead

    def teach(self, model: RankModel, batch: MicroBatch) -> Answers:
        """Return the most likely tokens at a micro-batch's targets."""
        assert self.top_k is not None, "else hidden states are sent"
        temperature = self.temperature if self.loss_temperature is None else self.loss_temperature
        kept = None if batch.kept is None else kept_ids(batch.kept, model.device)
        told = model(batch, self.temperature, TopKRequest(self.top_k, temperature, self.tells_own, kept))
        names = ("ids_NK", "logprobs_NK", "entropy_N", "own_N")
        arrays: dict[str, Any] = {name: found.cpu().numpy() for name, found in zip(names, told, strict=False)}
        return OwnTopKAnswers(**arrays) if self.tells_own else TopKAnswers(**arrays)


@dataclass(frozen=True, kw_only=True)
class TeacherObjective(TopKObjective[Any, MicroBatch]):
    """A frozen model that says what it would write at each token of given samples.

    Without `top_k` it sends hidden states, from which students compute the whole distribution.
    """

    packing: bool = True

    @property
    def row_sharing(self) -> str | None:
        return "data.packing" if self.packing else None

    def teach(self, model: RankModel, batch: MicroBatch) -> Answers:
        """Return the answers for a micro-batch's targets."""
        if self.top_k is not None:
            return super().teach(model, batch)
        *seen, _ = tensors_of(batch, model.device)
        return HiddenAnswers(hidden_NE=model.module.hidden_states(*seen).float().cpu().numpy())

    def projection(self, model: RankModel) -> Projection:
        """Return the output projection."""
        head = model.module.head
        bias = None if head.bias is None else head.bias.detach()
        return Projection(weight_VE=head.weight.detach(), bias_V=bias, logits=head.logits).to("cpu")


def teacher_answers(teacher: TrainingEngine[Any], samples: Sequence[TrainingSample]) -> Answers:
    """Return a teacher's answers for all targets, in the samples' order."""
    shards = teacher.micro_batches(samples)
    targets = Targets(samples)
    parts = [
        (targets.of(batch), answers)
        for batches, found in zip(shards, teacher.teach(shards), strict=True)
        for batch, answers in zip(batches, found, strict=True)
    ]
    return assembled(targets.count, parts)


def send_projections(teachers: Mapping[str, TrainingEngine[Any]], student: TrainingEngine[Any]) -> None:
    """Give every rank of a student the output projections of teachers that send hidden states."""
    projections = {
        name: engine.cluster.on(0, TrainingRank.ask, TeacherObjective.projection) for name, engine in teachers.items()
    }
    student.cluster.everywhere(TrainingRank.ask, DistillationObjective.take_projections, projections)


def send_unmatched(translations: Mapping[str, Translation], student: TrainingEngine[Any]) -> None:
    """Tell every rank of a student which of its tokens the teachers with another tokenizer do not have.

    Raises:
        ConfigError: A teacher has them all.
    """
    for name in (name for name, translation in translations.items() if not len(translation.unmatched)):
        raise ConfigError(
            f"{teacher_key(name)}: its vocabulary has every token of the student's, so that algorithm.loss."
            "unmatched_weight would compare nothing",
            fix="set algorithm.loss.unmatched_weight to 0",
        )
    unmatched = {name: translation.unmatched for name, translation in translations.items()}
    student.cluster.everywhere(TrainingRank.ask, DistillationObjective.take_unmatched, unmatched)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTargets:
    """Samples with what one teacher says of their targets.

    Attributes:
        teacher: The teacher's name.
        samples: What both read.
        answers: Of each target, in the samples' order.
    """

    teacher: str
    samples: Sequence[TrainingSample]
    answers: Answers


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScoredBatch(MicroBatch):
    """A micro-batch with what a teacher says of its targets.

    Attributes:
        teacher: The teacher's name.
        answers: Of each target.
    """

    teacher: str
    answers: Answers


@dataclass(frozen=True, slots=True)
class DistillationTarget:
    """What the head of a student compares with."""

    teacher: Teacher | TeacherTexts
    loss: DistillationLoss
    weights_N: Tensor

    def select(self, rows_N: Tensor) -> DistillationTarget:
        """Return the rows where `rows_N` is true."""
        return DistillationTarget(self.teacher.select(rows_N), self.loss, self.weights_N[rows_N])


def top_k_teacher(model: RankModel, answers: TopKAnswers, loss: DistillationLoss) -> TeacherTopK:
    """Return a teacher's most likely tokens on a model's device."""
    return TeacherTopK(
        ids_NK=torch.from_numpy(answers.ids_NK).to(model.device),
        logprobs_NK=model.tensor(answers.logprobs_NK),
        temperature=loss.config.temperature,
        entropy_N=model.tensor(answers.entropy_N),
    )


class DistillationHead(TokenLogprobHead):
    """The head of a student: losses and figures instead of log-probabilities."""

    def forward(  # type: ignore[override]
        self,
        hidden_ND: Tensor,
        targets_N: Tensor,
        temperature: float,  # noqa: ARG002 - of the protocol
        target: DistillationTarget,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each target, shape [N], and figures of each; temperatures are the loss's."""
        losses = compared(self, hidden_ND, target, targets_N)
        return losses.losses_N, dict(losses.metrics)


def compared(
    head: TokenLogprobHead, hidden_ND: Tensor, target: DistillationTarget, targets_N: Tensor | None = None
) -> TokenLosses:
    """Return how far a student's head is from its teacher at each target; `targets_N` for a cross-entropy."""
    return distillation_losses(
        *head.factors(hidden_ND),
        target.teacher,
        target.loss,
        chunk_tokens=head.chunk_tokens,
        chunk_vocab=head.chunk_vocab,
        bias=head.own(head.bias),
        targets_N=targets_N,
        weights_N=target.weights_N,
        logits=head.logits,
        divided=head.divided,
    )


@dataclass(frozen=True, kw_only=True)
class DistillationObjective(LanguageModelObjective[Sequence[TeacherTargets], TeacherScoredBatch]):
    """Moves a student's distributions to those of its teachers: the mean loss of all targets of a step.

    Attributes:
        loss_config: The distillation loss and its settings.
        projections: Output projections of teachers that send hidden states, by name; ranks have them.
        unmatched: The student's tokens that teachers with another tokenizer do not have, by the teacher's name.
    """

    loss_config: PluginConfig
    projections: dict[str, Projection] = field(default_factory=dict)
    unmatched: dict[str, IntArray] = field(default_factory=dict)

    drops: ClassVar[bool] = True

    @property
    def row_sharing(self) -> str | None:
        return "data.packing" if self.packing else None

    def head(self) -> type[TokenLogprobHead]:
        return DistillationHead

    def take_projections(self, model: RankModel, projections: Mapping[str, Projection]) -> None:
        """Keep the output projections of teachers."""
        self.projections.update({name: each.to(model.device) for name, each in projections.items()})

    def take_unmatched(self, model: RankModel, unmatched: Mapping[str, IntArray]) -> None:  # noqa: ARG002
        """Keep which tokens of the student teachers do not have."""
        self.unmatched.update(unmatched)

    def updates(self, step: Sequence[TeacherTargets], engine: Engine) -> Iterator[Update[TeacherScoredBatch]]:
        """Yield one optimizer step; a micro-batch has one teacher."""
        count = sum(int(sample.loss_mask.sum()) for scored in step for sample in scored.samples)
        shards: list[list[TeacherScoredBatch]] = [[] for _ in range(engine.layout["ranks"])]
        for scored in step:
            targets = Targets(scored.samples)
            weights = [np.where(sample.loss_mask, np.float32(1 / count), np.float32(0)) for sample in scored.samples]
            for shard, batches in zip(shards, micro_batches(scored.samples, weights, **engine.layout), strict=True):
                shard += [
                    TeacherScoredBatch(
                        **batch.shared_fields,
                        teacher=scored.teacher,
                        answers=chosen(scored.answers, targets.of(batch)),
                    )
                    for batch in batches
                ]
        yield Update(shards=shards)

    def loss(self, model: RankModel, batch: TeacherScoredBatch, shared: None) -> tuple[Tensor, Metrics]:  # noqa: ARG002
        loss: DistillationLoss = DISTILLATION_LOSSES.get(self.loss_config.type)(self.loss_config)
        weights_N = model.tensor(batch.weights)
        losses_N, figures = model(batch, 1.0, DistillationTarget(self._teacher(model, batch, loss), loss, weights_N))
        objective, metrics = distillation_objective(TokenLosses(losses_N, figures), weights_N)
        return objective, merge([metrics, computed(batch, model)])

    def _teacher(self, model: RankModel, batch: TeacherScoredBatch, loss: DistillationLoss) -> Teacher | TeacherTexts:
        answers = batch.answers
        if isinstance(answers, TextAnswers):
            integers = {
                name: torch.from_numpy(getattr(answers, name)).to(model.device)
                for name in ("ids_NK", "spans_N", "best_N")
            }
            floats = {name: model.tensor(getattr(answers, name)) for name in ("logprobs_NK", "entropy_N")}
            unmatched = self.unmatched.get(batch.teacher)
            return TeacherTexts(
                **integers,
                **floats,
                temperature=loss.config.temperature,
                unmatched_U=None if unmatched is None else torch.from_numpy(unmatched).to(model.device),
            )
        if isinstance(answers, TopKAnswers):
            return top_k_teacher(model, answers, loss)
        projection = self.projections[batch.teacher]
        # as precise as the teacher computed them
        hidden_NE = model.tensor(answers.hidden_NE).to(projection.weight_VE.dtype)
        return TeacherHead(
            hidden_NE=hidden_NE, weight_VE=projection.weight_VE, bias=projection.bias_V, logits=projection.logits
        )
