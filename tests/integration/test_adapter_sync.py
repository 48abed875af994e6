"""Adapters travel alone into a real vLLM engine: it computes what the merged model computes, update after update."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_thread import EngineThread, float_spec
from peft import LoraConfig, PeftModel, get_peft_model
from tests_support import given_logprobs
from tiny_families import make_family

from roll_like.config.inference import BASE, POLICY
from roll_like.config.training import LoRAConfig
from roll_like.errors import GenerationError, WeightSyncError
from roll_like.inference.interface import AdapterSpec, FrozenAdapter, GenerateRequest, Generation, Sampling
from roll_like.inference.vllm import arguments
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.engine import VLLMEngine
from roll_like.inference.vllm.plugin import VLLMPlugin
from roll_like.inference.weight_transfer.fingerprint import fingerprint
from roll_like.inference.weight_transfer.interface import SendReport
from roll_like.inference.weight_transfer.probe import LogprobProbe
from roll_like.inference.weight_transfer.shared_memory import SharedMemoryTransfer
from roll_like.inference.weight_transfer.sync import WeightSync
from roll_like.models.lora import adapter_names, add_adapters, named_weights, targets
from roll_like.models.modules import load_causal_lm
from roll_like.models.stored_adapter import StoredAdapter
from roll_like.types import StopReason

pytestmark = pytest.mark.integration

PROMPT = np.arange(20, 90, dtype=np.int32)
#: Both sides compute in float32: the largest difference that was seen is 3e-6.
TOLERANCE = 5e-5
FAR = 0.05
#: Adapters beside the policy's, of other layers and ranks.
FROZEN: dict[str, dict[str, Any]] = {
    "wide": {"r": 9, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "narrow": {"r": 2, "lora_alpha": 8, "target_modules": ["k_proj", "gate_proj"], "use_rslora": True},
}


class AdapterTrainer:
    """A transformers model with adapters in the trainer's place; it compares with merged matrices."""

    def __init__(self, path: Path, **lora: Any) -> None:
        self.config = LoRAConfig(**{"rank": 4, "alpha": 6, **lora})
        self.model: Any = load_causal_lm(path, "float32")
        self.merged: Any = load_causal_lm(path, "float32")
        self.base: Any = load_causal_lm(path, "float32")
        add_adapters(self.model, self.config, seed=3)
        self._known = False

    @property
    def spec(self) -> AdapterSpec:
        return AdapterSpec(rank=self.config.rank, modules=targets(self.base, self.config))

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for weight in named_weights(self.model):
            if weight.layer is not None:
                yield from zip(adapter_names(weight.name), weight.adapter(torch.float32), strict=True)

    @torch.no_grad()
    def change(self, seed: int, scale: float = 0.1) -> None:
        """Move all adapters, and merge them into the second model."""
        generator = torch.Generator().manual_seed(seed)
        for weight in named_weights(self.model):
            for part in weight.parts[1:]:
                part.add_(scale * torch.randn(part.shape, generator=generator))
        state = {weight.name: weight.merged(torch.float32) for weight in named_weights(self.model)}
        self.merged.load_state_dict(state, strict=False)

    def logprobs(self, tokens: np.ndarray, model: Any = None) -> np.ndarray:
        return given_logprobs(model or self.merged, tokens)

    def sync(self, engine: EngineThread, probe: LogprobProbe | None = None) -> WeightSync:
        sender = SharedMemoryTransfer(engine, 1 << 12).connect(self, rank=0)

        def send(seed: int) -> SendReport:
            report = sender.send(seed)
            base = {name: fingerprint(tensor, seed) for name, tensor in self.base.named_parameters()}
            return replace(report, fingerprints={**report.fingerprints, **base})

        return WeightSync(send, engine, probe=probe)


def engine_of(path: Path, adapter: AdapterSpec) -> EngineThread:
    config = VLLMConfig(kv_cache_gib=0.1, max_running=16)
    return EngineThread(VLLMEngine(config, replace(float_spec(path), adapter=adapter)))


@pytest.fixture(scope="module")
def trainer(float_model: Path) -> AdapterTrainer:
    return AdapterTrainer(float_model)


@pytest.fixture(scope="module")
def frozen(float_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, PeftModel]:
    """Adapters beside the policy's."""
    return {
        name: peft_adapter(float_model, tmp_path_factory.mktemp(name), seed=seed, **lora)
        for seed, (name, lora) in enumerate(FROZEN.items())
    }


