"""What preference runs are made of: the answers of each step, the reference model, the evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

from roll_like.builtin.pipelines.dpo.config import DPOConfig, PreferenceRunConfig
from roll_like.builtin.pipelines.dpo.labelled_data import Preference
from roll_like.builtin.pipelines.dpo.labelled_objective import LabelledObjective, LabelledStep, labelled_step
from roll_like.builtin.pipelines.dpo.objective import AnswersObjective, PairedObjective, PairStep, whole_logprobs
from roll_like.cluster import ResourceManager
from roll_like.config.evaluation import ScheduleConfig
from roll_like.data.samples import SampleSet
from roll_like.metrics.files import replacing
from roll_like.models.load import resolve_model
from roll_like.registry import PREFERENCE_LOSSES
from roll_like.run.evaluation import Evaluation, pair_evaluation
from roll_like.run.state import RunContext
from roll_like.training.engine import PolicyCopy, Timer, TrainingEngine, WithoutAdapters
from roll_like.training.start import rank_spec, start_engine, start_trainer
from roll_like.types import FloatArray, Pair, TrainingSample

#: Where a run keeps its reference model's log-probabilities.
REFERENCE_FILE = "reference_logprobs.npz"


#: Log-probabilities of sequences under a reference model: of each sample's trained tokens, summed up.
SequenceReference: TypeAlias = Callable[[Sequence[TrainingSample]], FloatArray]

#: How many sequences a reference model computes in one call.
BATCH = 4096


class PrecomputedReference:
    """A reference model's log-probabilities of every sequence of a run, from before the first step.

    Args:
        sequence_logprobs: Log-probability of each, by the content of the sequence.
    """

    def __init__(self, sequence_logprobs: Mapping[bytes, float]) -> None:
        self._sequence_logprobs = sequence_logprobs

    @classmethod
    def of(cls, samples: Sequence[TrainingSample], sequence_logprobs: FloatArray) -> PrecomputedReference:
        """Return those of samples: the log-probability of each."""
        return cls(dict(zip(map(_content, samples), sequence_logprobs.tolist(), strict=True)))

    def __call__(self, samples: Sequence[TrainingSample]) -> FloatArray:
        """Return the log-probability of each sample."""
        return np.array([self._sequence_logprobs[_content(sample)] for sample in samples], np.float32)

    def missing(self, samples: Iterable[TrainingSample]) -> Iterator[TrainingSample]:
        """Yield the samples that it does not hold, each once."""
        seen: set[bytes] = set()
        for sample in samples:
            content = _content(sample)
            if content not in self._sequence_logprobs and content not in seen:
                seen.add(content)
                yield sample

    def extended(self, model: SequenceReference, samples: Iterable[TrainingSample]) -> PrecomputedReference:
        """Return the same with a model's log-probabilities of further samples."""
        logprobs, remaining = {**self._sequence_logprobs}, self.missing(samples)
        while batch := list(islice(remaining, BATCH)):
            logprobs.update(zip(map(_content, batch), model(batch).tolist(), strict=True))
        return PrecomputedReference(logprobs)

    @classmethod
    def read(cls, path: Path, model: str) -> PrecomputedReference:
        """Return what an earlier process of the run wrote; nothing where it wrote none, or of another model."""
        if not path.is_file():
            return cls({})
        with np.load(path) as kept:
            if str(kept["model"]) != model:
                return cls({})
            return cls(dict(zip(map(bytes, kept["contents"]), kept["sums"].tolist(), strict=True)))

    def write(self, path: Path, model: str) -> None:
        """Keep it for a resumed run."""
        contents = np.frombuffer(b"".join(self._sequence_logprobs), np.uint8).reshape(len(self._sequence_logprobs), -1)
        sums = np.array([*self._sequence_logprobs.values()], np.float32)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, contents=contents, sums=sums, model=np.array(model))


def _content(sample: TrainingSample) -> bytes:
    """Return a hash of everything that a sample's log-probability follows from."""
    digest = hashlib.blake2b(sample.token_ids.astype(np.int32).tobytes(), digest_size=16)
    digest.update(np.packbits(sample.loss_mask).tobytes())
    for image in sample.images:
        digest.update(image.picture.digest)
    return digest.digest()


#: What one step learns from: pairs, or single answers.
PreferenceStep: TypeAlias = PairStep | LabelledStep
PreferenceTrainer: TypeAlias = TrainingEngine[Any]
StepT = TypeVar("StepT", PairStep, LabelledStep, PairStep | LabelledStep)


def batch_of(config: DPOConfig, preferences: Sequence[Preference]) -> PreferenceStep:
    """Return what the loss takes: pairs, or single answers and what their baseline needs."""
    loss = PREFERENCE_LOSSES.get(config.algorithm.loss.type)
    if loss.paired:
        # the configuration's rules let nothing else in
        return pair_step(cast("Sequence[Pair]", preferences))
    return labelled_step(preferences, max_tokens=config.data.max_tokens, baseline=loss.needs_batch)


