"""The optimizer and its schedule, whatever the training backend."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from roll_like.config.training import OptimizerConfig


def optimizer_of(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW over what is trained of a module, or `Muon` over its weight matrices and AdamW over the rest.

    AdamW has a group for the parameters that the same ranks divide: torch computes with no mixture of them.

    Raises:
        ConfigError: Muon is wanted, and the module has no such matrices.
    """
    from roll_like.training.muon import Muon, weight_matrices, with_inputs_first

    matrices = {} if config.muon is None else weight_matrices(module)
    apart = set(matrices.values())
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad and parameter not in apart:
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    if matrices:
        return Muon(matrices, [*groups.values()], config, with_inputs_first(module))
    return torch.optim.AdamW(
        [{"params": group} for group in groups.values()],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def learning_rate(config: OptimizerConfig, update: int, total_updates: int) -> float:
    """Return the learning rate of the 0-based optimizer step `update`.

    A pure function of the step: a resumed run needs no scheduler state.

        >>> [learning_rate(OptimizerConfig(lr=1.0, warmup_steps=2), update, 10) for update in range(3)]
        [0.5, 1.0, 1.0]
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    decay_steps = max(total_updates - config.warmup_steps, 1)
    progress = min((update - config.warmup_steps) / decay_steps, 1.0)
    shape = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
