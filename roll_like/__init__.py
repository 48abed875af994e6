"""Reinforcement learning on language models with Ray, vLLM and DeepSpeed."""

from roll_like.rewards.base import Completion, Outcome, Reward, RewardCase, RewardConfig, Verdict, register_reward

__all__ = ["Completion", "Outcome", "Reward", "RewardCase", "RewardConfig", "Verdict", "register_reward"]
