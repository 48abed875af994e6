"""vLLM on a GPU that a trainer shares: weights by CUDA IPC, all states of an engine, memory, CUDA graphs, its runner.

A transformers model in this process is the trainer; vLLM's engine process works on the same GPU. What an engine samples
is compared with the log-probabilities of the trainer's model. Two implementations in bfloat16 differ by rounding;
weights of another version differ by much more, which is checked too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_specs import engine_spec
from engine_thread import EngineThread

from roll_like.inference.interface import GenerateRequest, Generation, Sampling
from roll_like.inference.vllm import weight_transfer
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.engine import VLLMEngine
from roll_like.inference.vllm.weight_transfer import VLLMTransfer
from roll_like.inference.weight_transfer.sync import WeightSync
from roll_like.models.modules import load_causal_lm

pytestmark = pytest.mark.gpu
Record = Callable[[str, object], None]
DEVICE = "cuda"
#: Mean distance of a log-probability from the trainer's, in nats: less is rounding; other weights are further away.
CLOSE, FAR = 0.05, 0.2
#: Share of the GPU for the engine, of which nearly all is key-value cache, as the model is tiny.
SHARE = 0.25
PROMPT = np.arange(20, 90, dtype=np.int32)


def used_gib() -> float:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


class Trainer:
    """A model in the trainer's place that remembers the weights of every version, and sends them."""

    def __init__(self, path: Path, engine: EngineThread) -> None:
        self._path = path
        self._models = {0: load_causal_lm(path, "bfloat16").to(DEVICE).eval()}
        self._current = 0
        handle: Any = engine
        transfer = VLLMTransfer(engines=handle, backend="ipc", gpus_per_engine=1, address="", port=0)
        self.sender = transfer.connect(self, rank=0)
        self.sync = WeightSync(self.sender.send, handle)

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._models[self._current].named_parameters():
            yield name, parameter.detach()

    @torch.no_grad()
    def prepare(self) -> None:
        """Have other weights, which the next push sends."""
        self._current = self.sync.version + 1
        model = load_causal_lm(self._path, "bfloat16")
        generator = torch.Generator().manual_seed(self._current)
        for parameter in model.parameters():
            parameter.add_((0.05 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype))
        self._models[self._current] = model.to(DEVICE).eval()

    @torch.no_grad()
    def distance(self, generations: list[Generation], version: int, *, weights: int | None = None) -> float:
        """Return the mean distance of the tokens of a version from what its weights, or those of another one, give."""
        found = []
        for each in generations:
            tokens = torch.from_numpy(np.concatenate([PROMPT, each.token_ids]).astype(np.int64)).to(DEVICE)
            logits_TV = (
                self._models[version if weights is None else weights](tokens[None])
                .logits[0, len(PROMPT) - 1 : -1]
                .float()
            )
            expected_T = logits_TV.log_softmax(-1).gather(1, tokens[len(PROMPT) :, None])[:, 0].cpu().numpy()
            for segment in each.segments:
                if segment.policy_version == version:
                    own = slice(segment.start, segment.end)
                    found.append(np.abs(each.logprobs - expected_T)[own])
        return float(np.concatenate(found).mean())


def requests(name: str, count: int, tokens: int) -> list[GenerateRequest]:
    sampling = Sampling(max_tokens=tokens)
    return [
        GenerateRequest(request_id=f"{name}-{index}", prompt_ids=PROMPT, sampling=sampling, seed=index)
        for index in range(count)
    ]


def sampled(engine: EngineThread, name: str) -> list[Generation]:
    return list(engine.generate(requests(name, 8, 48)).values())


Ended = dict[str, Generation]


def under_way(engine: EngineThread, name: str) -> Ended:
    """Begin long responses and wait until all have tokens; return those that have ended already."""
    engine.run(engine.engine.submit(requests(name, 16, 900)))
    ended: Ended = {}

    async def fewest() -> int:
        states = engine.engine._engine.output_processor.request_states.values()  # type: ignore[attr-defined]
        return min((state.detokenizer.num_output_tokens() for state in states), default=0)

    while engine.run(fewest()) < 8:
        ended |= {each.request_id: each for each in engine.run(engine.engine.poll(0.01))}  # type: ignore[misc]
        assert len(ended) < 8, "most responses ended before they were under way"
    return ended


def crossed(engine: EngineThread, name: str, ended: Ended, versions: list[int]) -> list[Generation]:
    """Let them have tokens of the new weights, stop them, and return those that have tokens of both versions."""
    time.sleep(1.0)
    ended |= {each.request_id: each for each in engine.run(engine.engine.poll(0.01))}  # type: ignore[misc]
    engine.run(engine.engine.abort([f"{name}-{index}" for index in range(16)]))
    ended |= engine.collect(16 - len(ended))
    found = [[segment.policy_version for segment in each.segments] for each in ended.values()]
    assert all(each in (versions, versions[:1]) for each in found)
    assert found.count(versions) >= 4
    return [each for each in ended.values() if len(each.segments) > 1]


