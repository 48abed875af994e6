"""What episodes of verifiers cost the driver: sixty-four at once, with an engine that takes no time.

    python benchmarks/verifiers_cost.py           # 256 episodes of 10 turns, 64 at a time

verifiers plays them in its own process, in a harness that starts no program; the driver answers its requests, records
tokens and builds samples. Measured is processor time of either process: the driver's is to be under 5 ms a turn. Needs
`make verifiers`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from common import ROOT, Options, finish, quickstart, repetition_count, say
from env_manager import InstantEngine

from roll_like.agents.env_manager import EnvManager, EpisodePlan, episode_task
from roll_like.agents.episode import EpisodeLimits, VerifiersSpec
from roll_like.agents.proxy import Proxy
from roll_like.agents.verifiers_episodes import VerifiersEnvironments
from roll_like.cluster.driver_loop import DriverLoop
from roll_like.data.chat import Renderer
from roll_like.inference.interface import Sampling
from roll_like.models.load import load_renderer
from roll_like.rollout.collection import collect_batch
from roll_like.types import Task

PYTHON = ROOT / ".verifiers" / "bin" / "python"
TASKS = ROOT / "tests" / "verifiers_tasks"
#: About as long as the result of a tool: 100 tokens.
REPLY = "The list has 12 entries. " * 14


@dataclass
class Played:
    """Episodes that were played.

    Attributes:
        driver: Processor time of this process, seconds.
        server: That of verifiers' process, seconds.
        wall: Seconds.
        turns: Answers of the policy.
        tokens: Tokens of all sequences.
    """

    driver: float
    server: float
    wall: float
    turns: int
    tokens: int


def spec_of(options: argparse.Namespace) -> VerifiersSpec:
    """Return the environment."""
    harness = {"id": "rambles", "turns": options.turns, "replies": REPLY}
    return VerifiersSpec(
        name="sums",
        python=str(PYTHON),
        config={"taskset": {"id": "sums", "num_tasks": 100_000}},
        seats={"runtime": {"type": "subprocess"}, "harness": harness},
        select={},
        held_out=0,
        env={"PYTHONPATH": str(TASKS)},
        timeout_seconds=600,
        max_episodes=options.at_once,
    )


class Rig:
    """A running server and what plays with it."""

    def __init__(self, options: argparse.Namespace, renderer: Renderer, runner: DriverLoop) -> None:
        self.options = options
        self.runner = runner
        self.spec = spec_of(options)
        engine: Any = InstantEngine(renderer, "Let me think about that, and add one to the other. " * 5)
        self.proxy = Proxy(engine, renderer)
        limits = EpisodeLimits(turns=options.turns, tokens=32_000)
        self.environments = VerifiersEnvironments(self.proxy, limits)
        self.manager = EnvManager(engine, None, [self.spec], renderer, retries=0, verifiers=self.environments)  # type: ignore[arg-type]
        self.plan = EpisodePlan(episodes_per_group=options.group, sampling=Sampling(max_tokens=256), limits=limits)
        runner.run(self.proxy.start())
        runner.run(self.environments.start([self.spec]))
        (self.server,) = (
            one for one in psutil.Process().children() if any("verifiers_server" in part for part in one.cmdline())
        )

    def play(self) -> Played:
        """Play."""
        groups = self.options.episodes // self.options.group
        at_once = self.options.at_once // self.options.group
        before, server, began = time.process_time(), _seconds(self.server), time.perf_counter()
        collected = self.runner.run(
            collect_batch(self.manager.runner(self.plan, 0), self._tasks(), groups=groups, at_once=at_once)
        )
        driver, wall = time.process_time() - before, time.perf_counter() - began
        samples = [sample for group in collected.groups for sample in group.samples]
        assert len(samples) == groups * self.options.group
        assert not collected.failures
        return Played(
            driver=driver,
            server=_seconds(self.server) - server,
            wall=wall,
            turns=sum(len(sample.record) for sample in samples),
            tokens=sum(len(sample.trajectory.token_ids) for sample in samples),
        )

    def _tasks(self) -> Iterator[Task]:
        return (episode_task(self.spec, seed) for seed in itertools.count())

    def close(self) -> None:
        """End the server."""
        self.runner.run(self.environments.close())
        self.runner.run(self.proxy.close())


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def parser() -> Options:
    """Return the options."""
    arguments = Options(__doc__, episodes=8, at_once=8, group=4, turns=2, repetitions=1)
    arguments.add_argument("--episodes", type=int, default=256)
    arguments.add_argument("--at-once", type=int, default=64, help="episodes at a time")
    arguments.add_argument("--group", type=int, default=8, help="episodes of a group")
    arguments.add_argument("--turns", type=int, default=10)
    arguments.add_argument("--repetitions", type=repetition_count, default=3)
    return arguments


def main() -> None:
    """Play, and print one line of JSON."""
    options = parser().parse_args()
    if not Path(PYTHON).exists():
        sys.exit("verifiers is missing: run `make verifiers`")
    renderer = load_renderer(quickstart(smoke=options.smoke).model)
    played = []
    with DriverLoop() as runner:
        rig = Rig(options, renderer, runner)
        rig.play()  # imports and caches of both sides
        for number in range(options.repetitions):
            one = rig.play()
            played.append(one)
            say(
                f"{number + 1}: {1000 * one.driver / one.turns:.2f} ms of the driver a turn, "
                f"{1000 * one.server / one.turns:.2f} ms of the server, {one.turns / one.wall:.0f} turns/s, "
                f"{one.tokens / options.episodes:.0f} tokens an episode"
            )
        rig.close()
    finish(
        options,
        {
            "benchmark": "verifiers_cost",
            "episodes": options.episodes,
            "at_once": options.at_once,
            "turns": options.turns,
            "driver_milliseconds_per_turn": 1000 * statistics.median(one.driver / one.turns for one in played),
            "server_milliseconds_per_turn": 1000 * statistics.median(one.server / one.turns for one in played),
            "turns_per_second": statistics.median(one.turns / one.wall for one in played),
        },
    )


if __name__ == "__main__":
    main()
