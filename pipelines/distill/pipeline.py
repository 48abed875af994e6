"""Distillation on given data: a student follows what its teachers predict at each token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from roll_like.builtin.pipelines.distill.check import distillation_findings
from roll_like.builtin.pipelines.distill.config import DistillConfig
from roll_like.builtin.pipelines.distill.objective import TeacherScored
from roll_like.builtin.pipelines.distill.teachers import (
    DistillationSample,
    Teachers,
    distillation_evaluator,
    samples_of,
    start_student_and_teachers,
)
from roll_like.check import Report, check_run
from roll_like.cluster import Cluster, ResourceManager
from roll_like.data.order import Order
from roll_like.data.samples import SampleSet
from roll_like.offline.check import offline_plan
from roll_like.offline.evaluator import OfflineEvaluator
from roll_like.offline.pipeline import OfflinePipeline
from roll_like.offline.samples import samples_metrics
from roll_like.run.state import RunContext
from roll_like.training.engine import TrainingEngine
from roll_like.training.rank import TrainingRank


@dataclass(kw_only=True)
class DistillPipeline(OfflinePipeline[DistillConfig]):
    """The parts of a distillation run."""

    samples: Order[DistillationSample]
    teachers: Teachers
    student: TrainingEngine[Sequence[TeacherScored]]

    def run(self) -> None:
        """Train to the end: each step brings the student nearer to what its teachers predict for the step's samples."""
        state = self.run_state
        state.evaluate(self.evaluator)
        for step in state.steps():
            scored = self.teachers.distributions(self.samples.take(self.config.data.samples_per_step))
            with state.timer("train"):
                report = self.student.train_step(scored)
            samples = [sample for part in scored for sample in part.samples]
            state.log(step, report, samples_metrics(samples))
            state.evaluate(self.evaluator)

    @classmethod
    def build(cls, config: DistillConfig, run: RunContext) -> Self:
        """Start student and teachers and put the parts together, where a resumed run left them."""
        samples = cls.read(config, run).order(seed=config.seed, shuffle=config.data.shuffle)
        run.state.metrics.phase("starting workers")
        student, teachers = start_student_and_teachers(config, run.resources, run.stack, run.state.timer)
        evaluator = distillation_evaluator(config, student, teachers)
        run.state.keep([student], lessons=samples)  # the name in checkpoints
        return cls(
            config=config,
            run_state=run.state,
            samples=samples,
            teachers=teachers,
            student=student,
            evaluator=evaluator,
        )

    @classmethod
    def load(cls, config: DistillConfig) -> SampleSet[DistillationSample]:
        """Return the conversations that are trained on, each with its teacher."""
        return samples_of(config)

    @classmethod
    def check(cls, config: DistillConfig) -> Report:
        """Return every problem that can be known before a run, and its plan."""
        return check_run(config, offline_plan, distillation_findings)

    @classmethod
    def start_evaluator(cls, config: DistillConfig, resources: ResourceManager, stack: ExitStack) -> OfflineEvaluator:
        """Start a student that only computes log-probabilities, and its teachers."""
        student, teachers = start_student_and_teachers(config, resources, stack, frozen=True)
        evaluator = distillation_evaluator(config, student, teachers)
        assert evaluator is not None, "there is an evaluation"
        return evaluator

    @property
    def trained(self) -> Cluster[TrainingRank]:
        """The student's ranks."""
        return self.student.cluster