@pytest.fixture(scope="module", params=["eager", "graphs"])
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[EngineThread]:
    if not torch.cuda.is_available():  # before it costs a minute
        pytest.skip("needs a GPU")
    eager = request.param == "eager"
    config = VLLMConfig(max_running=32, gpu_memory_utilization=SHARE, enforce_eager=eager or None)
    spec = engine_spec(
        tiny_model,
        dtype="bfloat16",
        device=DEVICE,
        max_model_len=1024,
        weight_backend="ipc",
        shares_gpus=True,
    )
    with EngineThread(VLLMEngine(config, spec)) as engine:
        yield engine


@pytest.fixture(scope="module")
def trainer(engine: EngineThread, tiny_model: Path) -> Iterator[Trainer]:
    with pytest.MonkeyPatch.context() as patch:
        # smaller than the embedding: a tensor larger than the buffer travels whole, and others in several pieces
        patch.setattr(weight_transfer, "BUFFER_BYTES", 4096)
        trainer = Trainer(tiny_model, engine)
    yield trainer
    trainer.sender.close()


@pytest.fixture
def record(request: pytest.FixtureRequest, record_property: Record) -> Record:
    """Figures of each kind of engine by names of their own."""
    kind = request.node.callspec.params["engine"]
    return lambda name, value: record_property(f"{kind}_{name}", value)


def test_it_samples_what_the_trainers_model_computes(engine: EngineThread, trainer: Trainer, record: Record) -> None:
    distance = trainer.distance(sampled(engine, "start"), 0)
    config = engine.engine._engine.vllm_config  # type: ignore[attr-defined]
    record("model_runner_v2", str(bool(config.use_v2_model_runner)))
    record("distance_at_start", round(distance, 4))
    assert distance < CLOSE


def test_new_weights_arrive_by_ipc_and_are_used(engine: EngineThread, trainer: Trainer, record: Record) -> None:
    for _ in range(2):
        trainer.prepare()
        report = trainer.sync.push()
        assert report.unchecked == ()
        assert report.checked == len(list(trainer.full_weights()))
        generations = sampled(engine, f"version-{report.version}")
        distance, stale = (
            trainer.distance(generations, report.version, weights=each) for each in (report.version, report.version - 1)
        )
        record("distance_after_a_sync", round(distance, 4))
        record("distance_from_old_weights", round(stale, 4))
        record("sync_seconds", round(report.seconds, 3))
        assert distance < CLOSE
        assert stale > FAR


def test_responses_cross_an_update(engine: EngineThread, trainer: Trainer) -> None:
    old = trainer.sync.version
    trainer.prepare()
    ended = under_way(engine, "crossing")
    trainer.sync.push()
    both = crossed(engine, "crossing", ended, [old, old + 1])
    assert max(trainer.distance(both, old), trainer.distance(both, old + 1)) < CLOSE
    assert trainer.distance(both, old + 1, weights=old) > FAR


def test_an_engine_passes_through_all_states_with_responses_under_way(
    engine: EngineThread, trainer: Trainer, record: Record
) -> None:
    old = trainer.sync.version
    trainer.prepare()
    ended = under_way(engine, "night")
    used = {"serving": used_gib()}
    engine.run(engine.engine.sleep())
    used["asleep"] = used_gib()
    engine.run(engine.engine.wake())
    used["awake_without_cache"] = used_gib()
    trainer.sync.push()  # ends in `resume`
    used["serving_again"] = used_gib()
    for state, gib in used.items():
        record(f"gib_{state}", round(gib, 2))
    both = crossed(engine, "night", ended, [old, old + 1])
    assert max(trainer.distance(both, old), trainer.distance(both, old + 1)) < CLOSE
    # asleep it keeps its CUDA context, and graphs
    total = torch.cuda.mem_get_info()[1] / 2**30
    assert used["serving"] - used["asleep"] > 0.6 * SHARE * total
    assert used["awake_without_cache"] - used["asleep"] < 0.1 * SHARE * total
    assert abs(used["serving_again"] - used["serving"]) < 1.0


def test_an_engine_that_slept_without_an_update_goes_on(engine: EngineThread, trainer: Trainer) -> None:
    for call in (engine.engine.sleep, engine.engine.wake, engine.engine.resume):
        engine.run(call())
    assert trainer.distance(sampled(engine, "morning"), trainer.sync.version) < CLOSE
