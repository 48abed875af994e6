"""Simulated inference engines and response lengths, for `schedule_simulation.py`: no model, only how long things take.

An engine runs up to `slots` requests, and all of them get one token per decoding step of t0 + t1 · running seconds.
Between two events (a request starts, ends or is aborted, weights are pushed) every running request advances at the same
rate. So the simulation jumps from event to event; 32k tokens cost as much as one.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from roll_like.inference.interface import GenerateRequest, Generation
from roll_like.types import Segment, StopReason

#: Tokens by which a request may be short of its length and count as finished: rounding.
ROUNDING = 1e-6
NO_LOGPROBS = np.zeros(1, np.float32)
ONE_TOKEN = np.zeros(1, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """How fast an engine is.

    Attributes:
        step_seconds: Seconds of a decoding step whatever runs, t0: reading the weights.
        request_seconds: Further seconds of the step for each running request, t1: its computation and its cache.
        slots: Requests that run at a time.
        prefill_rate: Tokens of context a second that are computed before a request decodes.
    """

    step_seconds: float
    request_seconds: float
    slots: int
    prefill_rate: float

    def step(self, running: int) -> float:
        """Return the seconds of a decoding step.

        >>> EngineRates(step_seconds=0.007, request_seconds=0.0001, slots=64, prefill_rate=1.0).step(30)
        0.01
        """
        return self.step_seconds + self.request_seconds * running


@dataclass(slots=True, eq=False)
class _Running:
    """A request that decodes: its place in the heap, the engine's ticks at its start, and the version of then."""

    request: GenerateRequest
    serial: int
    start: float
    version: int


class SimulatedReplica:
    """An inference engine in virtual time, with the methods that the router calls.

    A prompt is computed by the first request that has it; the others find it in the prefix cache. The engine decodes
    nothing while it prefills. A weight push (`pause`, `resume`) keeps running requests; their whole contexts are
    computed again with the new weights, and the prefix cache is empty.

    A generation has a single token, whatever its length: the arrays would only cost time. Its segment has the version
    of the first token, the oldest.

    Args:
        rates: How fast it is.
        length_of: Tokens of the response to a request.
    """

    def __init__(self, rates: EngineRates, length_of: Callable[[GenerateRequest], int]) -> None:
        self._rates = rates
        self._length_of = length_of
        self._loop = asyncio.get_running_loop()
        self._waiting: OrderedDict[str, GenerateRequest] = OrderedDict()
        self._running: dict[str, _Running] = {}
        self._ends: list[tuple[float, int, str]] = []  # ticks, serial and id of requests, some of them aborted
        self._serial = itertools.count()
        self._cached: set[int] = set()
        self._finished: list[Generation] = []
        self._any = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._ticks = 0.0  # tokens that a request has which runs from the start
        self._prefill = 0.0  # seconds until decoding goes on
        self._since = self._loop.time()
        self._paused = False
        self._version = 0
        self.busy_seconds = 0.0
        self.slot_seconds = 0.0

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Run requests where there are slots; the others wait."""
        for request in requests:
            self._waiting[request.request_id] = request
        self.advance()
        self._fill()

    async def poll(self, timeout: float) -> list[Generation]:  # noqa: ARG002
        """Return what has finished; wait for the first without limit, so that a deadlock shows."""
        if not self._finished:
            self._any.clear()
            await self._any.wait()
        finished, self._finished = self._finished, []
        return finished

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; they come out of `poll`."""
        self.advance()
        for request_id in request_ids:
            if (running := self._running.pop(request_id, None)) is not None:
                self._finish(running.request, running.version, StopReason.ABORTED)
            elif (waiting := self._waiting.pop(request_id, None)) is not None:
                self._finish(waiting, self._version, StopReason.ABORTED)
        self._fill()

    def pause(self) -> None:
        """Freeze generation; running requests keep their tokens."""
        self.advance()
        self._paused = True
        self._set_timer()

    def resume(self, version: int) -> None:
        """Go on with new weights: prefill what runs, prompts and tokens so far."""
        self.advance()
        self._paused = False
        self._version = version
        self._cached = {_prompt(running.request) for running in self._running.values()}
        self._prefill = self.context() / self._rates.prefill_rate
        self._fill()

    def context(self) -> float:
        """Return the tokens of all running requests, prompts included."""
        return sum(len(one.request.prompt_ids) + self._ticks - one.start for one in self._running.values())

    def advance(self) -> None:
        """Bring counters to the present time."""
        elapsed, self._since = self._loop.time() - self._since, self._loop.time()
        if self._paused or not self._running:
            return
        self.busy_seconds += elapsed
        self.slot_seconds += elapsed * len(self._running)
        prefilled = min(elapsed, self._prefill)
        self._prefill -= prefilled
        self._ticks += (elapsed - prefilled) / self._rates.step(len(self._running))

    def _fill(self) -> None:
        """Start what waits, as far as there are slots, and wait for the next end."""
        if not self._running:
            self._prefill = 0.0
        while self._waiting and len(self._running) < self._rates.slots and not self._paused:
            request_id, request = self._waiting.popitem(last=False)
            running = _Running(request, next(self._serial), self._ticks, self._version)
            self._running[request_id] = running
            heapq.heappush(self._ends, (self._ticks + self._length_of(request), running.serial, request_id))
            if _prompt(request) not in self._cached:
                self._cached.add(_prompt(request))
                self._prefill += len(request.prompt_ids) / self._rates.prefill_rate
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and not self._is_running(*self._ends[0][1:]):
            heapq.heappop(self._ends)
        if self._ends and not self._paused:
            decoding = (self._ends[0][0] - self._ticks) * self._rates.step(len(self._running))
            self._timer = self._loop.call_later(max(0.0, self._prefill + decoding), self._end)

    def _end(self) -> None:
        """Finish what has all its tokens."""
        self.advance()
        while self._ends and self._ends[0][0] <= self._ticks + ROUNDING:
            _, serial, request_id = heapq.heappop(self._ends)
            if self._is_running(serial, request_id):
                running = self._running.pop(request_id)
                self._finish(running.request, running.version, StopReason.STOP)
        self._fill()

    def _is_running(self, serial: int, request_id: str) -> bool:
        running = self._running.get(request_id)
        return running is not None and running.serial == serial

    def _finish(self, request: GenerateRequest, version: int, reason: StopReason) -> None:
        self._finished.append(_generation(request, version, reason))
        self._any.set()


