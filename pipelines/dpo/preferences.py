"""What preference runs are made of: the answers of each step, what the reference model says of them, the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol, TypeAlias, cast

from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.builtin.pipelines.dpo.labelled_objective import LabelledObjective, LabelledStep
from roll_like.builtin.pipelines.dpo.labels import labelled_step
from roll_like.builtin.pipelines.dpo.objective import AnswerLogprobs, AnswersObjective, PairedObjective, PairStep
from roll_like.builtin.pipelines.dpo.precomputed_reference import PrecomputedReference
from roll_like.cluster import ResourceManager
from roll_like.config.run import ScheduleConfig
from roll_like.data.chat import Renderer
from roll_like.data.pairs import PairSample, Preference, load_preferences, verdicts
from roll_like.data.samples import ConversationSample, SampleSet
from roll_like.models.load import ResolvedModel, load_tokenizer, resolve_model
from roll_like.registry import PREFERENCE_LOSSES
from roll_like.run.launch import RunContext, measuring
from roll_like.training.engine import Timer, TrainingEngine, WithoutAdapters
from roll_like.training.pairs import TrainingPair, sequences_of
from roll_like.training.start import rank_spec, start_engine
from roll_like.types import FloatArray, TrainingSample
from roll_like.values import Metric, reduce

#: Where a run keeps what its reference model said.
REFERENCE_FILE = "reference_logprobs.npz"

#: What one step learns from: pairs, or single answers.
PreferenceStep: TypeAlias = PairStep | LabelledStep
Trainer: TypeAlias = TrainingEngine[Any]


def preferences_of(config: DPOConfig) -> SampleSet[Preference]:
    """Return the pairs, or the single answers, that are trained on."""
    return load_preferences(config.data, Renderer(load_tokenizer(config.model)))


def evaluated_preferences_of(config: DPOConfig) -> SampleSet[Preference] | None:
    """Return those of the evaluation, where there is one."""
    rows = config.evaluated_rows
    return (
        None if rows is None else load_preferences(rows, Renderer(load_tokenizer(config.model)), section="evaluation")
    )


def batch_of(config: DPOConfig, preferences: Sequence[Preference]) -> PreferenceStep:
    """Return what the loss takes: pairs, or single answers and what their baseline needs."""
    loss = PREFERENCE_LOSSES.get(config.algorithm.loss.type)
    if loss.paired:
        # the configuration's rules let nothing else in
        return PairStep(pairs=training_pairs(cast("Sequence[PairSample]", preferences)))
    return labelled_step([*verdicts(preferences)], max_tokens=config.data.max_tokens, baseline=loss.needs_batch)


def training_pairs(pairs: Sequence[PairSample]) -> list[TrainingPair]:
    """Return pairs as the trainer takes them."""

    def answer(sample: ConversationSample, pair: PairSample, index: int) -> TrainingSample:
        return TrainingSample(
            group_id=str(index),
            token_ids=sample.token_ids,
            prompt_length=pair.prompt_length,
            sampled=sample.trained,
        )

    return [
        TrainingPair(chosen=answer(pair.chosen, pair, index), rejected=answer(pair.rejected, pair, index))
        for index, pair in enumerate(pairs)
    ]


def answers_of(pairs: Sequence[PairSample]) -> list[TrainingSample]:
    """Return the answers of pairs: each chosen one and, after it, the rejected one."""
    return sequences_of(training_pairs(pairs))


class References(Protocol):
    """Says how likely the reference model finds sequences."""

    def sums(self, samples: Sequence[TrainingSample]) -> FloatArray | None:
        """Return the log-probability of each sample's trained tokens, summed up; None without a reference."""


class NoReference:
    """For losses that compare with nothing."""

    def sums(self, samples: Sequence[TrainingSample]) -> None:  # noqa: ARG002 - what all references are asked
        """Return nothing."""
        return


