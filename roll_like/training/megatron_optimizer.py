"""AdamW for Megatron-Core's optimizers: torch's arithmetic, with one count of steps for each group of parameters.

Megatron-Core expects that of Transformer Engine's AdamW: its checkpoints keep the count with a group, and could not be
loaded with torch's, which counts for each parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
from torch import Tensor
from torch.optim.adamw import adamw


class CountingAdamW(torch.optim.Optimizer):
    """AdamW as torch computes it, fused; `step` is in the groups."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode, "Megatron-Core is not told otherwise"
        assert not capturable, "nor to record CUDA graphs"
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move the parameters that have gradients."""
        del closure
        for group in self.param_groups:
            trained: list[Tensor] = [each for each in group["params"] if each.grad is not None]
            done = int(group.get("step", 0))
            group["step"] = done + 1
            if not trained:
                continue
            for each in trained:
                if "exp_avg" not in self.state[each]:
                    self.state[each]["exp_avg"] = torch.zeros_like(each)
                    self.state[each]["exp_avg_sq"] = torch.zeros_like(each)
            counts = torch.full((len(trained),), float(done), device=trained[0].device)
            adamw(
                trained,
                [each.grad for each in trained],  # type: ignore[misc]
                [self.state[each]["exp_avg"] for each in trained],
                [self.state[each]["exp_avg_sq"] for each in trained],
                [],
                list(counts.unbind()),
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def use_adamw() -> None:
    """Let Megatron-Core make its optimizers with this AdamW, whether or not Transformer Engine is there."""
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = CountingAdamW, False
    distrib_optimizer.Adam = CountingAdamW
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
