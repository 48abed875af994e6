"""vLLM behind the engine protocol: exact log-probabilities, seeds, shared prefixes, aborts, a clean end."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import ANY, call, create_autospec

import numpy as np
import psutil
import pytest
import torch
from engine_specs import engine_spec
from engine_thread import EngineThread
from hygiene import ended, without_others

from roll_like.cluster.progress import PROGRESS, Work
from roll_like.errors import ConfigError, GenerationError, WeightSyncError
from roll_like.inference.hf.config import HFConfig
from roll_like.inference.hf.engine import HFEngine, sampling_logprobs
from roll_like.inference.interface import EngineDied, GenerateRequest, Generation, Sampling
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.engine import VLLMEngine
from roll_like.models.modules import load_causal_lm
from roll_like.types import ReasoningTags, StopReason

pytestmark = pytest.mark.integration

PROMPT = np.arange(20, 90, dtype=np.int32)


def request(name: str, *, seed: int | None = 0, **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, prompt_ids=PROMPT, sampling=Sampling(**{"max_tokens": 24, **sampling}), seed=seed
    )


def reference_logprobs(float_model: Path, generation: Generation, sampling: Sampling) -> np.ndarray:
    model = load_causal_lm(float_model, "float32")
    tokens = torch.from_numpy(np.concatenate([PROMPT, generation.token_ids]).astype(np.int64))
    with torch.no_grad():
        logits_TV = model(tokens[None]).logits[0, len(PROMPT) - 1 : -1]
    return np.array(
        [
            float(sampling_logprobs(logits_V, sampling)[token])
            for logits_V, token in zip(logits_TV, generation.token_ids, strict=True)
        ]
    )


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.7},
        {"top_k": 20},
    ],
)
def test_logprobs_are_those_of_the_distribution_that_was_sampled(
    vllm: EngineThread, float_model: Path, sampling: dict[str, float]
) -> None:
    generation = vllm.generate([request("one", seed=5, **sampling)])["one"]
    expected = reference_logprobs(float_model, generation, Sampling(max_tokens=24, **sampling))
    np.testing.assert_allclose(generation.logprobs, expected, atol=2e-4)


@pytest.mark.parametrize(
    "sampling",
    [{"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.5}, {"top_p": 0.7, "top_k": 90, "min_p": 0.1, "stop": ("e",)}],
)
def test_what_was_kept_is_told(vllm: EngineThread, float_model: Path, sampling: dict[str, Any]) -> None:
    """Log-probabilities among those tokens are the engine's, of requests that run beside others of another kind."""
    model = load_causal_lm(float_model, "float32")
    others = [request("whole", seed=9), request("greedy", temperature=0.0)]
    found = vllm.generate([*others, *(request(f"{seed}", seed=seed, **sampling) for seed in range(4))])
    for other in ("whole", "greedy"):
        kept = found.pop(other).kept
        assert kept is not None
        assert not kept.ids.size
    for generation in found.values():
        assert generation.kept is not None
        tokens = torch.from_numpy(np.concatenate([PROMPT, generation.token_ids]).astype(np.int64))
        with torch.no_grad():
            logits_TV = model(tokens[None]).logits[0, len(PROMPT) - 1 : -1]
        ids = np.split(generation.kept.ids, np.cumsum(generation.kept.counts)[:-1])
        assert len(ids) == len(logits_TV)
        for place, of_token in enumerate(ids):
            among = torch.log_softmax(logits_TV[place][of_token], -1)[of_token == generation.token_ids[place]]
            assert float(among) == pytest.approx(generation.logprobs[place], abs=1e-5)
            own = sampling_logprobs(logits_TV[place], replace(Sampling(max_tokens=1), **sampling)) > -torch.inf
            assert abs(int(own.sum()) - len(of_token)) <= 1  # the last one kept is a matter of rounding