def peft_adapter(base: Path, folder: Path, *, seed: int, **lora: Any) -> PeftModel:
    """Write a random adapter; return the model that has it, as peft computes it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = get_peft_model(load_causal_lm(base, "float32"), LoraConfig(task_type="CAUSAL_LM", **lora))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(str(folder))
    model.adapter_folder = folder
    return model.eval()


@pytest.fixture(scope="module")
def engine(float_model: Path, trainer: AdapterTrainer, frozen: dict[str, PeftModel]) -> Iterator[EngineThread]:
    held = []
    for name, model in frozen.items():
        stored = StoredAdapter.read(model.adapter_folder, "key")
        held.append(FrozenAdapter(name=name, path=str(stored.path), rank=stored.rank, modules=stored.modules))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "WORKER_EXTENSION", "spoiled_adapter_worker.WorkerExtension")
        with engine_of(float_model, replace(trainer.spec, frozen=tuple(held), named=2)) as engine:
            yield engine


def request(name: str, tokens: int = 24, seed: int = 0, adapter: str = POLICY) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, prompt_ids=PROMPT, sampling=Sampling(max_tokens=tokens), seed=seed, adapter=adapter
    )


def sampled(engine: EngineThread, name: str) -> list[Generation]:
    return list(engine.generate([request(f"{name}-{seed}", seed=seed) for seed in range(3)]).values())


def error(trainer: AdapterTrainer, generations: list[Generation], model: Any = None) -> float:
    """Return the largest difference of a sampled token's log-probability from a forward pass of the merged model."""
    return max(float(np.abs(expected(trainer, item, model) - item.logprobs).max()) for item in generations)


def expected(trainer: AdapterTrainer, generation: Generation, model: Any = None) -> np.ndarray:
    """Return the log-probabilities of a response's tokens."""
    tokens = np.concatenate([PROMPT, generation.token_ids])
    return trainer.logprobs(tokens, model)[-len(generation.token_ids) :]


def test_vllm_computes_with_the_adapter_what_the_merged_model_computes(
    engine: EngineThread, trainer: AdapterTrainer
) -> None:
    assert error(trainer, sampled(engine, "start"), trainer.base) < TOLERANCE
    probe = LogprobProbe(tokens=PROMPT[:64], trainer=trainer.logprobs, tolerance=1e-3, every=1)
    sync = trainer.sync(engine, probe)
    for version in (1, 2):
        before = sampled(engine, f"before-{version}")
        trainer.change(seed=version)
        assert error(trainer, before) > FAR  # a stale adapter would be seen
        report = sync.push()
        generations = sampled(engine, f"after-{version}")
        assert error(trainer, generations) < TOLERANCE
        assert error(trainer, generations, trainer.base) > FAR
        assert report.version == version
        assert report.unchecked == ()
        assert report.checked == 2 * 7 * 2 + len(list(trainer.base.named_parameters()))
        assert report.bytes == sum(4 * each.numel() for _, each in trainer.full_weights())
        assert report.probe is not None
        assert report.probe < TOLERANCE
        assert {segment.policy_version for item in generations for segment in item.segments} == {version}


def test_the_base_model_and_frozen_adapters_are_served_beside_the_policy(
    engine: EngineThread, trainer: AdapterTrainer, frozen: dict[str, PeftModel]
) -> None:
    """In one batch, before and after updates of the policy's adapter, which change nothing of them."""
    sync, samples = trainer.sync(engine), {}
    for version in range(3):
        if version:
            trainer.change(seed=20 + version)
            sync.push()
        # of one prompt, of which each needs keys and values of its own
        requests = [
            request(f"{adapter}-{seed}-{version}", seed=seed, adapter=adapter)
            for seed in range(3)
            for adapter in (POLICY, BASE, *frozen)
        ]
        found = engine.generate(requests)
        models = {POLICY: trainer.merged, BASE: trainer.base, **frozen}
        for name, model in models.items():
            own = [found[each.request_id] for each in requests if each.adapter == name]
            assert error(trainer, own, model) < TOLERANCE, name
            others = [other for other in models if other != name and (version or {name, other} != {POLICY, BASE})]
            assert all(error(trainer, own, models[other]) > FAR for other in others), name
            if name != POLICY:
                tokens = [each.token_ids.tolist() for each in own]
                assert samples.setdefault(name, tokens) == tokens, "the same seeds draw the same"
    with pytest.raises(GenerationError, match=r"asks for the adapter 'absent'; this engine has policy, base, wide, na"):
        engine.generate([request("strange", adapter="absent")])


