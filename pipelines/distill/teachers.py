"""What distillation runs are made of: conversations with their teachers, the evaluation, the student."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from roll_like.algorithms.distillation.base import DistillationConfig
from roll_like.builtin.pipelines.distill.config import DistillationDataConfig, DistillConfig
from roll_like.builtin.pipelines.distill.objective import (
    DistillationObjective,
    TeacherObjective,
    TeacherScored,
    send_projections,
    teacher_answers,
)
from roll_like.cluster import ResourceManager
from roll_like.config.teachers import teacher_of
from roll_like.data.conversations import load_conversations
from roll_like.data.samples import ConversationSample, SampleSet, SampleSource
from roll_like.models.load import ResolvedModel, load_renderer, resolve_model
from roll_like.models.teachers import planned_teachers
from roll_like.offline.evaluator import OfflineEvaluator
from roll_like.offline.samples import training_samples
from roll_like.training.engine import Timer, TrainingEngine
from roll_like.training.start import rank_spec, start_engine
from roll_like.values import Last, Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationSample:
    """A conversation with the name of its teacher."""

    sample: ConversationSample
    teacher: str

    @property
    def sequences(self) -> tuple[ConversationSample, ...]:
        """Its sequence of tokens."""
        return (self.sample,)

    def content(self) -> bytes:
        """Return everything that training sees of it, for fingerprints."""
        return self.sample.content() + self.teacher.encode()


def samples_of(config: DistillConfig) -> SampleSet[DistillationSample]:
    """Return what is trained on."""
    return _load(config, config.data, "data")


class Teachers:
    """The models that students learn from.

    Args:
        engines: Their ranks, by name.
        timer: Times a named part of a step.
    """

    def __init__(self, engines: Mapping[str, TrainingEngine[Any]], timer: Timer = lambda name: nullcontext()) -> None:
        self._engines = engines
        self._timer = timer

    def distributions(self, chosen: Sequence[DistillationSample]) -> list[TeacherScored]:
        """Return the samples by teacher, with what each predicts at their tokens."""
        scored = []
        with self._timer("teachers"):
            for name, engine in self._engines.items():
                samples = training_samples([each.sample for each in chosen if each.teacher == name])
                if samples:
                    scored.append(
                        TeacherScored(teacher=name, samples=samples, answers=teacher_answers(engine, samples))
                    )
        return scored

    def send_projections(self, student: TrainingEngine[Sequence[TeacherScored]]) -> None:
        """Give the student the teachers' output projections."""
        send_projections(self._engines, student)


def distillation_evaluator(
    config: DistillConfig, student: TrainingEngine[Sequence[TeacherScored]], teachers: Teachers
) -> OfflineEvaluator | None:
    """Return what measures how near the student is to its teachers on the evaluation's conversations, if there are any.

    Teachers do not change: they compute their distributions once.

    Args:
        config: The run's configuration.
        student: What is measured.
        teachers: What it is compared with.
    """
    if config.evaluation is None:
        return None
    samples = _load(config, config.data.reading(config.evaluation.sources), "evaluation").samples
    scored: list[TeacherScored] = []

    def measure() -> dict[str, Metric]:
        if not scored:
            scored.extend(teachers.distributions(samples))
        measured = student.measure(scored)
        metrics = {f"eval/{name.split('/', 1)[1]}": measured[name] for name in measured if name.startswith("distill/")}
        metrics["eval/loss"] = measured["train/loss"]
        metrics["eval/perplexity"] = Last(math.exp(min(metrics["eval/cross_entropy"].value, 700.0)))
        return metrics

    return OfflineEvaluator(config.evaluation, measure)


def start_teachers(
    config: DistillConfig, resources: ResourceManager, stack: ExitStack, timer: Timer = lambda name: nullcontext()
) -> Teachers:
    """Start the ranks of every teacher.

    Raises:
        ConfigError: A teacher has another tokenizer than the student.
        EngineError: A rank did not start.
    """
    engines = {}
    for teacher in planned_teachers(config, config.teachers):
        objective = TeacherObjective(
            settings=teacher.training,
            temperature=cast(DistillationConfig, config.algorithm.loss).temperature,
            top_k=config.algorithm.top_k,
        )
        spec = rank_spec(config, teacher.model, teacher.devices, objective, total_updates=None)
        engines[teacher.name] = start_engine(f"teacher {teacher.name}", spec, resources, teacher.devices, stack=stack)
    return Teachers(engines, timer)


def start_student(
    config: DistillConfig, model: ResolvedModel, resources: ResourceManager, stack: ExitStack, *, frozen: bool = False
) -> TrainingEngine[Sequence[TeacherScored]]:
    """Start the student's ranks; frozen ones only measure."""
    devices = config.resources.device_mapping.training
    objective = DistillationObjective(
        settings=config.training, loss_config=config.algorithm.loss, packing=config.data.packing
    )
    spec = rank_spec(config, model, devices, objective, total_updates=None if frozen else config.total_steps)
    return start_engine("training", spec, resources, devices, stack=stack)


def start_student_and_teachers(
    config: DistillConfig,
    resources: ResourceManager,
    stack: ExitStack,
    timer: Timer = lambda name: nullcontext(),
    *,
    frozen: bool = False,
) -> tuple[TrainingEngine[Sequence[TeacherScored]], Teachers]:
    """Start student and teachers; a frozen student is only measured."""
    student = start_student(config, resolve_model(config.model), resources, stack, frozen=frozen)
    teachers = start_teachers(config, resources, stack, timer)
    if config.algorithm.top_k is None:
        teachers.send_projections(student)
    return student, teachers


def _load(config: DistillConfig, data: DistillationDataConfig, section: str) -> SampleSet[DistillationSample]:
    loaded = load_conversations(data, load_renderer(config.model), section=section)
    names = [teacher_of(config.teachers, source.domain_label) for source in data.sources]
    return SampleSet(
        sources=tuple(
            SampleSource(
                name=source.name,
                key=source.key,
                weight=source.weight,
                samples=tuple(DistillationSample(sample=sample, teacher=name) for sample in source.samples),
                report=source.report,
            )
            for source, name in zip(loaded.sources, names, strict=True)
        )
    )
