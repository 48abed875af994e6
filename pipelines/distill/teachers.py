"""What distillation runs are made of: lessons, the teachers that are asked about them, the evaluation, the student."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from roll_like.algorithms.distillation import DistillationConfig
from roll_like.builtin.pipelines.distill.config import DistillationDataConfig, DistillConfig
from roll_like.builtin.pipelines.distill.objective import (
    DistillationObjective,
    Taught,
    TeacherObjective,
    introduce,
    teacher_answers,
)
from roll_like.builtin.pipelines.sft.examples import training_samples
from roll_like.cluster import ResourceManager
from roll_like.config.teachers import teacher_of
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.data.samples import ConversationSample, SampleSet, SampleSource
from roll_like.models.load import ResolvedModel, load_tokenizer, resolve_model
from roll_like.models.teachers import planned_teachers
from roll_like.run.launch import measuring
from roll_like.training.engine import Timer, TrainingEngine
from roll_like.training.start import rank_spec, start_engine
from roll_like.values import Last, Metric, reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A conversation with the name of the teacher that is asked about it."""

    sample: ConversationSample
    teacher: str

    @property
    def sequences(self) -> tuple[ConversationSample, ...]:
        """Its sequence of tokens."""
        return (self.sample,)

    def content(self) -> bytes:
        """Return everything that training sees of it, for fingerprints."""
        return self.sample.content() + self.teacher.encode()


def lessons_of(config: DistillConfig) -> SampleSet[Lesson]:
    """Return what is trained on."""
    return _lessons(config, config.data, "data")


class Teachers:
    """The models that students learn from.

    Args:
        engines: Their ranks, by name.
        timer: Times a named part of a step.
    """

    def __init__(self, engines: Mapping[str, TrainingEngine[Any]], timer: Timer = lambda name: nullcontext()) -> None:
        self._engines = engines
        self._timer = timer

    def teach(self, lessons: Sequence[Lesson]) -> list[Taught]:
        """Return the lessons' samples, by teacher, with what each says of them."""
        taught = []
        with self._timer("teach"):
            for name, engine in self._engines.items():
                samples = training_samples([lesson.sample for lesson in lessons if lesson.teacher == name])
                if samples:
                    taught.append(Taught(teacher=name, samples=samples, answers=teacher_answers(engine, samples)))
        return taught

    def introduce(self, student: TrainingEngine[Sequence[Taught]]) -> None:
        """Give the student the teachers' output projections."""
        introduce(self._engines, student)


class DistillationEvaluator:
    """Measures how near the student is to its teachers on conversations that it is not trained on.

    Teachers do not change: what they say is asked once.

    Args:
        config: The run's configuration; has an `evaluation` section.
        student: What is measured.
        teachers: What it is compared with.
    """

    def __init__(self, config: DistillConfig, student: TrainingEngine[Sequence[Taught]], teachers: Teachers) -> None:
        assert config.evaluation is not None, "the caller asked"
        self._schedule = config.evaluation
        self._student = student
        self._teachers = teachers
        data = config.data.reading(config.evaluation.sources)
        self._lessons = _lessons(config, data, "evaluation").samples
        self._taught: Sequence[Taught] = ()

    def due(self, finished: int, total: int) -> bool:
        """Return whether to evaluate after `finished` of `total` steps."""
        return self._schedule.due(finished, total)

    def evaluate(self) -> tuple[Mapping[str, Metric], None]:
        """Return `eval/loss`, `eval/kl`, `eval/top1_agreement`, `eval/perplexity` and other figures of all targets."""
        self._taught = self._taught or self._teachers.teach(self._lessons)
        measured = self._student.measure(self._taught)
        figures = {f"eval/{name.split('/', 1)[1]}": measured[name] for name in measured if name.startswith("distill/")}
        figures["eval/loss"] = measured["train/loss"]
        figures["eval/perplexity"] = Last(math.exp(min(figures["eval/cross_entropy"].value, 700.0)))
        return figures, None

    def score(self, values: Mapping[str, float]) -> float | None:
        """Return what the best checkpoint has most of: nearness."""
        return -values["eval/loss"] if "eval/loss" in values else None


def start_teachers(
    config: DistillConfig, resources: ResourceManager, stack: ExitStack, timer: Timer = lambda name: nullcontext()
) -> Teachers:
    """Start the ranks of every teacher.

    Raises:
        ConfigError: A teacher has another tokenizer than the student.
        EngineError: A rank did not start.
    """
    engines = {}
    for teacher in planned_teachers(config):
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
) -> TrainingEngine[Sequence[Taught]]:
    """Start the student's ranks; frozen ones only measure."""
    devices = config.resources.device_mapping.training
    objective = DistillationObjective(
        settings=config.training, loss_config=config.algorithm.loss, packing=config.data.packing
    )
    spec = rank_spec(config, model, devices, objective, total_updates=None if frozen else config.total_steps)
    return start_engine("training", spec, resources, devices, stack=stack)


def start_lessons(
    config: DistillConfig,
    resources: ResourceManager,
    stack: ExitStack,
    timer: Timer = lambda name: nullcontext(),
    *,
    frozen: bool = False,
) -> tuple[TrainingEngine[Sequence[Taught]], Teachers, DistillationEvaluator | None]:
    """Start student and teachers, and make what measures the student; a frozen one is only measured."""
    student = start_student(config, resolve_model(config.model), resources, stack, frozen=frozen)
    teachers = start_teachers(config, resources, stack, timer)
    if config.algorithm.top_k is None:
        teachers.introduce(student)
    evaluator = None if config.evaluation is None else DistillationEvaluator(config, student, teachers)
    return student, teachers, evaluator


def evaluate_student(config: DistillConfig, model_path: str) -> dict[str, float]:
    """Measure a model by the configuration's evaluation, against its teachers, without training.

    Raises:
        ConfigError: The configuration has no `evaluation` section.
    """
    config = config.evaluating(model_path)
    with measuring(config) as (resources, stack):
        _, _, evaluator = start_lessons(config, resources, stack, frozen=True)
        assert evaluator is not None, "`evaluating` has refused that"
        metrics, _ = evaluator.evaluate()
    return reduce(metrics)


def _lessons(config: DistillConfig, data: DistillationDataConfig, section: str) -> SampleSet[Lesson]:
    loaded = load_conversations(data, Renderer(load_tokenizer(config.model)), section=section)
    names = [teacher_of(config.teachers, source.domain_label) for source in data.sources]
    return SampleSet(
        sources=tuple(
            SampleSource(
                name=source.name,
                key=source.key,
                weight=source.weight,
                samples=tuple(Lesson(sample=sample, teacher=name) for sample in source.samples),
                report=source.report,
            )
            for source, name in zip(loaded.sources, names, strict=True)
        )
    )