def test_adapters_come_by_name_while_others_generate(engine: EngineThread, float_model: Path) -> None:
    """Two adapters of one service, then a third in the place of the first; none changes what another samples."""
    trainer = AdapterTrainer(float_model)
    sync = trainer.sync(engine, LogprobProbe(tokens=PROMPT[:64], trainer=trainer.logprobs, tolerance=1e-3, every=1))
    models: dict[str, Any] = {}
    for number, (name, dropped) in enumerate({"one": (), "two": (), "three": ("one",)}.items()):
        trainer.change(seed=40 + number)
        models[name] = copy.deepcopy(trainer.merged)
        if number:
            running = list(models)[number - 1]
            engine.run(engine.engine.submit([request(f"{running}-long", tokens=430, seed=5, adapter=running)]))
            before = wait_for_tokens(engine, f"{running}-long", 8)
        sync.push_adapter(name, dropped)
        if number:
            wait_for_tokens(engine, f"{running}-long", before + 1)  # nobody waited for its end
            engine.run(engine.engine.abort([f"{running}-long"]))
            generation = engine.collect(1)[f"{running}-long"]
            assert generation.stop_reason is StopReason.ABORTED
            assert error(trainer, [generation], models[running]) < TOLERANCE
    # one whose abort was lost ends before its adapter goes
    engine.run(engine.engine.submit([request("orphan", tokens=300, adapter="two")]))
    wait_for_tokens(engine, "orphan", 2)
    sync.push_adapter("four", ("two",))
    assert engine.collect(1)["orphan"].stop_reason is StopReason.ABORTED
    trainer.change(seed=50)
    models["five"] = copy.deepcopy(trainer.merged)
    sync.push_adapter("five", ("four",))
    requests = [
        replace(request(f"{name}-{seed}", seed=seed, adapter=name), top_logprobs=3)
        for seed in range(3)
        for name in ("three", "five", BASE)
    ]
    found = engine.generate(requests)
    models[BASE] = trainer.base
    for name in ("three", "five", BASE):
        own = [found[each.request_id] for each in requests if each.adapter == name]
        assert error(trainer, own, models[name]) < TOLERANCE, name
        assert all(error(trainer, own, models[other]) > FAR for other in models if other != name), name
        scores = engine.run(engine.engine.score_prompt(PROMPT, name, 4))
        np.testing.assert_allclose(scores.logprobs, trainer.logprobs(PROMPT, models[name]), atol=TOLERANCE)
        assert_top(scores.top, PROMPT, models[name], len(PROMPT) - 1, 4)
        for each in own:
            assert_top(each.top, np.concatenate([PROMPT, each.token_ids]), models[name], len(each.token_ids), 3)
    assert engine.run(engine.engine.score_prompt(PROMPT, BASE, 0)).top is None
    for refused in ("one", "two", "four"):
        with pytest.raises(GenerationError, match=f"asks for the adapter '{refused}'; this engine has .*three, five"):
            engine.generate([request("strange", adapter=refused)])


@torch.no_grad()
def assert_top(top: Any, tokens: np.ndarray, model: Any, places: int, count: int) -> None:
    """Compare with the likeliest tokens in the last places of a sequence."""
    logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, -places - 1 : -1]
    values, indices = torch.topk(torch.log_softmax(logits.float(), -1), count)
    np.testing.assert_allclose(top.logprobs, values, atol=TOLERANCE)
    assert (top.token_ids == indices.numpy()).mean() > 0.98  # where two are as likely, either is first


def wait_for_tokens(engine: EngineThread, name: str, count: int) -> int:
    """Return how many tokens a request has, as soon as these are `count` or more and it goes on."""

    async def sampled() -> int:
        states = engine.engine._engine.output_processor.request_states
        while own := [each for each in states.values() if each.external_req_id == name]:
            if (found := int(own[0].detokenizer.num_output_tokens())) >= count:
                return found
            await asyncio.sleep(0)
        return 0

    found = engine.run(sampled())
    assert found, f"{name} ended before it had {count} tokens"
    return found


@pytest.mark.parametrize("sleeps", [False, True], ids=["while it serves", "after sleep"])
def test_a_response_that_crosses_an_update_is_computed_again_with_the_new_adapter(
    engine: EngineThread, trainer: AdapterTrainer, sleeps: bool
) -> None:
    sync, other = trainer.sync(engine), copy.deepcopy(trainer.merged)
    trainer.change(seed=10)
    first = sync.push().version
    other.load_state_dict(trainer.merged.state_dict())
    trainer.change(seed=11)
    engine.run(engine.engine.submit([request("crossing", tokens=300, seed=5)]))
    wait_for_tokens(engine, "crossing", 8)
    if sleeps:
        engine.run(engine.engine.sleep())
        engine.run(engine.engine.wake())
    second = sync.push().version
    generation = engine.collect(1)["crossing"]
    assert [segment.policy_version for segment in generation.segments] == [first, second]
    for segment, model in zip(generation.segments, (other, trainer.merged), strict=True):
        own = slice(segment.start, segment.end)
        assert np.abs(expected(trainer, generation, model) - generation.logprobs)[own].max() < TOLERANCE
    later = slice(generation.segments[1].start, generation.segments[1].end)
    assert np.abs(expected(trainer, generation, other) - generation.logprobs)[later].max() > FAR
    sync.push()
    [again] = engine.generate([request("again", tokens=4)]).values()
    assert again.cached_prompt_tokens == 0  # keys and values of the adapter before are gone


