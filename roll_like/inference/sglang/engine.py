"""SGLang's engine behind the `InferenceEngine` protocol.

The engine runs in this process, its schedulers (one a GPU) in processes of their own. Their requests go through the
coroutines of SGLang's tokenizer manager: the methods of its `Engine` wait on an event loop, and there is one running.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import itertools
import os
import signal
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import psutil

from roll_like.cluster.progress import PROGRESS
from roll_like.config.inference import NCCL
from roll_like.errors import GenerationError, WeightSyncError
from roll_like.inference.interface import (
    EngineDied,
    EngineSpec,
    Fingerprints,
    GenerateRequest,
    Generation,
    Sampling,
)
from roll_like.inference.process_output import ProcessOutput
from roll_like.inference.routes import experts_of, told_routes
from roll_like.inference.sglang.arguments import (
    LOADER,
    engine_arguments,
    require_version,
    sglang_environment,
)
from roll_like.inference.sglang.config import SGLangConfig
from roll_like.inference.sglang.loader import described
from roll_like.inference.stops import Stops
from roll_like.inference.task_engine import DEATH_SECONDS, TaskEngine
from roll_like.inference.weight_transfer.shared_memory import BucketInfo, LocalBuckets, read_bucket
from roll_like.models.shape import Experts
from roll_like.types import FloatArray, IntArray, Segment, StopReason

_STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}
_CLOSE_SECONDS = 10.0
#: Tokens between two reports of a request. They are what the watchdog counts as progress, and all that is left of a
#: request that is aborted while the engine is frozen.
REPORT_TOKENS = 8
WEIGHTS, CACHE = "weights", "kv_cache"
_IGNORE = 1  # SIG_IGN


class SGLangEngine(TaskEngine):
    """Generates with SGLang.

    Its environment (`sglang_environment`) should be set before the process imports torch.

    Args:
        config: The `inference` section.
        spec: Model, precision, devices.
    """

    def __init__(self, config: SGLangConfig, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._config = config
        self._engine: Any = None
        self._manager: Any = None
        self._stops: Stops
        self._output = ProcessOutput()
        self._numbers = itertools.count()
        self._sglang_ids: dict[str, str] = {}  # of requests that SGLang has
        self._waiting: dict[str, asyncio.Future[bool]] = {}  # requests that came while the engine was frozen
        self._asleep: tuple[str, ...] = ()  # memory that is given up
        self._session = False  # whether a weight update is open
        self._buckets = LocalBuckets()
        self._experts: Experts | None = None  # where routes are told
        self._handler: int | None = None  # what SIGQUIT did before
        self._looked = 0.0  # when SGLang's processes were last seen

    # ---- start and end -------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model in SGLang's schedulers.

        Raises:
            ConfigError: `inference.engine_args` is wrong.
            GenerationError: SGLang is missing, has another version, or did not start; with the reason.
        """
        require_version()
        os.environ.update(sglang_environment())
        self._experts = experts_of(self._spec)
        arguments = engine_arguments(self._config, self._spec)
        self._handler = _on_sigquit(_IGNORE)  # schedulers that die end their parent so
        failure: Exception | None = None
        with self._output.capture(), PROGRESS.phase("start"):
            try:
                self._engine = _build(arguments)
            except Exception as error:  # noqa: BLE001 - whatever keeps SGLang from starting is the reason
                failure = error
        if failure is not None:
            await self.close()
            raise self._explain_start(failure) from failure
        self._manager = self._engine.tokenizer_manager
        tokenizer = self._manager.tokenizer
        self._stops = Stops(tokenizer, self._spec.stop_ids, kept=self._spec.kept_tokens)

    async def close(self) -> None:
        """End SGLang's processes and this engine's tasks."""
        engine, self._engine = self._engine, None
        self._death = self._death or EngineDied("the engine was closed")
        await self._end_tasks()
        if engine is not None:
            engine.shutdown()
            self._output.join(_CLOSE_SECONDS)
        if self._handler is not None:
            _on_sigquit(self._handler)
            self._handler = None
        self._buckets.clear()
        self._arrived.set()

    def _explain_start(self, error: Exception) -> GenerationError:
        self._output.join(2.0)
        cause = self._output.cause() or f"{type(error).__name__}: {error}"
        lowered = cause.lower()
        if "out of memory" in lowered or "mem_fraction_static" in lowered or "not enough memory" in lowered:
            fix = "change inference.mem_fraction_static, lower inference.max_running, or free memory"
        elif "context" in lowered and "length" in lowered:
            fix = "lower inference.max_model_len, or data.max_prompt_tokens and rollout.max_response_tokens"
        else:
            fix = "check model.path, model.dtype and inference.engine_args; or generate with inference.type: vllm or hf"
            if self._output.tail():
                print(self._output.tail(), file=sys.stderr)
        return GenerationError(
            f"SGLang did not start with {self._spec.model_path} on {self._spec.device}: {cause}", fix=fix
        )

    # ---- generating ----------------------------------------------------------------------------

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests. See `InferenceEngine.abort`."""
        self._require_alive()
        await asyncio.sleep(0)  # tasks that were created in this very tick reach SGLang first
        for request_id in request_ids:
            waiting = self._waiting.get(request_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(False)
            elif request_id in self._sglang_ids:
                self._manager.abort_request(self._sglang_ids[request_id])

    async def _generate(self, request: GenerateRequest) -> Generation:
        if not await self._admitted(request.request_id):
            return _never_started(request)
        # SGLang aborts whatever begins with the id it is given, so that all ids have one length
        sglang_id = f"{next(self._numbers):016d}"
        self._sglang_ids[request.request_id] = sglang_id
        try:
            answer = await self._ask(
                request.prompt_ids, self._sampling_params(request), sglang_id, logprob_start_len=-1
            )
        finally:
            del self._sglang_ids[request.request_id]
        return self._generation(request, answer)

    def _sampling_params(self, request: GenerateRequest) -> dict[str, Any]:
        stops = self._stops.of(request.sampling.stop)
        return {
            **sampling_params(request.sampling, request.seed),
            "stop": list(stops.strings) or None,
            "stop_token_ids": list(stops.ids),
            "skip_special_tokens": not stops.special,
        }

    async def _admitted(self, request_id: str) -> bool:
        """Wait while the engine is frozen; return False if the request was aborted meanwhile.

        SGLang would wait too, but an abort that arrives then is lost: it asks schedulers that do not know the request.
        """
        while self._frozen:
            waiting = self._waiting[request_id] = asyncio.get_running_loop().create_future()
            try:
                if not await waiting:
                    return False
            finally:
                del self._waiting[request_id]
        return True

    async def _ask(
        self, prompt_ids: IntArray, sampling: Mapping[str, Any], sglang_id: str, logprob_start_len: int
    ) -> Mapping[str, Any]:
        """Return SGLang's last report of a request."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        asked = GenerateReqInput(
            rid=sglang_id,
            input_ids=prompt_ids.tolist(),
            sampling_params=dict(sampling),
            return_logprob=True,
            logprob_start_len=logprob_start_len,
            stream=True,
            return_routed_experts=self._experts is not None,
        )
        last: Mapping[str, Any] | None = None
        reports = self._manager.generate_request(asked, None)
        try:
            while (report := await self._answered(_next(reports))) is not None:
                last = report
                PROGRESS.tick()
        finally:
            await reports.aclose()
        if last is None:
            raise GenerationError("SGLang ended the request without an answer")
        return last

    def _generation(self, request: GenerateRequest, answer: Mapping[str, Any]) -> Generation:
        meta = answer["meta_info"]
        reason = (meta["finish_reason"] or {}).get("type")
        drawn = meta.get("output_token_logprobs") or []
        drawn = drawn[: meta.get("completion_tokens", len(drawn))]  # without what came after a stop string
        tokens = [entry[1] for entry in drawn]
        if reason not in _STOP_REASONS or (reason == "abort" and "status_code" in meta["finish_reason"]):
            raise GenerationError(
                f"SGLang ended the request with {meta['finish_reason']!r}, after {len(tokens)} tokens"
            )
        stop_reason = _STOP_REASONS[reason]
        spans = meta.get("weight_versions") or [
            {"version": meta["weight_version"], "start": 0, "end": len(tokens)},
        ]
        segments = tuple(
            Segment(start=span["start"], end=min(span["end"], len(tokens)), policy_version=int(span["version"]))
            for span in spans
            if span["start"] < min(span["end"], len(tokens))
        )
        versioned = segments[-1].end if segments else 0
        if versioned != len(tokens):
            raise GenerationError(f"SGLang tells the policy versions of {versioned} tokens of {len(tokens)}")
        return Generation(
            request_id=request.request_id,
            token_ids=np.asarray(tokens, np.int32),
            logprobs=np.asarray([entry[0] for entry in drawn], np.float32),
            segments=segments,
            text=self._stops.text(tokens, request.sampling.stop, stop_reason),
            stop_reason=stop_reason,
            cached_prompt_tokens=int(meta.get("cached_tokens") or 0),
            routes=told_routes(self._routes(meta), request, len(tokens), stop_reason, self._experts),
        )

    def _routes(self, meta: Mapping[str, Any]) -> IntArray | None:
        """Return the experts that a report tells, shape [T, layers, k]: SGLang sends the bytes of int32 as base64."""
        told = meta.get("routed_experts")
        if self._experts is None or told is None:
            return None
        return np.frombuffer(base64.b64decode(told), np.int32).reshape(-1, self._experts.layers, self._experts.active)

    async def prompt_logprobs(self, token_ids: IntArray) -> FloatArray:
        """Return the log-probabilities of given tokens. See `InferenceEngine.prompt_logprobs`.

        From the first token on they are asked for, so that SGLang takes no keys and values of earlier requests.
        """
        self._require_alive()
        greedy = sampling_params(Sampling(temperature=0, max_tokens=1), None)
        try:
            with PROGRESS.phase("prompt_logprobs"):
                number = f"{next(self._numbers):016d}"
                answer = await self._ask(token_ids, greedy, number, logprob_start_len=0)
        except EngineDied:
            raise
        except Exception as error:
            raise GenerationError(
                f"SGLang cannot tell the log-probabilities of given tokens: {type(error).__name__}: {error}",
                fix="remove what excludes them from inference.engine_args",
            ) from error
        told = answer["meta_info"].get("input_token_logprobs") or []
        if [entry[1] for entry in told[1:]] != token_ids[1:].tolist():
            raise GenerationError(
                f"SGLang told log-probabilities of {len(told)} tokens, and they are not the {len(token_ids)} given ones"
            )
        return np.asarray([entry[0] for entry in told[1:]], np.float32)

    # ---- GPU memory and weights -------------------------------------------------------------------

    async def sleep(self) -> None:
        """Freeze generation; on GPUs shared with a trainer, weights move to host memory and the cache is dropped."""
        with PROGRESS.phase("sleep"):
            await self._pause()
            if self._config.sleeps(shares_gpus=self._spec.shares_gpus) and not self._asleep:
                from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

                tags = (CACHE, WEIGHTS)
                released = ReleaseMemoryOccupationReqInput(tags=list(tags))
                await self._answered(self._manager.release_memory_occupation(released, None))
                self._asleep = tags

    async def wake(self) -> None:
        """Bring the weights back; the key-value cache follows in `resume`."""
        self._require_alive()
        if WEIGHTS in self._asleep:
            with PROGRESS.phase("wake"):
                await self._take_memory(WEIGHTS)

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Join the trainer's process group."""
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        await self._update(self._manager.init_weights_update_group(InitWeightsUpdateGroupReqInput(**info), None))

    async def start_weight_update(self) -> None:
        """Freeze generation and open a weight-update session.

        Running requests go back to the queue with their tokens, and give up their keys and values, which are computed
        again from the tokens after `resume`.
        """
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

        await self._pause()
        if self._session:  # of an update that was broken off
            await self._update(self._manager.end_weight_update(EndWeightUpdateReqInput(), None))
            self._session = False
        await self._update(self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))
        self._session = True

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        """Load one bucket, out of shared memory or of a broadcast."""
        if self._spec.weight_backend == NCCL.name:
            from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

            broadcast = UpdateWeightsFromDistributedReqInput(**info, flush_cache=False)
            await self._update(self._manager.update_weights_from_distributed(broadcast, None))
            return
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        self._require_alive()
        bucket = self._buckets.here(info)
        read_bucket(BucketInfo(**bucket))  # here, because an error in a scheduler is that one's end
        payload = MultiprocessingSerializer.serialize(described(bucket))
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload] * self._spec.tensor_parallel_size,
            load_format=LOADER,
            flush_cache=False,
        )
        await self._update(self._manager.update_weights_from_tensor(request, None))

    async def finish_weight_update(self, version: int) -> None:
        """Close the session and forget every key and value; tokens sampled from now on carry `version`."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput, UpdateWeightVersionReqInput

        await self._update(self._manager.end_weight_update(EndWeightUpdateReqInput(), None))
        self._session = False
        with self._weight_errors():
            flushed = await self._answered(self._manager.flush_cache())
            if not flushed.success:
                raise WeightSyncError("SGLang kept keys and values of the old weights: requests are still running")
            counted = UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
            await self._answered(self._manager.update_weight_version(counted))
        self._buckets.clear()

    async def resume(self) -> None:
        """Continue generating; after `sleep` and `wake`, with a key-value cache that has memory again."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._require_alive()
        with PROGRESS.phase("resume"):
            for tag in self._asleep:
                await self._take_memory(tag)
            emptied = self._spec.device != "cpu"  # whatever the allocator kept of an update
            await self._answered(
                self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=emptied))
            )
        self._freeze(False)
        for waiting in list(self._waiting.values()):
            if not waiting.done():
                waiting.set_result(True)

    async def fingerprints(self, names: Sequence[str], seed: int) -> Fingerprints:
        """Return none: SGLang does not tell its numbers bit by bit, so every sync is followed by a probe."""
        del names, seed
        self._require_alive()
        return Fingerprints(tensors={}, tied={})

    async def _pause(self) -> None:
        """Freeze generation, unless it is frozen; returns when no scheduler computes any more."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._require_alive()
        if self._frozen:
            return
        self._freeze(True)
        await asyncio.sleep(0)  # requests that were admitted in this very tick reach SGLang first
        await self._answered(self._manager.pause_generation(PauseGenerationReqInput(mode="retract")))
        # pausing is not answered; what schedulers are asked after it is
        await self._answered(self._manager.get_internal_state())

    async def _take_memory(self, tag: str) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        taken = ResumeMemoryOccupationReqInput(tags=[tag])
        await self._answered(self._manager.resume_memory_occupation(taken, None))
        self._asleep = tuple(each for each in self._asleep if each != tag)

    async def _update(self, call: Coroutine[Any, Any, tuple[bool, str]]) -> None:
        """Await a call that answers whether it succeeded.

        Raises:
            WeightSyncError: It did not; with SGLang's reason.
        """
        with self._weight_errors():
            success, message = await self._answered(call)
            if not success:
                raise WeightSyncError(f"the inference engine refused the weights: {message}")

    @contextlib.contextmanager
    def _weight_errors(self) -> Iterator[None]:
        self._require_alive()
        try:
            with PROGRESS.phase("weight_update"):
                yield
        except (EngineDied, WeightSyncError):
            raise
        except Exception as error:
            raise WeightSyncError(
                f"the inference engine refused the weights: {type(error).__name__}: {error}"
            ) from error

    # ---- state ---------------------------------------------------------------------------------

    def _require_alive(self) -> None:
        if self._death is not None:
            raise self._death
        if self._engine is None:
            raise GenerationError("the engine was not started")
        if time.monotonic() - self._looked < DEATH_SECONDS / 2:  # every request under way asks
            return
        ended = [pid for pid in self._engine.get_all_child_pids() if not _runs(pid)]
        self._looked = time.monotonic()
        if ended:
            printed = self._output.cause() or self._output.tail(5) or "it printed nothing"
            self._death = EngineDied(
                f"process {ended[0]} of SGLang died: {printed}",
                fix="look for an out-of-memory kill (dmesg); lower inference.mem_fraction_static or "
                "inference.max_running",
            )
            self._arrived.set()
            raise self._death


def sampling_params(sampling: Sampling, seed: int | None) -> dict[str, Any]:
    """Return SGLang's sampling parameters; all that shape the distribution, so that no default of a model does."""
    return {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "sampling_seed": seed,
        "stream_interval": REPORT_TOKENS,
    }


def _build(arguments: dict[str, Any]) -> Any:
    from sglang.srt.entrypoints.engine import Engine

    return Engine(**arguments)


async def _next(reports: Any) -> Any:
    """Return the next report; None after the last."""
    return await anext(reports, None)


def _never_started(request: GenerateRequest) -> Generation:
    return Generation(
        request_id=request.request_id,
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        segments=(),
        text="",
        stop_reason=StopReason.ABORTED,
    )


def _on_sigquit(handler: int) -> int:
    """Set what the signal does to this process, and return what it did before.

    SGLang's schedulers send it to their parent when they die, which then could not say why. SGLang handles it in a main
    thread only; the event loop of an actor is in another, where Python sets no handlers. The C library does.
    """
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    return int(set_handler(signal.SIGQUIT, handler) or 0)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
