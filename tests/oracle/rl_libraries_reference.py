"""torchrl 0.14.1 and stable-baselines3 2.9.2.

Their value functions are of reinforcement learning at large and know no masks: they are given each
sample's actions, the tokens that the policy sampled, as one episode, all episodes one after the
other. torchrl's losses for language models take padded tensors and a mask.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Discrete
from oracle_imports import references
from torch import Tensor

with references():
    from stable_baselines3.common.buffers import RolloutBuffer
    from stable_baselines3.common.utils import explained_variance
    from tensordict import TensorDict
    from torchrl.objectives.llm.grpo import CISPOLoss, GRPOLoss
    from torchrl.objectives.utils import _clip_value_loss, distance_loss
    from torchrl.objectives.value import functional

__all__ = [
    "explained_variance",
    "stable_baselines3_gae",
    "torchrl_cispo_loss",
    "torchrl_effective_sample_size",
    "torchrl_gae",
    "torchrl_grpo_loss",
    "torchrl_reward_to_go",
    "torchrl_td_lambda_minus_value",
    "torchrl_value_loss",
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


class _Given:
    """In place of a model: log-probabilities that are already there, and the mask of a distribution."""

    def _get_cur_log_prob(self, tensordict: Any) -> tuple[Tensor, Any, bool]:
        return tensordict["current"], SimpleNamespace(mask=tensordict["mask"]), False


class _GRPO(_Given, GRPOLoss):
    pass


class _CISPO(_Given, CISPOLoss):
    pass


def _llm_loss(kind: Any, batch: Any, current_BT: Tensor, previous_BT: Tensor, **settings: Any) -> Any:
    loss = kind(None, entropy_bonus=False, **settings)
    tokens = {
        "current": current_BT,
        "mask": batch.sampled,
        "advantage": batch.advantages_BT[..., None],
        "tokens": {"full": torch.zeros_like(batch.mask_BT, dtype=torch.int64)},
        "log_probs": {"full": previous_BT},
    }
    return loss(TensorDict(tokens, batch_size=len(batch.mask_BT)))


def torchrl_grpo_loss(batch: Any, *, clip: tuple[float, float], aggregation: str, kind: Any = _GRPO) -> Any:
    """Loss and gradient [B, T] of `GRPOLoss`, from log-probabilities on."""
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    loss = _llm_loss(kind, batch, logprobs_BT, batch.old_BT, clip_epsilon=clip, aggregation=aggregation).loss_objective
    return loss.sum(), torch.autograd.grad(loss.sum(), logprobs_BT)[0]


def torchrl_cispo_loss(batch: Any, *, clip: tuple[float, float]) -> Any:
    """The same of `CISPOLoss`."""
    return torchrl_grpo_loss(batch, clip=clip, aggregation="token_mean", kind=_CISPO)


def torchrl_effective_sample_size(batch: Any) -> float:
    """Of the ratios of old to behaviour policy, as a share of the tokens."""
    return float(_llm_loss(_GRPO, batch, batch.old_BT, batch.behaviour_BT).ESS)


def torchrl_value_loss(batch: Any, clip: float) -> tuple[Tensor, Tensor]:
    """Half of the clipped squared error, as a mean; values and returns as `test_oracle_shaping` takes them."""
    values_BT = batch.logprobs_BT.clone().requires_grad_()
    values_N, old_N, returns_N = (array[batch.sampled] for array in (values_BT, batch.old_BT, batch.reference_BT))
    plain_N = distance_loss(returns_N, values_N, loss_function="l2")
    losses_N, _ = _clip_value_loss(old_N, values_N, torch.tensor(clip), returns_N, plain_N, "l2")
    loss = 0.5 * losses_N.mean()
    return loss, torch.autograd.grad(loss, values_BT)[0]
