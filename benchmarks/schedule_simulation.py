"""What the asynchronous schedule gains on GPUs: the real scheduler and router in virtual time, with simulated engines.

    python benchmarks/schedule_simulation.py           # 8 to 128 GPUs, two workloads; about ten minutes on one core

`Router`, `GenerateScheduler`, `StalenessManager` and `GroupStream` are those of a run. Engines and trainer are
simulated (`simulated.py`); the event loop's time is virtual, so nothing waits. Both schedules have the same GPUs, one
engine per GPU, and the same tasks:

- sync: all GPUs generate, then all train. Changing over costs nothing here. The router limits what an engine holds, so
  this baseline already has queue scheduling.
- async: some GPUs train, the others generate. Of the splits in sixteenths of the GPUs the fastest is printed, found by
  trying those beside a balanced one. Steps before `--warm-up` ends do not count.

Constants: Qwen2.5-7B (7.6e9 parameters, 15.2 GB in bfloat16; 28 layers, 4 key-value heads of 128: 57 kB of cache a
token, from its `config.json`) on an H100 SXM (80 GB, 3.35 TB/s, 989 TFLOP/s in bfloat16, NVIDIA's data sheet). They are
derived from these, not measured:

- t0 = 7 ms: weights at 80 % of the bandwidth (5.7 ms), and sampling and scheduling.
- t1 of a request: 2 FLOP per parameter at 70 % of the peak (0.02 ms), and reading its cache at 80 % of the bandwidth,
  at the mean context of what runs: 2.3k tokens in *base* (0.05 ms), 9k in *think* (0.19 ms).
- slots: what the cache holds (0.95 million tokens), at most 256. So no request is preempted.
- prefill: 30k tokens/s, half of the peak.
- training: 8 FLOP per parameter and token (with recomputation) at 40 % of the peak: 6.5k tokens/s per GPU, however many
  GPUs there are.
- a weight push takes 3 s, in which engines stand still; afterwards they prefill the contexts of running requests.

It also measures the driver: processor time of a group's life, from its admission to its batch, with `--open` groups
under way at once. What its 64 simulated engines take is measured apart and subtracted.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import math
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from common import Options, finish, say
from simulated import EagerReplica, EngineRates, Lengths, SimulatedReplica
from virtual_loop import run_virtually

from roll_like.cluster.driver_loop import rare_garbage_collection
from roll_like.inference.interface import GenerateRequest, Sampling
from roll_like.rollout.collection import GroupStream, collect_batch
from roll_like.rollout.router import Replica, Router
from roll_like.rollout.scheduler import GenerateScheduler, GroupPlan
from roll_like.rollout.staleness import StalenessManager
from roll_like.types import Group, Scored, Task, Trajectory

PROMPT_TOKENS = 256
CAP = 32768
PREFILL_RATE = 30_000.0
TRAINING_RATE = 6500.0
PUSH_SECONDS = 3.0
STALL_SECONDS = 7200.0
#: max_staleness and ahead of the schedules that are compared.
SCHEDULES = ((1, 1.0), (2, 1.0), (4, 1.0), (4, 2.0))
PUBLISHED = """
Published, for comparison; models, GPUs, lengths and baselines are others than above:
- ROLL Flash (arXiv:2510.11345): up to 2.24x on RLVR and 2.72x on agentic tasks, against synchronous baselines with the
  same GPU budget.
