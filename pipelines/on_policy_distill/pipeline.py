"""On-policy distillation: the student samples, teachers score its tokens, that moves it; beside rewards, if any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from roll_like.algorithms.kl import KLController
from roll_like.builtin.pipelines.on_policy_distill.config import OnPolicyDistillConfig
from roll_like.builtin.pipelines.on_policy_distill.demonstrations import Demonstrations
from roll_like.builtin.pipelines.on_policy_distill.objective import TaughtPolicyObjective
from roll_like.builtin.pipelines.on_policy_distill.teacher_scoring import TeacherWorkers, without_rewards
from roll_like.check import Finding, Report
from roll_like.check.data import prompt_findings
from roll_like.check.domains import taught_domains
from roll_like.check.teachers import teacher_findings
from roll_like.data.chat import Renderer
from roll_like.data.tasks import TaskSource
from roll_like.policy_gradient.advantages import Assigned
from roll_like.policy_gradient.objective import PolicyObjective
from roll_like.policy_gradient.pipeline import PolicyGradientPipeline
from roll_like.policy_gradient.start import policy_settings
from roll_like.rollout.collection import Collected
from roll_like.run.state import RunContext
from roll_like.types import Group, Scored
from roll_like.values import Metrics


@dataclass(kw_only=True)
class OnPolicyDistillPipeline(PolicyGradientPipeline[OnPolicyDistillConfig]):
    """The student's answers, scored by teachers and rewards; `PolicyGradientPipeline.run` is the algorithm."""

    auxiliary_role = TeacherWorkers

    auxiliary: TeacherWorkers

    @classmethod
    def build(cls, config: OnPolicyDistillConfig, run: RunContext) -> Self:
        built = super().build(config.with_teacher_in_loss(), run)
        if not config.teachers:
            built.auxiliary.scorer.policy = built.workers.actor
            built.auxiliary.scorer.own_weights = built.workers.copies.get("teacher")
        return built

    @classmethod
    def objective(cls, config: OnPolicyDistillConfig, kl: KLController) -> PolicyObjective:
        """Return what the policy learns: the policy gradient, and a divergence of distributions where configured."""
        signal = config.distillation
        if signal.signal == "sampled_token":
            return super().objective(config, kl)
        return TaughtPolicyObjective(
            **policy_settings(config, kl),
            **signal.top_k_settings,
            loss_config=signal.loss,
            weight=signal.weight,
            rewarded=signal.reward_weight > 0,
        )

    @classmethod
    def findings(cls, config: OnPolicyDistillConfig, renderer: Renderer | None, report: Report) -> Iterator[Finding]:
        """Yield what is wrong with prompts, rewards and teachers."""
        shown = config.distillation.demonstration
        find = None if shown is None or renderer is None else Demonstrations(renderer, shown).findings
        # a policy that teaches itself scores no answers of an evaluation
        scored = ("data", "evaluation") if config.teachers else ("data",)

        def further(tasks: Mapping[str, Sequence[TaskSource]]) -> Iterator[Finding]:
            if find is not None:
                yield from find({section: tasks[section] for section in scored})
            if config.teachers:
                yield from taught_domains(config.teachers, config.sources, [*tasks["data"], *tasks["evaluation"]])

        yield from prompt_findings(config, renderer, report, further)
        signal = config.distillation
        top_k = 1 if signal.signal == "sampled_token" else signal.top_k
        yield from teacher_findings(
            config, config.teachers, renderer, None, top_k=top_k, top_k_key="distillation.top_k"
        )

    def assign(self, groups: Sequence[Group[Scored]]) -> Assigned:
        """Return the samples of a step's groups; the teachers add to the advantages of rewards, or to the loss."""
        return self.auxiliary.scorer.score(super().assign(groups), groups)

    def rollout_metrics(self, collected: Collected, policy_version: int) -> Metrics:
        """Return what a step's samples were like, without rewards where there are none."""
        metrics = super().rollout_metrics(collected, policy_version)
        return metrics if self.config.rewards.use else without_rewards(metrics)
