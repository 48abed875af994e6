"""What episodes cost the driver: thousands at a time, with an engine and environments that take no time.

    python benchmarks/env_manager.py           # 10,000 episodes of 10 turns, in groups of 8

The engine answers at once and environments live in this process, so that all time is the driver's: messages,
chat template, tokens, asyncio. Then once more with one environment in a hundred that takes `--slow-seconds`
for each turn: throughput should hardly change, because a slow episode delays its own group only.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Hashable, Iterable, Iterator

import numpy as np
import psutil
from common import Options, finish, quickstart, repetition_count, say

from roll_like.agents.env_manager import EnvManager, EpisodePlan, episode_task
from roll_like.agents.episode import EnvironmentSpec, EpisodeLimits, Started, Stepped
from roll_like.cluster.driver_loop import DriverLoop
from roll_like.data.chat import Renderer
from roll_like.inference.interface import GenerateRequest, Generation, Sampling
from roll_like.models.load import load_renderer
from roll_like.rollout.collection import collect_batch
from roll_like.types import Segment, StopReason, Task

SPEC = EnvironmentSpec(name="corridor", env_id="benchmark/Corridor-v0", kwargs={})


class InstantEngine:
    """Answers at once, the same words to everything."""

    def __init__(self, renderer: Renderer, words: str = "<action>right</action>") -> None:
        self._words = words
        self._ids = np.asarray([*renderer.encode(words), *renderer.end_ids], np.int32)

    async def generate(self, request: GenerateRequest, affinity_key: Hashable, urgent: bool = False) -> Generation:  # noqa: ARG002
        """Return the words."""
        await asyncio.sleep(0)
        return Generation(
            request_id=request.request_id,
            token_ids=self._ids,
            logprobs=np.full(len(self._ids), -0.1, np.float32),
            segments=(Segment(start=0, end=len(self._ids), policy_version=0),),
            text=self._words,
            stop_reason=StopReason.STOP,
        )

    @property
    def replicas(self) -> int:
        """One."""
        return 1

    def busy_seconds(self) -> float:
        """Nothing is measured here."""
        return 0.0

    def prioritize(self, keys: Iterable[Hashable]) -> None:
        """Nothing ever waits."""

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Nothing is kept."""


class Corridor:
    """Ten turns to the right; each takes `seconds`."""

    def __init__(self, turns: int, seconds: float) -> None:
        self._length = turns
        self._seconds = seconds
        self._turns = 0

    async def reset(self, seed: int) -> Started:
        """Begin at the left end."""
        messages = [
            {"role": "system", "content": "You walk through a corridor. Answer with an action in tags."},
            {"role": "user", "content": f"Door {seed}. You are at the left end."},
        ]
        return Started(messages=messages, tools=(), state="0")

    async def step(self, text: str) -> Stepped:  # noqa: ARG002
        """Go one step."""
        if self._seconds:
            await asyncio.sleep(self._seconds)
        self._turns += 1
        done = self._turns == self._length
        return Stepped(
            messages=[{"role": "user", "content": f"You are {self._turns} steps from the left end."}],
            reward=float(done),
            terminated=done,
            truncated=False,
            success=True if done else None,
            state=str(self._turns),
        )

    async def close(self) -> None:
        """Nothing to let go of."""


class Corridors:
    """Makes environments, one in a hundred of them slow."""

    def __init__(self, turns: int, slow_seconds: float) -> None:
        self._turns = turns
        self._slow_seconds = slow_seconds
        self._made = 0

    def open(self, spec: EnvironmentSpec) -> Corridor:  # noqa: ARG002
        """Return one."""
        self._made += 1
        return Corridor(self._turns, self._slow_seconds if self._made % 100 == 0 else 0.0)


def play(options: argparse.Namespace, renderer: Renderer, runner: DriverLoop, slow_seconds: float) -> tuple[float, int]:
    """Play until nine of ten groups are there; return the episodes a second, and the sampled tokens.

    A group of eight has a slow member with a chance of 8 %, so that nine of ten need none of them.
    """
    groups = options.episodes // options.group
    manager = EnvManager(InstantEngine(renderer), Corridors(options.turns, slow_seconds), [SPEC], renderer, retries=0)
    plan = EpisodePlan(
        episodes_per_group=options.group,
        sampling=Sampling(max_tokens=32),
        limits=EpisodeLimits(turns=options.turns, tokens=4096),
    )
    wanted = int(groups * 0.9)
    started = time.perf_counter()
    collected = runner.run(collect_batch(manager.runner(plan, 0), tasks(), groups=wanted, at_once=groups))
    seconds = time.perf_counter() - started
    assert len(collected.groups) == wanted
    return wanted * options.group / seconds, collected.tokens


def tasks() -> Iterator[Task]:
    """Yield seeds for ever."""
    return (episode_task(SPEC, seed) for seed in itertools.count())


def parser() -> Options:
    """Return the options."""
    arguments = Options(__doc__, episodes=160, turns=3, slow_seconds=0.1, repetitions=1)
    arguments.add_argument("--episodes", type=int, default=10_000)
    arguments.add_argument("--group", type=int, default=8, help="episodes of a group")
    arguments.add_argument("--turns", type=int, default=10)
    arguments.add_argument("--slow-seconds", type=float, default=5.0, help="a turn of one environment in a hundred")
    arguments.add_argument("--repetitions", type=repetition_count, default=3)
    return arguments


def main() -> None:
    """Play, and print one line of JSON."""
    options = parser().parse_args()
    renderer = load_renderer(quickstart(smoke=options.smoke).model)
    process = psutil.Process()
    before = process.memory_info().rss
    plain, slow, peaks = [], [], []
    with DriverLoop() as runner:
        for number in range(options.repetitions):
            rate, tokens = play(options, renderer, runner, 0.0)
            peaks.append(process.memory_info().rss - before)
            plain.append(rate)
            say(f"{number + 1}: {rate:.0f} episodes/s, {tokens:,} sampled tokens, {peaks[-1] / 2**20:.0f} MiB")
            rate, _ = play(options, renderer, runner, options.slow_seconds)
            slow.append(rate)
            say(f"{number + 1}: {rate:.0f} episodes/s with slow environments among them")
    finish(
        options,
        {
            "benchmark": "env_manager",
            "episodes": options.episodes,
            "turns": options.turns,
            "milliseconds_per_episode": 1000 / statistics.median(plain),
            "microseconds_per_turn": 1e6 / statistics.median(plain) / options.turns,
            "kib_per_episode": max(peaks) / options.episodes / 1024,
            "ratio_with_slow": statistics.median(slow) / statistics.median(plain),
        },
    )


if __name__ == "__main__":
    main()
