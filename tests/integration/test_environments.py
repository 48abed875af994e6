"""Environments on real Ray: episodes of many groups, one that kills its process, one that hangs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import renderer
from fake_policy import Unqueued

from roll_like.agents.env_manager import EnvManager, EpisodePlan, episode_task
from roll_like.agents.env_worker import EnvPool, EnvWorker
from roll_like.agents.episode import EnvironmentSpec, EpisodeLimits
from roll_like.cluster import Cluster, ResourceManager
from roll_like.inference.interface import GenerateRequest, Generation, Sampling
from roll_like.rollout.collection import collect_batch
from roll_like.types import Segment, StopReason

pytestmark = pytest.mark.integration

MODULE = """
import os, time
from pathlib import Path
import gymnasium
from roll_like.envs import FreeText

class Counting(gymnasium.Env):
    metadata = {"render_modes": []}

    def __init__(self, folder):
        self.observation_space, self.action_space = FreeText(), FreeText()
        self.folder = Path(folder)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.turns = seed, 0
        return f"count from {seed}", {}

    def step(self, action):
        self.turns += 1
        mark = self.folder / f"{self.seed}"
        if self.seed == 3 and self.turns == 2 and not mark.exists():
            mark.touch()
            os._exit(9)
        if self.seed == 5 and self.turns == 2 and not mark.exists():
            # only after the death, and only one: else that takes a hung one with it
            while not (self.folder / "3").exists():
                time.sleep(0.05)
            time.sleep(0.5)
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                time.sleep(600)
        done = self.turns == 3
        return f"{self.seed + self.turns}", float(done), done, False, {"success": True} if done else {}

gymnasium.register("test/Counting-v0", entry_point=Counting, disable_env_checker=True, order_enforce=False)
"""
RENDERER = renderer("chatml")


class Speaker(Unqueued):
    """Says the same in every turn."""

    async def generate(self, request: GenerateRequest, affinity_key: Any, urgent: bool = False) -> Generation:
        await asyncio.sleep(0.01)
        ids = np.asarray([*RENDERER.encode("on"), *RENDERER.end_ids], np.int32)
        return Generation(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            segments=(Segment(start=0, end=len(ids), policy_version=0),),
            text="on",
            stop_reason=StopReason.STOP,
        )


@pytest.fixture
def cluster(
    resources: ResourceManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster[EnvWorker]]:
    (tmp_path / "counting_envs.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    started = Cluster(
        "environments", EnvWorker, resources.beside(2), arguments=lambda rank: (("counting_envs",),), concurrency=64
    )
    assert started.everywhere(EnvWorker.hosted) == [0, 0]
    yield started
    started.close()


def test_processes_that_die_and_hang_cost_no_episode(cluster: Cluster[EnvWorker], tmp_path: Path) -> None:
    spec = EnvironmentSpec(name="counting", env_id="test/Counting-v0", kwargs={"folder": str(tmp_path)})
    pool = EnvPool(cluster, deadline_seconds=3)
    manager = EnvManager(Speaker(), pool, [spec], RENDERER, retries=2)
    plan = EpisodePlan(
        episodes_per_group=4,
        sampling=Sampling(max_tokens=8),
        limits=EpisodeLimits(turns=5, tokens=500),
    )
    tasks = (episode_task(spec, seed) for seed in itertools.count())
    collecting = collect_batch(manager.runner(plan, 0), tasks, groups=8)
    collected = asyncio.run(asyncio.wait_for(collecting, timeout=90))
    assert collected.failures == ()
    assert [len(group.samples) for group in collected.groups] == [4] * 8
    assert all(sample.turn_rewards == (0.0, 0.0, 1.0) for group in collected.groups for sample in group.samples)
    assert sum(pool.worker_restarts.generations) >= 2  # one for the death, one for the hang
    assert asyncio.run(_hosted(cluster)) == 0


async def _hosted(cluster: Cluster[EnvWorker]) -> int:
    return sum(await asyncio.gather(*(cluster.ask(rank, EnvWorker.hosted) for rank in range(len(cluster)))))
