"""vLLM's asynchronous engine behind the `InferenceEngine` protocol.

One asyncio task a request waits for vLLM's final output, so a request costs the event loop two wake-ups,
however long its response. Finished samples gather in one list that `poll` hands over whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from typing import Any

import numpy as np

from roll_like.cluster.progress import PROGRESS
from roll_like.cluster.semaphores import name_semaphores
from roll_like.config.inference import POLICY
from roll_like.errors import GenerationError, WeightSyncError
from roll_like.inference.interface import (
    EngineDied,
    EngineSpec,
    Fingerprints,
    GenerateRequest,
    Generation,
)
from roll_like.inference.process_output import ProcessOutput
from roll_like.inference.routes import experts_of, told_routes
from roll_like.inference.stops import RequestStops, Stops
from roll_like.inference.task_engine import TaskEngine
from roll_like.inference.vllm.arguments import ADAPTER_ID, engine_arguments, vllm_environment
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.images import image_prompt
from roll_like.inference.weight_transfer.shared_memory import LocalBuckets
from roll_like.models.imports import quick_imports
from roll_like.models.shape import Experts
from roll_like.types import FloatArray, IntArray, Segment, StopReason

_STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}
_CLOSE_SECONDS = 10.0
#: How long vLLM's process may take to heed SIGTERM from now on, and one that does not heed it to end. Seconds.
_ACCEPT_SECONDS, _KILL_SECONDS = 5.0, 0.1


class VLLMEngine(TaskEngine):
    """Generates with vLLM.

    Its environment (`vllm_environment`) should be set before the process imports torch; variables that are
    not set yet are set by `start`.

    Args:
        config: The `inference` section.
        spec: Model, precision, devices.
    """

    def __init__(self, config: VLLMConfig, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._config = config
        self._llm: Any = None
        self._stops: Stops
        self._output = ProcessOutput()
        self._cache_asleep = False
        self._update_begun = False
        self._received = False
        self._buckets = LocalBuckets()
        self._probes = 0
        self._adapter: Any = None
        self._frozen_adapters: dict[str, Any] = {}
        self._experts: Experts | None = None  # where routes are told

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
        self._experts = experts_of(self._spec)
        arguments = engine_arguments(self._config, self._spec)
        # Python's own helper process outlives the engine: it must not hold the engine's output open
        resource_tracker.ensure_running()
        failure: Exception | None = None
        unserved: list[str] = []
        with self._output.capture(), PROGRESS.phase("start"):
            try:
                self._llm = _build(arguments)
                _count_steps(self._llm)
                await self._llm.get_supported_tasks()
                await self._llm.update_weight_version("0")
                unserved = await self._hold_adapter()
            except (RuntimeError, ValueError, OSError, TypeError, NotImplementedError, MemoryError) as error:
                failure = error
        if failure is not None:
            await self.close()
            raise _explain_start(failure, self._output, self._spec) from failure
        if unserved:
            await self.close()
            raise GenerationError(
                f"vLLM's model of {self._spec.model_path} takes no adapter in the layers {', '.join(unserved)}",
                fix="set inference.lora: false, which sends merged weights, or choose other layers in "
                "training.lora.target_modules",
            )
        self._stops = Stops(self._llm.get_tokenizer(), self._spec.stop_ids, kept=self._spec.kept_tokens)

    async def _hold_adapter(self) -> list[str]:
        """Hold the policy's adapter and frozen ones, where whole weights are not sent; return layers that take none."""
        adapter = self._spec.adapter
        if adapter is None:
            return []
        from vllm.lora.request import LoRARequest

        # the path is never read: the adapter is there
        self._adapter = LoRARequest("policy", ADAPTER_ID, "/in/memory")
        ranks = await self._llm.collective_rpc("hold_adapter", args=(adapter.rank, list(adapter.modules)))
        unserved: list[str] = ranks[0]
        for number, frozen in enumerate(adapter.frozen, start=ADAPTER_ID + 1):
            request = self._frozen_adapters[frozen.name] = LoRARequest(frozen.name, number, frozen.path)
            await self._llm.add_lora(request)
            await self._llm.pin_lora(number)
        return unserved

    def _adapter_of(self, request: GenerateRequest) -> Any:
        """Return vLLM's adapter of a request; None is the model as it was loaded."""
        return self._adapter if request.adapter == POLICY else self._frozen_adapters.get(request.adapter)

    async def close(self) -> None:
        """End vLLM's processes and this engine's tasks."""
        llm, self._llm = self._llm, None
        self._death = self._death or EngineDied("the engine was closed")
        await self._end_tasks()
        if llm is not None:
            llm.shutdown(timeout=_CLOSE_SECONDS if await self._accepts_signals(llm) else _KILL_SECONDS)
            llm.engine_core.resources.ctx.destroy(linger=0)  # vLLM leaves its sockets' context to the collector
            if llm.output_handler is not None:
                with contextlib.suppress(asyncio.CancelledError):
                    await llm.output_handler
            self._output.join(_CLOSE_SECONDS)
        self._arrived.set()

    async def _accepts_signals(self, llm: Any) -> bool:
        """Have vLLM's process end by SIGTERM, which it ignores as the run goes on; return whether it will.

        It would leave semaphores behind where it is killed. One of several GPUs has its workers in further processes,
        which alone could be told.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._spec.tensor_parallel_size > 1:
            return False
        try:
            await asyncio.wait_for(llm.collective_rpc("accept_signals"), _ACCEPT_SECONDS)
        except (TimeoutError, EngineDeadError):
            return False
        return True

    # ---- generating ----------------------------------------------------------------------------

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests. See `InferenceEngine.abort`."""
        self._require_alive()
        await asyncio.sleep(0)  # tasks that were created in this very tick reach vLLM first
        known = [request_id for request_id in request_ids if request_id in self._tasks]
        await self._answered(self._llm.abort(known))

    async def _generate(self, request: GenerateRequest) -> Generation:
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        completion: Any = None
        cached = 0
        prompt = image_prompt(request) if request.images else tokens_input(request.prompt_ids.tolist())
        params = _sampling_params(request, self._stops.of(request.sampling.stop))
        try:
            adapter = self._adapter_of(request)
            async for output in self._llm.generate(prompt, params, request.request_id, lora_request=adapter):
                completion, cached = output.outputs[0], output.num_cached_tokens or 0
                if request.images:
                    _require_same_prompt(request, output.prompt_token_ids)
        except EngineDeadError:
            self._die()
            self._require_alive()
        tokens = [] if completion is None else list(completion.token_ids)
        logprobs = [] if completion is None else _sampled_logprobs(completion)
        if completion is None or completion.finish_reason not in _STOP_REASONS or len(tokens) != len(logprobs):
            reason = None if completion is None else completion.finish_reason
            raise GenerationError(
                f"vLLM ended the request with reason {reason!r}, {len(tokens)} tokens and {len(logprobs)} "
                "log-probabilities"
            )
        stop_reason = _STOP_REASONS[completion.finish_reason]
        return Generation(
            request_id=request.request_id,
            token_ids=np.asarray(tokens, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            segments=tuple(
                Segment(start=one.start, end=one.end, policy_version=int(one.version))
                for one in completion.weight_versions or ()
                if one.end > one.start
            ),
            text=self._stops.text(tokens, request.sampling.stop, stop_reason),
            stop_reason=stop_reason,
            cached_prompt_tokens=cached,
            routes=told_routes(completion.routed_experts, request, len(tokens), stop_reason, self._experts),
        )

    # ---- GPU memory and weights -------------------------------------------------------------------

    async def sleep(self) -> None:
        """Freeze generation; on GPUs shared with a trainer, weights move to host memory and the cache is dropped."""
        self._require_alive()
        with PROGRESS.phase("sleep"):
            if self._config.sleeps(shares_gpus=self._spec.shares_gpus):
                await self._answered(self._llm.sleep(level=1, mode="keep"))
                self._cache_asleep = True
            else:
                await self._answered(self._llm.pause_generation(mode="keep", clear_cache=False))
        self._freeze(True)

    async def wake(self) -> None:
        """Bring the weights back.

        vLLM resumes by itself as soon as everything is awake. So the key-value cache sleeps on until `resume`:
        otherwise frozen requests would go on with the old weights before new ones arrive.
        """
        self._require_alive()
        if self._cache_asleep:
            with PROGRESS.phase("wake"):
                await self._answered(self._llm.wake_up(["weights"]))

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Meet the trainer, where the transfer needs it."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        with self._weight_errors():
            request = WeightTransferInitRequest(init_info=dict(info))
            await self._answered(self._llm.init_weight_transfer_engine(request))

    async def start_weight_update(self) -> None:
        """Freeze generation and open vLLM's layer-by-layer reload, where whole weights come.

        `clear_cache` takes running requests back to the queue, with their tokens, and forgets every key and value.
        Nothing is scheduled until `resume`, which computes them again from the tokens, with the new weights.

        The update before was broken off where the trainer has died in it. vLLM does not begin another one then.

        Raises:
            EngineDied: It had some of the weights of that already.
        """
        with self._weight_errors():
            if self._received:
                self._death = EngineDied(
                    "the trainer has died in the middle of a weight update, which cannot be undone"
                )
                raise self._death
            await self._answered(self._llm.pause_generation(mode="keep", clear_cache=True))
            self._freeze(True)
            if self._adapter is not None:
                await self._answered(self._llm.collective_rpc("start_adapter_update"))  # drops what came of another
            elif not self._update_begun:
                await self._answered(self._llm.start_weight_update())
                self._update_begun = True

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        """Load one bucket."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with self._weight_errors():
            bucket = self._buckets.here(info)
            if self._adapter is None:
                self._received = True
                await self._answered(self._llm.update_weights(WeightTransferUpdateRequest(update_info=bucket)))
            else:
                await self._answered(self._llm.collective_rpc("update_adapter", args=(bucket,)))

    async def finish_weight_update(self, version: int) -> None:
        """Close the reload, or put the adapter to work; tokens sampled from now on carry `version`."""
        with self._weight_errors():
            if self._adapter is None:
                await self._answered(self._llm.collective_rpc("require_every_layer"))
                await self._answered(self._llm.finish_weight_update(str(version)))
            else:
                await self._answered(self._llm.collective_rpc("finish_adapter_update"))
                await self._answered(self._llm.update_weight_version(str(version)))
        self._update_begun = self._received = False
        self._buckets.clear()

    async def resume(self) -> None:
        """Continue generating; after `sleep` and `wake`, with a key-value cache that has memory again."""
        self._require_alive()
        with PROGRESS.phase("resume"):
            if self._cache_asleep:
                awake = await self._answered(
                    self._llm.wake_up(["kv_cache"])
                )  # resumes generation: nothing sleeps any more
                assert awake, "the weights wake first"
                self._cache_asleep = False
            else:
                await self._answered(self._llm.resume_generation())
        self._freeze(False)

    async def fingerprints(self, names: Sequence[str], seed: int) -> Fingerprints:
        """Return fingerprints of the weights as vLLM computes with them."""
        with self._weight_errors():
            ranks = await self._answered(self._llm.collective_rpc("weight_fingerprints", args=(list(names), seed)))
        return Fingerprints(tensors=agreed([rank["tensors"] for rank in ranks]), tied=ranks[0]["tied"])

    async def prompt_logprobs(self, token_ids: IntArray) -> FloatArray:
        """Return the log-probabilities of given tokens. See `InferenceEngine.prompt_logprobs`."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        self._require_alive()
        self._probes += 1
        # greedy: other requests' random numbers stay the same; vLLM computes a prompt anew for these numbers
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        tokens = token_ids.tolist()
        output: Any = None
        try:
            with PROGRESS.phase("prompt_logprobs"):
                name = f"probe-{self._probes}"
                async for each in self._llm.generate(tokens_input(tokens), params, name, lora_request=self._adapter):
                    output = each
        except EngineDeadError:
            self._die()
            self._require_alive()
        except Exception as error:
            raise GenerationError(
                f"vLLM cannot tell the log-probabilities of given tokens: {type(error).__name__}: {error}",
                fix="remove what excludes prompt_logprobs from inference.engine_args",
            ) from error
        found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]
        return np.asarray(found, np.float32)

    @contextlib.contextmanager
    def _weight_errors(self) -> Iterator[None]:
        from vllm.v1.engine.exceptions import EngineDeadError

        self._require_alive()
        try:
            with PROGRESS.phase("weight_update"):
                yield
        except EngineDied:
            raise
        except EngineDeadError:
            self._die()
            self._require_alive()
        except Exception as error:
            # vLLM hands an error of its engine process over as text
            raise WeightSyncError(f"the inference engine refused the weights: {error}") from error

    # ---- state ---------------------------------------------------------------------------------

    def _die(self) -> None:
        if self._death is None:
            printed = self._output.cause() or self._output.tail(5) or "it printed nothing"
            self._death = EngineDied(
                f"vLLM's engine process died: {printed}",
                fix="look for an out-of-memory kill (dmesg); lower inference.kv_cache_gib or inference.max_running",
            )
        self._arrived.set()

    def _require_alive(self) -> None:
        if self._death is not None:
            raise self._death
        if self._llm is None:
            raise GenerationError("the engine was not started")
        if self._llm.errored:
            self._die()
            self._require_alive()


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


