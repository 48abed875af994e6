"""Distillation on given data: a student follows what its teachers would say at each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from roll_like.builtin.pipelines.distill.config import DistillConfig
from roll_like.builtin.pipelines.distill.objective import Taught
from roll_like.builtin.pipelines.distill.teachers import (
    DistillationEvaluator,
    Lesson,
    Teachers,
    evaluate_student,
    lessons_of,
    start_lessons,
)
from roll_like.builtin.pipelines.sft.examples import samples_metrics, warn_of_rows
from roll_like.check import Report, check_run, refuse_errors
from roll_like.data.order import Order
from roll_like.metrics.summary import Summary
from roll_like.offline.check import given_plan, lesson_findings
from roll_like.policy_gradient.workers import export_model
from roll_like.registry import PIPELINES
from roll_like.run.launch import RunContext, RunResult, RunState, launch
from roll_like.training.engine import TrainingEngine


@PIPELINES.register("distill")
@dataclass(kw_only=True)
class DistillPipeline:
    """The parts of a distillation run. `run` is the algorithm; everything else is a part's business."""

    Config: ClassVar[type[DistillConfig]] = DistillConfig

    config: DistillConfig
    run_state: RunState
    lessons: Order[Lesson]
    teachers: Teachers
    student: TrainingEngine[Sequence[Taught]]
    evaluator: DistillationEvaluator | None

    def run(self) -> None:
        """Train to the end: each step brings the student nearer to what its teachers say of the step's samples."""
        state = self.run_state
        state.evaluate(self.evaluator)
        for step in state.steps():
            taught = self.teachers.teach(self.lessons.take(self.config.data.samples_per_step))
            with state.timer("train"):
                report = self.student.train_step(taught)
            samples = [sample for lesson in taught for sample in lesson.samples]
            state.log(step, report, samples_metrics(samples))
            state.evaluate(self.evaluator)

    @classmethod
    def build(cls, config: DistillConfig, run: RunContext) -> Self:
        """Start student and teachers and put the parts together, where a resumed run left them."""
        run.state.metrics.phase("reading the data")
        data = lessons_of(config)
        warn_of_rows(run.state.metrics, data.report)
        lessons = data.order(seed=config.seed, shuffle=config.data.shuffle)
        run.state.metrics.phase("starting workers")
        student, teachers, evaluator = start_lessons(config, run.resources, run.stack, run.state.timer)
        run.state.keep([student], lessons=lessons)
        return cls(
            config=config,
            run_state=run.state,
            lessons=lessons,
            teachers=teachers,
            student=student,
            evaluator=evaluator,
        )

    def export(self, directory: Path, summary: Summary) -> None:
        """Write the trained model as a Hugging Face directory, with a card of the run."""
        export_model(self.student.cluster, self.config, directory, summary)

    @classmethod
    def launch(cls, config: DistillConfig, *, resume: str | None = None) -> RunResult:
        """Check the configuration, then train in a folder of its own.

        Args:
            config: The validated configuration.
            resume: None starts anew; "" continues the latest run of this name; else the run to continue.
        """
        refuse_errors(cls.check(config))
        lasting = config if config.epochs is None else config.lasting(len(lessons_of(config)))
        return launch(lasting, cls.build, resume=resume)

    @classmethod
    def check(cls, config: DistillConfig) -> Report:
        """Return every problem that can be known before a run, and its plan."""
        return check_run(config, given_plan, lesson_findings)

    @classmethod
    def evaluate(cls, config: DistillConfig, model: str) -> dict[str, float]:
        """Measure a model by the evaluation's conversations, against the teachers.

        Raises:
            ConfigError: The configuration has no `evaluation` section.
        """
        return evaluate_student(config, model)
