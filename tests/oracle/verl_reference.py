"""verl 0.9.1: `verl.trainer.ppo.core_algos` and `rollout_corr_helper`.

Pure functions over padded tensors [B, T]; they run in float64 where they are given float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from oracle_imports import references
from torch import Tensor

with references():
    import verl.utils.torch_functional as verl_functional
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.utils.debug.metrics import pearson_correlation_coefficient
    from verl.workers.config import ActorConfig

__all__ = [
    "actor_config",
    "advantages",
    "core_algos",
    "figures",
    "pearson_correlation_coefficient",
    "policy_loss",
    "returns",
    "rollout_corr_helper",
    "whiten",
]


def advantages(name: str, step: Any, **settings: Any) -> Tensor:
    """Advantages [B, T] of one of verl's estimators."""
    return _estimate(name, step, **settings)[0]


def returns(name: str, step: Any, **settings: Any) -> Tensor:
    """The second result of the same function."""
    return _estimate(name, step, **settings)[1]


def _estimate(name: str, step: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    function = core_algos.get_adv_estimator_fn(name)
    if name == "gae":
        return function(step.rewards_BT, step.values_BT, step.mask_BT, step.gamma, step.lam)
    if name == "remax":
        baselines_B = torch.tensor([step.baselines[group] for group in step.index], dtype=torch.float64)
        return function(step.rewards_BT, baselines_B, step.mask_BT)
    if name == "reinforce_plus_plus":
        return function(step.rewards_BT, step.mask_BT, config=AlgoConfig(gamma=step.gamma))
    if name == "gdpo":
        return function(step.rewards_BT, step.mask_BT, step.index_B, **_parts(step))
    if name == "grpo_passk":
        return function(step.rewards_BT, step.mask_BT, step.index_B, config=AlgoConfig(**settings))
    return function(step.rewards_BT, step.mask_BT, step.index_B, **settings)


def _parts(step: Any) -> dict[str, Any]:
    """Each reward on its own, as verl's GDPO finds it in its batch; it reads the response's length from there."""
    rows, longest = step.mask_BT.shape
    return {
        "config": {"gdpo_reward_keys": list(step.weights), "gdpo_reward_weights": list(step.weights.values())},
        "non_tensor_batch": {name: np.array([parts[name] for parts in step.parts]) for name in step.weights},
        "batch": {"prompts": torch.zeros(rows, 1), "attention_mask": torch.ones(rows, 1 + longest, dtype=torch.int64)},
    }


def whiten(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean 0, variance 1 over the mask."""
    return verl_functional.masked_whiten(values_BT, mask_BT) * mask_BT


def actor_config(*, policy_loss: dict[str, Any] | None = None, **settings: Any) -> ActorConfig:
    """verl's configuration of an actor; what it asks for beside the loss does not enter the loss."""
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **settings)
    if policy_loss:
        object.__setattr__(config, "policy_loss", type(config.policy_loss)(**policy_loss))
    return config


def policy_loss(name: str, batch: Any, config: ActorConfig, *, how: str, weights_BT: Tensor | None = None) -> Any:
    """Loss and gradient [B, T] of one of verl's policy losses."""
    loss, gradient_BT, _ = _policy_loss(name, batch, config, how, weights_BT)
    return loss, gradient_BT


def figures(name: str, batch: Any, config: ActorConfig, names: list[str]) -> list[float]:
    """Figures that one of verl's policy losses reports."""
    found = _policy_loss(name, batch, config, "token-mean", None)[2]
    return [found[f"actor/{name}"] for name in names]


def _policy_loss(name: str, batch: Any, config: ActorConfig, how: str, weights_BT: Tensor | None) -> Any:
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    loss, found = core_algos.get_policy_loss_fn(name)(
        old_log_prob=batch.old_BT,
        log_prob=logprobs_BT,
        advantages=batch.advantages_BT,
        response_mask=batch.mask_BT,
        loss_agg_mode=how,
        config=config,
        rollout_is_weights=weights_BT,
    )
    (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
    return loss, gradient_BT, found
