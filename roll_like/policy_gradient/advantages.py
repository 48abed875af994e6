"""Advantages of a step: shaping, KL in the reward, the estimator, masks, and what the estimator's critic learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roll_like.algorithms.advantages import AdvantageEstimator
from roll_like.algorithms.advantages.base import by_parts, flatten, joined, policy_samples
from roll_like.algorithms.kl import KLController, token_penalties
from roll_like.algorithms.shaping import RewardShaping, shape_advantages, trained_on
from roll_like.config.algorithm import AlgorithmConfig, DifficultyConfig
from roll_like.training.engine import Reference
from roll_like.types import FloatArray, Group, PolicySample, Scored, by_agent
from roll_like.values import Last, Mean, Metric, Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """What a step trains on.

    Attributes:
        samples: With advantages; without what masks leave out, and none while a critic warms up.
        metrics: Figures of shaping, penalties, masks, advantages and the critic.
        trained: Whether each sample of the groups is among them, in the order of `flatten(whole groups)`.
    """

    samples: Sequence[PolicySample]
    metrics: Metrics
    trained: list[bool]


class Advantages:
    """Turns scored groups into samples to train on.

    Args:
        estimator: The registered estimator, with its critic if it needs one.
        algorithm: The `algorithm` section.
        kl: Coefficient of the KL penalty. With `kl.use: reward` the estimator gets it, token by token, and subtracts it
            from the rewards (`penalised_rewards` and `action_rewards` in `algorithms/advantages/base.py`).
        max_response_tokens: `rollout.max_response_tokens`.
        warmup_steps: Steps in which only the critic learns.
        difficulty: Bands of domains that have their own; the others have that of `algorithm.mask`.
    """

    def __init__(
        self,
        estimator: AdvantageEstimator,
        algorithm: AlgorithmConfig,
        kl: KLController,
        reference: Reference[PolicySample] | None,
        *,
        max_response_tokens: int,
        warmup_steps: int = 0,
        difficulty: Mapping[str, DifficultyConfig] | None = None,
    ) -> None:
        self._estimator = estimator
        self._algorithm = algorithm
        self._kl = kl
        self._reference = reference
        self._warmup_steps = warmup_steps
        self._difficulty = difficulty or {}
        self._steps = 0
        self._shaping = RewardShaping(
            algorithm.reward_shaping, max_response_tokens=max_response_tokens, uses_steps=estimator.uses_steps
        )

    def assign(self, groups: Sequence[Group[Scored]]) -> Assigned:
        """Return a step's samples, each with its advantages; the estimator's critic has learned from them.

        Agents of an episode are compared with the same agent in the group's other episodes, and off-policy answers with
        the samples of their group.

        Raises:
            RewardError: A reward is not finite, or shaping does not fit scores of steps; names the task and the sample.
        """
        groups = by_agent([group.whole for group in groups])
        chosen, masked = trained_on(groups, self._algorithm.mask, self._difficulty)
        shaped, figures = self._shaping.apply(groups)
        penalties, kl_figures = self._penalties(groups)
        assigned = self._estimator.assign(shaped, penalties)
        kept = by_parts(flatten(groups), chosen)
        samples = [sample for sample, stays in zip(assigned, kept, strict=True) if stays]
        samples, advantage_figures = shape_advantages(samples, self._algorithm.advantage_shaping)
        learned = self._estimator.learn()
        self._steps += 1
        warming_up = self._steps <= self._warmup_steps
        return Assigned(
            samples=[] if warming_up else samples,
            metrics={**masked, **figures, **kl_figures, **advantage_figures, **learned},
            trained=[kept and not warming_up for kept in chosen],
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: steps so far, running statistics, KL coefficient, estimator."""
        return {
            "steps": self._steps,
            "shaping": self._shaping.state(),
            "kl": self._kl.state(),
            "estimator": {self._algorithm.advantage.type: self._estimator.state()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._steps = int(state["steps"])
        self._shaping.load_state(state["shaping"])
        self._kl.load_state(state["kl"])
        # checkpoints of earlier versions have none
        self._estimator.load_state(state.get("estimator", {}).get(self._algorithm.advantage.type, {}))

    def _penalties(self, groups: Sequence[Group[Scored]]) -> tuple[list[FloatArray] | None, dict[str, Metric]]:
        """Return each token's KL penalty, where it is part of the reward."""
        if self._algorithm.kl.use != "reward" or self._reference is None:
            return None, {}
        samples = policy_samples(groups)
        coefficient = self._kl.coefficient
        estimates = token_penalties(
            samples, self._reference.logprobs(samples), estimator=self._algorithm.kl.estimator, coefficient=1.0
        )
        estimates = joined(flatten(groups), estimates)
        tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
        mean = float(sum(estimate.sum(dtype=np.float64) for estimate in estimates)) / max(tokens, 1)
        self._kl.update(mean, len(flatten(groups)))
        figures: dict[str, Metric] = {
            "reward/kl": Mean(mean, tokens),
            "train/kl_coefficient": Last(coefficient),
        }
        return [np.float32(coefficient) * estimate for estimate in estimates], figures
