"""The transformers engine on a tiny model, and what both engines share."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_specs import check_stops_behind_reasoning, collect, engine_spec, generate

from roll_like.cluster.progress import PROGRESS, Work
from roll_like.errors import GenerationError, WeightSyncError
from roll_like.inference.hf.config import HFConfig
from roll_like.inference.hf.engine import HFEngine, draw, sampling_logprobs, segments_of
from roll_like.inference.interface import (
    EngineDied,
    FailedGeneration,
    GenerateRequest,
    Generation,
    Sampling,
)
from roll_like.inference.process_output import ProcessOutput
from roll_like.inference.stops import before
from roll_like.inference.weight_transfer.shared_memory import SharedMemory, as_payload, bucket_size, fill_bucket
from roll_like.models.modules import load_causal_lm
from roll_like.types import Segment, StopReason

PROMPT = np.arange(20, 60, dtype=np.int32)


def request(name: str, *, seed: int | None = 0, **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, prompt_ids=PROMPT, sampling=Sampling(**{"max_tokens": 12, **sampling}), seed=seed
    )


async def begin(engine: HFEngine, name: str) -> None:
    """Submit a long request, and return when it has its first token: all running ones advance together."""
    await engine.submit([request(name, max_tokens=80), request("first token", max_tokens=1)])
    assert list(await collect(engine, 1)) == ["first token"]


@pytest.fixture
async def engine(tiny_model: Path) -> AsyncIterator[HFEngine]:
    engine = HFEngine(HFConfig(max_running=4), engine_spec(tiny_model, dtype="bfloat16"))
    await engine.start()
    yield engine
    await engine.close()


async def test_a_sample_depends_on_nothing_but_prompt_and_seed(engine: HFEngine) -> None:
    alone = (await generate(engine, request("alone", seed=3)))["alone"]
    crowd = await generate(engine, *(request(str(seed), seed=seed) for seed in range(9)))
    np.testing.assert_array_equal(alone.token_ids, crowd["3"].token_ids)
    np.testing.assert_array_equal(alone.logprobs, crowd["3"].logprobs)
    assert len({tuple(item.token_ids) for item in crowd.values()}) == 9
    assert alone.segments == (Segment(start=0, end=12, policy_version=0),)


async def test_logprobs_equal_one_forward_pass(engine: HFEngine, tiny_model: Path) -> None:
    generation = (await generate(engine, request("one", temperature=0.6)))["one"]
    tokens = torch.from_numpy(np.concatenate([PROMPT, generation.token_ids]).astype(np.int64))
    with torch.no_grad():
        logits_TV = load_causal_lm(tiny_model, "bfloat16")(tokens[None]).logits[0, len(PROMPT) - 1 : -1].float()
    expected = torch.log_softmax(logits_TV / 0.6, -1).gather(1, tokens[len(PROMPT) :, None])[:, 0]
    np.testing.assert_allclose(generation.logprobs, expected, atol=0.05)


async def test_stop_strings_end_a_response(engine: HFEngine) -> None:
    whole = (await generate(engine, request("whole")))["whole"]
    assert whole.stop_reason is StopReason.LENGTH
    stop = whole.text[4:6]
    stopped = (await generate(engine, request("stopped", stop=(stop,))))["stopped"]
    assert stopped.stop_reason is StopReason.STOP
    assert stopped.text == whole.text[: whole.text.index(stop)]


async def test_a_stop_string_in_reasoning_does_not_end_a_response(engine: HFEngine) -> None:
    whole = (await generate(engine, request("whole", max_tokens=40)))["whole"]
    # words that each occur once, in this order
    words = [word for word in dict.fromkeys(re.findall(r"[A-Za-z]{3,}", whole.text)) if whole.text.count(word) == 1]
    early, close, late = words[0], words[len(words) // 2], words[-1]
    await check_stops_behind_reasoning(engine, request("asked", max_tokens=40), whole, (early, close, late), atol=1e-6)


async def test_aborts_keep_tokens_and_weight_updates_keep_requests(engine: HFEngine) -> None:
    await begin(engine, "long")
    await engine.start_weight_update()
    assert await engine.poll(0.1) == []
    await engine.submit([request("waits")])
    assert await engine.poll(0.1) == []
    await engine.abort(["long", "unknown"])
    (aborted,) = await engine.poll(1.0)
    assert aborted.stop_reason is StopReason.ABORTED
    assert 0 < len(aborted.token_ids) == len(aborted.logprobs) < 80
    await engine.resume()
    assert (await collect(engine, 1))["waits"].stop_reason is StopReason.LENGTH


async def push(engine: HFEngine, model: Path, version: int) -> list[str]:
    """Give the engine other weights than the model's; return the tensors' names."""
    await engine.start_weight_update()
    weights = [(name, tensor.detach() + 1) for name, tensor in load_causal_lm(model, "bfloat16").named_parameters()]
    memory = SharedMemory(bucket_size(weights))
    await engine.update_weights(as_payload(fill_bucket(memory, weights)))
    memory.close()
    await engine.finish_weight_update(version)
    return [name for name, _ in weights]


async def test_new_weights_start_a_new_segment(engine: HFEngine, tiny_model: Path) -> None:
    await begin(engine, "long")
    names = await push(engine, tiny_model, 5)
    await engine.resume()
    generation = (await collect(engine, 1))["long"]
    assert [segment.policy_version for segment in generation.segments] == [0, 5]
    assert generation.segments[0].end == generation.segments[1].start
    held = await engine.fingerprints(names, 1)
    assert held.tied == {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize("pushes", [False, True])
async def test_requests_freeze_while_the_engine_sleeps_and_go_on_after_resume(
    engine: HFEngine, tiny_model: Path, pushes: bool
) -> None:
    undisturbed = (await generate(engine, request("long", max_tokens=80)))["long"]
    await begin(engine, "long")
    await engine.sleep()
    await engine.submit([request("comes later")])
    kept = list(engine._samples["long"].tokens)
    assert 0 < len(kept) < len(undisturbed.token_ids)
    assert await engine.poll(0.1) == []
    await engine.wake()
    if pushes:
        await push(engine, tiny_model, 5)
    assert await engine.poll(0.1) == []
    assert engine._samples["long"].tokens == kept
    assert engine._samples["comes later"].tokens == []
    await engine.resume()
    results = await collect(engine, 2)
    assert results["long"].token_ids[: len(kept)].tolist() == kept
    if pushes:
        assert results["long"].segments[0] == Segment(start=0, end=len(kept), policy_version=0)
        assert [segment.policy_version for segment in results["comes later"].segments] == [5]
    else:
        np.testing.assert_array_equal(results["long"].token_ids, undisturbed.token_ids)
        np.testing.assert_array_equal(results["long"].logprobs, undisturbed.logprobs)


async def test_foreign_tensors_are_refused(engine: HFEngine) -> None:
    await engine.start_weight_update()
    memory = SharedMemory(64)
    info = as_payload(fill_bucket(memory, [("model.norm.weight", torch.zeros(3))]))
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight with shape \(3,\); the engine has \(64,\)"):
        await engine.update_weights(info)
    memory.close()


async def test_a_failing_request_comes_back_as_such(engine: HFEngine) -> None:
    beyond = GenerateRequest(
        request_id="beyond", prompt_ids=np.array([99_999], np.int32), sampling=Sampling(max_tokens=3), seed=0
    )
    results = await generate(engine, beyond, request("fine"))
    assert isinstance(results["beyond"], FailedGeneration)
    assert "request beyond failed: IndexError" in str(results["beyond"].error)
    assert results["fine"].stop_reason is StopReason.LENGTH


async def test_what_can_never_be_served_is_refused(engine: HFEngine) -> None:
    with pytest.raises(GenerationError, match="40 prompt tokens and up to 220 response tokens, 260 together"):
        await engine.submit([request("fits"), request("long", max_tokens=220)])
    with pytest.raises(GenerationError, match="'twice' is in use"):
        await engine.submit([request("twice"), request("twice")])
    assert await engine.poll(0.05) == []


async def test_the_watchdog_sees_tokens_and_no_work_of_a_frozen_engine(
    engine: HFEngine, progress: list[tuple[str, str, Work]]
) -> None:
    await generate(engine, request("one", max_tokens=7))
    assert progress == [("begin", "generate", Work.OWN), *[("tick", "generate", Work.OWN)] * 7]
    await asyncio.sleep(0)
    assert PROGRESS._active == []
    await begin(engine, "long")
    assert PROGRESS._active == [(Work.OWN, "generate")]
    await engine.start_weight_update()
    await asyncio.sleep(0.05)
    assert PROGRESS._active == []  # it waits for the trainer, however long that takes
    await engine.submit([request("waits")])
    await asyncio.sleep(0.05)
    assert PROGRESS._active == []
    progress.clear()
    await engine.fingerprints(["model.norm.weight"], 1)
    assert progress == [("begin", "fingerprints", Work.OWN)]
    await engine.resume()
    await asyncio.sleep(0.05)
    assert PROGRESS._active == [(Work.OWN, "generate")]
    await engine.close()
    assert PROGRESS._active == []


async def test_closing_ends_the_thread_and_wakes_whoever_polls(tiny_model: Path) -> None:
    engine = HFEngine(HFConfig(), engine_spec(tiny_model, dtype="bfloat16"))
    await engine.start()
    polling = asyncio.create_task(engine.poll(30.0))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineDied):
        await polling
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hf-engine")]
    await engine.close()


async def test_a_failed_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match="transformers cannot load"):
        await HFEngine(HFConfig(), engine_spec(tmp_path, dtype="bfloat16")).start()


async def test_what_else_runs_changes_no_bit(tiny_model: Path) -> None:
    """One seed gives one sample, whatever `max_running` puts beside it."""
    found: list[dict[str, Generation]] = []
    for running in (1, 3, 8):
        engine = HFEngine(HFConfig(max_running=running), engine_spec(tiny_model, dtype="bfloat16"))
        await engine.start()
        try:
            await engine.submit([request(f"{seed}", seed=seed) for seed in range(8)])
            found.append(await collect(engine, 8))
        finally:
            await engine.close()
    for name, one in found[0].items():
        for others in found[1:]:
            np.testing.assert_array_equal(others[name].token_ids, one.token_ids)
            np.testing.assert_array_equal(others[name].logprobs, one.logprobs)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(max_tokens=1), [0, 1, 2, 3]),
        (Sampling(max_tokens=1, top_k=2), [2, 3]),
        (Sampling(max_tokens=1, top_p=0.6), [3]),
        (Sampling(max_tokens=1, top_p=0.7), [2, 3]),
        (Sampling(max_tokens=1, top_k=3, top_p=0.95), [1, 2, 3]),
        (Sampling(max_tokens=1, top_p=1e-9), [3]),
        (Sampling(max_tokens=1, min_p=0.3), [2, 3]),
        # 2/17, 4/17 and 13/17 without the least: the last two make 15/17
        (Sampling(max_tokens=1, min_p=0.1, top_p=0.85), [2, 3]),
        (Sampling(max_tokens=1, min_p=1.0), [3]),
    ],
)
def test_cut_distributions_are_normalised_again(sampling: Sampling, kept: list[int]) -> None:
    logits_V = torch.log(torch.tensor([0.05, 0.1, 0.2, 0.65]))
    probabilities_V = sampling_logprobs(logits_V, sampling).exp()
    assert torch.nonzero(probabilities_V)[:, 0].tolist() == kept
    torch.testing.assert_close(probabilities_V[kept], torch.softmax(logits_V[kept], -1))


def test_the_temperature_comes_first() -> None:
    """At temperature 2 the least likely token is √(0.05 / 0.65) = 0.28 times as likely as the likeliest, not 0.08."""
    logits_V = torch.log(torch.tensor([0.05, 0.1, 0.2, 0.65]))
    for min_p, kept in ((0.27, 4), (0.29, 3)):
        logprobs_V = sampling_logprobs(logits_V, Sampling(max_tokens=1, min_p=min_p, temperature=2.0))
        assert int((logprobs_V > -torch.inf).sum()) == kept


def test_draws_follow_the_distribution() -> None:
    logprobs_V = torch.log(torch.tensor([0.2, 0.8]))
    generator = torch.Generator().manual_seed(0)
    drawn = [draw(logprobs_V, Sampling(max_tokens=1), generator) for _ in range(2000)]
    assert abs(np.mean(drawn) - 0.8) < 0.03
    assert draw(logprobs_V, Sampling(max_tokens=1, temperature=0), generator) == 1


def test_text_ends_before_the_stop_string_that_ended_it() -> None:
    assert before("one two one", ("two", "ne t")) == "o"
    assert before("one", ("two",)) == "one"
    assert segments_of([]) == ()


def test_the_cause_is_the_last_error_that_is_not_second_hand() -> None:
    output = ProcessOutput()
    output._lines.extend(
        [
            "(EngineCore pid=1) ERROR 11-21 [core.py:1510] ValueError: Available memory is less than requested",
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "RuntimeError: cancelled",
        ]
    )
    assert output.cause() == "ValueError: Available memory is less than requested"
    assert ProcessOutput().cause() is None
