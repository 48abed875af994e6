"""On-policy distillation: the student samples, teachers score its tokens, that moves it; beside rewards, if any."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from roll_like.builtin.pipelines.on_policy_distill.check import on_policy_distill_findings
from roll_like.builtin.pipelines.on_policy_distill.config import OnPolicyDistillConfig
from roll_like.builtin.pipelines.on_policy_distill.teacher_scoring import (
    TeacherScorer,
    TeacherWorkers,
    teacher_evaluator,
    without_rewards,
)
from roll_like.check import Report, check
from roll_like.cluster import ResourceManager
from roll_like.policy_gradient.objective import with_reference
from roll_like.policy_gradient.pipeline import PolicyGradientPipeline
from roll_like.policy_gradient.reward_workers import prompt_groups
from roll_like.policy_gradient.rollouts import start_rollouts
from roll_like.policy_gradient.workers import start_engines, start_replay, start_workers
from roll_like.rollout.metrics import rollout_metrics
from roll_like.run.state import Evaluates, RunContext


@dataclass(kw_only=True)
class OnPolicyDistillPipeline(PolicyGradientPipeline[OnPolicyDistillConfig]):
    """The parts of an on-policy distillation."""

    teachers: TeacherScorer

    def run(self) -> None:
        """Train to the end: the student samples, its teachers say how likely they find that, and it follows them."""
        state, workers = self.run_state, self.workers
        has_rewards = bool(self.config.rewards.use)
        workers.push()
        state.evaluate(self.evaluator)
        for step in state.steps():
            with workers.generating():
                collected = self.rollouts.collect(step)
            with workers.training():
                assigned = workers.advantages.assign(collected.groups)
                scored = self.teachers.score(assigned.samples, collected.groups)
                values = self.training_values(collected.groups, assigned.trained, scored.samples)
                report = workers.actor.train_step(with_reference(scored.samples, workers.kl_reference))
            sync = workers.push()
            rollout = rollout_metrics(collected, sync.version - 1)
            metrics = rollout if has_rewards else without_rewards(rollout)
            state.log(step, metrics, assigned.metrics, scored.metrics, report, sync.metrics)
            state.keep_rollouts(collected, values)
            state.evaluate(self.evaluator)

    @classmethod
    def build(cls, config: OnPolicyDistillConfig, run: RunContext) -> Self:
        """Start the workers and put the parts together, where a resumed run left them."""
        teachers = TeacherWorkers(config, run.resources, run.stack, run.state.timer)
        if config.replay is not None:
            workers, replayed = start_replay(
                config.with_teacher_in_loss(), run, teachers, difficulty=config.domain_difficulty
            )
            return cls(
                config=config,
                run_state=run.state,
                workers=workers,
                teachers=teachers.scorer,
                rollouts=replayed,
                evaluator=None,
            )
        workers = start_workers(config.with_teacher_in_loss(), run, teachers, difficulty=config.domain_difficulty)
        teachers.share(workers.gpu_sharing)
        scheduler = teachers.scheduler(workers.inference)
        source = prompt_groups(config, scheduler, run.state.metrics.warn)
        rollouts = start_rollouts(config, run, workers, source)
        run.state.keep([*workers.saved_engines, rollouts], rollouts=rollouts, advantages=workers.advantages)
        return cls(
            config=config,
            run_state=run.state,
            workers=workers,
            teachers=teachers.scorer,
            rollouts=rollouts,
            evaluator=teacher_evaluator(config, teachers, scheduler, workers.runner, workers.progress),
        )

    @classmethod
    def check(cls, config: OnPolicyDistillConfig) -> Report:
        """Return every problem that can be known before a run, and its plan."""
        return check(config, on_policy_distill_findings)

    @classmethod
    def start_evaluator(
        cls, config: OnPolicyDistillConfig, resources: ResourceManager, stack: ExitStack
    ) -> Evaluates | None:
        """Start engines, teachers and reward workers."""
        teachers = TeacherWorkers(config, resources, stack)
        inference, runner = start_engines(config, resources, stack, teachers)
        return teacher_evaluator(config, teachers, teachers.scheduler(inference), runner)