class EagerReplica:
    """An engine that costs nothing to simulate: it answers one request every `seconds`, first come, first served.

    So every answer comes alone, which is the most work for what calls it.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: deque[GenerateRequest] = deque()

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Take requests."""
        self._waiting.extend(requests)

    async def poll(self, timeout: float) -> list[Generation]:  # noqa: ARG002
        """Return the answer to the oldest request."""
        await asyncio.sleep(self._seconds)
        return [_generation(self._waiting.popleft(), 1, StopReason.STOP)]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Nothing is aborted here."""


def _generation(request: GenerateRequest, version: int, reason: StopReason) -> Generation:
    return Generation(
        request_id=request.request_id,
        token_ids=ONE_TOKEN,
        logprobs=NO_LOGPROBS,
        segments=(Segment(start=0, end=1, policy_version=version),),
        text="",
        stop_reason=reason,
    )


def _prompt(request: GenerateRequest) -> int:
    """Return the number of a request's task: the first token of its prompt."""
    return int(request.prompt_ids[0])


class Lengths:
    """Response lengths: lognormal with an effect of the prompt and one of the sample, cut at `cap`.

    The longest of 4,096 is about 20 times the median with the default spreads (σ = 0.9 in all), as ROLL Flash reports
    of reasoning data (arXiv:2510.11345, section 1). A task has the same lengths in every schedule.

    Args:
        mean: Mean of the lengths after the cut. Tokens.
        samples: Responses to a prompt.
        cap: Longest response. Tokens.
        seed: Seed of all lengths.
        prompt_spread: Standard deviation of the prompt's effect on the log of the length.
        sample_spread: The same of the sample.
    """

    def __init__(
        self,
        mean: float,
        samples: int,
        *,
        cap: int,
        seed: int,
        prompt_spread: float = 0.6,
        sample_spread: float = 0.67,
    ) -> None:
        self._samples = samples
        self._cap = cap
        self._seed = seed
        self._spreads = prompt_spread, sample_spread
        self._median = median_of(mean, math.hypot(prompt_spread, sample_spread), cap)
        self._drawn: dict[int, list[int]] = {}

    def of(self, number: int) -> list[int]:
        """Return the lengths of the responses to a task."""
        if number not in self._drawn:
            random = np.random.default_rng([self._seed, number])
            prompt, sample = self._spreads
            logs = prompt * random.standard_normal() + sample * random.standard_normal(self._samples)
            lengths = np.clip(self._median * np.exp(logs), 1, self._cap)
            self._drawn[number] = [int(length) for length in lengths]
        return self._drawn[number]

    def of_request(self, request: GenerateRequest) -> int:
        """Return the length of the response to a request: its id ends with the sample's index."""
        return self.of(_prompt(request))[int(request.request_id.rpartition("-")[2])]


def median_of(mean: float, spread: float, cap: float) -> float:
    """Return the median of a lognormal that has this mean after it is cut at `cap`.

    Without a cut the mean is median · exp(spread² / 2).

    >>> round(median_of(math.exp(0.5), 1.0, 1e9), 6)
    1.0
    """
    low, high = 0.0, mean
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean_of(middle, spread, cap) < mean else (low, middle)
    return (low + high) / 2


def _mean_of(median: float, spread: float, cap: float) -> float:
    """Return E[min(X, cap)] of a lognormal X."""
    cut = math.log(cap / median) / spread
    return median * math.exp(spread**2 / 2) * _normal(cut - spread) + cap * (1 - _normal(cut))


def _normal(value: float) -> float:
    """Return the distribution function of the standard normal."""
    return (1 + math.erf(value / math.sqrt(2))) / 2
