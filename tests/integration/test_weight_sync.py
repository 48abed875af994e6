"""Weights travel from a trainer's model into a real vLLM engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from engine_specs import engine_spec
from engine_thread import EngineThread
from tiny_model import make_tiny_model

from roll_like.errors import WeightSyncError
from roll_like.inference.hf.config import HFConfig
from roll_like.inference.hf.engine import HFEngine
from roll_like.inference.interface import GenerateRequest, Generation, Sampling
from roll_like.inference.vllm import arguments
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.engine import VLLMEngine
from roll_like.inference.weight_transfer.shared_memory import SharedMemoryTransfer
from roll_like.inference.weight_transfer.sync import WeightSync
from roll_like.models.modules import load_causal_lm

pytestmark = pytest.mark.integration

PROMPT = np.arange(20, 90, dtype=np.int32)
TEMPERATURE = 0.7


class Trainer:
    """A transformers model in the trainer's place."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.model = load_causal_lm(path, dtype)

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    @torch.no_grad()
    def change(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.add_((0.05 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype))

    def logits_of(self, tokens_T: torch.Tensor) -> torch.Tensor:
        logits_TV: torch.Tensor = self.model(tokens_T[None]).logits[0]
        return logits_TV

    @torch.no_grad()
    def logprobs(self, generation: Generation) -> np.ndarray:
        tokens = torch.from_numpy(np.concatenate([PROMPT, generation.token_ids]).astype(np.int64))
        logits_TV = self.logits_of(tokens)[len(PROMPT) - 1 : -1].float() / TEMPERATURE
        responses_T = tokens[len(PROMPT) :]
        return torch.log_softmax(logits_TV, -1).gather(1, responses_T[:, None])[:, 0].numpy()


def samples(engine: EngineThread, name: str, count: int = 4) -> list[Generation]:
    requests = [
        GenerateRequest(
            request_id=f"{name}-{index}",
            prompt_ids=PROMPT,
            sampling=Sampling(temperature=TEMPERATURE, max_tokens=24),
            seed=index,
        )
        for index in range(count)
    ]
    return list(engine.generate(requests).values())


def difference(trainer: Trainer, generations: list[Generation]) -> float:
    return float(np.mean([np.abs(trainer.logprobs(item) - item.logprobs).mean() for item in generations]))


def sync_of(trainer: Trainer, engine: EngineThread, bucket_bytes: int = 1 << 16, **options: Any) -> WeightSync:
    sender = SharedMemoryTransfer(engine, bucket_bytes, **options).connect(trainer, rank=0)
    return WeightSync(sender.send, engine)


@pytest.fixture(scope="module")
def bfloat(tiny_model: Path) -> Iterator[EngineThread]:
    """vLLM in bfloat16, whose weights tests change."""
    with EngineThread(VLLMEngine(VLLMConfig(kv_cache_gib=0.1), engine_spec(tiny_model, dtype="bfloat16"))) as engine:
        yield engine


def follows(trainer: Trainer, engine: EngineThread, tolerance: float, **options: Any) -> None:
    """The engine computes with the trainer's weights after every sync."""
    assert difference(trainer, samples(engine, "start")) < tolerance
    sync = sync_of(trainer, engine, **options)
    for round_ in range(1, 3):
        trainer.change(seed=round_)
        assert difference(trainer, samples(engine, f"stale-{round_}")) > 0.2
        report = sync.push()
        generations = samples(engine, f"fresh-{round_}")
        assert difference(trainer, generations) < tolerance
        assert report.version == round_
        assert report.buckets > 1
        assert report.unchecked == ()
        assert report.checked == len(list(trainer.model.named_parameters()))
        assert {segment.policy_version for item in generations for segment in item.segments} == {round_}


def test_vllm_computes_with_the_trainers_weights_in_float32(vllm: EngineThread, float_model: Path) -> None:
    trainer = Trainer(float_model, "float32")
    follows(trainer, vllm, 1e-4)
    trainer.model.load_state_dict(load_causal_lm(float_model, "float32").state_dict())
    sync_of(trainer, vllm).push()  # other tests use this engine
    assert difference(trainer, samples(vllm, "restored")) < 1e-4


def test_vllm_computes_with_the_trainers_weights_in_bfloat16(bfloat: EngineThread, tiny_model: Path) -> None:
    follows(Trainer(tiny_model, "bfloat16"), bfloat, 0.03)


class Float32Head(Trainer):
    """One with `model.head_dtype: float32`."""

    def logits_of(self, tokens_T: torch.Tensor) -> torch.Tensor:
        states_TH = self.model.model(tokens_T[None]).last_hidden_state[0]
        return states_TH.float() @ self.model.lm_head.weight.float().T


@pytest.mark.slow
def test_a_head_in_float32_follows_and_is_nearer_than_one_in_bfloat16(tiny_model: Path, bfloat: EngineThread) -> None:
    exact = Float32Head(tiny_model, "bfloat16")
    sync_of(exact, bfloat).push()
    rounded = difference(exact, samples(bfloat, "rounded", 16))
    there = engine_spec(tiny_model, dtype="bfloat16", float32_head=True)
    with EngineThread(VLLMEngine(VLLMConfig(kv_cache_gib=0.1), there)) as engine:
        assert difference(exact, samples(engine, "first", 16)) < rounded
        follows(exact, engine, 0.03)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_8_bit_weights_are_made_of_the_trainers_at_each_sync(
    tmp_path: Path, dtype: Literal["float32", "bfloat16"]
) -> None:
    model = make_tiny_model(tmp_path, dtype=dtype)
    trainer = Trainer(model, dtype)
    config = VLLMConfig(kv_cache_gib=0.1, quantization="int8")
    with EngineThread(VLLMEngine(config, engine_spec(model, dtype=dtype))) as engine:
        # every tensor is compared; activations are rounded too
        follows(trainer, engine, 0.1, int8=True)
        assert difference(trainer, samples(engine, "rounded")) > 1e-3
        for sync in ("full", "delta"):
            trainer.change(seed=5)
            report = sync_of(trainer, engine, by_value=True, sync=sync, full_every=5, int8=True).push()
            assert report.unchecked == ()
            assert difference(trainer, samples(engine, sync)) < 0.1
        # a trainer that does not know of it finds other numbers than its own
        with pytest.raises(WeightSyncError, match=r"weights differ on inference engine .*q_proj\.weight"):
            sync_of(trainer, engine).push()


@pytest.mark.slow
def test_a_stale_output_head_is_found_and_named(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "WORKER_EXTENSION", "stale_head_worker.WorkerExtension")
    trainer = Trainer(tiny_model, "bfloat16")
    with EngineThread(VLLMEngine(VLLMConfig(kv_cache_gib=0.1), engine_spec(tiny_model, dtype="bfloat16"))) as engine:
        trainer.change(seed=1)
        with pytest.raises(
            WeightSyncError, match=r"in 1 of .*: lm_head\.weight \(tied to model\.embed_tokens\.weight\)"
        ):
            sync_of(trainer, engine).push()


def test_a_sync_in_the_middle_of_a_response_starts_a_new_segment(bfloat: EngineThread, tiny_model: Path) -> None:
    trainer = Trainer(tiny_model, "bfloat16")
    sync = sync_of(trainer, bfloat)
    before = sync.push().version
    requests = [
        GenerateRequest(request_id=name, prompt_ids=PROMPT, sampling=Sampling(max_tokens=tokens), seed=3)
        for name, tokens in [("long", 180), ("first token", 1)]
    ]
    samples(bfloat, "warm-up")
    bfloat.run(bfloat.engine.submit(requests))
    assert list(bfloat.collect(1)) == ["first token"]
    trainer.change(seed=1)
    after = sync.push().version
    generation = bfloat.collect(1)["long"]
    assert [segment.policy_version for segment in generation.segments] == [before, after]
    assert after == before + 1
    assert generation.segments[0].start == 0
    assert generation.segments[0].end == generation.segments[1].start
    assert generation.segments[1].end == len(generation.token_ids) == len(generation.logprobs)


def test_the_transformers_engine_takes_weights_too(float_model: Path) -> None:
    trainer = Trainer(float_model, "float32")
    with EngineThread(HFEngine(HFConfig(), engine_spec(float_model))) as engine:
        trainer.change(seed=1)
        assert difference(trainer, samples(engine, "stale")) > 0.2
        report = sync_of(trainer, engine).push()
        assert difference(trainer, samples(engine, "fresh")) < 1e-5
        assert report.unchecked == ()
