"""`model.head_dtype: float32`: the output layer's products are those of float32, on either side; its weights stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from config_files import MINIMAL, changed
from engine_thread import float_spec
from torch import Tensor, nn
from vocabulary_threads import on_threads

from roll_like.algorithms.divided import DividedVocabulary
from roll_like.algorithms.kept import KeptIds
from roll_like.algorithms.logprobs import token_logprobs
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.config.inference import EngineCapabilities
from roll_like.errors import ConfigError
from roll_like.inference.hf.config import HFConfig
from roll_like.inference.hf.engine import HFEngine
from roll_like.inference.interface import GenerateRequest, Generation, Sampling
from roll_like.inference.sglang.arguments import engine_arguments as sglang_arguments
from roll_like.inference.sglang.config import SGLangConfig
from roll_like.inference.vllm.arguments import engine_arguments
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.models.modules import load_causal_lm
from roll_like.training.policy import TokenLogprobHead
from roll_like.types import PLAIN_LOGITS

VOCABULARY, WIDTH, TOKENS = 37, 8, 9


def drawn(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        (2 * torch.randn(*shape, generator=generator)).bfloat16()
        for shape in ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    )
    return hidden, weight, bias, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def exact(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """Log-probabilities of bfloat16 values in float64, at temperature 0.7."""
    logits = nn.functional.linear(hidden.double(), weight.double(), bias.double()) / 0.7
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("chunk", [(4, 10), (100, 100), (4, 100), (100, 10)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_narrower_weight_is_multiplied_in_the_precision_of_the_states(chunk: tuple[int, int], ranks: int) -> None:
    hidden, weight, bias, targets = drawn()
    inputs = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
    wanted = exact(*inputs, targets)
    grads = torch.autograd.grad(wanted.sum(), inputs)

    def of_rank(divided: DividedVocabulary) -> Any:
        own = [hidden.clone(), weight[divided.own].clone(), bias[divided.own].clone()]
        own = [each.requires_grad_() for each in own]
        options: Any = {"temperature": 0.7, "chunk_tokens": chunk[0], "chunk_vocab": chunk[1]}
        part = None if ranks == 1 else divided
        found, _ = token_logprobs(own[0].float(), own[1], targets, bias=own[2], divided=part, **options)
        return found, torch.autograd.grad(found.sum(), own)

    results = on_threads(of_rank, ranks=ranks, vocabulary=VOCABULARY)
    for found, mine in results:
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine[0], grads[0], rtol=0.01, atol=1e-3)
    for place in (1, 2):
        whole = torch.cat([mine[place] for _, mine in results])
        assert whole.dtype == torch.bfloat16
        torch.testing.assert_close(whole, grads[place], rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("master", [torch.bfloat16, torch.float32])
def test_the_head_multiplies_the_weights_that_engines_have(master: torch.dtype) -> None:
    """Of a master weight in float32 that is the one in the model's precision."""
    hidden, weight, bias, targets = drawn()
    layer = nn.Linear(WIDTH, VOCABULARY, dtype=master)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
        if master == torch.float32:
            layer.weight.add_(1e-4)  # less than half of what tells bfloat16 numbers of this size apart, for most
    rounded = layer.weight.detach().to(torch.bfloat16)
    mask = torch.zeros(TOKENS, VOCABULARY, dtype=torch.bool)
    mask[:, ::3] = True
    mask[torch.arange(TOKENS), targets] = True
    kept = KeptIds(torch.where(mask)[1], mask.sum(1))
    errors = []
    for float32 in (True, False):
        head = TokenLogprobHead(layer, chunk_tokens=4, chunk_vocab=10, logits=PLAIN_LOGITS, float32=float32)
        found = [head(hidden, targets, 0.7)[0], head(hidden, targets, 0.7, kept)[0]]
        wanted = [exact(hidden, rounded, bias, targets, part) for part in (None, mask)]
        apart = [(one - other).detach().abs().max() for one, other in zip(found, wanted, strict=True)]
        errors.append(float(max(apart)))
    assert errors[0] < 2e-5
    assert errors[1] > 1e-3  # products rounded to bfloat16


async def test_the_transformers_engine_multiplies_in_float32(tiny_model: Path) -> None:
    spec = replace(float_spec(tiny_model), dtype="bfloat16", float32_head=True)
    prompt = np.arange(20, 60, dtype=np.int32)
    engine = HFEngine(HFConfig(), spec)
    await engine.start()
    try:
        sampling = Sampling(max_tokens=1, temperature=0)
        await engine.submit([GenerateRequest(request_id="one", prompt_ids=prompt, sampling=sampling, seed=0)])
        (found,) = await engine.poll(20.0)
        given = await engine.prompt_logprobs(prompt)
    finally:
        await engine.close()
    assert isinstance(found, Generation)
    model = load_causal_lm(tiny_model, "bfloat16")
    ids = torch.from_numpy(prompt.astype(np.int64))
    with torch.no_grad():
        hidden = model.base_model(ids[None]).last_hidden_state[0]
        logprobs = (hidden.double() @ model.lm_head.weight.double().t()).log_softmax(-1)
    assert found.logprobs[0] == pytest.approx(float(logprobs[-1].max()), abs=1e-5)
    np.testing.assert_allclose(given, logprobs[:-1].gather(1, ids[1:, None])[:, 0], atol=1e-5)


def test_engines_are_told(tiny_model: Path) -> None:
    spec = float_spec(tiny_model)
    on = replace(spec, float32_head=True)
    assert engine_arguments(VLLMConfig(), on)["hf_overrides"] == {"head_dtype": "float32"}
    assert "hf_overrides" not in engine_arguments(VLLMConfig(), spec)
    given = VLLMConfig(engine_args={"hf_overrides": {"rope_theta": 1e6}})
    assert engine_arguments(given, on)["hf_overrides"] == {"rope_theta": 1e6, "head_dtype": "float32"}
    with pytest.raises(ConfigError, match=r"engine_args\.hf_overrides is 'all'; a mapping was expected"):
        engine_arguments(VLLMConfig(engine_args={"hf_overrides": "all"}), on)
    assert sglang_arguments(SGLangConfig(type="sglang"), on)["enable_fp32_lm_head"] is True


def test_an_engine_that_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    values = changed(MINIMAL, model={"path": "org/model", "head_dtype": "float32"}, inference={"type": "hf"})
    assert RLVRConfig.model_validate(values).model.head_dtype == "float32"
    monkeypatch.setattr(HFConfig, "capabilities", EngineCapabilities(pause=True, prompt_logprobs=True))
    with pytest.raises(ConfigError, match="the engine 'hf' computes its output layer in the model's precision only"):
        RLVRConfig.model_validate(values)
