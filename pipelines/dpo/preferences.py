"""What preference runs are made of: the answers of each step, what the reference model says of them, the evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from roll_like.builtin.pipelines.dpo.config import DPOConfig, PreferenceRunConfig
from roll_like.builtin.pipelines.dpo.labelled_objective import LabelledObjective, LabelledStep
from roll_like.builtin.pipelines.dpo.labels import labelled_step
from roll_like.builtin.pipelines.dpo.objective import AnswerLogprobs, AnswersObjective, PairedObjective, PairStep
from roll_like.builtin.pipelines.dpo.precomputed_reference import PrecomputedReference
from roll_like.cluster import ResourceManager
from roll_like.config.run import ScheduleConfig
from roll_like.data.pairs import PairSample, Preference, labelled_samples, load_preferences
from roll_like.data.samples import ConversationSample, SampleSet
from roll_like.models.load import ResolvedModel, load_renderer, resolve_model
from roll_like.offline.evaluator import OfflineEvaluator, pair_evaluator
from roll_like.registry import PREFERENCE_LOSSES
from roll_like.run.state import RunContext
from roll_like.training.engine import Timer, TrainingEngine, WithoutAdapters
from roll_like.training.pairs import TrainingPair
from roll_like.training.start import rank_spec, start_engine
from roll_like.types import FloatArray, TrainingSample

#: Where a run keeps what its reference model said.
REFERENCE_FILE = "reference_logprobs.npz"

#: What one step learns from: pairs, or single answers.
PreferenceStep: TypeAlias = PairStep | LabelledStep
Trainer: TypeAlias = TrainingEngine[Any]
StepT = TypeVar("StepT", PairStep, LabelledStep, PairStep | LabelledStep)


def preferences_of(config: DPOConfig) -> SampleSet[Preference]:
    """Return the pairs, or the single answers, that are trained on."""
    return load_preferences(config.data, load_renderer(config.model))


def evaluated_preferences_of(config: DPOConfig) -> SampleSet[Preference] | None:
    """Return those of the evaluation, where there is one."""
    rows = config.evaluated_rows
    return None if rows is None else load_preferences(rows, load_renderer(config.model), section="evaluation")


def batch_of(config: DPOConfig, preferences: Sequence[Preference]) -> PreferenceStep:
    """Return what the loss takes: pairs, or single answers and what their baseline needs."""
    loss = PREFERENCE_LOSSES.get(config.algorithm.loss.type)
    if loss.paired:
        # the configuration's rules let nothing else in
        return pair_step(cast("Sequence[PairSample]", preferences))
    return labelled_step([*labelled_samples(preferences)], max_tokens=config.data.max_tokens, baseline=loss.needs_batch)


def pair_step(pairs: Sequence[PairSample]) -> PairStep:
    """Return pairs as the trainer takes them."""

    def answer(sample: ConversationSample, pair: PairSample, index: int) -> TrainingSample:
        return TrainingSample(
            group_id=str(index),
            token_ids=sample.token_ids,
            prompt_length=pair.prompt_length,
            sampled=sample.trained,
        )

    return PairStep(
        pairs=[
            TrainingPair(chosen=answer(pair.chosen, pair, index), rejected=answer(pair.rejected, pair, index))
            for index, pair in enumerate(pairs)
        ]
    )


def answers_of(pairs: Sequence[PairSample]) -> list[TrainingSample]:
    """Return the answers of pairs: each chosen one and, after it, the rejected one."""
    return pair_step(pairs).sequences


class References(Protocol):
    """Says how likely the reference model finds sequences."""

    def sequence_logprobs(self, samples: Sequence[TrainingSample]) -> FloatArray | None:
        """Return the log-probability of each sample's trained tokens, summed up; None without a reference."""


class NoReference:
    """For losses that compare with nothing."""

    def sequence_logprobs(self, samples: Sequence[TrainingSample]) -> None:  # noqa: ARG002 - what all references are asked
        """Return nothing."""
        return


def compared(step: StepT, references: References) -> StepT:
    """Return a step with what the reference model says of it."""
    return replace(step, reference=references.sequence_logprobs(step.sequences))


def asked_of(
    config: DPOConfig, data: SampleSet[Preference], evaluated: SampleSet[Preference] | None
) -> Iterator[TrainingSample]:
    """Yield everything that the reference model will be asked about in a run.

    Which answers are mismatched depends on what else is in their step, so the steps are gone through as they will come.
    """
    if PREFERENCE_LOSSES.get(config.algorithm.loss.type).paired:
        yield from batch_of(config, data.samples).sequences
    else:
        order = data.order(seed=config.seed, shuffle=config.data.shuffle)
        for _ in range(config.total_steps):
            yield from batch_of(config, order.take(config.items_per_step[0])).sequences
    if evaluated is not None:
        yield from batch_of(config, evaluated.samples).sequences


