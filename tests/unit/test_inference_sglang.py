"""The SGLang engine on a stand-in for SGLang: its calls, what it does around them, and what it refuses."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import multiprocessing
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from config_files import MINIMAL, changed
from engine_specs import check_stops_behind_reasoning, collect, engine_spec, generate
from engine_thread import EngineThread
from pydantic import ValidationError
from sglang_engine import STAND_IN, stand_in, tokens_of
from tests_support import given_logprobs
from transformers import AutoTokenizer

from roll_like import RLVRConfig
from roll_like.check.plan import plan
from roll_like.cluster.address import free_port
from roll_like.config.inference import weight_backend
from roll_like.errors import ConfigError, EngineError, GenerationError, WeightSyncError
from roll_like.inference.interface import (
    EngineDied,
    FailedGeneration,
    GenerateRequest,
    Generation,
    Sampling,
)
from roll_like.inference.sglang import arguments
from roll_like.inference.sglang import engine as engine_module
from roll_like.inference.sglang.arguments import TESTED, engine_arguments, known_arguments, require_version
from roll_like.inference.sglang.config import FIXED_ENGINE_ARGS, OWNED_ENGINE_ARGS, SGLangConfig
from roll_like.inference.sglang.engine import REPORT_TOKENS, SGLangEngine, sampling_params
from roll_like.inference.sglang.plugin import SGLangPlugin
from roll_like.inference.sglang.weight_transfer import SGLangSender, SGLangTransfer
from roll_like.inference.stops import Stops
from roll_like.inference.weight_transfer.probe import LogprobProbe
from roll_like.inference.weight_transfer.shared_memory import (
    SharedMemory,
    SharedMemoryTransfer,
    as_payload,
    bucket_size,
    fill_bucket,
)
from roll_like.inference.weight_transfer.sync import WeightSync
from roll_like.models.modules import load_causal_lm
from roll_like.types import Segment, StopReason

PROMPT = np.arange(20, 60, dtype=np.int32)
CUDA = {"device": "cuda", "devices_per_node": 4, "device_mapping": {"training": "0-1", "inference": "2-3"}}
COLOCATED = {"device": "cuda", "devices_per_node": 2, "device_mapping": {"training": "0-1", "inference": "0-1"}}


@pytest.fixture(autouse=True)
def sglang() -> Iterator[None]:
    with stand_in():
        yield


def request(name: str, *, seed: int | None = 0, prompt: np.ndarray = PROMPT, **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, prompt_ids=prompt, sampling=Sampling(**{"max_tokens": 12, **sampling}), seed=seed
    )


@pytest.fixture
async def engine(tiny_model: Path) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine(SGLangConfig(max_running=4), engine_spec(tiny_model, shares_gpus=True))
    await engine.start()
    yield engine
    await engine.close()


async def begin(engine: SGLangEngine, name: str) -> None:
    """Submit a long request, and return when it has tokens."""
    await engine.submit([request(name, max_tokens=200)])
    while tokens_of(engine)[name] < REPORT_TOKENS:
        await asyncio.sleep(0.005)


def bucket(path: Path, change: float = 1.0) -> tuple[SharedMemory, dict[str, Any]]:
    weights = [(name, each.detach() + change) for name, each in load_causal_lm(path, "float32").named_parameters()]
    memory = SharedMemory(bucket_size(weights))
    return memory, as_payload(fill_bucket(memory, weights))


async def push(engine: SGLangEngine, path: Path, number: int) -> None:
    await engine.start_weight_update()
    memory, info = bucket(path)
    await engine.update_weights(info)
    memory.close()
    await engine.finish_weight_update(number)


# ---- its calls ---------------------------------------------------------------------------------------


def test_the_record_is_that_of_the_pinned_version() -> None:
    recorded = importlib.import_module("sglang.recorded").RECORD
    assert recorded["version"] == TESTED == version("sglang")
    extra = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert f'"sglang=={TESTED}"' in extra
    assert len(recorded["server_args"]) > 300


def test_every_argument_is_one_of_sglangs(tiny_model: Path) -> None:
    known = set(importlib.import_module("sglang.recorded").RECORD["server_args"])
    for config in (SGLangConfig(), SGLangConfig(cuda_graphs=True, deterministic=True, expert_parallel=True)):
        assert set(engine_arguments(config, engine_spec(tiny_model, shares_gpus=True, returns_routes=True))) <= known
    divided = engine_arguments(SGLangConfig(expert_parallel=True), engine_spec(tiny_model, tensor_parallel_size=2))
    assert (divided["tp_size"], divided["ep_size"]) == (2, 2)
    assert set(OWNED_ENGINE_ARGS) | set(FIXED_ENGINE_ARGS) <= known
    fields = importlib.import_module("sglang.recorded").RECORD["classes"]["SamplingParams"]
    assert set(sampling_params(Sampling(max_tokens=3), 1)) <= set(fields)


def test_the_stand_in_refuses_what_sglang_would_refuse() -> None:
    io_struct: Any = importlib.import_module("sglang.srt.managers.io_struct")
    with pytest.raises(TypeError, match=r"unknown fields \['modus'\]"):
        io_struct.PauseGenerationReqInput(modus="retract")
    with pytest.raises(TypeError, match=r"misses \['new_version'\]"):
        io_struct.UpdateWeightVersionReqInput()
    manager: Any = importlib.import_module("sglang.srt.managers.tokenizer_manager").TokenizerManager
    with pytest.raises(TypeError, match="too many positional arguments"):
        manager.pause_generation(None, "request", "more")
    recorded: Any = importlib.import_module("sglang.recorded")
    with pytest.raises(TypeError, match="abort_request is no coroutine in SGLang"):

        @recorded.with_signature("TokenizerManager.abort_request")
        async def abort_request(self: Any, rid: str) -> None: ...

    # each method that the engine calls is a recorded one
    source = inspect.getsource(engine_module)
    called = {line.split("self._manager.")[1].split("(")[0] for line in source.splitlines() if "_manager." in line}
    methods = {name.partition(".")[2] for name in recorded.RECORD["functions"]}
    assert called - {"tokenizer"} <= methods
    assert len(called) > 12


@pytest.mark.slow
def test_the_record_is_what_the_wheel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "scripts")
    script: Any = importlib.import_module("sglang_signatures")
    try:
        package = script.unpack(tmp_path)
    except subprocess.CalledProcessError:
        pytest.skip("pip cannot fetch the wheel")
    assert script.record(package) == importlib.import_module("sglang.recorded").RECORD


# ---- generating --------------------------------------------------------------------------------------


async def test_logprobs_are_those_of_the_sampled_distribution(engine: SGLangEngine, tiny_model: Path) -> None:
    asked = {name: request(name, temperature=t) for name, t in (("cold", 0.6), ("one", 1.0), ("greedy", 0.0))}
    for name, generation in (await generate(engine, *asked.values())).items():
        tokens = torch.from_numpy(np.concatenate([PROMPT, generation.token_ids]).astype(np.int64))
        with torch.no_grad():
            logits_TV = load_causal_lm(tiny_model, "float32")(tokens[None]).logits[0, len(PROMPT) - 1 : -1]
        temperature = asked[name].sampling.temperature or 1.0
        expected = torch.log_softmax(logits_TV / temperature, -1).gather(1, tokens[len(PROMPT) :, None])[:, 0]
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)
        assert generation.segments == (Segment(start=0, end=len(generation.token_ids), policy_version=0),)
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        assert generation.text == tokenizer.decode(generation.token_ids, skip_special_tokens=True)


async def test_seeds_are_followed_with_deterministic_kernels(tiny_model: Path) -> None:
    for deterministic in (True, False):
        engine = SGLangEngine(SGLangConfig(deterministic=deterministic), engine_spec(tiny_model))
        await engine.start()
        twice = [(await generate(engine, request("one", seed=3, max_tokens=20)))["one"] for _ in range(2)]
        assert (twice[0].token_ids.tolist() == twice[1].token_ids.tolist()) is deterministic
        await engine.close()


async def test_stop_strings_and_limits_end_a_response(engine: SGLangEngine) -> None:
    whole = (await generate(engine, request("whole", temperature=0, max_tokens=20)))["whole"]
    assert (whole.stop_reason, len(whole.token_ids)) == (StopReason.LENGTH, 20)
    stop = whole.text[4:6]
    stopped = (await generate(engine, request("stopped", temperature=0, max_tokens=20, stop=(stop,))))["stopped"]
    assert stopped.stop_reason is StopReason.STOP
    assert stopped.text == whole.text[: whole.text.index(stop)]
    with pytest.raises(GenerationError, match="40 prompt tokens and up to 240 response tokens, 280 together"):
        await engine.submit([request("long", max_tokens=240)])


async def test_a_stop_string_in_reasoning_does_not_end_a_response(engine: SGLangEngine) -> None:
    whole = (await generate(engine, request("whole", temperature=0, max_tokens=60)))["whole"]
    # greedy, the model says one thing again and again, then another
    turns = [at for at, pair in enumerate(pairwise(whole.text)) if len(set(pair)) == 2]
    early, close, late = whole.text[:2], *(whole.text[at : at + 2] for at in turns[:2])
    asked = request("asked", temperature=0, max_tokens=60)
    await check_stops_behind_reasoning(engine, asked, whole, (early, close, late), atol=1e-4)


def test_what_sglang_says_of_a_request_is_checked(tiny_model: Path) -> None:
    engine = SGLangEngine(SGLangConfig(), engine_spec(tiny_model))
    engine._stops = Stops(Words())
    drawn = [(-0.5, 7, None), (-1.5, 8, None), (-2.5, 9, None)]

    def told(**changes: Any) -> Generation:
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "2", "output_token_logprobs": drawn}
        return engine._told(request("one"), {"meta_info": meta | changes})

    whole = told()
    assert (whole.token_ids.tolist(), whole.logprobs.tolist()) == ([7, 8, 9], [-0.5, -1.5, -2.5])
    assert whole.segments == (Segment(start=0, end=3, policy_version=2),)
    # the stop string ended with the second token
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]
    cut = told(completion_tokens=2, weight_versions=spans)
    assert [(each.end, each.policy_version) for each in cut.segments] == [(1, 1), (2, 2)]
    assert cut.token_ids.tolist() == [7, 8]
    with pytest.raises(GenerationError, match="policy versions of 2 tokens of 3"):
        told(weight_versions=spans)
    with pytest.raises(GenerationError, match=r"ended the request with .*out of memory"):
        told(finish_reason={"type": "abort", "status_code": 500, "message": "out of memory"})
    with pytest.raises(GenerationError, match="ended the request with None, after 3 tokens"):
        told(finish_reason=None)
    for number in (math.nan, -math.inf):
        with pytest.raises(GenerationError, match=r"told a log-probability of (nan|-inf) for token 1 of request one"):
            told(output_token_logprobs=[(-0.5, 7, None), (number, 8, None), (-2.5, 9, None)])


class Words:
    eos_token_id = None

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, tokens))


async def test_a_prompt_is_shared_and_said_to_be(engine: SGLangEngine) -> None:
    first = (await generate(engine, request("first")))["first"]
    assert (first.cached_prompt_tokens, (await generate(engine, request("next")))["next"].cached_prompt_tokens) == (
        0,
        len(PROMPT) - 1,
    )


async def test_an_abort_stops_its_request_alone(engine: SGLangEngine) -> None:
    """SGLang aborts by the beginning of an id: `1` would take `10` along."""
    await engine.submit([request(name, max_tokens=60 if name != "1" else 200) for name in ("1", "10", "1x")])
    while tokens_of(engine)["1"] < 3:
        await asyncio.sleep(0.005)
    await engine.abort(["1", "unknown"])
    results = await collect(engine, 3)
    assert {name: result.stop_reason for name, result in results.items()}.pop("1") is StopReason.ABORTED
    assert 0 < len(results["1"].token_ids) == len(results["1"].logprobs) < 200
    assert results["10"].stop_reason is not StopReason.ABORTED
    assert results["1x"].stop_reason is not StopReason.ABORTED


async def test_aborts_of_a_frozen_engine_are_answered_before_it_goes_on(engine: SGLangEngine) -> None:
    await begin(engine, "long")
    await engine.start_weight_update()
    await engine.submit([request("waits"), request("dropped")])
    assert await engine.poll(0.1) == []
    await engine.abort(["long", "dropped"])
    results = await collect(engine, 2)
    assert {result.stop_reason for result in results.values()} == {StopReason.ABORTED}
    # what was reported: the first token, and all but the last few
    assert REPORT_TOKENS <= len(results["long"].token_ids) == len(results["long"].logprobs) < 200
    assert len(results["dropped"].token_ids) == 0
    assert results["dropped"].segments == ()
    await engine.resume()
    assert (await collect(engine, 1))["waits"].stop_reason is not StopReason.ABORTED
    assert engine._sglang_ids == engine._waiting == engine._tasks == {}


async def test_what_sglang_refuses_fails_one_request(engine: SGLangEngine) -> None:
    engine._spec = engine_spec(Path("model"), max_model_len=10_000)  # ours lets it pass
    results = await generate(engine, request("long", max_tokens=500), request("fine"))
    assert isinstance(results["long"], FailedGeneration)
    assert "Requested token count exceeds" in str(results["long"].error)
    assert results["fine"].stop_reason is not StopReason.ABORTED


async def test_it_tells_the_logprobs_of_given_tokens(engine: SGLangEngine, tiny_model: Path) -> None:
    await generate(engine, request("same prompt"))  # whose keys and values are not used
    tokens = torch.from_numpy(PROMPT.astype(np.int64))
    with torch.no_grad():
        logits_TV = load_causal_lm(tiny_model, "float32")(tokens[None]).logits[0, :-1]
    expected = torch.log_softmax(logits_TV, -1).gather(1, tokens[1:, None])[:, 0]
    np.testing.assert_allclose(await engine.prompt_logprobs(PROMPT), expected, atol=1e-4)


# ---- weights and memory ------------------------------------------------------------------------------


async def test_new_weights_start_a_new_segment(engine: SGLangEngine, tiny_model: Path) -> None:
    await begin(engine, "long")
    await push(engine, tiny_model, 5)
    await engine.submit([request("later")])
    assert await engine.poll(0.1) == []
    await engine.resume()
    results = await collect(engine, 2)
    assert [segment.policy_version for segment in results["long"].segments] == [0, 5]
    assert results["long"].segments[0].end == results["long"].segments[1].start
    assert [segment.policy_version for segment in results["later"].segments] == [5]
    assert results["later"].cached_prompt_tokens == 0


async def test_an_update_that_was_broken_off_does_not_hinder_the_next(engine: SGLangEngine, tiny_model: Path) -> None:
    await engine.start_weight_update()
    await push(engine, tiny_model, 1)
    await engine.resume()
    assert [each.policy_version for each in (await generate(engine, request("one")))["one"].segments] == [1]


async def test_bytes_and_shapes_that_are_not_the_models_are_refused(engine: SGLangEngine, tiny_model: Path) -> None:
    await engine.start_weight_update()
    memory, info = bucket(tiny_model)
    memory.view[100] ^= 1
    with pytest.raises(WeightSyncError, match="arrived changed"):
        await engine.update_weights(info)
    memory.close()
    await engine.finish_weight_update(1)
    engine._manager.begin_weight_update = refused
    with pytest.raises(WeightSyncError, match="the inference engine refused the weights: not now"):
        await engine.start_weight_update()


async def refused(obj: Any, request: Any) -> tuple[bool, str]:
    return False, "not now"


@pytest.mark.parametrize("frees", [False, True], ids=["freezes", "frees memory"])
@pytest.mark.parametrize("pushes", [False, True], ids=["no push", "push"])
async def test_requests_freeze_while_it_sleeps_and_go_on_after_resume(
    tiny_model: Path, frees: bool, pushes: bool
) -> None:
    engine = SGLangEngine(SGLangConfig(deterministic=True), engine_spec(tiny_model, shares_gpus=frees))
    await engine.start()
    await engine.wake()  # of an engine that has not slept
    undisturbed = (await generate(engine, request("long", max_tokens=80)))["long"]
    await begin(engine, "long")
    await engine.sleep()
    kept = tokens_of(engine)["long"]
    assert set(engine._asleep) == ({"weights", "kv_cache"} if frees else set())
    scheduler = engine._manager.scheduler
    assert scheduler._model.module.get_input_embeddings().weight.isnan().all().item() is frees
    await engine.submit([request("later")])
    assert await engine.poll(0.1) == []
    await engine.wake()
    assert set(scheduler._asleep) == ({"kv_cache"} if frees else set())
    if pushes:
        await push(engine, tiny_model, 5)
    assert await engine.poll(0.1) == []
    assert tokens_of(engine) == {"long": kept, "later": 0}
    await engine.resume()
    assert scheduler._asleep == set()
    results = await collect(engine, 2)
    tokens = results["long"].token_ids.tolist()
    assert tokens[:kept] == undisturbed.token_ids[:kept].tolist()
    if pushes:
        assert [segment.policy_version for segment in results["long"].segments] == [0, 5]
    else:
        assert tokens[:80] == undisturbed.token_ids.tolist()
    await engine.close()


class Trainer:
    """Other weights than the engine's."""

    def __init__(self, path: Path) -> None:
        self.model = load_causal_lm(path, "float32")
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def logprobs(self, tokens_T: np.ndarray) -> np.ndarray:
        return given_logprobs(self.model, tokens_T)


