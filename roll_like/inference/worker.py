"""One inference replica, as an actor hosts it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from roll_like.config.sections import HFConfig, VLLMConfig
from roll_like.inference.interface import (
    EngineSpec,
    FailedGeneration,
    Fingerprints,
    GenerateRequest,
    Generation,
    GenerationDelta,
    InferenceEngine,
)
from roll_like.inference.vllm.environment import vllm_environment


def build_engine(config: VLLMConfig | HFConfig, spec: EngineSpec) -> InferenceEngine:
    """Return the engine that `inference.type` names, not started."""
    if isinstance(config, VLLMConfig):
        from roll_like.inference.vllm.engine import VLLMEngine

        return VLLMEngine(config, spec)
    from roll_like.inference.hf.engine import HFEngine

    return HFEngine(config, spec)


def engine_environment(config: VLLMConfig | HFConfig, threads: int, device: str) -> dict[str, str]:
    """Return the environment variables of a process that will host this engine."""
    return vllm_environment(config, threads, device) if isinstance(config, VLLMConfig) else {}


class InferenceWorker:
    """Builds an engine and forwards to it. Methods are those of `InferenceEngine`.

    Args:
        config: The `inference` section.
        spec: Model, precision and devices of this replica.
    """

    def __init__(self, config: VLLMConfig | HFConfig, spec: EngineSpec) -> None:
        self._engine = build_engine(config, spec)

    async def start(self) -> None:
        """Load the model."""
        await self._engine.start()

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Take requests."""
        await self._engine.submit(requests)

    async def poll(self, timeout: float) -> list[Generation | FailedGeneration]:
        """Return what finished since the last call."""
        return await self._engine.poll(timeout)

    async def stream(self, request_id: str) -> AsyncIterator[GenerationDelta]:
        """Yield a request's tokens as they come."""
        async for delta in self._engine.stream(request_id):
            yield delta

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests."""
        await self._engine.abort(request_ids)

    async def pause(self) -> None:
        """Freeze what is generating."""
        await self._engine.pause()

    async def resume(self) -> None:
        """Go on."""
        await self._engine.resume()

    async def sleep(self) -> None:
        """Give GPU memory back."""
        await self._engine.sleep()

    async def wake(self) -> None:
        """Take GPU memory again."""
        await self._engine.wake()

    async def policy_version(self) -> int:
        """Return the version of the weights that sample now."""
        return self._engine.policy_version

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Meet the trainer."""
        await self._engine.init_weight_transfer(info)

    async def start_weight_update(self) -> None:
        """Freeze generation and get ready for new weights."""
        await self._engine.start_weight_update()

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        """Load one bucket."""
        await self._engine.update_weights(info)

    async def finish_weight_update(self, version: int) -> None:
        """Put the new weights to work."""
        await self._engine.finish_weight_update(version)

    async def fingerprints(self, names: Sequence[str], salt: int) -> Fingerprints:
        """Return fingerprints of the weights as they are computed with."""
        return await self._engine.fingerprints(names, salt)

    async def stats(self) -> dict[str, float]:
        """Return counts."""
        return await self._engine.stats()

    async def healthy(self) -> bool:
        """Return whether it can still generate."""
        return await self._engine.healthy()

    async def close(self) -> None:
        """Stop for good."""
        await self._engine.close()
