"""The interface of inference engines, and their requests and results.

The scheduler works in batches: it submits many requests in one call and polls for whatever has
finished. One call a batch, not one a request, keeps the load of the driver's event loop low.

A new engine is an `InferenceEngine` (or a `PolledEngine`, which keeps finished requests) and an `EnginePlugin`
(`plugin.py`), registered with `INFERENCE_ENGINES.register("name")`: `inference.type: name` selects it. `hf/` is the
smallest.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roll_like.config.inference import BASE, POLICY
from roll_like.config.model import Precision
from roll_like.errors import GenerationError
from roll_like.types import (
    FloatArray,
    IntArray,
    KeptTokens,
    PlacedImage,
    ReasoningTags,
    RouteArray,
    Segment,
    StopReason,
)


class EngineDied(GenerationError):
    """The engine has ended; its unfinished requests have to be sent to another one."""

    retry = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus; 1 keeps all tokens.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        min_p: Keep tokens whose probability is at least this share of the likeliest token's; 0 keeps all.
        max_tokens: Longest response, in tokens.
        stop: Strings that end a response.
        stop_ids: Tokens that end it, in the place of those that end the model's responses; None for these.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sample to draw.

    Attributes:
        request_id: Unique among the engine's unfinished requests.
        prompt_ids: Tokens of the prompt, shape [P].
        sampling: How tokens are drawn.
        seed: Makes the sample repeatable; None draws from the engine's own generator.
        images: The images of the prompt, which has all their placeholders.
        adapter: What samples: `POLICY`, or of an engine with `EngineSpec.adapter` also `BASE`, the model without an
            adapter, or the name of a `FrozenAdapter` or of one that `start_adapter` began.
        json_schema: JSON Schema that the response follows; of an engine with `EngineSpec.adapter` only.
        top_logprobs: How many of the likeliest tokens are told at each position (`Generation.top`); 0 for none. Of an
            engine that declares `top_logprobs` as many or more.
        reasoning: What delimits reasoning that stop strings do not end; None: they end a response wherever they stand.
    """

    request_id: str
    prompt_ids: IntArray
    sampling: Sampling
    seed: int | None
    images: tuple[PlacedImage, ...] = ()
    adapter: str = POLICY
    json_schema: str | None = None
    top_logprobs: int = 0
    reasoning: ReasoningTags | None = None