@pytest.mark.parametrize("by_value", [False, True], ids=["shared memory", "object store"])
def test_a_sync_is_verified_by_a_probe(tiny_model: Path, by_value: bool) -> None:
    trainer = Trainer(tiny_model)
    with EngineThread(SGLangEngine(SGLangConfig(), engine_spec(tiny_model))) as engine:
        transfer = SharedMemoryTransfer(engine, bucket_bytes=1 << 14, by_value=by_value)
        sender = transfer.connect(trainer, rank=0)
        with pytest.raises(WeightSyncError, match="sync 1 cannot be verified"):
            WeightSync(sender.send, engine).push()
        probe = LogprobProbe(tokens=PROMPT, trainer=trainer.logprobs, tolerance=1e-4, every=0)
        sync = WeightSync(sender.send, engine, probe=probe)
        for _ in range(4):  # every one, though `every` says the first two
            report = sync.push()
            assert report.probe is not None
            assert report.probe < 1e-4
        assert (report.checked, report.buckets > 1) == (0, True)
        trainer.model.get_input_embeddings().weight.data += 0.1
        engine.engine._manager.scheduler._model.load_weights = lambda weights: None  # SGLang keeps the old ones
        with pytest.raises(EngineError, match="compute different log-probabilities"):
            sync.push()
        sender.close()


