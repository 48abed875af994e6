"""The part of an engine that serves each request in an asyncio task of its own."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from abc import abstractmethod
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from roll_like.cluster.progress import PROGRESS
from roll_like.data.kept import joined_kept
from roll_like.errors import GenerationError, RollLikeError, WeightSyncError
from roll_like.inference.interface import (
    EngineDied,
    EngineSpec,
    FailedGeneration,
    GenerateRequest,
    Generation,
    Guesses,
    PolledEngine,
    TopLogprobs,
    derived_seed,
)
from roll_like.inference.kept import told_kept
from roll_like.inference.process_output import ProcessOutput
from roll_like.inference.routes import experts_of, told_routes
from roll_like.inference.stops import Stops
from roll_like.inference.weight_transfer.shared_memory import LocalBuckets
from roll_like.models.shape import Experts
from roll_like.types import FloatArray, IntArray, Segment, StopReason

_STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}
#: How long a library's processes may take to end.
CLOSE_SECONDS = 10.0
#: How often a call that an engine's processes have not answered looks whether they are alive. Seconds.
DEATH_SECONDS = 1.0
R = TypeVar("R")


class TaskEngine(PolledEngine):
    """Base of an engine whose library has one awaitable answer a request, and processes of its own.

    Finished samples gather in one list that `poll` hands over whole.
    """

    #: What messages call the library.
    library: ClassVar[str]
    #: What to change, by words that the error of a failed start has; the first that fits.
    start_fixes: ClassVar[Sequence[tuple[tuple[str, ...], str]]]
    #: What to change where nothing else is known.
    other_fix: ClassVar[str] = (
        "check model.path, model.dtype and inference.engine_args; or generate with inference.type: hf"
    )
    #: What to lower where its processes were killed for want of memory.
    memory_fix: ClassVar[str]

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._engine: Any = None  # the library's
        self._stops: Stops
        self._experts: Experts | None = None  # where routes are told
        self._output = ProcessOutput()
        self._buckets = LocalBuckets()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._frozen = False

    @abstractmethod
    async def _generate(self, request: GenerateRequest) -> Generation:
        """Return the outcome of one request; whatever it raises fails that request alone.

        Raises:
            EngineDied: The engine is gone, and with it all requests.
        """

    @abstractmethod
    async def _given_logprobs(self, token_ids: IntArray) -> FloatArray:
        """Return the log-probabilities of given tokens. See `InferenceEngine.prompt_logprobs`."""

    @abstractmethod
    def _look(self) -> None:
        """Call `_die` if the library's processes have ended."""

    @abstractmethod
    async def _shut_down(self, engine: Any) -> None:
        """End the library's processes."""

    def _is_death(self, error: Exception) -> bool:
        """Return whether an error of the library says that its processes have ended."""
        del error
        return False

    # ---- start and end -------------------------------------------------------------------------

    async def _load(self, building: Coroutine[Any, Any, Any]) -> None:
        """Do what starts the library.

        Raises:
            GenerationError: It did not start; with the reason, which its processes printed.
        """
        try:
            self._experts = experts_of(self._spec)
            with self._output.capture(), PROGRESS.phase("start"):
                await building
        except Exception as error:
            building.close()
            await self.close()
            if isinstance(error, GenerationError):
                raise
            self._output.join(2.0)
            cause = self._output.cause() or _plain_words(error)
            fix = next((fix for words, fix in self.start_fixes if any(word in cause.lower() for word in words)), None)
            if fix is None and self._output.tail():
                print(self._output.tail(), file=sys.stderr)
            raise GenerationError(
                f"{self.library} did not start with {self._spec.model_path} on {self._spec.device}: {cause}",
                fix=fix or self.other_fix,
            ) from error

    async def close(self) -> None:
        """End the library's processes and this engine's tasks."""
        engine, self._engine = self._engine, None
        self._death = self._death or EngineDied("the engine was closed")
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if engine is not None:
            await self._shut_down(engine)
            self._output.join(CLOSE_SECONDS)
        self._buckets.close()
        self._arrived.set()

    async def held_weights(self, part: int = 0) -> str:
        return self._buckets.held(part)

    # ---- requests ------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._check(requests, self._tasks)
        for request in requests:
            self._tasks[request.request_id] = asyncio.create_task(self._serve(request))
        self._show()

    async def _serve(self, request: GenerateRequest) -> None:
        """Run one request; its outcome, whatever it is, goes to `poll`."""
        outcome: Generation | FailedGeneration
        try:
            outcome = await self._whole(request)
        except EngineDied:
            return
        except Exception as error:  # noqa: BLE001 - whatever a library raises over one request fails that request
            if self._is_death(error):
                self._die(f"{self.library}'s engine process died")
                return
            cause = error.__cause__ or error
            outcome = FailedGeneration(
                request_id=request.request_id,
                error=GenerationError(f"request {request.request_id} failed: {type(cause).__name__}: {cause}"),
            )
        finally:
            self._tasks.pop(request.request_id, None)
            self._show()
        self._finished.append(outcome)
        self._arrived.set()

    async def _whole(self, request: GenerateRequest) -> Generation:
        """Return the outcome of a request, which goes on where a stop string ended reasoning.

        The library looks for stop strings everywhere.
        """
        found, sampling = await self._generate(request), request.sampling
        while request.reasoning is not None and found.stop_reason is StopReason.STOP:
            tokens = found.token_ids.tolist()
            if self._stops.found(tokens, sampling.stop, sampling.stop_ids, request.reasoning):
                break
            if len(tokens) >= sampling.max_tokens:
                return self._joined(request, replace(found, stop_reason=StopReason.LENGTH))
            more = replace(
                request,
                prompt_ids=np.concatenate([request.prompt_ids, found.token_ids], dtype=np.int32),
                sampling=replace(sampling, max_tokens=sampling.max_tokens - len(tokens)),
                seed=derived_seed(request.seed, len(tokens)),
            )
            found = self._joined(request, found, await self._generate(more))
        return found

    def _joined(self, request: GenerateRequest, first: Generation, *following: Generation) -> Generation:
        """Return a generation with what was sampled after it."""
        parts, last = (first, *following), (first, *following)[-1]
        lengths = [len(part.token_ids) for part in parts]
        starts = [sum(lengths[:place]) for place in range(len(parts))]
        tokens = np.concatenate([part.token_ids for part in parts], dtype=np.int32)
        sampling, tops = request.sampling, [part.top for part in parts if part.top is not None]
        guesses = [part.speculation for part in parts if part.speculation is not None]
        return replace(
            first,
            token_ids=tokens,
            logprobs=np.concatenate([part.logprobs for part in parts], dtype=np.float32),
            segments=tuple(
                segment.shifted(start) for start, part in zip(starts, parts, strict=True) for segment in part.segments
            ),
            text=self._stops.text(
                tokens.tolist(), sampling.stop, last.stop_reason, sampling.stop_ids, request.reasoning
            ),
            stop_reason=last.stop_reason,
            routes=last.routes,  # of its prompt too, which the parts before are
            top=TopLogprobs(
                token_ids=np.concatenate([top.token_ids for top in tops]),
                logprobs=np.concatenate([top.logprobs for top in tops]),
            )
            if tops
            else None,
            kept=joined_kept([(part.kept, length) for part, length in zip(parts, lengths, strict=True)]),
            speculation=sum(guesses[1:], guesses[0]) if guesses else None,
        )

    def _generation(
        self,
        request: GenerateRequest,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        spans: Iterable[tuple[int, int, str]],
        reason: str | None,
        *,
        cached: int,
        routes: IntArray | None,
        kept: Sequence[Sequence[int]] | None,
        why: object = None,
        top: TopLogprobs | None = None,
        speculation: Guesses | None = None,
    ) -> Generation:
        """Return a finished sample; `spans` are first token, end and policy version, `why` explains a reason."""
        if reason not in _STOP_REASONS or len(tokens) != len(logprobs):
            raise GenerationError(
                f"{self.library} ended the request with {why or reason!r}, after {len(tokens)} tokens and "
                f"{len(logprobs)} log-probabilities"
            )
        if not np.isfinite(logprobs).all():
            place = int(np.flatnonzero(~np.isfinite(logprobs))[0])
            raise GenerationError(
                f"{self.library} told a log-probability of {logprobs[place]} for token {place} of request "
                f"{request.request_id}; expected finite numbers, which importance ratios are computed from",
                fix="look for NaN in train/grad_norm and mismatch/kl of the steps before; model.dtype: float32 tells "
                "whether precision is the cause",
            )
        stop_reason = _STOP_REASONS[reason]
        return Generation(
            request_id=request.request_id,
            token_ids=np.asarray(tokens, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            segments=tuple(
                Segment(start=start, end=min(end, len(tokens)), policy_version=int(version))
                for start, end, version in spans
                if start < min(end, len(tokens))
            ),
            text=self._stops.text(
                tokens, request.sampling.stop, stop_reason, request.sampling.stop_ids, request.reasoning
            ),
            stop_reason=stop_reason,
            cached_prompt_tokens=cached,
            routes=told_routes(routes, request, len(tokens), stop_reason, self._experts),
            top=top,
            kept=told_kept(kept, request, tokens, self._spec),
            speculation=speculation,
        )

    async def prompt_logprobs(self, token_ids: IntArray) -> FloatArray:
        with self._errors("prompt_logprobs"):
            return await self._given_logprobs(token_ids)

    # ---- calls ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _errors(self, phase: str) -> Iterator[None]:
        """Be in a phase; give errors of the library a name of this package."""
        self._require_alive()
        try:
            with PROGRESS.phase(phase):
                yield
        except RollLikeError:
            raise
        except Exception as error:
            self._raise_death(error)
            # vLLM hands errors of its engine process over as text
            text = str(error) if type(error) in (Exception, RuntimeError) else f"{type(error).__name__}: {error}"
            if phase == "weight_update":
                raise WeightSyncError(f"the inference engine refused the weights: {text}") from error
            raise GenerationError(
                f"{self.library} cannot tell the log-probabilities of given tokens: {text}",
                fix="remove what excludes prompt_logprobs from inference.engine_args",
            ) from error

    async def _answered(self, call: Coroutine[Any, Any, R]) -> R:
        """Return what the library's processes answer. The library itself may wait for ever if they die meanwhile.

        Raises:
            EngineDied: They have died.
        """
        answer = asyncio.ensure_future(call)
        try:
            while not answer.done():
                await asyncio.wait({answer}, timeout=DEATH_SECONDS)
                if not answer.done():
                    self._require_alive()
        finally:
            if not answer.done():
                answer.cancel()
                await asyncio.wait({answer}, timeout=DEATH_SECONDS)
        try:
            return answer.result()
        except Exception as error:
            self._raise_death(error)
            raise

    def _die(self, what: str) -> None:
        """Note that the library's processes have ended."""
        if self._death is None:
            printed = self._output.cause() or self._output.tail(5) or "it printed nothing"
            self._death = EngineDied(
                f"{what}: {printed}", fix=f"look for an out-of-memory kill (dmesg); lower {self.memory_fix}"
            )
        self._arrived.set()

    def _raise_death(self, error: Exception) -> None:
        """Raise EngineDied where an error of the library says that its processes have ended."""
        if self._is_death(error):
            self._die(f"{self.library}'s engine process died")
        if self._death is not None:
            raise self._death from error

    def _require_alive(self) -> None:
        if self._death is None:
            if self._engine is None:
                raise GenerationError("the engine was not started")
            self._look()
        if self._death is not None:
            raise self._death

    def _freeze(self, frozen: bool) -> None:
        self._frozen = frozen
        self._show()

    def _show(self) -> None:
        """Show the watchdog whether tokens are due: requests of a frozen engine wait."""
        PROGRESS.hold("generate", bool(self._tasks) and not self._frozen)


def _plain_words(error: BaseException) -> str:
    """Return an error's kind and message; of a pydantic error, which wraps another one, only that one's message."""
    text = str(error)
    if "Value error, " in text:
        return text.split("Value error, ", 1)[1].split(" [type=", 1)[0].strip()
    return f"{type(error).__name__}: {text}"
