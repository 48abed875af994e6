"""Estimators that keep a baseline for each role, in episodes of several agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field

from roll_like.algorithms.advantages.base import AdvantageEstimator, Groups, TokenValues, penalised_rewards
from roll_like.config.base import PluginConfig
from roll_like.registry import ADVANTAGES
from roll_like.types import FloatArray
from roll_like.values import Last, Metrics


@ADVANTAGES.register("rae")
class RoleConditioned(AdvantageEstimator):
    """`rae`: reward minus a running mean of the rewards of the same role in the same game, without groups.

    Role-conditioned advantage estimation of SPIRAL (Liu et al. 2025, arXiv:2506.24119, section 3.3): for each sample in
    turn, b ← α·b + (1 − α)·R, then A = R − b, with b = 0 at first. A game is an entry of `environments`, a role an
    agent of its episodes. All tokens of a sample get the same advantage; the sum of its penalties is subtracted from
    its reward first. (A mean from before R would give A/α.)
    """

    class Config(PluginConfig):
        type: Literal["rae"] = "rae"
        decay: float = Field(
            default=0.95, gt=0, lt=1, description="α, how much of a role's mean each further sample leaves."
        )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._baselines: dict[str, dict[str, float]] = {}

    def advantages(self, groups: Groups, token_penalties: TokenValues) -> TokenValues:
        arrays: list[FloatArray] = []
        for group, rewards in penalised_rewards(groups, token_penalties):
            roles = self._baselines.setdefault(group.task.source, {})
            for sample, reward in zip(group.samples, rewards.tolist(), strict=True):
                before = roles.get(sample.agent, 0.0)
                after = roles[sample.agent] = self.config.decay * before + (1 - self.config.decay) * reward
                arrays.append(np.full(len(sample.trajectory.token_ids), reward - after, np.float32))
        return arrays

    def learn(self) -> Metrics:
        """Return the baselines; they follow the rewards in `assign`."""
        return {
            "/".join(filter(None, ("advantage/baseline", game, role))): Last(value)
            for game, roles in self._baselines.items()
            for role, value in roles.items()
        }

    def state(self) -> dict[str, Any]:
        return {game: dict(roles) for game, roles in self._baselines.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._baselines = {game: {role: float(value) for role, value in roles.items()} for game, roles in state.items()}