def serve(path: Path, commands: Any) -> None:
    """An engine in a process of its own, which takes weights by broadcast."""
    with stand_in():
        config = SGLangConfig()
        with EngineThread(SGLangEngine(config, engine_spec(path, weight_backend="nccl"))) as engine:
            while (command := commands.recv()) is not None:
                name, args = command
                try:
                    commands.send((engine.run(getattr(engine.engine, name)(*args)), None))
                except Exception as error:  # noqa: BLE001 - goes to the test
                    commands.send((None, error))


class Replicas:
    """Engines in processes of their own, as a `ClusterHandle`."""

    def __init__(self, pipes: list[Any]) -> None:
        self._pipes = pipes

    def __len__(self) -> int:
        return len(self._pipes)

    def scatter(self, method: Any, arguments: list[Any]) -> list[Any]:
        for pipe, argument in zip(self._pipes, arguments, strict=True):
            pipe.send((method.__name__, (argument,)))
        return self._answers()

    def everywhere(self, method: Any, *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((method.__name__, args))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = [pipe.recv() for pipe in self._pipes]
        for _, error in answers:
            if error is not None:
                raise error
        return [found for found, _ in answers]


@pytest.mark.slow
def test_weights_are_broadcast_to_engines_with_gpus_of_their_own(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gloo here; on GPUs the same calls make a group of NCCL."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(tiny_model, theirs))
    process.start()
    trainer = Trainer(tiny_model)
    replicas: Any = Replicas([ours])
    where = {"address": "127.0.0.1", "port": free_port("127.0.0.1"), "backend": "gloo"}
    transfer = SGLangTransfer(engines=replicas, gpus_per_engine=1, bucket_bytes=1 << 15, **where)
    assert transfer.connect(trainer, rank=1).send(1).bytes == 0  # the other ranks gather
    sender = transfer.connect(trainer, rank=0)
    probe = LogprobProbe(tokens=PROMPT, trainer=trainer.logprobs, tolerance=1e-4, every=0)
    sync = WeightSync(sender.send, replicas, probe=probe)
    broadcast = Mock(side_effect=torch.distributed.broadcast)
    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    report = sync.push()
    assert report.version == 1
    sizes = [each.args[0].nbytes for each in broadcast.call_args_list]
    assert sum(sizes) == report.bytes == sum(4 * each.numel() for each in trainer.model.parameters())
    # one broadcast a bucket; only the embedding, which is larger, is alone in one
    assert report.buckets == len(sizes) < len(list(trainer.model.parameters()))
    assert [size for size in sizes if size > 1 << 15] == [trainer.model.get_input_embeddings().weight.nbytes]
    # an engine that refuses is an error, and no broadcast waits for it
    with ThreadPoolExecutor(1) as thread:
        failing = thread.submit(sender.send, 2)  # no session is open
        with pytest.raises(WeightSyncError, match="must run between begin_weight_update"):
            failing.result(60)
    ours.send(None)
    process.join(60)
    assert process.exitcode == 0
    sender.close()


def test_a_bucket_of_several_precisions_is_cut_at_multiples_of_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As biases and scales that stay in float32."""
    sent: list[torch.Tensor] = []
    announced: list[dict[str, Any]] = []
    monkeypatch.setattr(
        torch.distributed, "broadcast", lambda packed, **_: [sent.append(packed), SimpleNamespace(wait=lambda: None)][1]
    )
    weights = {
        "odd": torch.randn(3, dtype=torch.bfloat16),
        "scalar": torch.randn(()),
        "turned": torch.randn(5, 2).T,
        "codes": torch.arange(3, dtype=torch.uint8),
        "last": torch.randn(2, dtype=torch.bfloat16),
    }
    engines: Any = SimpleNamespace(
        __len__=lambda: 1, everywhere=lambda method, info: announced.append(info), scatter=lambda *_: None
    )
    transfer = SGLangTransfer(engines=engines, gpus_per_engine=1, address="", port=0, backend="gloo")
    source: Any = SimpleNamespace(full_weights=lambda: iter(weights.items()))
    sender = SGLangSender(transfer, source, rank=1)
    sender._rank = 0  # without a group to join
    assert sender.send(1).buckets == len(sent) == 1
    message = importlib.import_module("sglang.srt.managers.io_struct").UpdateWeightsFromDistributedReqInput(
        **announced[0]
    )
    cut_views = importlib.import_module("sglang.srt.managers.scheduler").cut_views
    arrived = dict(cut_views(message, lambda packed: packed.copy_(sent[0])))
    assert arrived.keys() == weights.keys()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in weights.items())


def test_gpus_of_engines_follow_one_another_in_the_group() -> None:
    three: Any = Replicas([None] * 3)
    transfer = SGLangTransfer(engines=three, gpus_per_engine=2, address="10.0.0.1", port=1234)
    assert (transfer.world_size, transfer.backend) == (7, "nccl")
    assert [place["rank_offset"] for place in transfer.places()] == [1, 3, 5]
    assert {place["world_size"] for place in transfer.places()} == {7}


# ---- the end -----------------------------------------------------------------------------------------


async def test_a_scheduler_that_dies_ends_the_engine(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr("roll_like.inference.task_engine.DEATH_SECONDS", 0.05)
    monkeypatch.setattr(engine_module, "DEATH_SECONDS", 0.05)
    monkeypatch.setattr(type(engine._engine), "children", [child.pid])
    await begin(engine, "long")
    await engine.start_weight_update()
    child.send_signal(signal.SIGKILL)
    signal.raise_signal(signal.SIGQUIT)  # as SGLang's schedulers do to their parent
    await asyncio.sleep(0.1)
    with pytest.raises(EngineDied, match=f"process {child.pid} of SGLang died"):
        await engine.poll(5.0)
    with pytest.raises(EngineDied):
        await engine.submit([request("more")])
    child.wait()
    await engine.close()
    assert engine._tasks == {}
    await engine.close()


async def test_a_start_that_fails_says_why(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GenerationError, match="SGLang did not start with nowhere on cpu") as caught:
        await SGLangEngine(SGLangConfig(), engine_spec(Path("nowhere"))).start()
    assert "model.path" in str(caught.value)

    def no_memory(arguments: dict[str, Any]) -> Any:
        raise RuntimeError("Not enough memory. Please try to increase --mem-fraction-static.")

    monkeypatch.setattr(engine_module, "_built", no_memory)
    with pytest.raises(GenerationError, match="Not enough memory") as caught:
        await SGLangEngine(SGLangConfig(), engine_spec(tiny_model)).start()
    assert "change inference.mem_fraction_static" in str(caught.value)


@pytest.mark.parametrize(
    ("found", "message"),
    [(None, "the package sglang is not installed here"), ("0.5.9", "sglang 0.5.9 is installed"), ("0.6.0", "0.6.0 is")],
)
async def test_missing_and_wrong_versions_are_named(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, found: str | None, message: str
) -> None:
    monkeypatch.setattr(arguments, "installed_version", lambda: found)
    monkeypatch.setattr("roll_like.inference.sglang.plugin.installed_version", lambda: found)
    with pytest.raises(GenerationError, match=message) as caught:
        require_version()
    assert f'pip install "roll-like[sglang]" (sglang {TESTED})' in str(caught.value)
    with pytest.raises(GenerationError, match=message):
        await SGLangEngine(SGLangConfig(), engine_spec(tiny_model)).start()
    (finding,) = findings()
    assert (finding.level, finding.key) == ("error", "inference.type")


# ---- settings ----------------------------------------------------------------------------------------


def configured(resources: dict[str, Any] = CUDA, **inference: Any) -> RLVRConfig:
    return RLVRConfig.from_values(
        changed(MINIMAL, resources=resources, training={"workers": 2}, inference={"type": "sglang", **inference})
    )


def findings(resources: dict[str, Any] = CUDA, **inference: Any) -> list[Any]:
    config = configured(resources, **inference)
    return list(SGLangPlugin.check(config.inference, config.resources))


def test_it_runs_where_its_capabilities_say() -> None:
    config = configured()  # one replica on two GPUs
    assert weight_backend(config.inference, config.resources) == "nccl"
    assert [role.name for role in plan(config).roles] == ["training", "inference"]
    colocated = configured(COLOCATED, replicas=2)
    assert weight_backend(colocated.inference, colocated.resources) == "shared_memory"
    assert colocated.inference.gpu_share == 0.5
    with pytest.raises(ValidationError, match=r"SGLang's packages compute on NVIDIA GPUs only, and resources\.device"):
        RLVRConfig.from_values(changed(MINIMAL, inference={"type": "sglang"}))
    with pytest.raises(ValidationError, match="would keep 80% of their memory while it trains"):
        configured(COLOCATED, sleep=False, mem_fraction_static=0.8)


def test_settings_that_it_does_not_have_are_refused() -> None:
    for key in ("gpu_memory_utilization", "kv_cache_gib", "enforce_eager", "top_p"):
        with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
            configured(**{key: 0.5})
    for name, why in (*OWNED_ENGINE_ARGS.items(), *FIXED_ENGINE_ARGS.items()):
        with pytest.raises(ValidationError) as caught:
            configured(engine_args={name: 1})
        assert why in str(caught.value)


def test_further_arguments_are_checked_by_name(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert known_arguments() == set()  # the stand-in has no sources of them
    fields = tmp_path / "sglang" / "srt" / "arg_groups" / "fields"
    fields.mkdir(parents=True)
    (fields.parents[2] / "__init__.py").touch()
    (fields / "memory.py").write_text("class Memory:\n    page_size: int = 1\n    kv_cache_dtype: str = 'auto'\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: PackageAt(tmp_path / "sglang"))
    assert known_arguments() == {"page_size", "kv_cache_dtype"}
    assert engine_arguments(SGLangConfig(engine_args={"page_size": 16}), engine_spec(tiny_model))["page_size"] == 16
    with pytest.raises(ConfigError, match="no argument 'pagesize'; did you mean 'page_size'"):
        engine_arguments(SGLangConfig(engine_args={"pagesize": 16}), engine_spec(tiny_model))
    (finding,) = findings(engine_args={"pagesize": 16})
    assert (finding.level, finding.key) == ("error", "inference.engine_args.pagesize")
    assert findings(engine_args={"page_size": 16}) == []


class PackageAt:
    def __init__(self, folder: Path) -> None:
        self.submodule_search_locations = [str(folder)]


def test_what_has_no_effect_or_was_not_tested_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings() == []
    (finding,) = findings(sleep=True)
    assert (finding.level, finding.key) == ("warning", "inference.sleep")
    assert findings(COLOCATED, sleep=True) == []
    monkeypatch.setattr("roll_like.inference.sglang.plugin.installed_version", lambda: "0.5.24")
    (finding,) = findings()
    assert (finding.level, finding.key) == ("warning", "inference.type")


def test_memory_is_given_up_only_where_it_is_shared(tiny_model: Path) -> None:
    shared = engine_arguments(SGLangConfig(), engine_spec(tiny_model, shares_gpus=True))
    assert (shared["enable_memory_saver"], shared["enable_weights_cpu_backup"]) == (True, True)
    apart = engine_arguments(SGLangConfig(), engine_spec(tiny_model))
    awake = engine_arguments(SGLangConfig(sleep=False), engine_spec(tiny_model, shares_gpus=True))
    assert "enable_memory_saver" not in {*apart, *awake}
    assert STAND_IN.is_dir()
