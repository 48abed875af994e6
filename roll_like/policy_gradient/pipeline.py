"""What the pipelines share that train a policy on rewards of its own samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from roll_like.config.policy_gradient import PolicyGradientConfig
from roll_like.policy_gradient.workers import Workers
from roll_like.rollout.source import RolloutSource
from roll_like.run.pipeline import Pipeline
from roll_like.run.state import Evaluates
from roll_like.training.engine import TrainingEngine

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
