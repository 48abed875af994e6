"""Images for vLLM: prompts with one placeholder an image."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

from roll_like.inference.interface import GenerateRequest


def torchvision_missing() -> str | None:
    """Return why vLLM cannot import its code of vision-language models; None where it can."""
    if find_spec("torchvision") is not None:
        return None
    return (
        "vLLM's code of such models imports torchvision, which is not installed (its builds on PyPI are linked against "
        "CUDA, so the CPU set-up has none)"
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
