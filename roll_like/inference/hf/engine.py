"""Transformers behind the `InferenceEngine` protocol: deterministic, for comparison and small cases.

Up to `max_running` requests advance in turn, a token each, every one in a forward pass of its own. That is
slow, and it is the point: what a request samples is a function of the weights, its prompt and its seed,
whatever else is under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll_like.cluster.progress import PROGRESS
from roll_like.config.algorithm import ROUTER_REPLAY
from roll_like.config.inference import POLICY
from roll_like.data.kept import kept_tokens
from roll_like.data.routes import known_routes
from roll_like.errors import ConfigError, GenerationError
from roll_like.inference.hf.config import HFConfig
from roll_like.inference.hf.weights import CheckpointWeights
from roll_like.inference.interface import (
    EngineDied,
    EngineSpec,
    FailedGeneration,
    Fingerprints,
    GenerateRequest,
    Generation,
    PolledEngine,
    PromptScores,
    Sampling,
    TopLogprobs,
)
from roll_like.inference.stops import Stops
from roll_like.inference.weight_transfer.fingerprint import fingerprint
from roll_like.inference.weight_transfer.shared_memory import BucketInfo, LocalBuckets, read_bucket
from roll_like.models.ends import stated_ends
from roll_like.models.modules import load_causal_lm
from roll_like.models.renames import cache_argument, cache_of
from roll_like.models.rotary import fix_frequencies
from roll_like.models.router import UNKNOWN, RouterReplay
from roll_like.models.vision import SeenTokens, seen_inputs
from roll_like.types import FloatArray, IntArray, RouteArray, Segment, StopReason

HEAD = "lm_head.weight"


@dataclass(slots=True)
class _Sample:
    """A request under way. `cache` is None when its keys and values have to be computed (again)."""

    request: GenerateRequest
    generator: torch.Generator | None
    cache: Any = None
    offset: int = 0  # of a position from the token's index: an image takes fewer positions than tokens
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[Any] = field(default_factory=list)  # values and indices of each token's place
    kept: list[IntArray] = field(default_factory=list)  # what each token was drawn from; none where from all
    routes: list[Tensor] = field(default_factory=list)  # [tokens, layers, k], of all that was computed
    stop_reason: StopReason | None = None
    error: GenerationError | None = None

    @property
    def finished(self) -> bool:
        return self.stop_reason is not None or self.error is not None


class HFEngine(PolledEngine):
    """Generates with transformers.

    Args:
        config: The `inference` section.
        spec: Model, precision, device.
    """

    def __init__(self, config: HFConfig, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._config = config
        self._model: Any = None
        self._router: RouterReplay | None = None
        self._weights: CheckpointWeights
        self._stops: Stops
        self._shared_generator = torch.Generator().manual_seed(spec.seed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hf-engine")
        self._samples: dict[str, _Sample] = {}  # in order of arrival: the first max_running are running
        self._work = asyncio.Event()  # something for the loop
        self._computing = asyncio.Lock()  # held over a tick, and over anything that touches the model
        self._frozen = False
        self._loop_task: asyncio.Task[None] | None = None
        self._version = 0
        self._buckets = LocalBuckets()

    # ---- start and end -------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model.

        Raises:
            GenerationError: Says why it cannot be loaded.
        """
        try:
            await self._compute(self._load)
        except (ConfigError, OSError, RuntimeError, ValueError) as error:
            await self.close()
            raise GenerationError(
                f"transformers cannot load {self._spec.model_path} on {self._spec.device}: {error}",
                fix="check model.path and model.dtype",
            ) from error
        self._loop_task = asyncio.create_task(self._run())

    def _load(self) -> None:
        from transformers import AutoTokenizer

        if self._spec.device == "cpu":
            torch.set_num_threads(self._spec.threads)
        model = load_causal_lm(
            Path(self._spec.model_path), self._spec.dtype, trust_remote_code=self._spec.trust_remote_code
        )
        fix_frequencies(model, self._spec.max_model_len)
        self._model = model.to(self._spec.device).requires_grad_(False).eval()
        self._weights = CheckpointWeights(self._model)
        if self._spec.float32_head:
            compute_in_float32(self._model.get_output_embeddings())
        if self._spec.returns_routes:
            self._router = RouterReplay(self._model, ROUTER_REPLAY)
        tokenizer = AutoTokenizer.from_pretrained(
            self._spec.tokenizer_path, local_files_only=True, trust_remote_code=self._spec.trust_remote_code
        )
        stated = stated_ends(Path(self._spec.model_path)).values()
        self._stops = Stops(
            tokenizer, {*self._spec.stop_ids, *(end for ends in stated for end in ends)}, kept=self._spec.kept_tokens
        )

    async def close(self) -> None:
        """End the engine's task and thread."""
        self._death = self._death or EngineDied("the engine was closed")
        if self._loop_task is not None:
            self._loop_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop_task
            PROGRESS.hold("generate", False)
        self._thread.shutdown(wait=True)
        self._buckets.close()
        self._model = None
        self._arrived.set()

    # ---- requests ------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Take requests. See `InferenceEngine.submit`."""
        self._check(requests, self._samples)
        for request in requests:
            generator = None if request.seed is None else torch.Generator().manual_seed(request.seed)
            self._samples[request.request_id] = _Sample(request, generator)
        self._work.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests. See `InferenceEngine.abort`."""
        self._require_alive()
        async with self._computing:
            for request_id in request_ids:
                sample = self._samples.get(request_id)
                if sample is not None and not sample.finished:
                    sample.stop_reason = StopReason.ABORTED
            self._hand_over()

    # ---- generating ----------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            busy = bool(self._samples) and not self._frozen
            PROGRESS.hold("generate", busy)
            if not busy:
                self._work.clear()
                continue
            async with self._computing:
                running = list(self._samples.values())[: self._config.max_running]
                await asyncio.get_running_loop().run_in_executor(self._thread, self._tick, running)
                self._hand_over()

    @torch.inference_mode()
    def _tick(self, running: Sequence[_Sample]) -> None:
        for sample in running:
            try:
                self._advance(sample)
                PROGRESS.tick()
            except Exception as error:  # noqa: BLE001 - whatever a model raises over one request fails that request
                sample.error = GenerationError(
                    f"request {sample.request.request_id} failed: {type(error).__name__}: {error}"
                )

    def _advance(self, sample: _Sample) -> None:
        """Sample one token."""
        everything = [*sample.request.prompt_ids.tolist(), *sample.tokens]
        inputs = everything if sample.cache is None else everything[-1:]
        ids_BL = torch.tensor([inputs], device=self._spec.device)
        with self._seen(sample, ids_BL, everything) as seen, self._recorded(sample, len(everything)):
            output = self._model(**seen, **cache_argument(self._model, sample.cache), use_cache=True, logits_to_keep=1)
        sample.cache = cache_of(output)
        logprobs_V = sampling_logprobs(output.logits[0, -1].float().cpu(), sample.request.sampling)
        token = draw(logprobs_V, sample.request.sampling, sample.generator or self._shared_generator)
        sample.tokens.append(token)
        sample.logprobs.append(float(logprobs_V[token]))
        if sample.request.top_logprobs:
            sample.top.append(torch.topk(logprobs_V, sample.request.top_logprobs))
        sample.versions.append(self._version)
        if self._spec.returns_kept:
            sample.kept.append(_kept_ids(logprobs_V))
        sample.stop_reason = self._why_stopped(sample)

    @contextlib.contextmanager
    def _recorded(self, sample: _Sample, tokens: int) -> Iterator[None]:
        """Note the experts of those of a sample's first `tokens` that are computed for the first time."""
        if self._router is None:
            yield
            return
        with self._router.record() as found:
            yield
        count, experts = len(next(iter(found.values()))), self._router.experts
        routes_TMK = torch.full((count, experts.layers, experts.active), UNKNOWN)
        for layer, experts_TK in found.items():
            routes_TMK[:, layer] = experts_TK.cpu()
        new = tokens - sum(map(len, sample.routes))
        sample.routes.append(routes_TMK[count - new :])

    @contextlib.contextmanager
    def _seen(self, sample: _Sample, ids_BL: Tensor, everything: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        """Yield the inputs of a sample's next tokens: of all, or of one after what is cached."""
        if not sample.request.images:
            yield {"input_ids": ids_BL}
        elif sample.cache is None:
            length = len(everything)
            visible_B1LL = torch.ones(1, 1, length, length, dtype=torch.bool, device=ids_BL.device).tril()
            with seen_inputs(self._model.base_model, SeenTokens(ids_BL, sample.request.images), visible_B1LL) as inputs:
                # a text's positions go on one by one, on all three axes
                sample.offset = int(inputs["position_ids"][0, 0, -1]) + 1 - length
                yield inputs
        else:
            position = len(everything) - 1 + sample.offset
            yield {"input_ids": ids_BL, "position_ids": torch.full((3, 1, 1), position, device=ids_BL.device)}

    def _why_stopped(self, sample: _Sample) -> StopReason | None:
        sampling, reasoning = sample.request.sampling, sample.request.reasoning
        if self._stops.found(sample.tokens, sampling.stop, sampling.stop_ids, reasoning):
            return StopReason.STOP
        return StopReason.LENGTH if len(sample.tokens) >= sampling.max_tokens else None

    def _hand_over(self) -> None:
        """Move finished samples to where `poll` finds them."""
        for request_id in [name for name, sample in self._samples.items() if sample.finished]:
            sample = self._samples.pop(request_id)
            if sample.error is not None or sample.stop_reason is None:
                error = sample.error or GenerationError(f"request {request_id} ended without a reason")
                self._finished.append(FailedGeneration(request_id=request_id, error=error))
                continue
            self._finished.append(
                Generation(
                    request_id=request_id,
                    token_ids=np.asarray(sample.tokens, np.int32),
                    logprobs=np.asarray(sample.logprobs, np.float32),
                    segments=segments_of(sample.versions),
                    text=self._stops.text(
                        sample.tokens,
                        sample.request.sampling.stop,
                        sample.stop_reason,
                        sample.request.sampling.stop_ids,
                        sample.request.reasoning,
                    ),
                    stop_reason=sample.stop_reason,
                    routes=self._routes(sample),
                    top=_top(sample.top),
                    kept=kept_tokens(sample.kept, sample.tokens) if self._spec.returns_kept else None,
                )
            )
        if self._finished:
            self._arrived.set()

    def _routes(self, sample: _Sample) -> RouteArray | None:
        if self._router is None or not sample.routes:
            return None
        tokens = len(sample.request.prompt_ids) + len(sample.tokens)
        return known_routes(torch.cat(sample.routes).numpy(), self._router.experts.choice, tokens)

    # ---- weights -------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Freeze generation; no memory is freed."""
        self._require_alive()
        self._frozen = True
        async with self._computing:
            pass

    async def start_weight_update(self) -> None:
        """Freeze generation."""
        await self.sleep()

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        """Load one bucket."""
        await self._compute(self._load_bucket, info)

    async def held_weights(self, part: int = 0) -> str:
        """Return which send is kept here. See `InferenceEngine.held_weights`."""
        return self._buckets.held(part)

    @torch.inference_mode()
    def _load_bucket(self, info: Mapping[str, Any]) -> None:
        for name, tensor in read_bucket(BucketInfo(**self._buckets.here(info))):
            self._weights.write(name, tensor)

    async def finish_weight_update(self, version: int) -> None:
        """Put the new weights to work; requests under way are computed again from their tokens."""
        async with self._computing:
            for sample in self._samples.values():
                sample.cache = None
            self._version = version
            self._buckets.clear()

    async def resume(self) -> None:
        """Continue generating."""
        self._require_alive()
        self._frozen = False
        self._work.set()

    async def fingerprints(self, names: Sequence[str], seed: int) -> Fingerprints:
        """Return fingerprints of the model's parameters."""
        held: Fingerprints = await self._compute(self._fingerprints, names, seed)
        return held

    def _fingerprints(self, names: Sequence[str], seed: int) -> Fingerprints:
        parameters = dict(self._model.named_parameters())
        tensors = {name: fingerprint(tensor, seed) for name, tensor in self._weights.read(names)}
        if HEAD in parameters:
            return Fingerprints(tensors=tensors, tied={})
        head, embedding = self._model.get_output_embeddings().weight, self._model.get_input_embeddings().weight
        source = next((name for name in names if parameters.get(name) is embedding), None)
        if source is None:
            return Fingerprints(tensors=tensors, tied={})
        return Fingerprints(tensors={**tensors, HEAD: fingerprint(head, seed)}, tied={HEAD: source})

    async def prompt_logprobs(self, token_ids: IntArray) -> FloatArray:
        """Return the log-probabilities of given tokens. See `InferenceEngine.prompt_logprobs`."""
        logprobs: FloatArray = await self._compute(self._prompt_logprobs, token_ids)
        return logprobs

    async def score_prompt(self, token_ids: IntArray, adapter: str, top_k: int) -> PromptScores:
        """Return the log-probabilities of given tokens, and the likeliest in their places."""
        if adapter != POLICY:
            raise GenerationError(f"the engine has no adapter {adapter!r}")
        scores: PromptScores = await self._compute(self._scores, token_ids, top_k)
        return scores

    def _prompt_logprobs(self, token_ids: IntArray) -> FloatArray:
        return self._scores(token_ids, 0).logprobs

    @torch.inference_mode()
    def _scores(self, token_ids: IntArray, top_k: int) -> PromptScores:
        ids_L = torch.from_numpy(token_ids.astype(np.int64)).to(self._spec.device)
        logits_LV = self._model(ids_L[None], use_cache=False).logits[0, :-1].float()
        logprobs_LV = torch.log_softmax(logits_LV, -1)
        given = logprobs_LV.gather(1, ids_L[1:, None])[:, 0].cpu().numpy()
        top = [torch.topk(each_V, top_k) for each_V in logprobs_LV.cpu()] if top_k else []
        return PromptScores(logprobs=given, top=_top(top))

    async def _compute(self, function: Any, *args: Any) -> Any:
        async with self._computing:
            with PROGRESS.phase(function.__name__.strip("_")):
                return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _require_alive(self) -> None:
        if self._death is not None:
            raise self._death
        if self._model is None:
            raise GenerationError("the engine was not started")


def sampling_logprobs(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """Return log-probabilities of the distribution that tokens are drawn from, shape [V]; −inf where cut.

    Temperature first, then min-p, then top-k, then top-p on what is left, as vLLM does. Greedy has temperature 1.
    """
    if sampling.temperature == 0:
        return torch.log_softmax(logits_V, -1)
    logits_V = logits_V / sampling.temperature
    if sampling.min_p > 0:
        logits_V = logits_V.masked_fill(logits_V < logits_V.max() + math.log(sampling.min_p), -torch.inf)
    if 0 < sampling.top_k < len(logits_V):
        smallest = torch.topk(logits_V, sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < smallest, -torch.inf)
    if sampling.top_p < 1:
        ascending, order = torch.sort(logits_V)
        cut = torch.softmax(ascending, -1).cumsum(-1) <= 1 - sampling.top_p
        cut[-1] = False  # the likeliest always stays
        logits_V = logits_V.masked_fill(cut[torch.argsort(order)], -torch.inf)
    return torch.log_softmax(logits_V, -1)


def _kept_ids(logprobs_V: Tensor) -> IntArray:
    """Return the tokens that can be drawn; none where all can."""
    ids_M = torch.where(logprobs_V > -torch.inf)[0]
    kept: IntArray = ids_M[: 0 if len(ids_M) == len(logprobs_V) else None].numpy().astype(np.int32)
    return kept


def compute_in_float32(head: Any) -> None:
    """Let a linear layer compute its products in float32; its weights stay as they are."""

    def forward(hidden: Tensor) -> Tensor:
        bias = None if head.bias is None else head.bias.float()
        return torch.nn.functional.linear(hidden.float(), head.weight.float(), bias)

    head.forward = forward


def draw(logprobs_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return a token drawn from `logprobs_V`, or the likeliest at temperature 0."""
    if sampling.temperature == 0:
        return int(logprobs_V.argmax())
    return int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))


def _top(found: Sequence[Any]) -> TopLogprobs | None:
    """Return the likeliest tokens, given values and indices at each position; None without any."""
    if not found:
        return None
    return TopLogprobs(
        token_ids=torch.stack([indices for _, indices in found]).numpy().astype(np.int32),
        logprobs=torch.stack([values for values, _ in found]).numpy(),
    )


def segments_of(versions: Sequence[int]) -> tuple[Segment, ...]:
    """Return the runs of equal versions.

    >>> [(segment.start, segment.end) for segment in segments_of([3, 3, 4])]
    [(0, 2), (2, 3)]
    """
    cuts = [at for at in range(1, len(versions)) if versions[at] != versions[at - 1]]
    ends = [0, *cuts, len(versions)] if versions else []
    return tuple(
        Segment(start=start, end=end, policy_version=versions[start]) for start, end in itertools.pairwise(ends)
    )
