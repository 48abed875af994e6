"""Images for vLLM: prompts with one placeholder an image."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

from roll_like.errors import GenerationError
from roll_like.inference.interface import GenerateRequest
from roll_like.types import IntArray


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
        "prompt_token_ids": _without_sampled(request)[keep_P].tolist(),
        "multi_modal_data": {"image": [image.picture.image() for image in request.images]},
    }


def image_input(request: GenerateRequest, rendered: dict[str, Any]) -> dict[str, Any]:
    """Return what vLLM made of `image_prompt`, with the tokens that the policy sampled in earlier turns.

    Raises:
        GenerationError: vLLM made another number of placeholders of an image than the trainer will see.
    """
    expected, seen = _without_sampled(request).tolist(), rendered["prompt_token_ids"]
    if list(seen) != expected:
        raise GenerationError(
            f"vLLM sees {len(seen)} prompt tokens with the images of request {request.request_id}, and the trainer "
            f"{len(expected)}",
            fix="remove mm_processor_kwargs from inference.engine_args; sizes of images are set in the model's "
            "preprocessor_config.json",
        )
    return {**rendered, "prompt_token_ids": request.prompt_ids.tolist()}


def _without_sampled(request: GenerateRequest) -> IntArray:
    """Return a prompt whose placeholders are those of its images: vLLM would put an image at one that was sampled."""
    ids, placeholder = request.prompt_ids.copy(), request.prompt_ids[request.images[0].start]
    sampled_P = ids == placeholder
    for image in request.images:
        sampled_P[image.start : image.start + image.length] = False
    ids[sampled_P] = ids[ids != placeholder][0]
    return ids