def derived_seed(seed: int | None, *place: int) -> int | None:
    """Return the seed of what has this place in a run that has a seed; None if it has none."""
    if seed is None:
        return None
    entropy = (seed, *place)
    # as 32-bit words the same in half the time
    words = np.array(entropy, np.uint32) if max(entropy) < 2**32 else entropy
    return int(np.random.SeedSequence(words).generate_state(1)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """The likeliest tokens at each of T positions, the likeliest first.

    Attributes:
        token_ids: Shape [T, K].
        logprobs: Of each, in nats, shape [T, K]; −inf for tokens that cannot be drawn.
    """

    token_ids: IntArray
    logprobs: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """What an engine tells of T given tokens.

    Attributes:
        logprobs: Of each but the first, given those before it, at temperature 1, in nats, shape [T−1].
        top: The likeliest tokens in their places; None where they were not asked for.
    """

    logprobs: FloatArray
    top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Guesses:
    """Tokens that were guessed, and checked several at a time.

    Attributes:
        tokens: How many were guessed.
        accepted: How many of them the policy accepted, also behind where a stop or `max_tokens` then cut the response.
        passes: Forward passes of the policy in which some were checked; each adds one token of its own.
    """

    tokens: int = 0
    accepted: int = 0
    passes: int = 0

    def __add__(self, other: Guesses) -> Guesses:
        return Guesses(
            tokens=self.tokens + other.tokens,
            accepted=self.accepted + other.accepted,
            passes=self.passes + other.passes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One finished sample.

    Attributes:
        request_id: Whose sample.
        token_ids: Sampled tokens, the end-of-sequence token included, shape [R].
        logprobs: Log-probability of each under the distribution it was drawn from, in nats, shape [R].
        segments: Which policy version sampled which tokens of the response; empty when R is 0.
        text: The response, decoded once, without the stop string and without special tokens but those of
            `EngineSpec.kept_tokens`.
        stop_reason: Why it ended.
        cached_prompt_tokens: Prompt tokens whose computation was shared with an earlier request.
        routes: With `EngineSpec.returns_routes`: the experts of all tokens of the prompt and of the response, shape
            [P+R, layers, k]; unknown for the last, which is not computed.
        top: The likeliest tokens in the place of each, by the distribution that it was drawn from; None where they were
            not asked for.
        kept: With `EngineSpec.returns_kept`: what each token of the response was drawn from.
        speculation: What an engine that guesses tokens has guessed; None of others.
    """

    request_id: str
    token_ids: IntArray
    logprobs: FloatArray
    segments: tuple[Segment, ...]
    text: str
    stop_reason: StopReason
    cached_prompt_tokens: int = 0
    routes: RouteArray | None = None
    top: TopLogprobs | None = None
    kept: KeptTokens | None = None
    speculation: Guesses | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedGeneration:
    """A request that the engine could not serve. It is never a sample."""

    request_id: str
    error: GenerationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprints:
    """What weights an engine holds, as far as a sync can compare them.

    Attributes:
        tensors: Fingerprint of each tensor as the engine computes with it, by the trainer's name.
        tied: Tensors that the engine keeps apart although the trainer has one: name → the trainer's name.
        quantized: Those of `tensors` that the engine holds in 8 bits (`weight_transfer.int8`).
    """

    tensors: Mapping[str, str]
    tied: Mapping[str, str]
    quantized: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenAdapter:
    """A low-rank adapter that an engine loads at its start and keeps.

    Attributes:
        name: What requests name it by.
        path: Its directory, in peft's format.
        rank: Largest rank of its matrices.
        modules: Last parts of the names of the layers that have one.
    """

    name: str
    path: str
    rank: int
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """The low-rank adapter that an engine is sent instead of whole weights.

    Attributes:
        rank: Of its matrices.
        modules: Last parts of the names of the layers that have one, in the model's checkpoint format.
        frozen: Further adapters of the same model, which stay as they are.
        named: Most adapters that are held beside these at a time, by names that come with them (`start_adapter`).
    """

    rank: int
    modules: tuple[str, ...]
    frozen: tuple[FrozenAdapter, ...] = ()
    named: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may be computed with from the start."""
        return (POLICY, BASE, *(each.name for each in self.frozen))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What every engine needs to know beside its own section.

    Attributes:
        model_path: Local Hugging Face directory.
        tokenizer_path: Local directory of the tokenizer.
        dtype: Precision of weights and computation.
        device: `cpu` or `cuda`.
        threads: Cores of this engine on CPU.
        tensor_parallel_size: GPUs of this engine.
        max_model_len: Longest prompt and response together. Tokens.
        seed: Seed of requests that have none.
        trust_remote_code: Whether the model may bring code.
        weight_backend: How weights arrive: the name of a `WeightTransport`.
        shares_gpus: Whether a trainer works on the same GPUs, in turns.
        adapter: What `update_weights` brings: an adapter of this kind, beside the weights in `model_path`, which stay;
            None for whole weights. Given to engines whose plugin finds no `adapter_obstacle`.
        returns_routes: Whether each `Generation` says which experts its tokens were computed with. True for engines
            whose plugin finds no `routes_obstacle`.
        returns_kept: Whether each `Generation` says what its tokens were drawn from. True for engines whose plugin
            finds no `kept_obstacle`.
        float32_head: Whether the output layer's products are computed in float32. True for engines that declare it.
        returns_metrics: Whether `metrics` is asked; an engine that is not asked need not count.
        stop_ids: Tokens that end every response (`Renderer.stop_ids`), beside the tokenizer's end of sequence.
        kept_tokens: Special tokens that stay in `Generation.text`: those that delimit reasoning or mark calls.
    """

    model_path: str
    tokenizer_path: str
    dtype: Precision
    device: str
    threads: int
    tensor_parallel_size: int
    max_model_len: int
    seed: int
    trust_remote_code: bool = False
    weight_backend: str = "shared_memory"
    shares_gpus: bool = False
    adapter: AdapterSpec | None = None
    returns_routes: bool = False
    returns_kept: bool = False
    float32_head: bool = False
    returns_metrics: bool = False
    stop_ids: tuple[int, ...] = ()
    kept_tokens: tuple[str, ...] = ()


class InferenceEngine(ABC):
    """Generates: one replica, made as `Engine(config, spec)` out of its `inference` section and an `EngineSpec`.

    In a run it lives in a Ray actor of its own. Every method is asynchronous; one event loop owns an engine. After
    `EngineDied` nothing but `close` works.

    `sleep` and `start_weight_update` freeze generation: requests under way keep the tokens that they have, new ones
    wait, and none gets another token before `resume`. Whatever comes between, in this order:

        sleep ─▶ wake ─▶ start_weight_update ─▶ update_weights … ─▶ finish_weight_update ─▶ resume

    `resume` may follow `wake` without an update; without `sleep`, an update begins while requests run.
    """

    @abstractmethod
    async def start(self) -> None:
        """Load the model.

        Raises:
            GenerationError: Says why it cannot be loaded.
        """

    @abstractmethod
    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Take requests; their results come out of `poll`.

        Raises:
            GenerationError: One of them can never be served (too long, id in use); none was taken.
            EngineDied: The engine is gone.
        """

    @abstractmethod
    async def poll(self, timeout: float) -> list[Generation | FailedGeneration]:
        """Return everything that finished since the last call; wait up to `timeout` seconds for the first.

        Raises:
            EngineDied: The engine is gone; what was not polled is lost.
        """

    @abstractmethod
    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; they come out of `poll` as aborted, with their tokens so far. Unknown ids are ignored."""

    async def sleep(self) -> None:  # noqa: B027 - optional
        """Freeze generation while a trainer works on the same devices.

        Engines that declare `sleep` free their GPU memory too. One that cannot freeze goes on with the weights it has.
        """

    async def wake(self) -> None:  # noqa: B027 - optional
        """Take memory for the weights again; generation stays frozen, and the key-value cache away, until `resume`.

        An engine that was started in the place of another while the others slept is told so too, without having slept.
        """

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """Connect to the trainer, for weight backends that need it. Called once."""

    @abstractmethod
    async def start_weight_update(self) -> None:
        """Freeze generation until `resume`, and get ready for new weights. May follow `wake`: it is frozen then."""

    async def held_weights(self, part: int = 0) -> str:
        """Return which send of buckets this engine keeps, so that what changed since then is enough; empty if none.

        Args:
            part: Of the weights: a stage of the trainer's layers, which sends its own.
        """
        del part
        return ""

    @abstractmethod
    async def update_weights(self, info: Mapping[str, Any]) -> None:
        """Load one bucket of tensors; another may come meanwhile, if several ranks send parts of the weights.

        Raises:
            WeightSyncError: Its bytes are not those that were sent.
        """

    @abstractmethod
    async def finish_weight_update(self, version: int) -> None:
        """Put the new weights to work as policy `version`.

        Requests under way keep their tokens and log-probabilities. Nothing else that the old weights computed is
        reused: keys and values of prompts and of tokens so far are computed again.
        """

    @abstractmethod
    async def fingerprints(self, names: Sequence[str], seed: int) -> Fingerprints:
        """Return fingerprints of the weights as they are computed with."""

    async def prompt_logprobs(self, token_ids: IntArray) -> FloatArray:
        """Return the log-probability of each given token but the first, given those before it, shape [T−1], in nats.

        At temperature 1, computed without keys and values of earlier requests. Optional: `EngineCapabilities` declares
        it. Called while the engine generates. `WeightSync` compares them with the trainer's.

        Args:
            token_ids: Shape [T]; at least one token shorter than the context window.
        """
        raise NotImplementedError(f"{type(self).__qualname__} declares `prompt_logprobs` and does not implement it")

    async def score_prompt(self, token_ids: IntArray, adapter: str, top_k: int) -> PromptScores:
        """Return `prompt_logprobs` of an adapter, with the likeliest tokens in the place of each.

        Optional, as `EngineCapabilities.top_logprobs` and `EngineSpec.adapter` say.

        Args:
            token_ids: As in `prompt_logprobs`.
            adapter: As in `GenerateRequest`.
            top_k: How many of the likeliest tokens; 0 for none.
        """
        if adapter != POLICY or top_k:
            raise GenerationError(f"{type(self).__qualname__} does not score prompts for {adapter} with {top_k} others")
        return PromptScores(logprobs=await self.prompt_logprobs(token_ids))

    async def metrics(self) -> str:
        """Return the library's own metrics in Prometheus's text format; by default none.

        Called while the engine generates, with `EngineSpec.returns_metrics` only.
        """
        return ""

    # ---- several adapters at a time: engines with `AdapterSpec.named` --------------------------

    async def start_adapter(self, name: str, dropped: Sequence[str]) -> None:
        """Get ready for an adapter beside those that are held, which go on generating; `update_weights` brings it.

        Args:
            name: How requests will call it; no two adapters have had the same name.
            dropped: Adapters that no request has any more, to make room; unknown ones are ignored.
        """
        raise NotImplementedError(f"{type(self).__qualname__} holds one adapter at a time; named {name}")

    async def finish_adapter(self) -> None:
        """Take requests for the adapter that has arrived."""
        raise NotImplementedError(f"{type(self).__qualname__} holds one adapter at a time")

    async def adapter_fingerprints(self, name: str, names: Sequence[str], seed: int) -> Fingerprints:
        """Return `fingerprints` of the weights that requests for an adapter are computed with."""
        raise NotImplementedError(f"{type(self).__qualname__} holds one adapter at a time; named {name}")

    @abstractmethod
    async def resume(self) -> None:
        """Continue generating after a weight update or `wake`; an engine that slept takes its other memory again."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine and free its processes, threads and shared memory. May be called twice."""


class PolledEngine(InferenceEngine):
    """Base of an engine that keeps finished requests until `poll` returns them.

    Args:
        spec: Model, precision, devices.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._finished: list[Generation | FailedGeneration] = []
        self._arrived = asyncio.Event()
        self._death: EngineDied | None = None

    @abstractmethod
    def _require_alive(self) -> None:
        """Raise if the engine was not started, or is gone."""

    async def poll(self, timeout: float) -> list[Generation | FailedGeneration]:
        """Return what finished. See `InferenceEngine.poll`."""
        if not self._finished and self._death is None:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), timeout)
        finished, self._finished = self._finished, []
        if not finished:
            self._require_alive()
        return finished

    def _check(self, requests: Sequence[GenerateRequest], unfinished: Collection[str]) -> None:
        """Raise if a request can never be served.

        Raises:
            GenerationError: Names the request, and what to change.
        """
        self._require_alive()
        names = [request.request_id for request in requests]
        for request in requests:
            name, prompt, response = request.request_id, len(request.prompt_ids), request.sampling.max_tokens
            if prompt == 0:
                raise GenerationError(f"request {name} has an empty prompt; at least one token is needed")
            if prompt + response > self._spec.max_model_len:
                raise GenerationError(
                    f"request {name} needs {prompt} prompt tokens and up to {response} response tokens, "
                    f"{prompt + response} together; the engine's window holds {self._spec.max_model_len}",
                    fix="raise inference.max_model_len, or lower data.max_prompt_tokens or rollout.max_response_tokens",
                )
            if name in unfinished or names.count(name) > 1:
                raise GenerationError(f"request id {name!r} is in use; ids are unique among unfinished requests")
            served = self._served_adapters()
            if request.adapter not in served:
                raise GenerationError(
                    f"request {name} asks for the adapter {request.adapter!r}; this engine has {', '.join(served)}"
                )

    def _served_adapters(self) -> Sequence[str]:
        """Return what requests may be computed with now."""
        return (POLICY,) if self._spec.adapter is None else self._spec.adapter.names


class JudgeServer(ABC):
    """An OpenAI-compatible server of one replica of a judge model, in a Ray actor of its own.

    Made as `Server(config, spec, timeout_seconds, address)` out of its `judge` section, an `EngineSpec`, how long it
    may take to start, and where it is to answer: the `url` of the server that it replaces, or None for a place of its
    own.
    """

    @abstractmethod
    async def url(self) -> str:
        """Return the base address of its API; nothing answers there before `start`."""

    @abstractmethod
    async def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            EngineError: It ended, or did not answer in time.
        """

    @abstractmethod
    async def ended(self) -> None:
        """Wait until the server that was started has ended, whatever the reason."""

    @abstractmethod
    async def close(self) -> None:
        """End the server."""
