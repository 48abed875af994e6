"""What an engine of a tiny model is told, and what it has finished."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from roll_like.inference.interface import EngineSpec, FailedGeneration, GenerateRequest, Generation, PolledEngine
from roll_like.types import ReasoningTags, StopReason


def engine_spec(model: Path | str, **changes: Any) -> EngineSpec:
    """Return the specification of an engine in float32 on one core, with rows of 256 tokens."""
    values: dict[str, Any] = {
        "model_path": str(model),
        "tokenizer_path": str(model),
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "tensor_parallel_size": 1,
        "max_model_len": 256,
        "seed": 0,
    }
    return EngineSpec(**{**values, **changes})


async def collect(engine: PolledEngine, count: int) -> dict[str, Any]:
    """Return so many results by the names of their requests."""
    finished: list[Generation | FailedGeneration] = []
    while len(finished) < count:
        batch = await engine.poll(20.0)
        assert batch, "nothing finished within 20 s"
        finished += batch
    return {result.request_id: result for result in finished}


async def generate(engine: PolledEngine, *requests: GenerateRequest) -> dict[str, Any]:
    """Return the results of requests by their names."""
    await engine.submit(requests)
    return await collect(engine, len(requests))


async def check_stops_behind_reasoning(
    engine: Any, request: GenerateRequest, whole: Generation, words: tuple[str, str, str], *, atol: float
) -> None:
    """A stop string ends what comes after reasoning, and not the reasoning.

    Args:
        engine: With the attribute `_stops`.
        request: What `whole` was sampled for, under another name.
        whole: The response without stop strings.
        words: Texts of it, in this order: a stop string, what closes reasoning, another stop string.
        atol: Tolerance of log-probabilities.
    """
    early, close, late = words
    tags = ReasoningTags(open="<open>", close=close, opened=True)
    asked = replace(request, reasoning=tags, sampling=replace(request.sampling, stop=(early, late)))
    found = (await generate(engine, asked))[asked.request_id]
    length = len(found.token_ids)
    assert found.stop_reason is StopReason.STOP
    assert found.text == whole.text[: whole.text.index(late)]
    np.testing.assert_array_equal(found.token_ids, whole.token_ids[:length])
    np.testing.assert_allclose(found.logprobs, whole.logprobs[:length], atol=atol)
    assert [index for segment in found.segments for index in range(segment.start, segment.end)] == [*range(length)]
    # reasoning that fills the response is cut by its limit, and not by the string
    short = replace(asked, request_id="short", sampling=replace(asked.sampling, max_tokens=6))
    cut = (await generate(engine, short))["short"]
    assert (cut.stop_reason, len(cut.token_ids)) == (StopReason.LENGTH, 6)
    assert cut.text == engine._stops.text(whole.token_ids[:6].tolist(), (), StopReason.LENGTH)
    ended = (await generate(engine, replace(asked, request_id="ended", reasoning=None)))["ended"]
    assert ended.text == whole.text[: whole.text.index(early)]
