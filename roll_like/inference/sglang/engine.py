"""SGLang's engine behind the `InferenceEngine` protocol.

The engine runs in this process, its schedulers (one a GPU) in processes of their own. Their requests go through the
coroutines of SGLang's tokenizer manager: the methods of its `Engine` wait on an event loop, and there is one running.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import itertools
import os
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
import psutil

from roll_like.cluster.progress import PROGRESS
from roll_like.config.inference import NCCL
from roll_like.errors import GenerationError, WeightSyncError
from roll_like.inference.interface import (
    EngineSpec,
    Fingerprints,
    GenerateRequest,
    Generation,
    Sampling,
)
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
from roll_like.inference.weight_transfer.shared_memory import BucketInfo, read_bucket
from roll_like.types import FloatArray, IntArray, StopReason

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
    """

    library = "SGLang"
    start_fixes = (
        (
            ("out of memory", "mem_fraction_static", "not enough memory"),
            "change inference.mem_fraction_static, lower inference.max_running, or free memory",
        ),
        (
            ("context length", "context_length"),
            "lower inference.max_model_len, or data.max_prompt_tokens and rollout.max_response_tokens",
        ),
    )
    other_fix = "check model.path, model.dtype and inference.engine_args; or generate with inference.type: vllm or hf"
    memory_fix = "inference.mem_fraction_static or inference.max_running"

    def __init__(self, config: SGLangConfig, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._config = config
        self._manager: Any = None
        self._io: Any = None  # SGLang's requests
        self._numbers = itertools.count()
        self._sglang_ids: dict[str, str] = {}  # of requests that SGLang has
        self._waiting: dict[str, asyncio.Future[bool]] = {}  # requests that came while the engine was frozen
        self._asleep: tuple[str, ...] = ()  # memory that is given up
        self._session = False  # whether a weight update is open
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
        arguments = engine_arguments(self._config, self._spec)
        self._handler = _on_sigquit(_IGNORE)  # schedulers that die end their parent so
        await self._load(self._build(arguments))
        self._manager = self._engine.tokenizer_manager
        tokenizer = self._manager.tokenizer
        self._stops = Stops(tokenizer, self._spec.stop_ids, kept=self._spec.kept_tokens)

    async def _build(self, arguments: dict[str, Any]) -> None:
        from sglang.srt.managers import io_struct

        self._io = io_struct
        self._engine = _built(arguments)

    async def close(self) -> None:
        """End SGLang's processes and this engine's tasks."""
        await super().close()
        if self._handler is not None:
            _on_sigquit(self._handler)
            self._handler = None

    async def _shut_down(self, engine: Any) -> None:
        engine.shutdown()

    # ---- generating ----------------------------------------------------------------------------

    async def abort(self, request_ids: Sequence[str]) -> None:
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
        return self._told(request, answer)

    def _sampling_params(self, request: GenerateRequest) -> dict[str, Any]:
        stops = self._stops.of(request.sampling.stop, request.sampling.stop_ids)
        return {
            **sampling_params(request.sampling, request.seed),
            "stop": list(stops.strings) or None,
            "stop_token_ids": list(stops.ids),
            "ignore_eos": request.sampling.stop_ids is not None,
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
        asked = self._io.GenerateReqInput(
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

    def _told(self, request: GenerateRequest, answer: Mapping[str, Any]) -> Generation:
        meta = answer["meta_info"]
        ended = meta["finish_reason"] or {}
        drawn = meta.get("output_token_logprobs") or []
        drawn = drawn[: meta.get("completion_tokens", len(drawn))]  # without what came after a stop string
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(drawn)}]
        generation = self._generation(
            request,
            [entry[1] for entry in drawn],
            [entry[0] for entry in drawn],
            [(span["start"], span["end"], span["version"]) for span in spans],
            None if "status_code" in ended else ended.get("type"),
            cached=int(meta.get("cached_tokens") or 0),
            routes=self._routes(meta),
            kept=None,
            why=meta["finish_reason"],
        )
        versioned = generation.segments[-1].end if generation.segments else 0
        if versioned != len(drawn):
            raise GenerationError(f"SGLang tells the policy versions of {versioned} tokens of {len(drawn)}")
        return generation

    def _routes(self, meta: Mapping[str, Any]) -> IntArray | None:
        """Return the experts that a report tells, shape [T, layers, k]: SGLang sends the bytes of int32 as base64."""
        told = meta.get("routed_experts")
        if self._experts is None or told is None:
            return None
        return np.frombuffer(base64.b64decode(told), np.int32).reshape(-1, self._experts.layers, self._experts.active)

    async def _given_logprobs(self, token_ids: IntArray) -> FloatArray:
        greedy = sampling_params(Sampling(temperature=0, max_tokens=1), None)
        # asked for from the first token on, so that SGLang takes no keys and values of earlier requests
        answer = await self._ask(token_ids, greedy, f"{next(self._numbers):016d}", logprob_start_len=0)
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
                tags = (CACHE, WEIGHTS)
                released = self._io.ReleaseMemoryOccupationReqInput(tags=list(tags))
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
        await self._update(
            self._manager.init_weights_update_group(self._io.InitWeightsUpdateGroupReqInput(**info), None)
        )

    async def start_weight_update(self) -> None:
        """Freeze generation and open a weight-update session.

        Running requests go back to the queue with their tokens, and give up their keys and values, which are computed
        again from the tokens after `resume`.
        """
        await self._pause()
        if self._session:  # of an update that was broken off
            await self._update(self._manager.end_weight_update(self._io.EndWeightUpdateReqInput(), None))
            self._session = False
        await self._update(self._manager.begin_weight_update(self._io.BeginWeightUpdateReqInput(), None))
        self._session = True

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        """Load one bucket, out of shared memory or of a broadcast."""
        if self._spec.weight_backend == NCCL.name:
            broadcast = self._io.UpdateWeightsFromDistributedReqInput(**info, flush_cache=False)
            await self._update(self._manager.update_weights_from_distributed(broadcast, None))
            return
        from sglang.srt.utils import MultiprocessingSerializer

        self._require_alive()
        bucket = self._buckets.here(info)
        read_bucket(BucketInfo(**bucket))  # here, because an error in a scheduler is that one's end
        payload = MultiprocessingSerializer.serialize(described(bucket))
        request = self._io.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload] * self._spec.tensor_parallel_size,
            load_format=LOADER,
            flush_cache=False,
        )
        await self._update(self._manager.update_weights_from_tensor(request, None))

    async def finish_weight_update(self, version: int) -> None:
        """Close the session and forget every key and value; tokens sampled from now on carry `version`."""
        await self._update(self._manager.end_weight_update(self._io.EndWeightUpdateReqInput(), None))
        self._session = False
        with self._errors("weight_update"):
            flushed = await self._answered(self._manager.flush_cache())
            if not flushed.success:
                raise WeightSyncError("SGLang kept keys and values of the old weights: requests are still running")
            counted = self._io.UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
            await self._answered(self._manager.update_weight_version(counted))
        self._buckets.clear()

    async def resume(self) -> None:
        """Continue generating; after `sleep` and `wake`, with a key-value cache that has memory again."""
        self._require_alive()
        with PROGRESS.phase("resume"):
            for tag in self._asleep:
                await self._take_memory(tag)
            emptied = self._spec.device != "cpu"  # whatever the allocator kept of an update
            await self._answered(
                self._manager.continue_generation(self._io.ContinueGenerationReqInput(torch_empty_cache=emptied))
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
        self._require_alive()
        if self._frozen:
            return
        self._freeze(True)
        await asyncio.sleep(0)  # requests that were admitted in this very tick reach SGLang first
        await self._answered(self._manager.pause_generation(self._io.PauseGenerationReqInput(mode="retract")))
        # pausing is not answered; what schedulers are asked after it is
        await self._answered(self._manager.get_internal_state())

    async def _take_memory(self, tag: str) -> None:
        taken = self._io.ResumeMemoryOccupationReqInput(tags=[tag])
        await self._answered(self._manager.resume_memory_occupation(taken, None))
        self._asleep = tuple(each for each in self._asleep if each != tag)

    async def _update(self, call: Coroutine[Any, Any, tuple[bool, str]]) -> None:
        """Await a call that answers whether it succeeded.

        Raises:
            WeightSyncError: It did not; with SGLang's reason.
        """
        with self._errors("weight_update"):
            success, message = await self._answered(call)
            if not success:
                raise WeightSyncError(f"the inference engine refused the weights: {message}")

    # ---- state ---------------------------------------------------------------------------------

    def _look(self) -> None:
        if time.monotonic() - self._looked < DEATH_SECONDS / 2:  # every request under way asks
            return
        self._looked = time.monotonic()
        ended = [pid for pid in self._engine.get_all_child_pids() if not _runs(pid)]
        if ended:
            self._die(f"process {ended[0]} of SGLang died")


def sampling_params(sampling: Sampling, seed: int | None) -> dict[str, Any]:
    """Return SGLang's sampling parameters; all that shape the distribution, so that no default of a model does."""
    return {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "sampling_seed": seed,
        "stream_interval": REPORT_TOKENS,
    }


def _built(arguments: dict[str, Any]) -> Any:
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
