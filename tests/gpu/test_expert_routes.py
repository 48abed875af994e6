"""vLLM on a GPU tells which experts it computed tokens with; the CPU build cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_thread import EngineThread, float_spec
from tiny_families import make_family

from roll_like.inference.interface import GenerateRequest, Sampling
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.engine import VLLMEngine
from roll_like.models.modules import load_causal_lm
from roll_like.models.router import RouterReplay

pytestmark = pytest.mark.gpu
PROMPT = np.arange(20, 90, dtype=np.int32)


@torch.no_grad()
def test_it_tells_the_experts_that_the_model_chooses(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Of prompt and response, also where requests share a prompt's keys and values; all but near ties alike."""
    path = make_family("qwen3_moe", tmp_path)
    spec = replace(float_spec(path), dtype="bfloat16", device="cuda", returns_routes=True)
    sampling = Sampling(max_tokens=48)
    requests = [
        GenerateRequest(request_id=str(seed), prompt_ids=PROMPT, sampling=sampling, seed=seed) for seed in range(8)
    ]
    with EngineThread(VLLMEngine(VLLMConfig(max_running=8, gpu_memory_utilization=0.25), spec)) as engine:
        first = engine.generate(requests[:1])
        generations = first | engine.generate(requests[1:])
    model = load_causal_lm(path, "bfloat16").to("cuda").eval()
    router, alike = RouterReplay(model, "the test"), []
    for generation in generations.values():
        tokens = torch.from_numpy(np.concatenate([PROMPT, generation.token_ids]).astype(np.int64)).to("cuda")
        with router.record() as chosen:
            model(tokens[None, :-1], use_cache=False)
        routes = generation.routes
        assert routes is not None
        assert routes.shape == (len(tokens), 2, 2)
        for layer, experts in chosen.items():
            alike.append((np.sort(routes[:-1, layer]) == np.sort(experts.cpu().numpy())).all(-1))
    share = float(np.concatenate(alike).mean())
    record_property("same_experts", round(share, 4))
    assert share > 0.95
