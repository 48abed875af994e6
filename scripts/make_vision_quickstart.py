"""Writes what the vision quickstart starts from: python scripts/make_vision_quickstart.py [FOLDER].

A Qwen2.5-VL of random weights (0.6 million parameters, a tokenizer of characters); pictures of one coloured disc on a
noisy ground, with rows that ask for its colour; and solved episodes of a frozen lake that is shown as an image. What is
evaluated on has other places, sizes and grounds. The same for the same seed. Default folder: vision_quickstart.
"""

from __future__ import annotations

import argparse
import json
import string
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from roll_like.envs import make_env, scripted_action, system_prompt_of

#: Options of the lake, as configs/vision_agentic.yaml has them; the first seed of solved episodes.
LAKE = {"size": 3, "random_start": True, "view": "image", "style": "word"}
FIRST_SEED = 2_000_000
COLOURS = {
    "red": (215, 45, 40),
    "green": (45, 165, 70),
    "blue": (45, 80, 215),
    "yellow": (235, 210, 50),
    "purple": (150, 60, 180),
    "orange": (240, 140, 40),
}
QUESTION = "Which colour?"
SIDE = 56  # pixels: four tokens
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(folder: Path, *, seed: int = 0, width: int = 128) -> Path:
    """Write a random model, its tokenizer of characters and its image processor; return the folder.

    Two layers in the language model, in the vision tower two, of which one attends within windows; heads of 32 (a
    size that vLLM's CPU attention has) and tied embeddings.
    """
    characters = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    characters_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=SPECIAL[0]))
    characters_only.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters_only,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL),
        chat_template=CHAT_TEMPLATE,
    )
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(vocabulary),
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": width // 32,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": vocabulary["<|im_end|>"],
            "pad_token_id": vocabulary["<|endoftext|>"],
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": width,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        image_token_id=vocabulary["<|image_pad|>"],
        video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"],
        vision_end_token_id=vocabulary["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112}).save_pretrained(folder)
    return folder


def draw(colour: str, random: np.random.Generator) -> Image.Image:
    """Return a disc of a colour on a noisy grey ground."""
    noise = random.normal(random.uniform(60, 190), 25, (SIDE, SIDE, 1)) + random.normal(0, 10, (SIDE, SIDE, 3))
    image = Image.fromarray(noise.clip(0, 255).astype(np.uint8))
    radius = int(random.integers(7, 16))
    x, y = (int(random.integers(radius, SIDE - radius)) for _ in range(2))
    shade = random.normal(0, 12, 3)
    fill = tuple(int(np.clip(channel + moved, 0, 255)) for channel, moved in zip(COLOURS[colour], shade, strict=True))
    ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    return image


def make_rows(folder: Path, name: str, count: int, seed: int) -> None:
    """Write `name.jsonl`, whose rows serve all pipelines, and the pictures that they show."""
    random = np.random.default_rng(seed)
    (folder / name).mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as rows:
        for number in range(count):
            colour, other = random.choice(list(COLOURS), 2, replace=False).tolist()
            path = f"{name}/{number:04d}.png"
            draw(colour, random).save(folder / path)
            content = [{"type": "image_url", "image_url": {"url": path}}, {"type": "text", "text": QUESTION}]
            row = {"prompt": [{"role": "user", "content": content}], "completion": colour, "answer": colour}
            rows.write(json.dumps({**row, "chosen": colour, "rejected": other}) + "\n")


def make_episodes(folder: Path, name: str, count: int) -> None:
    """Write `name.jsonl`: conversations in which the lake of configs/vision_agentic.yaml is crossed, and its images.

    Seeds are those behind which neither training nor evaluation begins.
    """
    env = make_env("roll_like/FrozenLake-v0", **LAKE)
    (folder / name).mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as rows:
        for number in range(count):
            text, info = env.reset(seed=FIRST_SEED + number)
            messages = [{"role": "system", "content": system_prompt_of(env)}]
            over = False
            while not over:
                (image,), path = info["images"], f"{name}/{info['images'][0].digest.hex()}.png"
                (folder / path).write_bytes(image.data)
                content = [{"type": "image_url", "image_url": {"url": path}}, {"type": "text", "text": text}]
                answer = scripted_action(env)
                messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
                text, _, terminated, truncated, info = env.step(answer)
                over = terminated or truncated
            rows.write(json.dumps({"messages": messages}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("vision_quickstart"))
    folder = parser.parse_args().folder
    make_model(folder / "model")
    for name, count, seed in (("sft", 512, 0), ("rl", 1024, 1), ("eval", 96, 2)):
        make_rows(folder, name, count, seed)
    make_episodes(folder, "lake", 512)


if __name__ == "__main__":
    main()
