"""A transformers model in the trainer's place, compared with an engine by plain forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_thread import EngineThread, float_spec
from tests_support import given_logprobs
from tiny_families import load_family

from roll_like.inference.hf.config import HFConfig
from roll_like.inference.hf.engine import HFEngine
from roll_like.inference.interface import GenerateRequest, Sampling
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.engine import VLLMEngine
from roll_like.inference.weight_transfer.probe import LogprobProbe
from roll_like.inference.weight_transfer.shared_memory import SharedMemoryTransfer
from roll_like.inference.weight_transfer.sync import WeightSync
from roll_like.models.checkpoint_names import checkpoint_tensors, tensor_groups
from roll_like.models.modules import persistent_buffers

PROMPT = np.random.default_rng(1).integers(0, 512, 80).astype(np.int32)


class FamilyTrainer:
    """Sends checkpoint tensors as a training rank does."""

    def __init__(self, path: Path, family: str) -> None:
        self.model: Any = load_family(family, path)

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        parameters = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        parameters |= dict(persistent_buffers(self.model))
        for group in tensor_groups(self.model, {name: tensor.shape for name, tensor in parameters.items()}):
            yield from checkpoint_tensors(self.model, group, {name: parameters[name] for name in group.parameters})

    @torch.no_grad()
    def change(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))

    def logprobs(self, tokens: np.ndarray) -> np.ndarray:
        return given_logprobs(self.model, tokens)

    def sync(self, engine: EngineThread, probe: LogprobProbe | None = None) -> WeightSync:
        sender = SharedMemoryTransfer(engine, 1 << 16).connect(self, rank=0)
        return WeightSync(sender.send, engine, probe=probe)

    def probe(self, tolerance: float = 1e-3, every: int = 1) -> LogprobProbe:
        return LogprobProbe(tokens=PROMPT[:64], trainer=self.logprobs, tolerance=tolerance, every=every)


def vllm_of(path: Path) -> EngineThread:
    return EngineThread(VLLMEngine(VLLMConfig(kv_cache_gib=0.05, max_running=4), float_spec(path)))


def hf_of(path: Path) -> EngineThread:
    return EngineThread(HFEngine(HFConfig(), replace(float_spec(path), threads=1)))


def differences(trainer: FamilyTrainer, engine: EngineThread, name: str) -> tuple[float, float]:
    """Return the largest difference of a log-probability: of a given prompt, and of tokens that the engine samples."""
    asked = engine.run(engine.engine.prompt_logprobs(PROMPT))
    prompt = float(np.abs(trainer.logprobs(PROMPT) - asked).max())
    request = GenerateRequest(request_id=name, prompt_ids=PROMPT, sampling=Sampling(max_tokens=16), seed=0)
    sample = engine.generate([request])[name]
    expected = trainer.logprobs(np.concatenate([PROMPT, sample.token_ids]))[len(PROMPT) - 1 :]
    return prompt, float(np.abs(expected - sample.logprobs).max())