def pair_step(pairs: Sequence[Pair]) -> PairStep:
    """Return pairs as the trainer takes them: both of a pair share their prompt."""
    sharing = []
    for index, pair in enumerate(pairs):
        chosen, rejected = (
            replace(each, group_id=str(index), prompt_length=pair.chosen.first_trained) for each in pair.sequences
        )
        sharing.append(replace(pair, chosen=chosen, rejected=rejected))
    return PairStep(pairs=sharing)


def answers_of(pairs: Sequence[Pair]) -> list[TrainingSample]:
    """Return the answers of pairs: each chosen one and, after it, the rejected one."""
    return pair_step(pairs).sequences


def with_reference_logprobs(step: StepT, reference: SequenceReference | None) -> StepT:
    """Return a step with the reference model's log-probabilities, where there is one."""
    return step if reference is None else replace(step, reference=reference(step.sequences))


def reference_inputs(
    config: DPOConfig, data: SampleSet[Preference], evaluated: SampleSet[Preference] | None
) -> Iterator[TrainingSample]:
    """Yield everything that the reference model computes log-probabilities of in a run.

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


def live_reference(
    config: PreferenceRunConfig,
    run: RunContext,
    trainer: PreferenceTrainer,
    copies: Mapping[str, PolicyCopy],
    started: Callable[[PreferenceTrainer], None] = lambda engine: None,
) -> SequenceReference | None:
    """Return a reference model that is computed in each step; None where the loss needs none.

    Args:
        copies: Of the trainer's weights, by name.
        started: Called with the reference's ranks, where it has some of its own.
    """
    if config.reference is None:
        return None
    if config.reference.mode == "adapter_off":
        return partial(whole_logprobs, WithoutAdapters(trainer))
    if config.reference.mode == "copy":
        return partial(whole_logprobs, copies["reference"])
    engine = start_reference(config, run.resources, run.stack, run.state.timer)
    started(engine)
    return partial(whole_logprobs, engine)


def precomputed_reference(
    config: PreferenceRunConfig, run: RunContext, trainer: PreferenceTrainer, samples: Iterable[TrainingSample]
) -> PrecomputedReference:
    """Return the reference model's log-probabilities of samples; an earlier process of the run may have kept them.

    The trainer has not taken a step yet.
    """
    own = None if config.reference is None else config.reference.path
    model, path = own or config.model.path, run.state.directory / REFERENCE_FILE
    known = PrecomputedReference.read(path, model)
    further = known.missing(samples)
    if (first := next(further, None)) is None:
        return known
    run.state.metrics.phase("computing the reference model")
    with ExitStack() as stack:
        engine = trainer if own is None else start_reference(config, run.resources, stack)
        computed = known.extended(partial(whole_logprobs, engine), chain([first], further))
    computed.write(path, model)
    return computed


def preference_evaluator(
    schedule: ScheduleConfig, batch: PreferenceStep, trainer: PreferenceTrainer, reference: SequenceReference | None
) -> Evaluation:
    """Return what measures how often the policy prefers what it should, compared with the reference."""
    return pair_evaluation(schedule, lambda: trainer.measure(with_reference_logprobs(batch, reference)))


def start_preference_evaluator(
    config: PreferenceRunConfig,
    schedule: ScheduleConfig,
    batch: PreferenceStep,
    resources: ResourceManager,
    stack: ExitStack,
) -> Evaluation:
    """Compute the reference's log-probabilities of a batch, then start the policy to compare, without training.

    Args:
        resources: Where ranks go.
        stack: Ends them when it is closed.
    """
    reference = None
    if config.reference is not None:
        with ExitStack() as short:
            model = partial(whole_logprobs, start_reference(config, resources, short))
            reference = PrecomputedReference({}).extended(model, batch.sequences)
    once = config.model_copy(update={"steps": 1})
    trainer = start_trainer(once, resolve_model(once.model), objective_of(once), resources, stack)
    return preference_evaluator(schedule, batch, trainer, reference)


def objective_of(config: PreferenceRunConfig) -> AnswersObjective[Any, Any]:
    """Return what the policy learns: from pairs, or from single answers, as the loss does."""
    loss = config.algorithm.loss
    of_items: type[AnswersObjective[Any, Any]] = (
        PairedObjective if PREFERENCE_LOSSES.get(loss.type).paired else LabelledObjective
    )
    return of_items(settings=config.training, loss_config=loss)


def start_reference(
    config: PreferenceRunConfig,
    resources: ResourceManager,
    stack: ExitStack,
    timer: Timer = lambda name: nullcontext(),
) -> PreferenceTrainer:
    """Start the ranks of a frozen model that the policy is compared with."""
    assert config.reference is not None, "the caller checks"
    model = resolve_model(config.reference_model)
    training = config.training.frozen(
        workers=config.reference.workers,
        max_tokens_per_micro_batch=config.reference.max_tokens_per_micro_batch,
    )
    devices = config.resources.devices_of("reference")
    objective = PairedObjective(settings=training, loss_config=config.algorithm.loss)
    spec = rank_spec(config, model, devices, objective, total_updates=None)
    return start_engine("reference", spec, resources, devices, stack=stack, timer=timer)