def plain_words(error: BaseException) -> str:
    """Return an error's kind and message; of a pydantic error, which wraps another one, only that one's message."""
    text = str(error)
    if "Value error, " in text:
        return text.split("Value error, ", 1)[1].split(" [type=", 1)[0].strip()
    return f"{type(error).__name__}: {text}"


def _build(arguments: dict[str, Any]) -> Any:
    with quick_imports():
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, disable_log_stats=True))


def _count_steps(llm: Any) -> None:
    """Count what arrives from the engine's process as progress; vLLM's own hook, its statistics, takes time."""
    receive = llm.engine_core.get_output_async

    async def received() -> Any:
        outputs = await receive()
        PROGRESS.tick()
        return outputs

    llm.engine_core.get_output_async = received


def _require_same_prompt(request: GenerateRequest, seen: Sequence[int] | None) -> None:
    """Raise a GenerationError where vLLM made another number of placeholders of an image than the trainer will see."""
    if seen is None or request.prompt_ids.tolist() != list(seen):
        raise GenerationError(
            f"vLLM sees {0 if seen is None else len(seen)} prompt tokens with the images of request "
            f"{request.request_id}, and the trainer {len(request.prompt_ids)}",
            fix="remove mm_processor_kwargs from inference.engine_args; sizes of images are set in the model's "
            "preprocessor_config.json",
        )


