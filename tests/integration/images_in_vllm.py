"""vLLM with images in later turns, in a process that has torchvision: python images_in_vllm.py MODEL, prints JSON.

differences   of log-probabilities from transformers', with placeholders that the policy sampled before
forgotten     how a request ends whose images vLLM's process has forgotten
paused        how many requests fail while caches are emptied again and again
aborted       how a request ends that is aborted while its images are processed, and after how many tokens
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_specs import engine_spec, generate
from tiny_vision import picture, plain_logprobs, renderer

from roll_like.agents.conversation import Conversation
from roll_like.inference.interface import GenerateRequest, Generation, Sampling
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.engine import VLLMEngine
from roll_like.models.modules import load_causal_lm

ANSWERS = ("ab", "a<|image_pad|>b", "<|vision_start|><|image_pad|><|image_pad|>", "<|video_pad|>")


def second_turn(folder: Path, answer: str, *, first: int = 1) -> GenerateRequest:
    """Return the request of a turn after an answer; no image is resized."""
    stated = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    side, render = stated["patch_size"] * stated["merge_size"], renderer(folder)
    images = [picture(first, 2 * side, side), picture(2, side, side), picture(3, 2 * side, 2 * side)]
    parts = [{"type": "image", "image": image} for image in images]
    conversation = Conversation(render)
    conversation.start([{"role": "user", "content": [parts[0], {"type": "text", "text": "Where?"}]}])
    ids = np.asarray([*render.encode(answer), *render.end_ids], np.int32)
    conversation.sampled(ids, np.zeros(len(ids)))
    prompt = conversation.observe([{"role": "user", "content": [{"type": "text", "text": "And here?"}, *parts[1:]]}])
    sampling = Sampling(max_tokens=6)
    return GenerateRequest(request_id=answer, prompt_ids=prompt, images=conversation.images, sampling=sampling, seed=1)


async def difference(engine: VLLMEngine, model: Any, folder: Path, request: GenerateRequest) -> float:
    (found,) = (await generate(engine, request)).values()
    assert isinstance(found, Generation), found
    whole = np.concatenate([request.prompt_ids, found.token_ids]).astype(np.int32)
    with torch.no_grad():
        theirs = plain_logprobs(model, folder, whole, request.images).numpy()
    return float(np.abs(theirs[len(request.prompt_ids) - 1 :] - found.logprobs).max())


async def main(folder: Path) -> dict[str, Any]:
    engine = VLLMEngine(VLLMConfig(kv_cache_gib=0.1, max_running=16), engine_spec(folder, max_model_len=512))
    await engine.start()
    model, found = load_causal_lm(folder, "float32").eval(), dict[str, Any]()
    requests = [second_turn(folder, answer) for answer in ANSWERS]
    found["differences"] = [await difference(engine, model, folder, request) for request in requests]
    await engine._engine.engine_core.reset_mm_cache_async()
    (forgotten,) = (await generate(engine, replace(requests[0], request_id="forgotten"))).values()
    found["forgotten"] = getattr(forgotten, "stop_reason", str(forgotten))
    long = replace(second_turn(folder, "c", first=9), sampling=Sampling(max_tokens=200, stop_ids=()))
    await engine.submit([long])
    await engine.abort([long.request_id])
    (aborted,) = await engine.poll(20.0)
    found["aborted"] = [getattr(aborted, "stop_reason", str(aborted)), len(getattr(aborted, "token_ids", ()))]
    await engine.close()
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
