"""Distillation on given data: a student follows what its teachers predict at each token."""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from roll_like.builtin.pipelines.distill.config import DistillConfig
from roll_like.builtin.pipelines.distill.data import TaughtSample, load_samples_of_teachers
from roll_like.builtin.pipelines.distill.objective import DistillationObjective, TeacherTargets
from roll_like.builtin.pipelines.distill.teachers import Teachers, start_teachers
from roll_like.check import Finding, Report
from roll_like.check.hub import localised
from roll_like.check.teachers import teacher_findings
from roll_like.cluster import ResourceManager
from roll_like.config.teachers import teacher_key, teacher_model
from roll_like.data.chat import Renderer
from roll_like.data.samples import SampleSet
from roll_like.models.shape import ModelShape
from roll_like.offline.pipeline import Findings, OfflinePipeline
from roll_like.run.evaluation import Evaluation
from roll_like.run.state import RunContext
from roll_like.training.engine import TrainingEngine
from roll_like.values import Last, Metric, Metrics


@dataclass(kw_only=True)
class DistillPipeline(OfflinePipeline[DistillConfig, TaughtSample, Sequence[TeacherTargets]]):
    """Given conversations; each step brings the student nearer to what its teachers predict for them."""

    position: ClassVar[str] = "lessons"

    teachers: Teachers

    @classmethod
    def build(cls, config: DistillConfig, run: RunContext) -> Self:
        """Start student and teachers and put the parts together, where a resumed run left them."""
        data = cls.read(config, run)
        run.state.metrics.phase("starting workers")
        student = cls.start_trainer(config, run.resources, run.stack)
        teachers = start_teachers(config, student, run.resources, run.stack, run.state.timer)
        evaluator = cls._evaluation(config, student, teachers)
        return cls.resumed(config, run, data, student, evaluator, teachers=teachers)

    @classmethod
    def load(cls, config: DistillConfig, rows: Any, renderer: Renderer, section: str) -> SampleSet[TaughtSample]:
        """Return the conversations of `rows`, each with its teacher."""
        return load_samples_of_teachers(config, rows, renderer, section)

    @classmethod
    def findings(
        cls, config: DistillConfig, renderer: Renderer | None, shape: ModelShape | None, report: Report
    ) -> Findings[TaughtSample]:
        """Yield what is wrong with teachers and conversations; tell the report what became of rows, and the steps."""
        found = [*teacher_findings(config, config.teachers, renderer, shape, top_k=config.algorithm.top_k)]
        yield from found
        compared = yield from with_teachers_here(config, [each.key for each in found if each.level == "error"])
        return (yield from super().findings(compared, renderer, shape, report))

    @classmethod
    def objective(cls, config: DistillConfig) -> DistillationObjective:
        """Return the distillation loss."""
        return DistillationObjective(
            settings=config.training, loss_config=config.algorithm.loss, packing=config.data.packing
        )

    def batch(self, samples: Sequence[TaughtSample]) -> Sequence[TeacherTargets]:
        """Return a step's samples by teacher, with what each predicts at their tokens."""
        return self.teachers(samples)

    @classmethod
    def start_evaluator(cls, config: DistillConfig, resources: ResourceManager, stack: ExitStack) -> Evaluation | None:
        """Start a student that only computes, and its teachers."""
        student = cls.start_trainer(config, resources, stack, frozen=True)
        return cls._evaluation(config, student, start_teachers(config, student, resources, stack))

    @classmethod
    def _evaluation(
        cls, config: DistillConfig, student: TrainingEngine[Sequence[TeacherTargets]], teachers: Teachers
    ) -> Evaluation | None:
        """Return what measures how near the student is to its teachers; None without an evaluation.

        Teachers do not change: they compute their distributions once.
        """
        loaded = cls.evaluated_on(config)
        if config.evaluation is None or loaded is None:
            return None
        scored: list[TeacherTargets] = []

        def measure() -> tuple[Metrics, None]:
            if not scored:
                scored.extend(teachers(loaded.samples))
            measured = student.measure(scored)
            metrics: dict[str, Metric] = {
                f"eval/{name.split('/', 1)[1]}": measured[name] for name in measured if name.startswith("distill/")
            }
            metrics["eval/loss"] = measured["train/loss"]
            metrics["eval/perplexity"] = Last(math.exp(min(metrics["eval/cross_entropy"].value, 700.0)))
            return metrics, None

        return Evaluation(schedule=config.evaluation, measure=measure)


def with_teachers_here(config: DistillConfig, wrong: Collection[str]) -> Generator[Finding, None, DistillConfig]:
    """Yield which teachers' tokens the texts are not compared with; return a configuration that compares the others.

    Nothing is downloaded.

    Args:
        wrong: Keys with an error, which says enough.
    """
    teachers = {}
    for name, teacher in config.teachers.items():
        key, model = teacher_key(name), None
        if teacher.other_tokenizer:
            model = localised(teacher_model(config.model, teacher), key, []) if key not in wrong else None
            if model is None and key not in wrong:
                yield Finding.note(
                    key,
                    "that its chat template trains the same texts is not checked, because its tokenizer is not on this "
                    "machine; it is when the run reads its data",
                )
        changes = {"other_tokenizer": False} if model is None else {"path": model.path}
        teachers[name] = teacher.model_copy(update=changes)
    return config.model_copy(update={"teachers": teachers})