def test_a_changed_number_of_an_adapter_is_found_and_named(engine: EngineThread, trainer: AdapterTrainer) -> None:
    sync = trainer.sync(engine)
    sync.push()
    llm: Any = engine.engine
    finish = llm.finish_weight_update

    async def spoiling_finish(version: int) -> None:
        await finish(version)
        await llm._engine.collective_rpc("spoil_adapter", args=("model.layers.1.self_attn.qkv_proj", 2, 1e-3))

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(llm, "finish_weight_update", spoiling_finish)
        with pytest.raises(WeightSyncError, match=r"in 1 of .* tensors: model\.layers\.1\.self_attn\.v_proj\.lora_B"):
            sync.push()
    assert sync.push().unchecked == ()


def test_an_adapter_of_a_layer_that_takes_none_is_refused(engine: EngineThread, trainer: AdapterTrainer) -> None:
    weights = [*trainer.full_weights()]

    class Strange:
        def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from ((name.replace("up_proj", "sideways_proj"), tensor) for name, tensor in weights)

    sender = SharedMemoryTransfer(engine, 1 << 16).connect(Strange(), rank=0)
    with pytest.raises(
        WeightSyncError, match=r"(?s)no adapter in 4 of the layers.*sideways_proj.*inference\.lora: false"
    ):
        WeightSync(sender.send, engine).push()
    trainer.sync(engine).push()  # it goes on with the next one


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "mistral_window", "gemma3_window", "phi3"])
def test_adapters_of_other_families_alone_give_what_merged_weights_give(family: str, tmp_path: Path) -> None:
    trainer = AdapterTrainer(make_family(family, tmp_path), rank=9, alpha=9, rslora=True)
    architecture = trainer.base.config.architectures[0]
    assert VLLMPlugin.adapter_obstacle(architecture, trainer.spec, device="cpu", experts=False) is None
    with engine_of(tmp_path, trainer.spec) as engine:
        sync = trainer.sync(engine)
        trainer.change(seed=1)
        report = sync.push()
        generations = sampled(engine, "after")
        assert error(trainer, generations) < 1e-3
        assert error(trainer, generations, trainer.base) > FAR
        assert report.checked > 2 * len(trainer.spec.modules)


@pytest.mark.slow
def test_a_layer_that_vllm_has_not_ends_the_start(float_model: Path) -> None:
    spec = AdapterSpec(rank=4, modules=("q_proj", "sideways_proj"))
    refusal = r"(?s)takes no adapter in the layers sideways_proj.*inference\.lora: false"
    with pytest.raises(GenerationError, match=refusal), engine_of(float_model, spec):
        pass


@pytest.mark.slow  # by day an engine computes a batch of several adapters and of none
def test_a_product_on_cpu_is_that_of_each_tokens_own_adapter() -> None:
    """vLLM's own code for CPUs gives tokens without an adapter the last one."""
    generator = torch.Generator().manual_seed(0)
    inputs_TD = torch.randn(5, 6, generator=generator)
    downs = [torch.randn(2, 1, 3, 6, generator=generator) for _ in range(2)]
    ups = [torch.randn(2, 1, width, 3, generator=generator) for width in (4, 2)]
    slots = torch.tensor([0, -1, 1, 0, -1])
    before = torch.randn(5, 6, generator=generator)
    found = before.clone()
    wrapper = SimpleNamespace(no_lora=False, token_lora_indices=slots)
    from roll_like.inference.vllm.adapters import add_lora_linear  # imports vLLM

    add_lora_linear(wrapper, found, inputs_TD, downs, ups, 0.5, (4, 2))
    for token, slot in enumerate(slots.tolist()):
        expected = before[token].clone()
        if slot >= 0:
            products = [up[slot, 0] @ (down[slot, 0] @ inputs_TD[token]) for down, up in zip(downs, ups, strict=True)]
            expected += 0.5 * torch.cat(products)
        torch.testing.assert_close(found[token], expected)
