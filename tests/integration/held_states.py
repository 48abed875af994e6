"""Counts what a backend holds of a small module after a backward pass, beside what the plan says."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from roll_like.config.training import StateSizes, TrainingConfig
from roll_like.registry import TRAINING_BACKENDS

LAYERS, WIDTH = 6, 256


def storages(tensors: Any) -> dict[int, int]:
    """Return the bytes of all storages that tensors with content have, by address."""
    return {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in tensors
        if each.device.type == "cpu"
    }


class Layer(GradientCheckpointingLayer):
    """A layer with one matrix, which Muon moves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, rows: Any) -> Any:
        return self.inner(rows)


def held_states(
    rank: int, ranks: int, address: tuple[str, int], name: Any, stage: Any, dtype: str, optimizer: str
) -> dict[str, Any]:
    """Return bytes that one rank holds and that the plan says, and the number of parameters."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
    muon = {} if optimizer == "muon" else None
    settings = TrainingConfig.model_validate({"zero_stage": stage, "backend": name, "optimizer": {"muon": muon}})
    backend: Any = TRAINING_BACKENDS.get(name)(settings, dtype=dtype, device="cpu", world_size=1)
    backend.join()
    kind = getattr(torch, dtype)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) if muon is None else Layer() for _ in range(LAYERS))
    module = nn.Sequential(*layers).to(kind)
    parameters = sum(each.numel() for each in module.parameters())
    backend.wrap(module)
    inputs = torch.randn(4, WIDTH, dtype=kind)
    for _ in range(2):  # moments exist after the first step
        backend.forward_backward([inputs, inputs], lambda batch: backend.forward(batch).float().square().sum())
        weights, others = (storages(backend.tensors(part)) for part in ("weights", "optimizer"))
        others = {address: size for address, size in others.items() if address not in weights}
        held = {"weights": sum(weights.values()), "others": sum(others.values())}
        backend.optimizer_step(1e-4)
    sizes = StateSizes(
        parameters=parameters,
        trained=parameters,
        largest=WIDTH**2,
        layer=WIDTH**2,
        outside=0,
        width=kind.itemsize,
        matrices=parameters,
    )
    planned = asdict(backend.state_bytes(settings, sizes))
    backend.close()
    return {"held": held, "planned": planned, "parameters": parameters}
