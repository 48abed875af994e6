"""Reward workers on real Ray: one is killed, one hangs, one loses its interpreter; all other groups are judged."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hygiene import ended
from tests_support import scored, task

from roll_like.cluster import Cluster, ResourceManager
from roll_like.config.load import import_plugins
from roll_like.config.rewards import RewardsConfig
from roll_like.registry import REWARDS
from roll_like.rewards.worker import RewardWorker
from roll_like.rollout.reward_pools import RewardPool
from roll_like.types import Group, Scored, Trajectory

pytestmark = pytest.mark.integration

MODULE = """
import ctypes, os, time
from pathlib import Path
from roll_like import Completion, register_reward

@register_reward("trying")
def trying(completion: Completion) -> float:
    text, folder = completion.text, Path(completion.metadata["folder"])
    with (folder / "calls").open("a") as calls:
        calls.write(f"{text} {os.getpid()}\\n")
    if text == "slow":
        time.sleep(1.0)
    if text == "dies":
        os._exit(9)
    if text == "dies once" and not (folder / "died").exists():
        (folder / "died").touch()
        os._exit(9)
    if text == "raises once" and not (folder / "raised").exists():
        (folder / "raised").touch()
        raise ConnectionError("the judge is away")
    if text == "holds the interpreter":
        ctypes.PyDLL(None).sleep(60)  # as a regular expression without end does, which would take a core
    if text == "hangs":
        time.sleep(60)
    return float(text == completion.answer)
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("module")
    (folder / "trying_rewards.py").write_text(MODULE)
    REWARDS.names()
    before = dict(REWARDS._plugins)
    sys.path.append(str(folder))
    import_plugins(["trying_rewards"])
    yield "trying_rewards"
    sys.path.remove(str(folder))
    sys.modules.pop("trying_rewards")
    REWARDS._plugins.clear()
    REWARDS._plugins.update(before)


@pytest.fixture
def cluster(resources: ResourceManager, module: str) -> Iterator[Cluster[RewardWorker]]:
    config = RewardsConfig.model_validate({"use": ["trying"], "timeout_seconds": 3, "retries": 1})
    started = Cluster(
        "rewards",
        RewardWorker,
        resources.beside(2),
        arguments=lambda rank: (config, (module,)),
        concurrency=8,
    )
    started.everywhere(RewardWorker.healthy)
    yield started
    started.close(RewardWorker.close)


def make_group(folder: Path, *texts: str) -> Group[Trajectory]:
    owner = replace(task(), task_id=texts[0], answer="yes", metadata={"folder": str(folder)}, origin="d.jsonl:1")
    samples = tuple(replace(scored(owner, 0.0, sample=index).trajectory, text=text) for index, text in enumerate(texts))
    return Group(task=owner, samples=samples, failures=())


def calls(folder: Path) -> list[tuple[str, int]]:
    lines = (folder / "calls").read_text().splitlines()
    return [(line.rpartition(" ")[0], int(line.rpartition(" ")[2])) for line in lines]


def values(group: Group[Scored]) -> list[float]:
    return [sample.reward for sample in group.samples]


async def test_a_worker_that_is_killed_is_replaced_and_its_groups_are_judged(
    cluster: Cluster[RewardWorker], tmp_path: Path
) -> None:
    pool = RewardPool(cluster, limit_seconds=60, groups_per_worker=2)
    scoring = [asyncio.create_task(pool.score(make_group(tmp_path, "slow", "yes"))) for _ in range(6)]
    while not ((tmp_path / "calls").exists() and (tmp_path / "calls").read_text().endswith("\n")):
        await asyncio.sleep(0.05)
    victim = calls(tmp_path)[0][1]
    os.kill(victim, signal.SIGKILL)
    judged = await asyncio.gather(*scoring)
    assert [values(group) for group in judged] == [[0.0, 1.0]] * 6
    assert sum(pool.worker_restarts.generations) == 1
    assert ended(victim)
    assert len({pid for _, pid in calls(tmp_path)}) == 3


async def test_only_the_group_that_kills_workers_is_lost(cluster: Cluster[RewardWorker], tmp_path: Path) -> None:
    pool = RewardPool(cluster, limit_seconds=60)
    texts = [("dies",), ("yes", "no"), ("dies once", "yes"), ("raises once", "yes")]
    judged = await asyncio.gather(*(pool.score(make_group(tmp_path, *group)) for group in texts))
    assert [values(group) for group in judged] == [[], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
    (failure,) = judged[0].failures
    assert (failure.stage, failure.origin) == ("reward", "d.jsonl:1")
    assert "process is gone" in failure.error


async def test_a_reward_that_hangs_loses_its_samples_and_its_worker(
    cluster: Cluster[RewardWorker], tmp_path: Path
) -> None:
    pool = RewardPool(cluster, limit_seconds=60)
    began = time.monotonic()
    (judged,) = await asyncio.gather(pool.score(make_group(tmp_path, "hangs", "yes")))
    assert time.monotonic() - began < 50  # it sleeps for sixty seconds
    assert (len(judged.samples), len(judged.failures)) == (0, 2)
    assert "within 3 s" in judged.failures[0].error
    assert sum(pool.worker_restarts.generations) == 1
    assert values(await pool.score(make_group(tmp_path, "yes"))) == [1.0]


async def test_a_worker_without_its_interpreter_is_replaced_from_outside(
    cluster: Cluster[RewardWorker], tmp_path: Path
) -> None:
    pool = RewardPool(cluster, limit_seconds=8)
    judged = await pool.score(make_group(tmp_path, "holds the interpreter"))
    assert "did not answer within 8 s" in judged.failures[0].error
    assert sum(pool.worker_restarts.generations) == 2
    assert values(await pool.score(make_group(tmp_path, "yes"))) == [1.0]


@pytest.mark.slow  # by day two workers judge what a third one did not
async def test_the_workers_judge_side_by_side(cluster: Cluster[RewardWorker], tmp_path: Path) -> None:
    pool = RewardPool(cluster, limit_seconds=60)
    await asyncio.gather(*(pool.score(make_group(tmp_path, "slow")) for _ in range(4)))
    pids = [pid for _, pid in calls(tmp_path)]
    assert sorted(pids.count(pid) for pid in set(pids)) == [2, 2]