def references_of(config: DPOConfig, run: RunContext, trainer: Trainer, asked: Iterable[TrainingSample]) -> References:
    """Return what the reference model says; the trainer has not taken a step yet.

    Args:
        config: The run's configuration.
        run: What it is built on.
        trainer: The policy before its first step.
        asked: Everything that will be asked about.
    """
    reference = config.reference
    if reference is None or reference.mode != "precomputed":
        return live_reference(config, run, trainer)
    return precomputed_reference(config, run, trainer, asked)


def live_reference(config: PreferenceRunConfig, run: RunContext, trainer: Trainer) -> References:
    """Return a reference that is asked in each step, or none where the loss needs none."""
    if config.reference is None:
        return NoReference()
    if config.reference.mode == "adapter_off":
        return AnswerLogprobs(WithoutAdapters(trainer))
    return AnswerLogprobs(start_reference(config, run.resources, run.stack, run.state.timer))


def precomputed_reference(
    config: PreferenceRunConfig, run: RunContext, trainer: Trainer, asked: Iterable[TrainingSample]
) -> PrecomputedReference:
    """Return what the reference model says of samples; an earlier process of the run may have kept it."""
    own = None if config.reference is None else config.reference.path
    model, path = own or config.model.path, run.state.directory / REFERENCE_FILE
    known = PrecomputedReference.read(path, model)
    further = known.lacks(asked)
    if (first := next(further, None)) is None:
        return known
    run.state.metrics.phase("asking the reference model")
    with ExitStack() as stack:
        engine = trainer if own is None else start_reference(config, run.resources, stack)
        computed = known.asking(AnswerLogprobs(engine), chain([first], further))
    computed.write(path, model)
    return computed


def preference_evaluator(
    schedule: ScheduleConfig, batch: PreferenceStep, trainer: Trainer, references: References
) -> OfflineEvaluator:
    """Return what measures how often the policy prefers what it should, compared with the reference."""
    return pair_evaluator(schedule, lambda: trainer.measure(compared(batch, references)))


def start_preference_evaluator(
    config: PreferenceRunConfig,
    schedule: ScheduleConfig,
    batch: PreferenceStep,
    resources: ResourceManager,
    stack: ExitStack,
) -> OfflineEvaluator:
    """Ask the reference about a batch, and start the policy to compare it with, without training.

    Args:
        config: The configuration of the model to measure.
        schedule: The section of this evaluation.
        batch: What to measure it on.
        resources: Where ranks go.
        stack: Ends them when it is closed.
    """
    references: References = NoReference()
    if config.reference is not None:
        with ExitStack() as short:
            asked = AnswerLogprobs(start_reference(config, resources, short))
            references = PrecomputedReference({}).asking(asked, batch.sequences)
    once = config.model_copy(update={"steps": 1})
    trainer = start_preference(once, resolve_model(once.model), resources, stack)
    return preference_evaluator(schedule, batch, trainer, references)


def start_preference(
    config: PreferenceRunConfig,
    model: ResolvedModel,
    resources: ResourceManager,
    stack: ExitStack,
    *,
    timer: Timer = lambda name: nullcontext(),
) -> Trainer:
    """Start the policy's ranks: of a model that learns from pairs, or from single answers, as the loss does."""
    devices, loss = config.resources.device_mapping.training, config.algorithm.loss
    paired = PREFERENCE_LOSSES.get(loss.type).paired
    of_items: type[AnswersObjective[Any, Any]] = PairedObjective if paired else LabelledObjective
    objective = of_items(settings=config.training, loss_config=loss)
    spec = rank_spec(config, model, devices, objective, total_updates=config.total_steps)
    return start_engine("training", spec, resources, devices, stack=stack, timer=timer)


def start_reference(
    config: PreferenceRunConfig,
    resources: ResourceManager,
    stack: ExitStack,
    timer: Timer = lambda name: nullcontext(),
) -> Trainer:
    """Start the ranks of a frozen model that the policy is compared with."""
    assert config.reference is not None, "the caller asked"
    model = resolve_model(config.reference_model)
    training = config.training.frozen(
        workers=config.reference.workers,
        max_tokens_per_micro_batch=config.reference.max_tokens_per_micro_batch,
    )
    devices = config.reference_devices
    objective = PairedObjective(settings=training, loss_config=config.algorithm.loss)
    spec = rank_spec(config, model, devices, objective, total_updates=None)
    return start_engine("reference", spec, resources, devices, stack=stack, timer=timer)
