"""torchrl 0.14.1 and stable-baselines3 2.9.2: value functions of reinforcement learning at large.

They know no masks: they are given each sample's actions, the tokens that the policy sampled, as one
episode, all episodes one after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Discrete
from oracle_imports import references
from torch import Tensor

with references():
    from stable_baselines3.common.buffers import RolloutBuffer
    from stable_baselines3.common.utils import explained_variance
    from torchrl.objectives.value import functional

__all__ = [
    "explained_variance",
    "stable_baselines3_gae",
    "torchrl_gae",
    "torchrl_reward_to_go",
    "torchrl_td_lambda_minus_value",
]


def _episodes(step: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and ends of all actions, each [N, 1]."""
    rewards = np.concatenate([rewards for rewards, _ in step.actions])
    values = np.concatenate([values for _, values in step.actions])
    ends = np.concatenate([np.arange(len(rewards)) == len(rewards) - 1 for rewards, _ in step.actions])
    return tuple(torch.from_numpy(array)[:, None] for array in (rewards, values, ends))  # type: ignore[return-value]


def _spread(step: Any, of_actions: Tensor) -> Tensor:
    lengths = [len(rewards) for rewards, _ in step.actions]
    return step.spread([part.numpy() for part in of_actions.flatten().split(lengths)])


def torchrl_gae(step: Any) -> Tensor:
    rewards, values, ends = _episodes(step)
    following = torch.cat([values[1:], values.new_zeros(1, 1)])
    advantages, _ = functional.generalized_advantage_estimate(step.gamma, step.lam, values, following, rewards, ends)
    return _spread(step, advantages)


def torchrl_td_lambda_minus_value(step: Any) -> Tensor:
    """TD(λ) returns minus values, the same quantity by another route."""
    rewards, values, ends = _episodes(step)
    following = torch.cat([values[1:], values.new_zeros(1, 1)])
    advantages = functional.td_lambda_advantage_estimate(step.gamma, step.lam, values, following, rewards, ends)
    return _spread(step, advantages)


def torchrl_reward_to_go(step: Any) -> Tensor:
    rewards, _, ends = _episodes(step)
    return _spread(step, functional.reward2go(rewards, ends, step.gamma))


def stable_baselines3_gae(step: Any) -> Tensor:
    """In float32, the only type of its buffer."""
    rewards, values, ends = (array[:, 0].numpy() for array in _episodes(step))
    buffer = RolloutBuffer(len(rewards), Discrete(2), Discrete(2), gamma=step.gamma, gae_lambda=step.lam)
    buffer.rewards[:, 0], buffer.values[:, 0] = rewards, values
    buffer.episode_starts[1:, 0] = ends[:-1]
    buffer.compute_returns_and_advantage(torch.zeros(1), np.ones(1))
    return _spread(step, torch.from_numpy(buffer.advantages))
