"""What an inference engine is: requests in, generations out, at any time.

    submit ──▶ engine ──▶ poll       every generation finished since the last call, in one batch
                 ▲
    abort, pause, resume, sleep, wake, new weights
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from roll_like.types import FloatArray, IntArray, Segment, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus; 1 keeps all tokens.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        max_tokens: Longest response, in tokens.
        stop: Strings that end a response.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sample to generate.

    Attributes:
        request_id: Unique among the requests that are under way.
        prompt_ids: Tokens to continue, shape [P].
        sampling: How to draw.
        seed: Seed of this sample alone; None draws from the engine's own generator.
    """

    request_id: str
    prompt_ids: IntArray
    sampling: Sampling
    seed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A finished (or aborted) sample.

    Attributes:
        request_id: Whose it is.
        token_ids: Sampled tokens, the end-of-sequence token included, shape [R].
        logprobs: Log-probability of each under the distribution it was drawn from, in nats, shape [R].
        segments: Which policy version sampled which span of the response.
        text: The response, special tokens removed.
        stop_reason: Why it ended.
    """

    request_id: str
    token_ids: IntArray
    logprobs: FloatArray
    segments: tuple[Segment, ...]
    text: str
    stop_reason: StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedGeneration:
    """A request that the engine could not serve; comes out of `poll` like a generation."""

    request_id: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDelta:
    """Tokens of one request since the last delta."""

    request_id: str
    token_ids: IntArray
    logprobs: FloatArray
    finished: bool


class InferenceEngine(Protocol):
    """Generates, stops, pauses and takes weights."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample now."""

    async def start(self) -> None:
        """Load the model. Raises GenerationError with the cause."""

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Start generating. Raises GenerationError for a request that cannot fit."""

    async def poll(self, timeout: float) -> list[Generation | FailedGeneration]:
        """Return what finished since the last call; wait up to `timeout` seconds for the first."""

    def stream(self, request_id: str) -> AsyncIterator[GenerationDelta]:
        """Yield a submitted request's tokens as they come."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; they come out of `poll` as ABORTED with their tokens so far."""

    async def pause(self) -> None:
        """Freeze what is under way, keeping it."""

    async def resume(self) -> None:
        """Go on with what was paused."""

    async def sleep(self) -> None:
        """Free the GPU's memory; nothing on CPU."""

    async def wake(self) -> None:
        """Take the GPU's memory back."""

    async def stats(self) -> Mapping[str, float]:
        """Return running and waiting requests, tokens generated and the prefix cache's hit rate."""

    async def healthy(self) -> bool:
        """Return whether the engine still works."""

    async def close(self) -> None:
        """End the engine and its processes."""