def test_a_seed_repeats_a_sample_whatever_else_is_under_way(vllm: EngineThread) -> None:
    alone = vllm.generate([request("alone", seed=7)])["alone"]
    crowd = vllm.generate([request(f"{index}", seed=index) for index in range(16)])
    np.testing.assert_array_equal(alone.token_ids, crowd["7"].token_ids)
    assert len({tuple(item.token_ids) for item in crowd.values()}) == 16


def test_samples_of_one_batch_share_their_prompt(vllm: EngineThread) -> None:
    prompt = np.arange(100, 180, dtype=np.int32)  # two whole blocks of 32 tokens and 16 more
    batch = [
        GenerateRequest(request_id=f"{index}", prompt_ids=prompt, sampling=Sampling(max_tokens=2), seed=index)
        for index in range(8)
    ]
    shared = [item.cached_prompt_tokens for item in vllm.generate(batch).values()]
    assert sorted(shared) == [0, *[64] * 7]


def test_end_of_sequence_is_a_sampled_token_and_stop_strings_cut_the_text(
    vllm: EngineThread, float_model: Path
) -> None:
    crowd = vllm.generate([request(f"{index}", seed=index, max_tokens=180) for index in range(32)]).values()
    ended = [item for item in crowd if item.stop_reason is StopReason.STOP]
    assert ended, "a random model ends about every 500 tokens"
    assert all(item.token_ids[-1] == 2 and len(item.logprobs) == len(item.token_ids) for item in ended)
    assert all("<|im_end|>" not in item.text for item in ended)
    assert all(len(item.token_ids) == 180 for item in crowd if item.stop_reason is StopReason.LENGTH)
    whole = vllm.generate([request("free", seed=3)])["free"]
    stop = whole.text[len(whole.text) // 2 :][:3]
    stopped = vllm.generate([request("stopped", seed=3, stop=(stop,))])["stopped"]
    assert stopped.stop_reason is StopReason.STOP
    assert stopped.text == whole.text[: whole.text.index(stop)]
    np.testing.assert_array_equal(stopped.token_ids, whole.token_ids[: len(stopped.token_ids)])
    # reasoning that is never closed goes on behind the string, up to the limit
    tags = ReasoningTags(open="<open>", close="<close>", opened=True)
    reasoned = vllm.generate([replace(request("reasoned", seed=3, stop=(stop,)), reasoning=tags)])["reasoned"]
    assert (reasoned.stop_reason, len(reasoned.token_ids)) == (StopReason.LENGTH, 24)
    length = len(stopped.token_ids)
    assert length < 24
    np.testing.assert_array_equal(reasoned.token_ids[:length], stopped.token_ids)
    assert reasoned.text.startswith(whole.text[: whole.text.index(stop) + len(stop)])
    expected = reference_logprobs(float_model, reasoned, request("reasoned", seed=3).sampling)
    np.testing.assert_allclose(reasoned.logprobs, expected, atol=1e-3)
    assert [index for one in reasoned.segments for index in range(one.start, one.end)] == [*range(24)]


def test_aborted_requests_come_back_with_their_tokens(vllm: EngineThread) -> None:
    async def abort_after_first_token() -> None:
        one = request("first token", max_tokens=1)
        await vllm.engine.submit([request("kept", seed=1), request("dropped", max_tokens=180, seed=2), one])
        assert [result.request_id for result in await vllm.engine.poll(30.0)] == ["first token"]
        await vllm.engine.abort(["dropped", "never heard of"])

    vllm.run(abort_after_first_token())
    results = vllm.collect(2)
    assert results["dropped"].stop_reason is StopReason.ABORTED
    assert 0 < len(results["dropped"].token_ids) == len(results["dropped"].logprobs) < 180
    assert len(results["dropped"].kept) == len(results["dropped"].token_ids)
    assert results["kept"].stop_reason is StopReason.LENGTH
    vllm.run(vllm.engine.submit([request("at once")]))
    vllm.run(vllm.engine.abort(["at once"]))
    assert vllm.collect(1)["at once"].stop_reason is StopReason.ABORTED


def test_what_can_never_be_served_is_refused(vllm: EngineThread) -> None:
    with pytest.raises(
        GenerationError, match=r"70 prompt tokens and up to 443 response tokens, 513 together.*holds 512"
    ):
        vllm.run(vllm.engine.submit([request("fits"), request("long", max_tokens=443)]))
    assert vllm.run(vllm.engine.poll(0.2)) == []
    with pytest.raises(GenerationError, match="'twice' is in use"):
        vllm.run(vllm.engine.submit([request("twice"), request("twice")]))


def test_vllm_and_transformers_agree_greedily(vllm: EngineThread, float_model: Path) -> None:
    ours = vllm.generate([request("greedy", temperature=0.0)])["greedy"]
    with EngineThread(HFEngine(HFConfig(), engine_spec(float_model))) as hf:
        theirs = hf.generate([request("greedy", temperature=0.0)])["greedy"]
    np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-4)
    assert ours.text == theirs.text


