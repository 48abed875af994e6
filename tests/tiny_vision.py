"""A tiny vision-language model, made by the quickstart's script, and what transformers computes with pictures."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loose_modules import SCRIPTS, load_module
from PIL import Image

from roll_like.data.chat import Renderer
from roll_like.models.vision import image_processor
from roll_like.types import Picture, PlacedImage, TrainingSample

_ROOT = Path(__file__).resolve().parents[1]
#: What vLLM imports for models that see images; made by `make torchvision`.
TORCHVISION = _ROOT / ".torchvision"


def quickstart() -> Any:
    """Return the script as a module."""
    return load_module(SCRIPTS / "make_vision_quickstart.py")


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


def unresized_prompts(folder: Path) -> list[tuple[np.ndarray, tuple[PlacedImage, ...]]]:
    """Return prompts with two pictures, one and none, of sizes that a model's processor leaves as they are.

    torchvision, which vLLM uses, and Pillow resize with other rounding.
    """
    stated = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    side = stated["patch_size"] * stated["merge_size"]  # of what becomes one placeholder
    shown = ([picture(1, 3 * side, 2 * side), picture(2, 2 * side, 2 * side)], [picture(3, 2 * side, 4 * side)], [])
    return [prompt(folder, pictures, "What?") for pictures in shown]


def samples_of(folder: Path) -> list[TrainingSample]:
    """Return two samples of each of four groups, about pictures of several sizes; one group has none."""
    random = np.random.default_rng(0)
    samples = []
    for group, seeds in enumerate([(1,), (2, 3), (), (4,)]):
        begin, images = prompt(folder, [picture(seed, 40 + 15 * seed) for seed in seeds], "Which?" * (group + 1))
        for length in (3, 6):
            response = random.integers(8, 100, length)
            tokens = np.concatenate([begin, response]).astype(np.int32)
            loss_mask = np.arange(len(tokens)) >= len(begin)
            samples.append(
                TrainingSample(
                    group_id=str(group), token_ids=tokens, prompt_length=len(begin), loss_mask=loss_mask, images=images
                )
            )
    return samples


def plain_logprobs(model: Any, folder: Path, token_ids: np.ndarray, images: Sequence[PlacedImage]) -> torch.Tensor:
    """Return the log-probability of each token but the first as transformers computes it by itself, shape [T − 1]."""
    ids = torch.from_numpy(token_ids.astype(np.int64))
    seen, placeholder = ids.clone(), getattr(model.config, "image_token_id", None)
    options: dict[str, Any] = {}
    if images:
        processor = image_processor(folder)
        assert processor is not None
        kinds = torch.zeros_like(ids, dtype=torch.int)
        # transformers takes each placeholder for an image's, sampled ones too: those of images become another token
        model.config.image_token_id = min(set(range(len(ids) + 1)) - set(ids.tolist()))
        for image in images:
            place = slice(image.start, image.start + image.length)
            kinds[place], seen[place] = 1, model.config.image_token_id
        options = {"mm_token_type_ids": kinds[None], **processor.inputs([image.picture for image in images])}
    logits = model(input_ids=seen[None], use_cache=False, **options).logits[0, :-1].float()
    model.base_model.rope_deltas = None  # what transformers remembers for generation
    if images:
        model.config.image_token_id = placeholder
    return torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]


def make_vision_model(family: str, folder: Path) -> Path:
    """Write a tiny random model and return its folder: the quickstart's Qwen2.5-VL, or another with its tokens."""
    makers = {
        "qwen2_vl": _make_qwen2_vl,
        "qwen2_5_vl": quickstart().make_model,
        "qwen3_vl": _make_qwen3_vl,
        "qwen3_5": _make_qwen3_5,
        "qwen3_5_moe": _make_qwen3_5_moe,
    }
    made: Path = makers[family](folder)
    return made


def _make_qwen2_vl(folder: Path) -> Path:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    quickstart().make_model(folder)
    stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = {name: value for name, value in stated["text_config"].items() if name != "model_type"}
    tokens = {name: value for name, value in stated.items() if name.endswith("_token_id")}
    vision = {"depth": 2, "embed_dim": 64, "num_heads": 2, "hidden_size": text["hidden_size"], "mlp_ratio": 2}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    return folder


def _make_qwen3_vl(folder: Path, width: int = 128) -> Path:
    from transformers import Qwen3VLForConditionalGeneration

    text = {
        "num_hidden_layers": 3,
        "rope_parameters": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
    }
    vision = {"depth": 3, "deepstack_visual_indexes": [0, 1]}
    return _make_qwen3(folder, Qwen3VLForConditionalGeneration, text, vision, width)


def _make_qwen3_5(folder: Path, width: int = 128) -> Path:
    from transformers import Qwen3_5ForConditionalGeneration

    return _make_qwen3(folder, Qwen3_5ForConditionalGeneration, _HYBRID, {"depth": 2}, width)


def _make_qwen3_5_moe(folder: Path, width: int = 128) -> Path:
    from transformers import Qwen3_5MoeForConditionalGeneration

    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    widths = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    text = {**_HYBRID, **experts, **widths}
    return _make_qwen3(folder, Qwen3_5MoeForConditionalGeneration, text, {"depth": 2}, width)


#: A gated delta layer, and one that attends with rotary positions in half of a head.
_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
    },
}


def _make_qwen3(folder: Path, kind: Any, text: dict[str, Any], vision: dict[str, Any], width: int) -> Path:
    """Write a random model of a class, with settings of its own beside those that Qwen3-VL and later ones share."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    quickstart().make_model(folder)
    stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokens = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    config = kind.config_class(
        text_config={
            **{key: stated["text_config"][key] for key in tokens},
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_attention_heads": width // 32,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,  # vLLM reads it here, transformers below
            **text,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": width,
            "num_position_embeddings": 64,
            **vision,
        },
        **{key: stated[key] for key in stated if key.endswith("_token_id")},
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config)
        for parameter in model.parameters():
            # norms are born as ones and biases as zeros: nothing would notice that they are missing
            parameter.data.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    processor = Qwen2VLImageProcessorPil(patch_size=16, size={"shortest_edge": 32 * 32, "longest_edge": 128 * 128})
    processor.save_pretrained(folder)
    return folder
