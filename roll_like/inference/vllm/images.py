"""Images for vLLM: prompts with one placeholder an image."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from roll_like.errors import ConfigError
from roll_like.inference.interface import GenerateRequest
from roll_like.models.vision import is_vision_model


def require_torchvision(model_path: str) -> None:
    """Raise a ConfigError for a vision-language model where vLLM cannot import its code."""
    if is_vision_model(Path(model_path)) and find_spec("torchvision") is None:
        raise ConfigError(
            f"vLLM's code of the vision-language model {model_path} imports torchvision, which is not installed "
            "(its builds on PyPI are linked against CUDA, so the CPU set-up has none)",
            fix="set inference.type: hf",
        )


def image_prompt(request: GenerateRequest) -> dict[str, Any]:
    """Return a prompt with images as vLLM takes it: it makes as many of a placeholder as the model sees itself."""
    keep_P = np.ones(len(request.prompt_ids), np.bool_)
    for image in request.images:
        keep_P[image.start + 1 : image.start + image.length] = False
    return {
        "prompt_token_ids": request.prompt_ids[keep_P].tolist(),
        "multi_modal_data": {"image": [image.picture.image() for image in request.images]},
    }