async def poll_for_ever(engine: EngineThread) -> None:
    while True:
        assert await engine.engine.poll(1.0) == []


def test_the_watchdog_sees_each_step_and_no_work_of_a_frozen_engine(
    vllm: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[tuple[Work, str]]] = []
    monkeypatch.setattr(PROGRESS, "tick", lambda: seen.append(list(PROGRESS._active)))
    monkeypatch.setattr(PROGRESS, "_active", [])
    vllm.generate([request("one", max_tokens=10), request("two", max_tokens=20, seed=1)])
    assert 15 < len(seen) < 40  # two sequences advance together
    assert seen[1:-1] == [[(Work.OWN, "generate")]] * (len(seen) - 2)
    assert PROGRESS._active == []
    vllm.run(vllm.engine.submit([request("long", max_tokens=150)]))
    assert PROGRESS._active == [(Work.OWN, "generate")]
    vllm.run(vllm.engine.sleep())
    assert PROGRESS._active == []  # it waits for the trainer, however long that takes
    vllm.run(vllm.engine.resume())
    assert PROGRESS._active == [(Work.OWN, "generate")]
    vllm.collect(1)
    assert PROGRESS._active == []


def test_a_killed_engine_process_is_an_error_and_nothing_is_left(float_model: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    known = {child.pid for child in psutil.Process().children(recursive=True)}
    with EngineThread(VLLMEngine(VLLMConfig(kv_cache_gib=0.1), engine_spec(float_model))) as engine:
        started = [child for child in psutil.Process().children(recursive=True) if child.pid not in known]
        assert started
        engine.run(engine.engine.submit([request("lost", max_tokens=180)]))
        killed = [child.pid for child in started if "resource_tracker" not in " ".join(child.cmdline())]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="engine process died"):
            engine.run(poll_for_ever(engine))
        with pytest.raises(EngineDied):
            engine.run(engine.engine.submit([request("more")]))
    assert ended(*killed)
    # Python's resource tracker removes semaphores when this process ends
    new = {path for path in set(Path("/dev/shm").iterdir()) - before if not path.name.startswith("sem.")}
    assert not without_others(new)


