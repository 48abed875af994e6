"""Advantage estimators: how much better each sampled token did than a baseline."""

from roll_like.algorithms.advantages import groups, process, returns, roles, tokens, turns
from roll_like.algorithms.advantages.base import AdvantageEstimator, GroupEstimator, Rewards
from roll_like.algorithms.advantages.groups import grpo_advantages

__all__ = [
    "AdvantageEstimator",
    "GroupEstimator",
    "Rewards",
    "groups",
    "grpo_advantages",
    "process",
    "returns",
    "roles",
    "tokens",
    "turns",
]
