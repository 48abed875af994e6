"""vLLM's asynchronous engine behind the `InferenceEngine` protocol.

One asyncio task a request waits for vLLM's final output, so a request costs the event loop two wake-ups,
however long its response. Finished samples gather in one list that `poll` hands over whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from typing import Any

import numpy as np

from roll_like.cluster.guardian import name_semaphores
from roll_like.cluster.progress import PROGRESS
from roll_like.config.inference import BASE, POLICY
from roll_like.errors import GenerationError
from roll_like.inference.interface import (
    EngineDied,
    EngineSpec,
    Fingerprints,
    GenerateRequest,
    Generation,
    Guesses,
    PromptScores,
    Sampling,
    TopLogprobs,
)
from roll_like.inference.stops import RequestStops, Stops
from roll_like.inference.task_engine import CLOSE_SECONDS, TaskEngine
from roll_like.inference.vllm.arguments import ADAPTER_ID, engine_arguments, vllm_environment
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.images import image_input, image_prompt
from roll_like.models.imports import quick_imports
from roll_like.types import FloatArray, IntArray

#: How long requests that are aborted may take to end before they are aborted again. Seconds.
_ABORT_SECONDS = 0.01
#: How often a request is sent whose images vLLM's process has forgotten.
_IMAGE_TRIES = 3
#: Path of adapters that come over the network; it is never read.
_IN_MEMORY = "/in/memory"
#: How long vLLM's process may take to heed SIGTERM from now on, and one that does not heed it to end. Seconds.
_ACCEPT_SECONDS, _KILL_SECONDS = 5.0, 0.1


class VLLMEngine(TaskEngine):
    """Generates with vLLM.

    Its environment (`vllm_environment`) should be set before the process imports torch; variables that are
    not set yet are set by `start`.

    Args:
        config: The `inference` section.
    """

    library = "vLLM"
    start_fixes = (
        (
            ("out of memory", "available memory", "kv cache", "alloc"),
            "lower inference.kv_cache_gib (CPU) or inference.gpu_memory_utilization (GPU), or free memory",
        ),
        (
            ("max_model_len", "max_position_embeddings"),
            "lower inference.max_model_len, or data.max_prompt_tokens and rollout.max_response_tokens",
        ),
        (
            ("architecture", "not supported", "no common block size"),
            "choose a model that vLLM supports (model.path), or generate with inference.type: hf",
        ),
        (
            ("no module named 'flashinfer",),
            "install the package, as requirements/gpu.txt and cpu.txt do; or set VLLM_USE_FLASHINFER_SAMPLER=0",
        ),
        (("no module named",), "install the package, as requirements/gpu.txt and cpu.txt do"),
    )
    other_fix = "check model.path, model.dtype and inference.engine_args; or generate with inference.type: hf"
    memory_fix = "inference.kv_cache_gib or inference.max_running"

    def __init__(self, config: VLLMConfig, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._config = config
        self._cache_asleep = False
        self._update_begun = False
        self._received = False
        self._probes = 0
        #: vLLM's adapters by the names that requests have for them; empty where whole weights are sent.
        self._adapters: dict[str, Any] = {}
        self._adapter_number = ADAPTER_ID
        self._arriving: Any = None
        self._users: dict[str, str] = {}
        #: Requests whose images are being processed: vLLM does not know them yet.
        self._rendering: set[str] = set()

    # ---- start and end -------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model in vLLM's engine process.

        Raises:
            ConfigError: `inference.engine_args` is wrong.
            GenerationError: vLLM did not start; with the reason.
        """
        for name, value in vllm_environment(self._config, self._spec.threads, self._spec.device).items():
            os.environ.setdefault(name, value)
        name_semaphores()
        arguments = engine_arguments(self._config, self._spec)
        # Python's own helper process outlives the engine: it must not hold the engine's output open
        resource_tracker.ensure_running()
        await self._load(self._build(arguments))
        self._stops = Stops(self._engine.get_tokenizer(), self._spec.stop_ids, kept=self._spec.kept_tokens)

    async def _build(self, arguments: dict[str, Any]) -> None:
        with quick_imports():
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            if self._config.quantization == "int8":
                import roll_like.inference.vllm.int8  # noqa: F401 - registers it
        self._engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**arguments, disable_log_stats=not self._spec.returns_metrics)
        )
        _count_steps(self._engine)
        await self._engine.get_supported_tasks()
        await self._engine.update_weight_version("0")
        unserved = await self._hold_adapter()
        if unserved:
            raise GenerationError(
                f"vLLM's model of {self._spec.model_path} takes no adapter in the layers {', '.join(unserved)}",
                fix="set inference.lora: false, which sends merged weights, or choose other layers in "
                "training.lora.target_modules",
            )

    async def _hold_adapter(self) -> list[str]:
        """Hold the policy's adapter and frozen ones, where whole weights are not sent; return layers that take none."""
        adapter = self._spec.adapter
        if adapter is None:
            return []
        from vllm.lora.request import LoRARequest

        self._adapters[POLICY] = LoRARequest("policy", ADAPTER_ID, _IN_MEMORY)
        ranks = await self._engine.collective_rpc("hold_adapter", args=(adapter.rank, list(adapter.modules)))
        unserved: list[str] = ranks[0]
        for frozen in adapter.frozen:
            self._adapter_number += 1
            request = self._adapters[frozen.name] = LoRARequest(frozen.name, self._adapter_number, frozen.path)
            await self._engine.add_lora(request)
            await self._engine.pin_lora(self._adapter_number)
        return unserved

    @contextlib.contextmanager
    def _using(self, adapter: str, request_id: str) -> Iterator[Any]:
        """Yield vLLM's adapter for a request, or None: the model as it was loaded. It stays as long as the request.

        Raises:
            GenerationError: There is none of this name, or there is none any more.
        """
        served = self._served_adapters()
        if adapter not in served:
            raise GenerationError(f"the engine has no adapter {adapter!r}; it has {', '.join(served)}")
        self._users[request_id] = adapter
        try:
            yield self._adapters.get(adapter)
        finally:
            del self._users[request_id]

    def _served_adapters(self) -> Sequence[str]:
        return (POLICY, BASE, *list(self._adapters)[1:]) if self._adapters else (POLICY,)

    async def _shut_down(self, engine: Any) -> None:
        engine.shutdown(timeout=CLOSE_SECONDS if await self._accepts_signals(engine) else _KILL_SECONDS)
        engine.engine_core.resources.ctx.destroy(linger=0)  # vLLM leaves its sockets' context to the collector
        if engine.output_handler is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await engine.output_handler

    async def _accepts_signals(self, llm: Any) -> bool:
        """Have vLLM's process end by SIGTERM, which it ignores as the run goes on; return whether it will.

        It would leave semaphores behind where it is killed. One of several GPUs has its workers in further processes,
        which alone could be told.
        """
        if self._spec.tensor_parallel_size > 1:
            return False
        try:
            await asyncio.wait_for(llm.collective_rpc("accept_signals"), _ACCEPT_SECONDS)
        except Exception as error:
            if isinstance(error, TimeoutError) or self._is_death(error):
                return False
            raise
        return True

    # ---- generating ----------------------------------------------------------------------------

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._require_alive()
        await asyncio.sleep(0)  # tasks that were created in this very tick reach vLLM first
        known = {request_id for request_id in request_ids if request_id in self._tasks}
        while known:
            late = self._rendering & known
            if known - late:
                await self._answered(self._engine.abort(list(known - late)))
            if late:
                await asyncio.sleep(_ABORT_SECONDS)
            known = late

    async def _generate(self, request: GenerateRequest) -> Generation:
        completion: Any = None
        cached = 0
        stops = self._stops.of(request.sampling.stop, request.sampling.stop_ids)
        params = _sampling_params(request, stops, self._spec)
        for _ in range(_IMAGE_TRIES):
            prompt = await self._prompt(request)
            with self._using(request.adapter, request.request_id) as adapter:
                async for output in self._engine.generate(prompt, params, request.request_id, lora_request=adapter):
                    completion, cached = output.outputs[0], output.num_cached_tokens or 0
            if completion is None:
                raise GenerationError("vLLM ended the request without an answer")
            # A weight update empties two caches of images, one after the other: what is sent in between is thought to
            # be in the second one. vLLM ends the request that notices it, and sends the images with the next.
            if not request.images or completion.finish_reason != "error":
                break
        flat = completion.logprobs
        return self._generation(
            request,
            list(completion.token_ids),
            [flat.logprobs[start] for start in flat.start_indices] if flat else [],
            [(one.start, one.end, one.version) for one in completion.weight_versions or ()],
            completion.finish_reason,
            cached=cached,
            routes=completion.routed_experts,
            top=_top(flat, request.top_logprobs),
            kept=None if completion.sampling_mask is None else completion.sampling_mask.token_ids,
            speculation=_guesses(completion.spec_decode_metrics),
        )

    async def _prompt(self, request: GenerateRequest) -> Any:
        """Return a request's prompt as vLLM's engine takes it; images are decoded beside the event loop.

        Raises:
            GenerationError: vLLM made another number of placeholders of an image than the trainer will see.
        """
        if not request.images:
            from vllm.inputs.engine import tokens_input

            return tokens_input(request.prompt_ids.tolist())
        self._rendering.add(request.request_id)
        try:
            given = await asyncio.to_thread(image_prompt, request)
            (rendered,) = await self._engine.renderer.render_cmpl_async([given])
        finally:
            self._rendering.discard(request.request_id)
        return image_input(request, rendered)

    # ---- GPU memory and weights -------------------------------------------------------------------

    async def sleep(self) -> None:
        """Freeze generation; on GPUs shared with a trainer, weights move to host memory and the cache is dropped."""
        self._require_alive()
        with PROGRESS.phase("sleep"):
            if self._config.sleeps(shares_gpus=self._spec.shares_gpus):
                await self._answered(self._engine.sleep(level=1, mode="keep"))
                self._cache_asleep = True
            else:
                await self._answered(self._engine.pause_generation(mode="keep", clear_cache=False))
        self._freeze(True)

    async def wake(self) -> None:
        """Bring the weights back.

        vLLM resumes by itself as soon as everything is awake. So the key-value cache sleeps on until `resume`:
        otherwise frozen requests would go on with the old weights before new ones arrive.
        """
        self._require_alive()
        if self._cache_asleep:
            with PROGRESS.phase("wake"):
                await self._answered(self._engine.wake_up(["weights"]))

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Meet the trainer, where the transfer needs it."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        with self._errors("weight_update"):
            request = WeightTransferInitRequest(init_info=dict(info))
            await self._answered(self._engine.init_weight_transfer_engine(request))

    async def start_weight_update(self) -> None:
        """Freeze generation and open vLLM's layer-by-layer reload, where whole weights come.

        `clear_cache` takes running requests back to the queue, with their tokens, and forgets every key and value.
        Nothing is scheduled until `resume`, which computes them again from the tokens, with the new weights.

        The update before was broken off where the trainer has died in it. vLLM does not begin another one then.

        Raises:
            EngineDied: It had some of the weights of that already.
        """
        with self._errors("weight_update"):
            if self._received:
                self._death = EngineDied(
                    "the trainer has died in the middle of a weight update, which cannot be undone"
                )
                raise self._death
            await self._answered(self._engine.pause_generation(mode="keep", clear_cache=True))
            self._freeze(True)
            if self._adapters:
                await self._begin_adapter([])
            elif not self._update_begun:
                await self._answered(self._engine.start_weight_update())
                self._update_begun = True

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with self._errors("weight_update"):
            bucket = self._buckets.here(info)
            if not self._adapters:
                self._received = True
                await self._answered(self._engine.update_weights(WeightTransferUpdateRequest(update_info=bucket)))
            else:
                await self._answered(self._engine.collective_rpc("update_adapter", args=(bucket,)))

    async def finish_weight_update(self, version: int) -> None:
        """Close the reload, or put the adapter to work; tokens sampled from now on carry `version`."""
        with self._errors("weight_update"):
            if not self._adapters:
                await self._answered(self._engine.collective_rpc("require_every_layer"))
                await self._answered(self._engine.finish_weight_update(str(version)))
            else:
                await self._finish_adapter(ADAPTER_ID)
                await self._answered(self._engine.update_weight_version(str(version)))
        self._update_begun = self._received = False
        self._buckets.clear()

    async def start_adapter(self, name: str, dropped: Sequence[str]) -> None:
        """Get ready for an adapter of a new name. vLLM's prefix cache tells adapters apart by it."""
        from vllm.lora.request import LoRARequest

        with self._errors("weight_update"):
            # also one of this name, where an update was broken off
            gone = [self._adapters.pop(each) for each in (*dropped, name) if each in self._adapters]
            # requests that were aborted before vLLM had them; it ends if it meets an adapter that it does not have
            while late := [each for each, adapter in self._users.items() if adapter not in self._served_adapters()]:
                await self._answered(self._engine.abort(late))
                await asyncio.sleep(_ABORT_SECONDS)
            self._adapter_number += 1
            self._arriving = LoRARequest(name, self._adapter_number, _IN_MEMORY)
            await self._begin_adapter([each.lora_int_id for each in gone])

    async def finish_adapter(self) -> None:
        with self._errors("weight_update"):
            await self._finish_adapter(self._arriving.lora_int_id)
        self._adapters[self._arriving.lora_name] = self._arriving
        self._buckets.clear()

    async def _begin_adapter(self, dropped: Sequence[int]) -> None:
        """Let workers forget what came of another update, and these adapters."""
        await self._answered(self._engine.collective_rpc("start_adapter_update", args=(list(dropped),)))

    async def _finish_adapter(self, number: int) -> None:
        await self._answered(self._engine.collective_rpc("finish_adapter_update", args=(number,)))

    async def resume(self) -> None:
        """Continue generating; after `sleep` and `wake`, with a key-value cache that has memory again."""
        self._require_alive()
        with PROGRESS.phase("resume"):
            if self._cache_asleep:
                awake = await self._answered(
                    self._engine.wake_up(["kv_cache"])
                )  # resumes generation: nothing sleeps any more
                assert awake, "the weights wake first"
                self._cache_asleep = False
            else:
                await self._answered(self._engine.resume_generation())
        self._freeze(False)

    async def fingerprints(self, names: Sequence[str], seed: int) -> Fingerprints:
        """Return fingerprints of the weights as vLLM computes with them."""
        return await self._fingerprints(ADAPTER_ID, names, seed)

    async def adapter_fingerprints(self, name: str, names: Sequence[str], seed: int) -> Fingerprints:
        """Return fingerprints of the weights as vLLM computes requests for an adapter with them."""
        return await self._fingerprints(self._adapters[name].lora_int_id, names, seed)

    async def _fingerprints(self, adapter: int, names: Sequence[str], seed: int) -> Fingerprints:
        with self._errors("weight_update"):
            arguments = (list(names), seed, adapter)
            ranks = await self._answered(self._engine.collective_rpc("weight_fingerprints", args=arguments))
        return Fingerprints(
            tensors=agreed([rank["tensors"] for rank in ranks]),
            tied=ranks[0]["tied"],
            quantized=frozenset(ranks[0]["quantized"]),
        )

    async def score_prompt(self, token_ids: IntArray, adapter: str, top_k: int) -> PromptScores:
        """Return the log-probabilities of given tokens, and the likeliest in their places."""
        with self._errors("prompt_logprobs"):
            return await self._scores(token_ids, adapter, top_k)

    async def _given_logprobs(self, token_ids: IntArray) -> FloatArray:
        return (await self._scores(token_ids, POLICY, 0)).logprobs

    async def _scores(self, token_ids: IntArray, adapter: str, top_k: int) -> PromptScores:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._probes += 1
        # greedy: other requests' random numbers stay the same; vLLM computes a prompt anew for these numbers
        params = SamplingParams(
            max_tokens=1,
            **drawing(Sampling(temperature=0, max_tokens=1), self._spec),
            prompt_logprobs=top_k,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        tokens = token_ids.tolist()
        output: Any = None
        name = f"probe-{self._probes}"
        with self._using(adapter, name) as lora:
            async for each in self._engine.generate(tokens_input(tokens), params, name, lora_request=lora):
                output = each
        flat = output.prompt_logprobs[1:]  # the first has none before it
        found = [flat.logprobs[start] for start in flat.start_indices]
        if [flat.token_ids[start] for start in flat.start_indices] != tokens[1:]:
            raise GenerationError("vLLM told the log-probabilities of other tokens than the given ones")
        return PromptScores(logprobs=np.asarray(found, np.float32), top=_top(flat, top_k))

    async def metrics(self) -> str:
        """Return what vLLM counts, as its own server tells at `/metrics`."""
        from prometheus_client import generate_latest

        return generate_latest(_VLLMMetrics()).decode()

    # ---- state ---------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._engine.errored:
            self._die("vLLM's engine process died")

    def _is_death(self, error: Exception) -> bool:
        from vllm.v1.engine.exceptions import EngineDeadError

        return isinstance(error, EngineDeadError)


def agreed(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return an engine's fingerprints out of those of its workers: where two differ, one unlike the first.

    >>> agreed([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}])
    {'a': '1', 'b': '3'}
    """
    first, *others = ranks
    return {
        name: next((own[name] for own in others if own.get(name, value) != value), value)
        for name, value in first.items()
    }


def _top(flat: Any, count: int) -> TopLogprobs | None:
    """Return the likeliest tokens out of vLLM's lists, in which each position has the given token first."""
    if not count:
        return None
    rows = [slice(start + 1, end) for start, end in zip(flat.start_indices, flat.end_indices, strict=True)]
    return TopLogprobs(
        token_ids=np.asarray([flat.token_ids[row] for row in rows], np.int32).reshape(len(rows), -1)[:, :count],
        logprobs=np.asarray([flat.logprobs[row] for row in rows], np.float32).reshape(len(rows), -1)[:, :count],
    )


def _guesses(counted: Any) -> Guesses | None:
    """Return vLLM's counts of a request's guessed tokens: of its passes by how many were accepted, and of all."""
    if counted is None:
        return None
    accepted = sum(number * passes for number, passes in enumerate(counted.histogram))
    return Guesses(tokens=counted.num_draft_tokens, accepted=accepted, passes=sum(counted.histogram))


def _count_steps(llm: Any) -> None:
    """Count what arrives from the engine's process as progress; vLLM's own hook, its statistics, takes time."""
    receive = llm.engine_core.get_output_async

    async def received() -> Any:
        outputs = await receive()
        PROGRESS.tick()
        return outputs

    llm.engine_core.get_output_async = received


class _VLLMMetrics:
    """vLLM's own metrics of this process, without those of Python."""

    def collect(self) -> Iterator[Any]:
        """Yield them, as `prometheus_client` collects."""
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        return (family for family in get_prometheus_registry().collect() if family.name.startswith("vllm:"))


def drawing(sampling: Sampling, spec: EngineSpec) -> dict[str, Any]:
    """Return temperature and `top_k` for vLLM, which on GPUs tells what it kept of random requests only: of one token.

    >>> drawing(Sampling(temperature=0, max_tokens=1), EngineSpec(..., device="cuda", returns_kept=True))
    {'temperature': 1.0, 'top_k': 1}
    """
    if sampling.temperature == 0 and spec.returns_kept and spec.device != "cpu":
        return {"temperature": 1.0, "top_k": 1}
    return {"temperature": sampling.temperature, "top_k": sampling.top_k}


def _sampling_params(request: GenerateRequest, stops: RequestStops, spec: EngineSpec) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    sampling, schema = request.sampling, request.json_schema
    return SamplingParams(
        **drawing(sampling, spec),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        stop=list(stops.strings) or None,
        stop_token_ids=list(stops.ids),
        ignore_eos=sampling.stop_ids is not None,
        skip_special_tokens=not stops.special,
        seed=request.seed,
        logprobs=request.top_logprobs,  # and of the sampled token
        flat_logprobs=True,  # numbers in one list, not an object a token
        detokenize=bool(stops.strings),  # only stop strings need text while tokens come
        output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
        skip_clone=True,
    )
