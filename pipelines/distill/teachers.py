"""What distillation runs are made of: teachers, the evaluation, the student."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, TypeAlias, cast

from roll_like.algorithms.distillation.base import DistillationConfig
from roll_like.builtin.pipelines.distill.config import DistillConfig
from roll_like.builtin.pipelines.distill.data import TaughtSample
from roll_like.builtin.pipelines.distill.objective import (
    DistillationObjective,
    TeacherObjective,
    TeacherTargets,
    send_projections,
    teacher_answers,
)
from roll_like.cluster import ResourceManager
from roll_like.config.evaluation import ScheduleConfig
from roll_like.models.load import resolve_model
from roll_like.models.teachers import planned_teachers
from roll_like.offline.evaluator import OfflineEvaluator
from roll_like.offline.samples import numbered
from roll_like.training.engine import Timer, TrainingEngine
from roll_like.training.start import rank_spec, start_engine, start_trainer
from roll_like.values import Last, Metric

Student: TypeAlias = TrainingEngine[Sequence[TeacherTargets]]


class Teachers:
    """The models that students learn from.

    Args:
        engines: Their ranks, by name.
        timer: Times a named part of a step.
    """

    def __init__(self, engines: Mapping[str, TrainingEngine[Any]], timer: Timer = lambda name: nullcontext()) -> None:
        self._engines = engines
        self._timer = timer

    def distributions(self, chosen: Sequence[TaughtSample]) -> list[TeacherTargets]:
        """Return the samples by teacher, with what each predicts at their tokens."""
        scored = []
        with self._timer("teachers"):
            for name, engine in self._engines.items():
                samples = numbered([each for each in chosen if each.teacher == name])
                if samples:
                    scored.append(
                        TeacherTargets(teacher=name, samples=samples, answers=teacher_answers(engine, samples))
                    )
        return scored


def distillation_evaluator(
    schedule: ScheduleConfig, samples: Sequence[TaughtSample], student: Student, teachers: Teachers
) -> OfflineEvaluator:
    """Return what measures how near a student is to its teachers on given conversations.

    Teachers do not change: they compute their distributions once.
    """
    scored: list[TeacherTargets] = []

    def measure() -> dict[str, Metric]:
        if not scored:
            scored.extend(teachers.distributions(samples))
        measured = student.measure(scored)
        metrics = {f"eval/{name.split('/', 1)[1]}": measured[name] for name in measured if name.startswith("distill/")}
        metrics["eval/loss"] = measured["train/loss"]
        metrics["eval/perplexity"] = Last(math.exp(min(metrics["eval/cross_entropy"].value, 700.0)))
        return metrics

    return OfflineEvaluator(schedule, measure)


def start_student_and_teachers(
    config: DistillConfig,
    resources: ResourceManager,
    stack: ExitStack,
    timer: Timer = lambda name: nullcontext(),
    *,
    frozen: bool = False,
) -> tuple[Student, Teachers]:
    """Start the ranks of student and teachers; a frozen student is only measured.

    Raises:
        ConfigError: A teacher has another tokenizer than the student.
        EngineError: A rank did not start.
    """
    target = DistillationObjective(
        settings=config.training, loss_config=config.algorithm.loss, packing=config.data.packing
    )
    student = start_trainer(config, resolve_model(config.model), target, resources, stack, frozen=frozen)
    engines = {}
    for teacher in planned_teachers(config, config.teachers):
        objective = TeacherObjective(
            settings=teacher.training,
            temperature=cast(DistillationConfig, config.algorithm.loss).temperature,
            top_k=config.algorithm.top_k,
            packing=config.data.packing,
        )
        spec = rank_spec(config, teacher.model, teacher.devices, objective, total_updates=None)
        engines[teacher.name] = start_engine(f"teacher {teacher.name}", spec, resources, teacher.devices, stack=stack)
    if config.algorithm.top_k is None:
        send = partial(send_projections, engines, student)
        send()
        for engine in (student, *engines.values()):
            engine.on_rebuilt.append(send)
    return student, Teachers(engines, timer)
