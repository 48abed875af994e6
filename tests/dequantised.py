"""The model that a trainer with a base in 4 bits computes with, in a directory that any library loads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from roll_like.config.training import LoRAConfig
from roll_like.models.lora import named_weights, quantized_layers
from roll_like.models.modules import load_causal_lm
from roll_like.models.quantized import quantize


def dequantised(model: Path, directory: Path, dtype: Any = "float32") -> Path:
    """Write what a trainer with a quantised base computes with, and return its directory."""
    shutil.copytree(model, directory)
    base, config = load_causal_lm(model, dtype), LoRAConfig(quantization="nf4")
    quantize(base, quantized_layers(base, config), "nf4")
    tensors = {weight.name: weight.merged(torch.float32) for weight in named_weights(base)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
