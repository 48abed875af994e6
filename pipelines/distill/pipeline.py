"""Distillation on given data: a student follows what its teachers predict at each token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from roll_like.builtin.pipelines.distill.config import DistillConfig
from roll_like.builtin.pipelines.distill.data import TaughtSample, load_samples_of_teachers
from roll_like.builtin.pipelines.distill.objective import TeacherTargets
from roll_like.builtin.pipelines.distill.teachers import (
    Student,
    Teachers,
    distillation_evaluator,
    start_student_and_teachers,
)
from roll_like.check import Report
from roll_like.check.teachers import teacher_findings
from roll_like.cluster import ResourceManager
from roll_like.data.chat import Renderer
from roll_like.data.samples import SampleSet
from roll_like.models.shape import ModelShape
from roll_like.offline.evaluator import OfflineEvaluator
from roll_like.offline.pipeline import Findings, OfflinePipeline
from roll_like.run.state import RunContext


@dataclass(kw_only=True)
class DistillPipeline(OfflinePipeline[DistillConfig, TaughtSample, Sequence[TeacherTargets]]):
    """The parts of a distillation run; the trainer is the student's."""

    teachers: Teachers

    def batch(self, samples: list[TaughtSample]) -> list[TeacherTargets]:
        """Return the samples with what their teachers predict, to which the student comes nearer."""
        return self.teachers.distributions(samples)

    @classmethod
    def build(cls, config: DistillConfig, run: RunContext) -> Self:
        """Start student and teachers and put the parts together, where a resumed run left them."""
        samples = cls.read(config, run).order(seed=config.seed, shuffle=config.data.shuffle)
        run.state.metrics.phase("starting workers")
        student, teachers = start_student_and_teachers(config, run.resources, run.stack, run.state.timer)
        run.state.keep([student], lessons=samples)  # the name in checkpoints
        return cls(
            config=config,
            run_state=run.state,
            samples=samples,
            teachers=teachers,
            trainer=student,
            evaluator=cls.evaluator_of(config, student, teachers),
        )

    @classmethod
    def load(cls, config: DistillConfig, rows: Any, renderer: Renderer, section: str) -> SampleSet[TaughtSample]:
        """Return the conversations of `rows`, each with its teacher."""
        return load_samples_of_teachers(config, rows, renderer, section)

    @classmethod
    def findings(
        cls, config: DistillConfig, renderer: Renderer | None, shape: ModelShape | None, report: Report
    ) -> Findings[TaughtSample]:
        """Yield what is wrong with teachers and conversations; tell the report what became of rows, and the steps."""
        yield from teacher_findings(config, config.teachers, renderer, shape, top_k=config.algorithm.top_k)
        return (yield from super().findings(config, renderer, shape, report))

    @classmethod
    def start_evaluator(
        cls, config: DistillConfig, resources: ResourceManager, stack: ExitStack
    ) -> OfflineEvaluator | None:
        """Start a student that only computes log-probabilities, and its teachers."""
        student, teachers = start_student_and_teachers(config, resources, stack, frozen=True)
        return cls.evaluator_of(config, student, teachers)

    @classmethod
    def evaluator_of(cls, config: DistillConfig, student: Student, teachers: Teachers) -> OfflineEvaluator | None:
        """Return what measures how near the student is to its teachers; None without an evaluation."""
        loaded = cls.evaluated_on(config)
        if config.evaluation is None or loaded is None:
            return None
        return distillation_evaluator(config.evaluation, loaded.samples, student, teachers)