- verl, fully async (verl.readthedocs.io/en/latest/advance/fully_async.html): Qwen2.5-Math-7B, up to 28k tokens, H20,
  against its colocated synchronous trainer, whose steps include a pass for old log-probabilities (14 to 19 %): 2.35x to
  2.67x on 128 GPUs (64 train, 64 generate), 1.83x to 2.09x on 64, 1.70x to 2.66x on 32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is sampled: mean response length in tokens, and how engines run it."""

    name: str
    mean_tokens: float
    rates: EngineRates


WORKLOADS = (
    Workload(
        name="base",
        mean_tokens=1800.0,
        rates=EngineRates(step_seconds=0.007, request_seconds=0.00007, slots=256, prefill_rate=PREFILL_RATE),
    ),
    Workload(
        name="think",
        mean_tokens=9900.0,
        rates=EngineRates(step_seconds=0.007, request_seconds=0.00021, slots=104, prefill_rate=PREFILL_RATE),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What both schedules do.

    Attributes:
        rates: Of an engine.
        lengths: Of responses.
        groups: Groups of a step.
        samples: Samples of a group.
        steps: Steps that count.
        warm_up: Steps before them.
    """

    rates: EngineRates
    lengths: Lengths
    groups: int
    samples: int
    steps: int
    warm_up: int

    def training_seconds(self, tasks: Sequence[Task], gpus: int) -> float:
        """Return how long GPUs train on all samples of these tasks."""
        tokens = sum(PROMPT_TOKENS + length for task in tasks for length in self.lengths.of(int(task.prompt_ids[0])))
        return tokens / (TRAINING_RATE * gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a schedule did, after the warm-up.

    Attributes:
        trainers: GPUs that train.
        engines: GPUs that generate.
        step_seconds: Mean time of a step.
        waiting: Share of the time in which the trainer waits for groups.
        busy: Share of the time in which an engine has something to do, mean of the engines.
        occupied: Share of all slots that run a request.
        mean_age: Versions between a sample's oldest token and the weights it trains, mean over trained samples.
        max_age: The same, the most of all steps.
    """

    trainers: int
    engines: int
    step_seconds: float
    waiting: float
    busy: float
    occupied: float
    mean_age: float
    max_age: int


class InstantScorer:
    """Gives every sample the same reward, at once."""

    async def score(self, group: Group[Trajectory]) -> Group[Scored]:
        """Return the group with rewards."""
        samples = tuple(Scored(trajectory=one, reward=0.0, rewards={}, details={}, weights={}) for one in group.samples)
        return Group(task=group.task, samples=samples, failures=group.failures)


@dataclass(slots=True)
class Meter:
    """Counts what steps take. Seconds are virtual."""

    replicas: Sequence[SimulatedReplica]
    began: float = 0.0
    waited: float = 0.0
    busy: float = 0.0
    slots: float = 0.0
    ages: list[int] = field(default_factory=list)
    max_age: int = 0

    def trained(self, groups: Sequence[Group[Scored]], version: int) -> None:
        """Note the ages of samples that are trained from a version."""
        ages = [version - one.trajectory.policy_version for group in groups for one in group.samples]
        self.ages += ages
        self.max_age = max(self.max_age, *ages)

    def begin(self) -> None:
        """Forget all but the greatest age: the warm-up has ended."""
        for replica in self.replicas:
            replica.advance()
        self.began, self.waited, self.ages = now(), 0.0, []
        self.busy = sum(replica.busy_seconds for replica in self.replicas)
        self.slots = sum(replica.slot_seconds for replica in self.replicas)

    def outcome(self, work: Work, *, trainers: int) -> Outcome:
        """Return what was measured since `begin`."""
        seconds, engines = now() - self.began, len(self.replicas)
        for replica in self.replicas:
            replica.advance()
        busy = sum(replica.busy_seconds for replica in self.replicas) - self.busy
        slots = sum(replica.slot_seconds for replica in self.replicas) - self.slots
        return Outcome(
            trainers=trainers,
            engines=engines,
            step_seconds=seconds / work.steps,
            waiting=self.waited / seconds,
            busy=busy / seconds / engines,
            occupied=slots / seconds / engines / work.rates.slots,
            mean_age=float(np.mean(self.ages)),
            max_age=self.max_age,
        )


def now() -> float:
    """Return the virtual time in seconds."""
    return asyncio.get_running_loop().time()


def tasks() -> Iterator[Task]:
    """Yield tasks without end; all tokens of a prompt are its task's number."""
    for number in itertools.count():
        yield Task(
            task_id=f"simulated/{number}",
            source="simulated",
            domain="simulated",
            messages=(),
            prompt_ids=np.full(PROMPT_TOKENS, number, np.int32),
            answer=None,
            metadata={},
            origin=f"simulated:{number}",
        )


def replicas_of(work: Work, engines: int) -> list[SimulatedReplica]:
    """Return simulated engines."""
    return [SimulatedReplica(work.rates, work.lengths.of_request) for _ in range(engines)]


def scheduler_of(work: Work, replicas: Sequence[Replica]) -> tuple[GenerateScheduler, GroupPlan]:
    """Return what samples groups from engines, and how."""
    router = Router(replicas, max_running=work.rates.slots, max_in_flight=2**31, retries=0)
    scheduler = GenerateScheduler(router, InstantScorer())
    return scheduler, GroupPlan(samples_per_group=work.samples, sampling=Sampling(max_tokens=CAP))


async def push(replicas: Sequence[SimulatedReplica], version: int) -> None:
    """Send new weights to all engines at once."""
    for replica in replicas:
        replica.pause()
    await asyncio.sleep(PUSH_SECONDS if version > 1 else 0.0)
    for replica in replicas:
        replica.resume(version)


async def synchronous(work: Work, gpus: int) -> Outcome:
    """Generate and train in turns on all GPUs."""
    replicas = replicas_of(work, gpus)
    scheduler, plan = scheduler_of(work, replicas)
    meter, source = Meter(replicas), tasks()
    await push(replicas, 1)
    for step in range(work.warm_up + work.steps):
        if step == work.warm_up:
            meter.begin()
        began = now()
        collected = await collect_batch(scheduler.runner(plan, 0), source, groups=work.groups)
        meter.waited += now() - began
        meter.trained(collected.groups, step + 1)
        await asyncio.sleep(work.training_seconds([group.task for group in collected.groups], gpus))
        await push(replicas, step + 2)
    return meter.outcome(work, trainers=gpus)


async def asynchronous(work: Work, gpus: int, trainers: int, max_staleness: int, ahead: float) -> Outcome:
    """Train on some GPUs while the others generate, as `AsyncRollouts` does between a pipeline and a stream."""
    replicas = replicas_of(work, gpus - trainers)
    scheduler, plan = scheduler_of(work, replicas)
    steps = work.warm_up + work.steps
    stream = GroupStream(
        scheduler.runner(plan, 0),
        tasks(),
        # a few batches more than are trained, so that the end does not thin what runs
        StalenessManager(
            groups=work.groups, max_staleness=max_staleness, ahead=ahead, batches=steps + max_staleness, max_filtered=0
        ),
        accept=lambda group: True,
        clock=now,
        stall_seconds=STALL_SECONDS,
    )
    meter = Meter(replicas)
    await push(replicas, 1)
    stream.published(1)
    for step in range(steps):
        if step == work.warm_up:
            meter.begin()
        began = now()
        batch = await stream.batch()
        meter.waited += now() - began
        meter.trained([entry.group for entry in batch if entry.group is not None], step + 1)
        assert meter.max_age <= max_staleness, f"a sample of age {meter.max_age}, above {max_staleness}"
        await asyncio.sleep(work.training_seconds([entry.task for entry in batch], trainers))
        await push(replicas, step + 2)
        stream.published(step + 2)
    outcome = meter.outcome(work, trainers=trainers)
    await stream.close()
    return outcome


def simulated(run: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run in virtual time, without the garbage collector: it would take a quarter of the time."""
    gc.disable()
    try:
        return run_virtually(run)
    finally:
        gc.enable()
        gc.collect()


def fastest_split(work: Work, gpus: int, max_staleness: int, ahead: float, first: int) -> Outcome:
    """Return the outcome of the best number of training GPUs, in steps of a sixteenth of all.

    Goes out from `first`, to fewer and then to more, as long as steps become faster.
    """
    unit = max(1, gpus // 16)

    def outcome(trainers: int) -> Outcome:
        found = simulated(asynchronous(work, gpus, trainers, max_staleness, ahead))
        say(f"{max_staleness}, {ahead:g}, {trainers} : {gpus - trainers}: {found.step_seconds:.1f} s a step")
        return found

    best = outcome(first)
    for direction in (-unit, unit):
        if best.trainers != first:
            break  # fewer were faster, so more are not
        while unit <= best.trainers + direction <= gpus - unit:
            other = outcome(best.trainers + direction)
            if other.step_seconds >= best.step_seconds:
                break
            best = other
    return best


def balanced_split(work: Work, gpus: int, mean_tokens: float) -> int:
    """Return the training GPUs with which training takes as long as sampling; where a search begins."""
    unit = max(1, gpus // 16)
    responses = work.groups * work.samples

    def seconds(trainers: int) -> float:
        engines = gpus - trainers
        running = min(work.rates.slots, responses / engines)
        sampling = responses * mean_tokens * work.rates.step(math.ceil(running)) / running / engines
        return max(sampling, responses * (PROMPT_TOKENS + mean_tokens) / (TRAINING_RATE * trainers))

    return min(range(unit, gpus, unit), key=seconds)


def row(gpus: int, name: str, outcome: Outcome, speedup: float) -> str:
    """Return a line of the table."""
    split = "all" if name == "sync" else f"{outcome.trainers} : {outcome.engines}"
    slower = " (slower)" if speedup < 1 else ""
    return (
        f"| {gpus} | {name} | {split} | {3600 / outcome.step_seconds:.1f} | {speedup:.2f}{slower} "
        f"| {outcome.waiting:.0%} | {outcome.busy:.0%} | {outcome.occupied:.0%} "
        f"| {outcome.mean_age:.2f} | {outcome.max_age} |"
    )


def compare(work: Work, workload: Workload, counts: Sequence[int]) -> dict[str, float]:
    """Print the table of a workload and return its speed-ups."""
    rows, speedups = [], {}
    for gpus in counts:
        sync = simulated(synchronous(work, gpus))
        say(f"{workload.name}, {gpus} GPUs, sync: {sync.step_seconds:.1f} s a step")
        rows.append(row(gpus, "sync", sync, 1.0))
        split = balanced_split(work, gpus, workload.mean_tokens)
        for max_staleness, ahead in SCHEDULES:
            outcome = fastest_split(work, gpus, max_staleness, ahead, split)
            split = outcome.trainers
            speedup = sync.step_seconds / outcome.step_seconds
            rows.append(row(gpus, f"{max_staleness}, {ahead:g}", outcome, speedup))
            speedups[f"{workload.name}_{gpus}_{max_staleness}_{ahead:g}"] = speedup
    print(
        f"\n{workload.name}: {work.groups} x {work.samples} responses a step, {workload.mean_tokens:g} tokens on "
        "average\n\n| GPUs | schedule | train : generate | steps/h | speed-up | trainer waits | engines busy "
        "| slots used | mean age | max age |\n|---|---|---|---|---|---|---|---|---|---|",
        *rows, sep="\n", flush=True,
    )  # fmt: skip
    return speedups


async def drive(work: Work, engines: int) -> None:
    """Take two batches that are all under way at once."""
    scheduler, plan = scheduler_of(work, [EagerReplica(0.1) for _ in range(engines)])
    stream = GroupStream(
        scheduler.runner(plan, 0),
        tasks(),
        StalenessManager(groups=work.groups, max_staleness=1, ahead=1.0, batches=2, max_filtered=0),
        accept=lambda group: True,
        clock=now,
        stall_seconds=STALL_SECONDS,
    )
    for version in (1, 2):
        stream.published(version)
        assert stream.running + stream.ready == work.groups * (3 - version)
        assert len(await stream.batch()) == work.groups
    await stream.close()


async def poll_alone(requests: int, engines: int) -> None:
    """Let the engines of `drive` answer without a driver."""
    request = GenerateRequest(
        request_id="", prompt_ids=next(tasks()).prompt_ids, sampling=Sampling(max_tokens=CAP), seed=None
    )

    async def answer(replica: EagerReplica, count: int) -> None:
        await replica.submit([request] * count)
        for _ in range(count):
            await replica.poll(0.0)

    await asyncio.gather(*(answer(EagerReplica(0.1), requests // engines) for _ in range(engines)))


def driver_seconds(work: Work, engines: int, groups: int) -> float:
    """Return the processor seconds of a group's whole life on the driver, with so many under way.

    Without what the simulated engines take, which is measured apart.
    """

    def seconds(run: Coroutine[Any, Any, None]) -> float:
        gc.collect()
        began = time.process_time()
        run_virtually(run)
        return time.process_time() - began

    with rare_garbage_collection():  # as in a run
        with_engines = seconds(drive(replace(work, groups=groups // 2), engines))
        return (with_engines - seconds(poll_alone(groups * work.samples, engines))) / groups


def parser() -> Options:
    """Return the options."""
    names = [workload.name for workload in WORKLOADS]
    arguments = Options(__doc__, gpus=[8], groups=4, samples=2, steps=2, warm_up=1, open=40)
    arguments.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 32, 64, 128], help="GPUs that are compared")
    arguments.add_argument("--workloads", nargs="+", default=names, choices=names, help="what is sampled")
    arguments.add_argument("--groups", type=int, default=256, help="groups of a step")
    arguments.add_argument("--samples", type=int, default=16, help="samples of a group")
    arguments.add_argument("--steps", type=int, default=5, help="steps that count")
    arguments.add_argument("--warm-up", type=int, default=3, help="steps before them")
    arguments.add_argument("--open", type=int, default=10_000, help="groups under way where the driver is measured")
    return arguments


def work_of(options: argparse.Namespace, workload: Workload) -> Work:
    """Return what the options mean for a workload."""
    lengths = Lengths(workload.mean_tokens, options.samples, cap=CAP, seed=0)
    sizes = {name: getattr(options, name) for name in ("groups", "samples", "steps", "warm_up")}
    return Work(rates=workload.rates, lengths=lengths, **sizes)


def main() -> None:
    """Simulate, and print one line of JSON."""
    options = parser().parse_args()
    began = time.process_time()
    figures: dict[str, float] = {}
    for workload in WORKLOADS:
        if workload.name not in options.workloads:
            continue
        figures |= compare(work_of(options, workload), workload, options.gpus)
    print(PUBLISHED, flush=True)
    cost = partial(driver_seconds, work_of(options, WORKLOADS[0]), 64)
    few, many = cost(options.open // 10), cost(options.open)
    say(f"driver: {1000 * many:.2f} ms per group with {options.open:,} under way, {1000 * few:.2f} ms with a tenth")
    finish(
        options,
        {
            "benchmark": "schedule_simulation",
            **figures,
            "milliseconds_per_group": 1000 * many,
            "milliseconds_per_group_of_a_tenth": 1000 * few,
            "seconds": time.process_time() - began,
        },
    )


if __name__ == "__main__":
    main()