@pytest.mark.usefixtures("vllm")  # a first import of vLLM warns
@pytest.mark.parametrize("shares_gpus", [False, True])
@pytest.mark.parametrize("pushes", [False, True])
async def test_the_calls_of_a_turn_of_the_trainer_are_vllms_own_and_in_order(
    float_model: Path, shares_gpus: bool, pushes: bool
) -> None:
    from vllm.v1.engine import PauseMode
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.abstract import SLEEP_TAGS

    assert "keep" in get_args(PauseMode)
    assert set(SLEEP_TAGS) == {"weights", "kv_cache"}
    llm = create_autospec(AsyncLLM, instance=True, errored=False)  # refuses calls that vLLM would not take
    llm.wake_up.side_effect = [False, True]  # whether everything is awake
    engine = VLLMEngine(VLLMConfig(), engine_spec(float_model, shares_gpus=shares_gpus))
    engine._engine = llm
    await engine.sleep()
    await engine.wake()
    if pushes:
        await engine.start_weight_update()
        await engine.update_weights({"names": []})
        await engine.finish_weight_update(3)
    await engine.resume()
    update = [
        call.pause_generation(mode="keep", clear_cache=True),
        call.start_weight_update(),
        call.update_weights(ANY),
        call.collective_rpc("require_every_layer"),
        call.finish_weight_update("3"),
    ]
    on_gpu = ([call.sleep(level=1, mode="keep"), call.wake_up(["weights"])], [call.wake_up(["kv_cache"])])
    on_cpu = ([call.pause_generation(mode="keep", clear_cache=False)], [call.resume_generation()])
    before, after = on_gpu if shares_gpus else on_cpu
    assert llm.mock_calls == before + (update if pushes else []) + after
    llm.reset_mock()
    await engine.resume()  # what is awake is not woken again
    assert llm.mock_calls == [call.resume_generation()]


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("verb", ["sleep", "resume", "start_weight_update"])
async def test_a_death_is_one_whatever_was_asked(float_model: Path, verb: str) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError

    llm = create_autospec(AsyncLLM, instance=True, errored=False)
    llm.pause_generation.side_effect = llm.resume_generation.side_effect = EngineDeadError()
    engine = VLLMEngine(VLLMConfig(), engine_spec(float_model))
    engine._engine = llm
    with pytest.raises(EngineDied, match="vLLM's engine process died"):
        await getattr(engine, verb)()


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("backend", ["shared_memory", "object_store", "nccl", "ipc"])
async def test_no_reload_is_closed_that_left_layers_alone(float_model: Path, backend: str) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = create_autospec(AsyncLLM, instance=True, errored=False)
    llm.collective_rpc.side_effect = RuntimeError("GptOssForCausalLM put none of the tensors")
    engine = VLLMEngine(VLLMConfig(), engine_spec(float_model, weight_backend=backend))
    engine._engine = llm
    await engine.start_weight_update()
    await engine.update_weights({"names": []})
    with pytest.raises(WeightSyncError, match="refused the weights: GptOssForCausalLM put none"):
        await engine.finish_weight_update(3)
    llm.finish_weight_update.assert_not_called()


@pytest.mark.usefixtures("vllm")
async def test_an_update_that_was_broken_off_goes_on_or_ends_the_engine(float_model: Path) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = create_autospec(AsyncLLM, instance=True, errored=False)
    engine = VLLMEngine(VLLMConfig(), engine_spec(float_model))
    engine._engine = llm
    await engine.start_weight_update()
    await engine.start_weight_update()  # by a trainer in the place of one that had sent nothing
    assert llm.start_weight_update.await_count == 1
    await engine.update_weights({"names": []})
    await engine.finish_weight_update(3)
    await engine.start_weight_update()
    assert llm.start_weight_update.await_count == 2
    await engine.update_weights({"names": []})
    with pytest.raises(EngineDied, match="in the middle of a weight update"):
        await engine.start_weight_update()


async def test_a_failed_start_says_why(tmp_path: Path, float_model: Path) -> None:
    async def start(config: VLLMConfig, path: Path) -> None:
        try:
            await VLLMEngine(config, engine_spec(path)).start()
        except GenerationError as error:
            # vLLM leaves a half-built client to the collector, which finds its ZeroMQ context open
            error.with_traceback(None).__cause__ = None
            with warnings.catch_warnings(action="ignore", category=ResourceWarning):
                gc.collect()
            raise

    with pytest.raises(
        GenerationError, match=r"did not start with .*Invalid repository ID or local directory"
    ) as missing:
        await start(VLLMConfig(), tmp_path)
    assert missing.value.fix
    with pytest.raises(GenerationError, match=r"did not start.*[Mm]emory") as memory:
        await start(VLLMConfig(kv_cache_gib=4000), float_model)
    assert "kv_cache_gib" in str(memory.value.fix)
    with pytest.raises(ConfigError, match="no argument 'max_num_batched_token'; did you mean 'max_num_batched_tokens'"):
        await start(VLLMConfig(engine_args={"max_num_batched_token": 1}), float_model)
