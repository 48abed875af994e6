"""What an engine of a tiny model is told, and what it has finished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll_like.inference.interface import EngineSpec, FailedGeneration, Generation, PolledEngine


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
