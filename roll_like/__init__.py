"""Reinforcement learning on language models with Ray, vLLM and DeepSpeed."""

from roll_like.rewards.base import Completion, Outcome, Reward, RewardCase, RewardConfig, Verdict, register_reward
from roll_like.rewards.check import RewardReport, check_reward

__all__ = [
    "Completion",
    "Outcome",
    "Reward",
    "RewardCase",
    "RewardConfig",
    "RewardReport",
    "Verdict",
    "check_reward",
    "register_reward",
]
