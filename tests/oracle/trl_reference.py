"""TRL 1.16: `GRPOTrainer` and `RLOOTrainer`.

TRL computes losses and advantages inside of its trainers. Here a trainer is made without `__init__`,
so that there is no model, data or accelerator; what the compared methods read is set by hand, and
the few methods around them that would generate, call a model or talk to other processes give back
what a case holds. The compared code itself is TRL's, unchanged: `_compute_loss`, and
`_generate_and_score_completions` from rewards to advantages and importance ratios.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from oracle_imports import references
from torch import Tensor

with references():
    from trl.rewards import get_soft_overlong_punishment
    from trl.trainer import grpo_trainer, rloo_trainer

__all__ = [
    "get_soft_overlong_punishment",
    "grpo_advantages",
    "grpo_loss",
    "importance_ratio",
    "rloo_advantages",
    "rloo_loss",
]

#: A single process: what is gathered or reduced over processes is what this one has.
ACCELERATOR = SimpleNamespace(
    num_processes=1,
    process_index=0,
    device=torch.device("cpu"),
    gather=lambda tensor: tensor,
    reduce=lambda tensor, reduction: tensor,
)


class _Given:
    """A trainer without `__init__`, whose model gives log-probabilities that are already there."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self.accelerator = ACCELERATOR
        self.aux_loss_enabled = False
        self._metrics: Any = {"train": defaultdict(list)}

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return self.logprobs_BT, self.entropy_BT, None

    # from rewards to advantages

    def _generate(self, prompts: list[str]) -> Any:
        return self.generated

    def _calculate_rewards(self, *_: Any) -> Tensor:
        return self.rewards_BK


class _GRPO(_Given, grpo_trainer.GRPOTrainer):
    pass


class _RLOO(_Given, rloo_trainer.RLOOTrainer):
    pass


