"""What the pipelines share that train a policy on rewards of its own samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from roll_like.algorithms.advantages.base import by_parts, flatten, joined, policy_samples
from roll_like.config.rollout import GroupRolloutConfig
from roll_like.config.sampling import PolicyGradientConfig
from roll_like.policy_gradient.workers import Workers
from roll_like.rollout.source import RolloutSource
from roll_like.run.pipeline import Pipeline
from roll_like.run.state import Evaluates
from roll_like.training.engine import TrainingEngine
from roll_like.types import Group, PolicySample, Scored, TrainingValues

ConfigT = TypeVar("ConfigT", bound=PolicyGradientConfig)


@dataclass(kw_only=True)
class PolicyGradientPipeline(Pipeline[ConfigT]):
    """Base of pipelines that train a policy on rewards of its own samples.

    Attributes:
        workers: Policy, engines, reference model, critic, and how advantages are computed.
        rollouts: Brings the groups of a step.
        evaluator: Measures the policy; None without an `evaluation` section.
    """

    workers: Workers
    rollouts: RolloutSource
    evaluator: Evaluates | None

    @property
    def trained(self) -> TrainingEngine[Any]:
        """The policy."""
        return self.workers.actor

    def training_values(
        self, groups: Sequence[Group[Scored]], trained: Sequence[bool], samples: Sequence[PolicySample]
    ) -> TrainingValues | None:
        """Return what training makes of each token, before the weights move; None unless it is to be written.

        Args:
            groups: What the step trains on.
            trained: Whether the update uses each of their samples.
            samples: What it learns from: the parts of those that it uses, in order.
        """
        rollout: GroupRolloutConfig = self.config.rollout
        if not rollout.save_logprobs or self.run_state.replaying:
            return None
        scored, everything, used = flatten(groups), policy_samples(groups), iter(samples)
        advantages = [
            next(used).advantages if kept else sample.advantages  # which are 0
            for sample, kept in zip(everything, by_parts(scored, trained), strict=True)
        ]
        return TrainingValues(
            logprobs=joined(scored, self.workers.actor.logprobs(everything)),
            advantages=joined(scored, advantages),
            trained=list(trained),
        )
