"""Runs an engine on an event loop of its own, for tests that are not asynchronous themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from engine_specs import engine_spec
from forked_cores import fork_core_of

from roll_like.inference.interface import EngineSpec, GenerateRequest, Generation, InferenceEngine
from roll_like.inference.vllm.engine import VLLMEngine

T = TypeVar("T")
MAX_MODEL_LEN = 512


class EngineThread:
    """An engine, driven from outside its event loop; for a weight sync, the cluster of this one engine."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine
        if isinstance(engine, VLLMEngine) and engine._spec.device == "cpu":
            fork_core_of(engine)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float = 120) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def __enter__(self) -> EngineThread:
        self.run(self.engine.start())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(self, requests: Sequence[GenerateRequest]) -> dict[str, Generation]:
        self.run(self.engine.submit(requests))
        return self.collect(len(requests))

    def collect(self, count: int) -> dict[str, Any]:
        finished: list[Any] = []
        while len(finished) < count:
            batch = self.run(self.engine.poll(30.0))
            assert batch, "nothing finished within 30 s"
            finished += batch
        return {result.request_id: result for result in finished}

    # as `ClusterHandle`

    def __len__(self) -> int:
        return 1

    def everywhere(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return [self.run(getattr(self.engine, method.__name__)(*args))]

    def scatter(self, method: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        return [self.run(getattr(self.engine, method.__name__)(*arguments))]


def float_spec(model: Path) -> EngineSpec:
    """Return what an engine of the tiny model needs, in float32 on one core."""
    return engine_spec(model, max_model_len=MAX_MODEL_LEN)