def grpo_loss(
    batch: Any,
    loss_type: str,
    *,
    level: str = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    delta: float | None = None,
    temperatures: tuple[float, float] = (1.0, 1.05),
    max_response: int = 1,
    beta: float = 0.0,
    entropy_coefficient: float = 0.0,
    ratio_BT: Tensor | None = None,
    weighted_kl: bool = False,
    vespo: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0),
    mask_threshold: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss and gradient [B, T] of `GRPOTrainer._compute_loss`.

    `ratio_BT` is vLLM's importance ratio, `vespo` k and λ of positive and of negative advantages, `mask_threshold` δ of
    the off-policy mask.
    """
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    trainer = _GRPO(
        logprobs_BT=logprobs_BT,
        entropy_BT=batch.entropy_BT,
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=clip_low,
        epsilon_high=clip_high,
        beta=beta,
        max_completion_length=max_response,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            delta=delta,
            sapo_temperature_pos=temperatures[0],
            sapo_temperature_neg=temperatures[1],
            use_bias_correction_kl=weighted_kl,
            vespo_k_pos=vespo[0],
            vespo_lambda_pos=vespo[1],
            vespo_k_neg=vespo[2],
            vespo_lambda_neg=vespo[3],
            steps_per_generation=1,
        ),
        use_vllm=ratio_BT is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=mask_threshold,
        _entropy_bonus_enabled=entropy_coefficient > 0,
        use_adaptive_entropy=False,
        entropy_coef=entropy_coefficient,
    )
    trainer.accelerator = SimpleNamespace(**vars(ACCELERATOR), sync_gradients=True)
    inputs = {
        **_completions(batch),
        "tool_mask": batch.mask_BT,
        "advantages": batch.advantages_BT if level == "token" else batch.advantages_B,
        "old_per_token_logps": batch.old_BT,
        "ref_per_token_logps": batch.reference_BT,
        "num_items_in_batch": batch.mask_BT.sum(),
        "importance_sampling_ratio": ratio_BT,
    }
    loss = trainer._compute_loss(None, inputs)
    (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
    return loss, gradient_BT


def rloo_loss(batch: Any, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Loss and gradient [B, T] of `RLOOTrainer._compute_loss`: the sequence's ratio, clipped."""
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    trainer = _RLOO(
        logprobs_BT=logprobs_BT,
        entropy_BT=batch.entropy_BT,
        epsilon_low=clip_low,
        epsilon_high=clip_high,
        model=SimpleNamespace(training=True),
    )
    inputs = {
        **_completions(batch),
        "completion_mask": batch.mask_BT,
        "advantages": batch.advantages_B,
        "old_logps": (batch.old_BT * batch.mask_BT).sum(-1),
    }
    loss = trainer._compute_loss(None, inputs)
    (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
    return loss, gradient_BT


def _completions(batch: Any) -> dict[str, Tensor]:
    """Token ids, which nothing reads; the mask of a completion ends with its last token."""
    rows, longest = batch.mask_BT.shape
    ids_BT = torch.zeros(rows, longest, dtype=torch.int64)
    inside_BT = torch.arange(longest) < torch.tensor(batch.lengths)[:, None]
    return {
        "prompt_ids": ids_BT[:, :1],
        "prompt_mask": torch.ones(rows, 1),
        "completion_ids": ids_BT,
        "completion_mask": inside_BT.double(),
    }


def grpo_advantages(rewards_BK: Tensor, weights_K: Tensor, generations: int, *, scale: str, order: str) -> Tensor:
    """Advantages [B] of rewards of K kinds; groups are `generations` samples in a row."""
    return _scored(_GRPO, rewards_BK, weights_K, generations, scale_rewards=scale, multi_objective_aggregation=order)[
        "advantages"
    ]


def rloo_advantages(rewards_BK: Tensor, weights_K: Tensor, generations: int) -> Tensor:
    """Leave-one-out advantages [B]."""
    scored = _scored(_RLOO, rewards_BK, weights_K, generations, normalize_advantages=False, reward_clip_range=None)
    return scored["advantages"]


def importance_ratio(batch: Any, mode: str, *, low: float | None, high: float) -> Tensor:
    """Ratio of old to behaviour policy, [B, T] or [B, 1]: truncated or masked, of tokens or sequences."""
    rows = len(batch.lengths)
    ids = [[0] * length for length in batch.lengths]
    behaviour = [row[:length].tolist() for row, length in zip(batch.behaviour_BT, batch.lengths, strict=True)]
    tools = [row[:length].int().tolist() for row, length in zip(batch.mask_BT, batch.lengths, strict=True)]
    scored = _scored(
        _GRPO,
        torch.zeros(rows, 1, dtype=torch.float64),
        torch.ones(1),
        rows,
        logprobs_BT=batch.old_BT,
        entropy_BT=batch.entropy_BT,
        generated=([[0]] * rows, ids, tools, [""] * rows, behaviour, {}, None, None),
        use_vllm=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
        scale_rewards="none",
        multi_objective_aggregation="sum_then_normalize",
    )
    return scored["importance_sampling_ratio"]


def _scored(trainer: Any, rewards_BK: Tensor, weights_K: Tensor, generations: int, **attributes: Any) -> Any:
    rows, kinds = rewards_BK.shape
    names = [f"reward {kind}" for kind in range(kinds)]
    ids = [[0]] * rows
    generated = (ids, ids, None, [""] * rows, None, {}, None, None) if trainer is _GRPO else (ids, ids, [""] * rows)
    given = {
        "generated": generated,
        "rewards_BK": rewards_BK,
        "reward_weights": weights_K,
        "reward_funcs": names,
        "reward_func_names": names,
        "num_generations": generations,
        "logprobs_BT": torch.zeros(rows, 1),
        "entropy_BT": torch.zeros(rows, 1),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False, modules=lambda: iter(())),
        "args": SimpleNamespace(
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            per_device_train_batch_size=rows,
            gradient_checkpointing_kwargs=None,
        ),
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "pad_to_multiple_of": None,
        "mask_truncated_completions": False,
        "num_iterations": 1,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "beta": 0.0,
        "log_multimodal": False,
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "_logs": defaultdict(lambda: defaultdict(list), {key: [] for key in ("prompt", "completion", "advantages")}),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    }
    module = grpo_trainer if trainer is _GRPO else rloo_trainer
    with patch.object(module, "gather_object", lambda values: values):
        return trainer(**{**given, **attributes})._generate_and_score_completions([{"prompt": ""}] * rows)
