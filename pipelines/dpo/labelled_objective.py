"""Preference training on single answers, each desirable or not: what a step trains on, its baseline, the loss."""

from __future__ import annotations

import hashlib
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
from roll_like.builtin.pipelines.dpo.labelled_data import LabelledSample, Preference, labelled_samples
from roll_like.builtin.pipelines.dpo.objective import AnswersObjective, whole_logprobs
from roll_like.data.images import shift_images
from roll_like.errors import DataError, EngineError
from roll_like.training.interface import Engine, RankModel, Update, computed
from roll_like.training.layout import MicroBatch, micro_batches
from roll_like.types import BoolArray, FloatArray, IntArray, Pair, PlacedImage, TrainingSample
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


def labelled_step(preferences: Sequence[Preference], *, max_tokens: int, baseline: bool) -> LabelledStep:
    """Return what a step trains on, and for a loss with a baseline as many mismatched answers.

    The baseline of `kto` estimates how far the policy is from its reference by answers that stand after prompts that
    they do not answer. Within each step, answers are moved on: the prompt of each is followed by the answer before it,
    as in the paper (arXiv:2402.01306, section 4.1) and in TRL. Where several answers have one prompt, they move by as
    many places as the largest such group has, so that all of them end elsewhere:

        prompts a b c       answers 1 2 3      after them 3 1 2
        prompts a a b b     answers 1 2 3 4    after them 3 4 1 2

    Args:
        preferences: Labelled answers of one step, or pairs of a desirable and an undesirable one.
        max_tokens: Longest sequence. An answer after a longer prompt than its own is cut there.
        baseline: Whether the loss has one.

    Raises:
        DataError: All answers have one prompt, so that none can be mismatched.
    """
    answers = [
        replace(each, group_id=_prompt_id(each), prompt_length=each.first_trained)
        for each in labelled_samples(preferences)
    ]
    pair_places = _pair_places(preferences)
    if not baseline:
        return LabelledStep(answers=answers, pair_places=pair_places)
    mismatched = [_after(answers[prompt], answers[answer], max_tokens) for prompt, answer in _moved_on(answers)]
    if not mismatched:
        raise DataError(
            f"all {len(answers)} answers of a step have one prompt, first {answers[0].origin}; the baseline of the "
            "loss needs answers to other prompts beside them",
            fix="raise data.samples_per_step (or pairs_per_step), or set data.shuffle: true",
        )
    return LabelledStep(answers=answers, pair_places=pair_places, mismatched=mismatched)


def _pair_places(preferences: Sequence[Preference]) -> IntArray:
    """Return the places that each pair's two answers have among all answers, shape [pairs, 2]."""
    first = np.cumsum([0, *(len(each.sequences) for each in preferences)])
    paired = [at for at, each in zip(first, preferences, strict=False) if isinstance(each, Pair)]
    return np.array([(at, at + 1) for at in paired], np.int32).reshape(-1, 2)


def _moved_on(samples: Sequence[TrainingSample]) -> Iterator[tuple[int, int]]:
    """Yield whose prompt is followed by whose answer; each answer at most once, and never after its own prompt."""
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(index)
    ordered = [index for members in groups.values() for index in members]
    group_of = {index: group for group, members in groups.items() for index in members}
    places = max(map(len, groups.values()))
    for at, answer in enumerate(ordered):
        prompt = ordered[(at + places) % len(ordered)]
        # a group of more than half of the answers cannot go elsewhere as a whole
        if group_of[prompt] != group_of[answer]:
            yield prompt, answer


def _after(prompt: TrainingSample, answer: TrainingSample, max_tokens: int) -> TrainingSample:
    """Return a prompt with another's answer; there is room for a token at least, because the prompt's own has it."""
    begin, end = prompt.token_ids[: prompt.prompt_length], max_tokens - prompt.prompt_length
    loss_mask = answer.loss_mask[answer.prompt_length :][:end]
    last = int(np.flatnonzero(loss_mask)[-1]) + 1
    later = _within(answer, answer.prompt_length, answer.prompt_length + last)
    return TrainingSample(
        group_id=prompt.group_id,
        token_ids=np.concatenate([begin, answer.token_ids[answer.prompt_length :][:last]]),
        prompt_length=len(begin),
        loss_mask=np.concatenate([np.zeros(len(begin), np.bool_), loss_mask[:last]]),
        images=(*_within(prompt, 0, len(begin)), *shift_images(later, len(begin) - answer.prompt_length)),
    )


def _within(sample: TrainingSample, begin: int, end: int) -> list[PlacedImage]:
    return [image for image in sample.images if begin <= image.start < end]


def _prompt_id(sample: TrainingSample) -> str:
    """Return what samples share that have one prompt."""
    digest = hashlib.blake2b(sample.token_ids[: sample.first_trained].tobytes(), digest_size=16)
    for image in _within(sample, 0, sample.first_trained):
        digest.update(image.picture.digest)
    return digest.hexdigest()