def _sampling_params(request: GenerateRequest, stops: RequestStops) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    sampling, schema = request.sampling, request.json_schema
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=list(stops.strings) or None,
        stop_token_ids=list(stops.ids),
        skip_special_tokens=not stops.special,
        seed=request.seed,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,  # numbers in one list, not an object a token
        detokenize=bool(stops.strings),  # only stop strings need text while tokens come
        output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
        skip_clone=True,
    )


def _sampled_logprobs(completion: Any) -> list[float]:
    flat = completion.logprobs
    return [flat.logprobs[start] for start in flat.start_indices] if flat else []


def _explain_start(error: BaseException, output: ProcessOutput, spec: EngineSpec) -> GenerationError:
    """Return why the start failed, with the error that the engine process printed, if it printed one."""
    output.join(2.0)
    cause = output.cause() or plain_words(error)
    lowered = cause.lower()
    if "out of memory" in lowered or "available memory" in lowered or "kv cache" in lowered or "alloc" in lowered:
        fix = "lower inference.kv_cache_gib (CPU) or inference.gpu_memory_utilization (GPU), or free memory"
    elif "max_model_len" in lowered or "max_position_embeddings" in lowered:
        fix = "lower inference.max_model_len, or data.max_prompt_tokens and rollout.max_response_tokens"
    elif "architecture" in lowered or "not supported" in lowered or "no common block size" in lowered:
        fix = "choose a model that vLLM supports (model.path), or generate with inference.type: hf"
    elif "no module named" in lowered:
        fix = "install the package, as requirements/gpu.txt and cpu.txt do" + (
            "; or set VLLM_USE_FLASHINFER_SAMPLER=0" if "'flashinfer" in lowered else ""
        )
    else:
        fix = "check model.path, model.dtype and inference.engine_args; or generate with inference.type: hf"
        if output.tail():
            print(output.tail(), file=sys.stderr)
    return GenerationError(f"vLLM did not start with {spec.model_path} on {spec.device}: {cause}", fix=fix)
