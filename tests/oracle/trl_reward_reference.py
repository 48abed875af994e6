"""TRL 1.16: `RewardTrainer`, made without `__init__`; its model gives scores that are already there.

The compared code is TRL's, unchanged: `compute_loss`.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from oracle_imports import references
from torch import Tensor

with references():
    from trl.trainer import reward_trainer

__all__ = ["reward_figures", "reward_loss"]

ACCELERATOR = SimpleNamespace(gather=lambda tensor: tensor, gather_for_metrics=lambda tensor: tensor)


class _Reward(reward_trainer.RewardTrainer):
    def __init__(self, center: float | None) -> None:
        self.args = SimpleNamespace(center_rewards_coefficient=center)
        self.accelerator = ACCELERATOR
        self.model = SimpleNamespace(training=True)
        self._metrics: Any = {"train": defaultdict(list)}
        self._total_train_tokens, self._tp_size = 0, 1


def reward_loss(case: Any, *, center: float | None = None, margins: bool = False) -> tuple[Tensor, Tensor]:
    """Loss, and gradient for the scores [2·P] of chosen, then rejected responses."""
    scores_B = case.scores_B.clone().requires_grad_()
    loss, _ = _loss(case, scores_B, center, margins)
    return loss, torch.autograd.grad(loss, scores_B)[0]


def reward_figures(case: Any) -> dict[str, float]:
    """What `RewardTrainer` logs."""
    _, trainer = _loss(case, case.scores_B, None, margins=False)
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


def _loss(case: Any, scores_B: Tensor, center: float | None, margins: bool) -> tuple[Tensor, Any]:
    trainer = _Reward(center)
    inputs = {"attention_mask": torch.ones(len(scores_B), 1)}
    if margins:
        inputs["margin"] = case.margins_P
    loss = trainer.compute_loss(lambda **_: SimpleNamespace(logits=scores_B[:, None]), inputs)
    return loss, trainer
