"""On-policy distillation: the student samples, teachers score its tokens, that moves it; beside rewards, if any."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from roll_like.builtin.pipelines.on_policy_distill.config import OnPolicyDistillConfig
from roll_like.builtin.pipelines.on_policy_distill.teacher_scoring import (
    TutoredEvaluator,
    Tutoring,
    Tutors,
    tutored_evaluator,
    without_rewards,
)
from roll_like.check import Report, check, refuse_errors
from roll_like.check.teachers import tutored_findings
from roll_like.config.domains import domain_difficulty
from roll_like.metrics.summary import Summary
from roll_like.policy_gradient.objective import with_reference
from roll_like.policy_gradient.reward_workers import prompt_rollouts
from roll_like.policy_gradient.workers import Workers, evaluate_model, export_model, start_workers
from roll_like.registry import PIPELINES
from roll_like.rollout.metrics import rollout_metrics
from roll_like.rollout.source import RolloutSource
from roll_like.run.launch import RunContext, RunResult, RunState, launch


@PIPELINES.register("on_policy_distill")
@dataclass(kw_only=True)
class OnPolicyDistillPipeline:
    """The parts of an on-policy distillation. `run` is the algorithm; everything else is a part's business."""

    Config: ClassVar[type[OnPolicyDistillConfig]] = OnPolicyDistillConfig

    config: OnPolicyDistillConfig
    run_state: RunState
    workers: Workers
    tutors: Tutors
    rollouts: RolloutSource
    evaluator: TutoredEvaluator | None

    def run(self) -> None:
        """Train to the end: the student samples, its teachers say how likely they find that, and it follows them."""
        state, workers = self.run_state, self.workers
        judged = bool(self.config.rewards.use)
        workers.push()
        state.evaluate(self.evaluator)
        for step in state.steps():
            with workers.generating():
                collected = self.rollouts.collect(step)
            with workers.training():
                assigned = workers.advantages.assign(collected.groups)
                tutored = self.tutors.teach(assigned.samples, collected.groups)
                report = workers.actor.train_step(with_reference(tutored.samples, workers.kl_reference))
            sync = workers.push()
            rollout = rollout_metrics(collected, sync.version - 1)
            figures = rollout if judged else without_rewards(rollout)
            state.log(step, figures, assigned.metrics, tutored.metrics, report, sync.metrics)
            state.keep_rollouts(collected)
            state.evaluate(self.evaluator)

    @classmethod
    def build(cls, config: OnPolicyDistillConfig, run: RunContext) -> Self:
        """Start the workers and put the parts together, where a resumed run left them."""
        tutoring = Tutoring(config, run.resources, run.stack, run.state.timer)
        workers = start_workers(config.with_teacher_in_loss(), run, tutoring, difficulty=domain_difficulty(config))
        scheduler = tutoring.scheduler(workers.inference, workers.progress)
        rollouts = prompt_rollouts(config, scheduler, workers.runner, run.state.metrics.warn)
        run.state.keep(workers.saved_engines, rollouts=rollouts, advantages=workers.advantages)
        return cls(
            config=config,
            run_state=run.state,
            workers=workers,
            tutors=tutoring.tutors,
            rollouts=rollouts,
            evaluator=tutored_evaluator(config, tutoring, workers.inference, workers.runner),
        )

    def export(self, directory: Path, summary: Summary) -> None:
        """Write the trained model as a Hugging Face directory, with a card of the run."""
        export_model(self.workers.actor.cluster, self.config, directory, summary)

    @classmethod
    def launch(cls, config: OnPolicyDistillConfig, *, resume: str | None = None) -> RunResult:
        """Check the configuration, then train in a folder of its own.

        Args:
            config: The validated configuration.
            resume: None starts anew; "" continues the latest run of this name; else the run to continue.
        """
        refuse_errors(cls.check(config))
        return launch(config, cls.build, resume=resume)

    @classmethod
    def check(cls, config: OnPolicyDistillConfig) -> Report:
        """Return every problem that can be known before a run, and its plan."""
        return check(config, tutored_findings)

    @classmethod
    def evaluate(cls, config: OnPolicyDistillConfig, model: str) -> dict[str, float]:
        """Evaluate a model on the configuration's evaluation set, against its teachers, and return the figures."""
        return evaluate_model(config, model, Tutoring, tutored_evaluator)
