"""A tiny vision-language model, made by the quickstart's script, and what transformers computes with pictures."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from roll_like.data.chat import Renderer
from roll_like.models.vision import image_processor
from roll_like.types import Picture, PlacedImage, TrainingSample

_SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "make_vision_quickstart.py"


def quickstart() -> Any:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("make_vision_quickstart", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def picture(seed: int, width: int = 70, height: int = 90) -> Picture:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return Picture(data=buffer.getvalue(), label=f"{seed}.png")


def renderer(folder: Path) -> Renderer:
    from transformers import AutoTokenizer

    return Renderer(AutoTokenizer.from_pretrained(str(folder)), images=image_processor(folder))


def prompt(folder: Path, pictures: Sequence[Picture], text: str) -> tuple[np.ndarray, tuple[PlacedImage, ...]]:
    """Return a user's question about pictures as tokens, and where the pictures are."""
    render = renderer(folder)
    parts = [{"type": "image", "image": each} for each in pictures]
    written = render.render([{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], ())
    return render.expanded(render.encode(written), pictures, "here")


def samples_of(folder: Path) -> list[TrainingSample]:
    """Return two samples of each of four groups, about pictures of several sizes; one group has none."""
    random = np.random.default_rng(0)
    samples = []
    for group, seeds in enumerate([(1,), (2, 3), (), (4,)]):
        begin, images = prompt(folder, [picture(seed, 40 + 15 * seed) for seed in seeds], "Which?" * (group + 1))
        for length in (3, 6):
            response = random.integers(8, 100, length)
            tokens = np.concatenate([begin, response]).astype(np.int32)
            sampled = np.arange(len(tokens)) >= len(begin)
            samples.append(
                TrainingSample(
                    group_id=str(group), token_ids=tokens, prompt_length=len(begin), sampled=sampled, images=images
                )
            )
    return samples


def plain_logprobs(model: Any, folder: Path, token_ids: np.ndarray, images: Sequence[PlacedImage]) -> torch.Tensor:
    """Return the log-probability of each token but the first as transformers computes it by itself, shape [T − 1]."""
    ids = torch.from_numpy(token_ids.astype(np.int64))
    options: dict[str, Any] = {}
    if images:
        processor = image_processor(folder)
        assert processor is not None
        kinds = torch.zeros_like(ids, dtype=torch.int)
        for image in images:
            kinds[image.start : image.start + image.length] = 1
        options = {"mm_token_type_ids": kinds[None], **processor.inputs([image.picture for image in images])}
    logits = model(input_ids=ids[None], use_cache=False, **options).logits[0, :-1].float()
    model.base_model.rope_deltas = None  # what transformers remembers for generation
    return torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
