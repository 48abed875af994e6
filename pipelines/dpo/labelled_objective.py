"""Preference training on single answers, each desirable or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from roll_like.algorithms.preference.base import (
    MismatchedResponses,
    PreferenceLoss,
    UnpairedInputs,
    UnpairedLoss,
    without_reference,
)
from roll_like.algorithms.preference.objective import preference_objective
from roll_like.builtin.pipelines.dpo.labelled_data import LabelledSample
from roll_like.builtin.pipelines.dpo.objective import AnswersObjective, whole_logprobs
from roll_like.errors import EngineError
from roll_like.training.interface import Engine, RankModel, Update, computed
from roll_like.training.layout import MicroBatch, micro_batches
from roll_like.types import BoolArray, FloatArray, IntArray, TrainingSample
from roll_like.values import Last, Mean, Metric, Metrics, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledStep:
    """Single answers, and what the loss's baseline follows from.

    Attributes:
        answers: What is trained on.
        pair_places: Places in `answers` of each pair's desirable and undesirable answer, shape [pairs, 2].
        mismatched: Answers after other answers' prompts: only scored, for the baseline; none where the loss has none.
        reference: Log-probability of each of `sequences` under the reference model; None where the loss has none.
    """

    answers: Sequence[LabelledSample]
    pair_places: IntArray
    mismatched: Sequence[TrainingSample] = ()
    reference: FloatArray | None = None

    @property
    def sequences(self) -> list[TrainingSample]:
        """What the reference model computes log-probabilities of."""
        return [*self.answers, *self.mismatched]

    @property
    def trained(self) -> list[TrainingSample]:
        """The answers that are trained on."""
        return [*self.answers]

    @property
    def desirable(self) -> BoolArray:
        """Whether each answer is desirable."""
        return np.array([answer.desirable for answer in self.answers])

    @property
    def answers_reference(self) -> FloatArray | None:
        """The reference model's log-probabilities of `answers`."""
        return None if self.reference is None else self.reference[: len(self.answers)]

    def mismatched_responses(self, policy: FloatArray) -> MismatchedResponses | None:
        """Return what the baseline follows from, with the policy's log-probabilities of `mismatched`; None without.

        Raises:
            EngineError: There are mismatched answers and no reference.
        """
        if not self.mismatched:
            return None
        if self.reference is None:
            raise without_reference("mismatched samples")
        return MismatchedResponses(
            logprobs_M=torch.from_numpy(policy),
            reference_logprobs_M=torch.from_numpy(self.reference[len(self.answers) :]),
            tokens_M=torch.from_numpy(_tokens(self.mismatched)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledUpdate:
    """What one optimizer step over single answers has in common.

    Attributes:
        desirable: Whether each answer is desirable, shape [answers].
        reference: Log-probability of each under the reference model; None without.
        mismatched: What the whole step's baseline follows from; None where the loss has none.
        loss: The loss, with that baseline; only on ranks.
    """

    desirable: BoolArray
    reference: FloatArray | None
    mismatched: MismatchedResponses | None
    loss: UnpairedLoss | None = None


@dataclass(frozen=True, kw_only=True)
class LabelledObjective(AnswersObjective[LabelledStep, MicroBatch]):
    """Makes desirable answers likelier and others less likely."""

    def updates(self, step: LabelledStep, engine: Engine) -> Iterator[Update[MicroBatch]]:
        """Yield one optimizer step; its baseline is of the weights before it, and one for all ranks.

        Raises:
            EngineError: There are mismatched answers and no reference.
        """
        policy = whole_logprobs(engine, step.mismatched) if step.mismatched else np.zeros(0, np.float32)
        shared = LabelledUpdate(
            desirable=step.desirable,
            reference=step.answers_reference,
            mismatched=step.mismatched_responses(policy),
        )
        yield Update(shards=micro_batches(step.answers, **engine.layout), shared=shared)

    def bind(self, shared: LabelledUpdate, device: torch.device) -> LabelledUpdate:
        """Return what is shared with the loss of this optimizer step."""
        return replace(shared, loss=of_step(self.preference_loss, shared.mismatched, device))

    def loss(self, model: RankModel, batch: MicroBatch, shared: LabelledUpdate) -> tuple[Tensor, Metrics]:
        """Return a micro-batch's share of the loss."""
        assert shared.loss is not None, "`bind` has set it"
        answers_S, _, counted_S = batch.sequences()
        logprobs_S, tokens_S = self.answer_logprobs(model, batch)
        inputs = UnpairedInputs(
            logprobs_S=logprobs_S,
            tokens_S=tokens_S,
            desirable_S=torch.from_numpy(shared.desirable[answers_S]).to(model.device),
            weights_S=model.tensor(counted_S) / len(shared.desirable),
            reference_logprobs_S=None if shared.reference is None else model.tensor(shared.reference[answers_S]),
        )
        objective, metrics = preference_objective(inputs, shared.loss)
        return objective, merge([metrics, computed(batch, model)])

    def report(self, step: LabelledStep, metrics: Mapping[str, Metric], updates: int) -> dict[str, Metric]:
        """Return a step's metrics with the margin of its rewards."""
        return _with_margin(super().report(step, metrics, updates))

    def measure(self, step: LabelledStep, engine: Engine) -> dict[str, Metric]:
        """Return the metrics of answers under the current weights.

        Of pairs, they include `preference/pair_accuracy`: the share whose desirable answer has the higher reward.
        """
        logprobs, count = whole_logprobs(engine, step.sequences), len(step.answers)
        loss = of_step(self.preference_loss, step.mismatched_responses(logprobs[count:]), torch.device("cpu"))
        reference = step.answers_reference
        inputs = UnpairedInputs(
            logprobs_S=torch.from_numpy(logprobs[:count]),
            tokens_S=torch.from_numpy(_tokens(step.answers)),
            desirable_S=torch.from_numpy(step.desirable),
            weights_S=torch.full((count,), 1 / count),
            reference_logprobs_S=None if reference is None else torch.from_numpy(reference),
        )
        metrics = _with_margin(preference_objective(inputs, loss)[1])
        if len(step.pair_places):
            desirable_P, undesirable_P = loss(inputs).rewards_S.double()[torch.from_numpy(step.pair_places)].unbind(1)
            right_P = (desirable_P > undesirable_P).double() + 0.5 * (desirable_P == undesirable_P).double()
            metrics["preference/pair_accuracy"] = Mean(float(right_P.mean()), len(right_P))
        return metrics


def of_step(loss: PreferenceLoss, mismatched: MismatchedResponses | None, device: torch.device) -> UnpairedLoss:
    """Return a loss with the statistics of a whole optimizer step, where it has some.

    Raises:
        EngineError: It is a loss on pairs.
    """
    if not isinstance(loss, UnpairedLoss):
        raise EngineError(f"{type(loss).__name__} takes pairs, found single answers", fix="choose a loss on samples")
    if mismatched is None:
        return loss
    on_device = {each.name: getattr(mismatched, each.name).to(device) for each in fields(MismatchedResponses)}
    return loss.of_batch(MismatchedResponses(**on_device))


def _tokens(samples: Sequence[TrainingSample]) -> IntArray:
    """Return how many tokens of each sample the loss applies to, shape [len(samples)]."""
    return np.array([sample.trained_tokens for sample in samples], np.int32)


def _with_margin(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Add the difference of the mean rewards of desirable and other answers, where there are both."""
    desirable, other = (metrics.get(f"preference/reward_{side}") for side in ("chosen", "rejected"))
    if desirable is None or other is None:
        return {**metrics}
    return {**metrics, "preference/reward_margin": Last(desirable.value - other.value)}
