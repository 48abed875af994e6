"""The teachers of distillation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias, cast

from roll_like.algorithms.distillation.base import DistillationConfig
from roll_like.builtin.pipelines.distill.answers import Answers, OwnTopKAnswers
from roll_like.builtin.pipelines.distill.config import DistillConfig
from roll_like.builtin.pipelines.distill.data import TaughtSample, TranslatedSample
from roll_like.builtin.pipelines.distill.objective import (
    TeacherObjective,
    TeacherTargets,
    send_projections,
    send_unmatched,
    teacher_answers,
)
from roll_like.builtin.pipelines.distill.other_tokens import Translation
from roll_like.cluster import ResourceManager
from roll_like.config.teachers import teacher_key, teacher_model
from roll_like.models.load import load_renderer
from roll_like.models.teachers import planned_teachers
from roll_like.offline.samples import numbered
from roll_like.training.engine import Timer, TrainingEngine, untimed
from roll_like.training.start import rank_spec, start_engine

#: Returns samples by teacher, with what each predicts at their tokens.
Teachers: TypeAlias = Callable[[Sequence[TaughtSample]], list[TeacherTargets]]


def distributions(
    engines: Mapping[str, TrainingEngine[Any]],
    translations: Mapping[str, Translation],
    timer: Timer,
    chosen: Sequence[TaughtSample],
) -> list[TeacherTargets]:
    """Return the samples by teacher, with what each predicts at their tokens.

    Args:
        engines: The teachers' ranks, by name.
        timer: Times a named part of a step.
        chosen: Samples of any of them.
    """
    scored = []
    with timer("teachers"):
        for name, engine in engines.items():
            samples = numbered([each for each in chosen if each.teacher == name])
            if samples and name in translations:
                theirs = numbered([cast(TranslatedSample, each).theirs for each in samples])
                told = cast(OwnTopKAnswers, teacher_answers(engine, theirs))
                answers: Answers = translations[name].answers(samples, theirs, told)
                scored.append(TeacherTargets(teacher=name, samples=samples, answers=answers))
            elif samples:
                scored.append(TeacherTargets(teacher=name, samples=samples, answers=teacher_answers(engine, samples)))
    return scored


def start_teachers(
    config: DistillConfig,
    student: TrainingEngine[Any],
    resources: ResourceManager,
    stack: ExitStack,
    timer: Timer = untimed,
) -> Teachers:
    """Start the ranks of the teachers of a student, whose ranks get what they need of them.

    Raises:
        ConfigError: A teacher has another tokenizer than the student.
        EngineError: A rank did not start.
    """
    engines, translations = {}, {}
    for teacher in planned_teachers(config, config.teachers):
        section = config.teachers[teacher.name]
        if section.other_tokenizer:
            theirs = load_renderer(teacher_model(config.model, section), key=teacher_key(teacher.name))
            translations[teacher.name] = Translation(load_renderer(config.model), theirs, name=teacher.name)
        objective = TeacherObjective(
            settings=teacher.training,
            temperature=cast(DistillationConfig, config.algorithm.loss).temperature,
            top_k=config.algorithm.top_k,
            packing=config.data.packing,
            tells_own=section.other_tokenizer,
        )
        spec = rank_spec(config, teacher.model, teacher.devices, objective, total_updates=None)
        engines[teacher.name] = start_engine(f"teacher {teacher.name}", spec, resources, teacher.devices, stack=stack)
    if config.algorithm.top_k is None:
        send = partial(send_projections, engines, student)
        send()
        for engine in (student, *engines.values()):
            engine.on_rebuilt.append(send)
    if cast(DistillationConfig, config.algorithm.loss).unmatched_weight:
        tell = partial(send_unmatched, translations, student)
        tell()
        student.on_rebuilt.append(tell)
    return partial(distributions, engines, translations, timer)