def compared(step: PreferenceStep, references: References) -> PreferenceStep:
    """Return a step with what the reference model says of it."""
    return replace(step, reference=references.sums(step.sequences))


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
    if reference is None:
        return NoReference()
    if reference.mode == "adapter_off":
        return AnswerLogprobs(WithoutAdapters(trainer))
    if reference.mode == "cluster":
        return AnswerLogprobs(_start_reference(config, run.resources, run.stack, run.state.timer))
    model, path = reference.path or config.model.path, run.state.directory / REFERENCE_FILE
    known = PrecomputedReference.read(path, model)
    further = known.lacks(asked)
    if (first := next(further, None)) is None:
        return known
    run.state.metrics.phase("asking the reference model")
    with ExitStack() as stack:
        engine = trainer if reference.path is None else _start_reference(config, run.resources, stack)
        computed = known.asking(AnswerLogprobs(engine), chain([first], further))
    computed.write(path, model)
    return computed


class PairEvaluator:
    """Measures how often a model prefers what it should, on pairs that it is not trained on.

    Args:
        schedule: When.
        measure: Returns `train/loss` and `preference/…` of these pairs, without a step.
    """

    def __init__(self, schedule: ScheduleConfig, measure: Callable[[], Mapping[str, Metric]]) -> None:
        self._schedule = schedule
        self._measure = measure

    def due(self, finished: int, total: int) -> bool:
        """Return whether to evaluate after `finished` of `total` steps."""
        return self._schedule.due(finished, total)

    def evaluate(self) -> tuple[Mapping[str, Metric], None]:
        """Return `eval/loss`, `eval/accuracy` and the other figures of pairs."""
        measured = self._measure()
        figures = {"train/loss": "eval/loss"} | {
            name: f"eval/{name.removeprefix('preference/')}" for name in measured if name.startswith("preference/")
        }
        return {figures[name]: metric for name, metric in measured.items() if name in figures}, None

    def score(self, values: Mapping[str, float]) -> float | None:
        """Return what the best checkpoint has most of: right preferences."""
        return values.get("eval/pair_accuracy", values.get("eval/accuracy"))


class PreferenceEvaluator(PairEvaluator):
    """The same of a policy that is compared with a reference.

    Args:
        config: The run's configuration; has an `evaluation` section.
        preferences: What to evaluate on.
        trainer: The policy.
        references: What it is compared with.
    """

    def __init__(
        self, config: DPOConfig, preferences: SampleSet[Preference], trainer: Trainer, references: References
    ) -> None:
        assert config.evaluation is not None, "the caller asked"
        batch = batch_of(config, preferences.samples)
        super().__init__(config.evaluation, lambda: trainer.measure(compared(batch, references)))


def start_preference(
    config: DPOConfig,
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


def evaluate_preferences(config: DPOConfig, model_path: str) -> dict[str, float]:
    """Measure a model by the configuration's evaluation, against the configuration's reference, without training.

    Raises:
        ConfigError: The configuration has no `evaluation` section.
    """
    measured = config.evaluating(model_path).model_copy(update={"steps": 1})
    preferences = evaluated_preferences_of(config)
    assert preferences is not None, "there is an evaluation"
    with measuring(config) as (resources, stack):
        references: References = NoReference()
        if config.reference is not None:
            with ExitStack() as short:
                asked = AnswerLogprobs(_start_reference(config, resources, short))
                references = PrecomputedReference({}).asking(asked, batch_of(config, preferences.samples).sequences)
        trainer = start_preference(measured, resolve_model(measured.model), resources, stack)
        metrics, _ = PreferenceEvaluator(config, preferences, trainer, references).evaluate()
    return reduce(metrics)


def _start_reference(
    config: DPOConfig,
    resources: ResourceManager,
    stack: ExitStack,
    timer: Timer = lambda name: nullcontext(),
) -> Trainer:
    assert config.reference is not None, "the caller asked"
    path = config.reference.path
    model = resolve_model(config.model if path is None else config.model.at(path))
    training = config.training.frozen(
        workers=config.reference.workers,
        max_tokens_per_micro_batch=config.reference.max_tokens_per_micro_batch,
    )
    devices = config.resources.device_mapping.reference or config.resources.device_mapping.training
    objective = PairedObjective(settings=training, loss_config=config.algorithm.loss)
    spec = rank_spec(config, model, devices, objective, total_updates=None)
    return start_engine("reference", spec, resources, devices, stack=stack, timer=timer)
