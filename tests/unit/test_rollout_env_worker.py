"""Environments on workers: what crashes is reported, what hangs is replaced, the others in there are not to blame."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import threading
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from roll_like.agents.env_manager import EnvironmentLost
from roll_like.agents.env_worker import Crashed, EnvPool, EnvWorker
from roll_like.agents.episode import EnvironmentSpec, Started, Stepped
from roll_like.cluster import WorkerDied, worker_restarts
from roll_like.envs import FreeText
from roll_like.errors import EnvError


class Echo(gymnasium.Env[str, str]):
    """Says what it is told; `crash`, `hang` and `end` do what they say."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    system_prompt = "Talk."
    tools: ClassVar[list[dict[str, Any]]] = [{"type": "function", "function": {"name": "look"}}]

    def __init__(self, seconds: float = 0.0) -> None:
        self.observation_space = FreeText()
        self.action_space = FreeText()
        self.seconds = seconds

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"seed {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "crash":
            raise RuntimeError("echo broke")
        if action == "hang":
            time.sleep(self.seconds)
        ended = action == "end"
        return action, 0.5, ended, False, {"success": True, "state": "s"} if ended else {}


gymnasium.register("test/Echo-v0", entry_point=Echo, disable_env_checker=True, order_enforce=False)
SPEC = EnvironmentSpec(name="echo", env_id="test/Echo-v0", kwargs={"seconds": 1.5})


async def test_a_worker_hosts_episodes() -> None:
    worker = EnvWorker()
    started = await worker.reset("a", SPEC, 7)
    assert isinstance(started, Started)
    assert [(one["role"], one["content"]) for one in started.messages] == [("system", "Talk."), ("user", "seed 7")]
    assert started.tools[0]["function"]["name"] == "look"
    assert started.state == "seed 7"
    stepped = await worker.step("a", "hello")
    assert isinstance(stepped, Stepped)
    assert stepped.messages == [{"role": "user", "content": "hello"}]
    assert (stepped.reward, stepped.terminated, stepped.success, stepped.state) == (0.5, False, None, "hello")
    ended = await worker.step("a", "end")
    assert isinstance(ended, Stepped)
    assert (ended.terminated, ended.success, ended.state) == (True, True, "s")
    assert await worker.hosted() == 1
    await worker.close("a")
    await worker.close("a")
    assert await worker.hosted() == 0


async def test_what_crashes_is_reported_with_its_traceback() -> None:
    worker = EnvWorker()
    await worker.reset("a", SPEC, 0)
    crashed = await worker.step("a", "crash")
    assert isinstance(crashed, Crashed)
    assert "RuntimeError: echo broke" in crashed.error
    missing = await worker.reset("b", EnvironmentSpec(name="x", env_id="test/Ecko-v0", kwargs={}), 0)
    assert isinstance(missing, Crashed)
    assert "Ecko" in missing.error


class Returns(gymnasium.Env[str, str]):
    """Returns what it is made with, in the place of what an environment should."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    observation_space = action_space = FreeText()

    def __init__(self, **changed: Any) -> None:
        self.turn = {"observation": "o", "reward": 1.0, "terminated": True, "truncated": False, "info": {}} | changed

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "o", {}

    def step(self, action: str) -> Any:
        return tuple(self.turn.values())


gymnasium.register("test/Returns-v0", entry_point=Returns, disable_env_checker=True, order_enforce=False)


async def stepped_with(**changed: Any) -> Stepped | Crashed:
    worker = EnvWorker()
    assert isinstance(
        await worker.reset("a", EnvironmentSpec(name="r", env_id="test/Returns-v0", kwargs=changed), 0), Started
    )
    stepped = await worker.step("a", "go")
    await worker.close("a")
    return stepped


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"reward": float("nan")}, "the reward is nan"),
        ({"reward": float("inf")}, "the reward is inf"),
        ({"reward": None}, "the reward is None"),
        ({"terminated": "False"}, "terminated is 'False'"),
        ({"truncated": None}, "truncated is None"),
        ({"info": {"success": "no"}}, "info[\"success\"] is 'no'"),
        ({"info": {"success": 0.5}}, 'info["success"] is 0.5'),
        ({"info": {"fresh": "no"}}, "info[\"fresh\"] is 'no'"),
        ({"info": None}, "step() should return a dict as info, found None"),
        (
            {"observation": {"image": 7}},
            "expected messages with a role and a content of texts and images, found {'role': 'user', 'content': {",
        ),
        ({"observation": None}, "expected messages with a role and a content of texts and images"),
        ({"info": {"messages": "Hi"}}, "expected messages with a role and a content of texts and images, found H"),
        (
            {"info": {"messages": [{"content": "Hi"}]}},
            "expected messages with a role and a content of texts and images, found {'content': 'Hi'}",
        ),
    ],
)
def test_what_is_no_turn_is_a_failure(changed: dict[str, Any], error: str) -> None:
    """Each of these was trained on before: as a text that Python writes, or as true."""
    found = asyncio.run(stepped_with(**changed))
    assert isinstance(found, Crashed)
    assert error in found.error


def test_numbers_of_numpy_and_calls_without_a_text_are_a_turn() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    info = {"success": np.float32(0), "messages": [call, {"role": "tool", "content": "4"}]}
    found = asyncio.run(stepped_with(reward=np.float32(0.5), terminated=np.bool_(True), truncated=0, info=info))
    assert isinstance(found, Stepped)
    assert (found.reward, found.terminated, found.truncated, found.success) == (0.5, True, False, False)
    assert [message["role"] for message in found.messages] == ["assistant", "tool"]


class Notes(gymnasium.Env[str, str]):
    """Keeps its notes in SQLite, whose connections serve one thread alone; `next` asks for more than there is."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    observation_space = action_space = FreeText()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.connection = sqlite3.connect(":memory:")
        self.connection.execute("CREATE TABLE notes (text)")
        return "?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "next":
            next(iter(()))
        self.connection.execute("INSERT INTO notes VALUES (?)", (action,))
        return str(self.connection.execute("SELECT COUNT(*) FROM notes").fetchone()[0]), 0.0, False, False, {}

    def close(self) -> None:
        self.connection.close()


gymnasium.register("test/Notes-v0", entry_point=Notes, disable_env_checker=True, order_enforce=False)


async def test_an_episode_stays_in_its_thread() -> None:
    worker, spec = EnvWorker(), EnvironmentSpec(name="notes", env_id="test/Notes-v0", kwargs={})
    names = [str(number) for number in range(8)]
    await asyncio.gather(*(worker.reset(name, spec, 0) for name in names))
    for turn in ("1", "2"):
        stepped = await asyncio.gather(*(worker.step(name, turn) for name in reversed(names)))
        assert [one.messages[0]["content"] for one in stepped if isinstance(one, Stepped)] == [turn] * len(names)
    await worker.shut_down()
    assert await worker.hosted() == 0


async def test_a_stop_of_an_iteration_is_an_error_like_others() -> None:
    """No future takes it: the task that waits would wait until the deadline, and the worker be replaced."""

    worker = EnvWorker()
    await worker.reset("a", EnvironmentSpec(name="notes", env_id="test/Notes-v0", kwargs={}), 0)
    try:
        crashed = await asyncio.wait_for(worker.step("a", "next"), 60)
    finally:
        await worker.close("a")
    assert isinstance(crashed, Crashed)
    assert re.search(r"RuntimeError: StopIteration \(.*`next\(iter\(\(\)\)\)`", crashed.error)


class Waits(gymnasium.Env[str, str]):
    """Is as slow, in the method that `kwargs` name, as the test wants."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    observation_space = action_space = FreeText()
    begun, may_go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def __init__(self, method: str) -> None:
        self.method = method

    def wait(self, method: str) -> None:
        if method == self.method:
            self.begun.set()
            assert self.may_go_on.wait(60)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.wait("reset")
        return "?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.wait("step")
        return "!", 0.0, True, False, {}

    def close(self) -> None:
        self.closed.set()


gymnasium.register("test/Waits-v0", entry_point=Waits, disable_env_checker=True, order_enforce=False)


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize("ended_by", ["close", "shut_down"])
async def test_an_episode_that_is_dropped_in_a_slow_call_is_closed_after_it(method: str, ended_by: str) -> None:
    """What drops it does not wait for the call; the other environments are closed whatever happens to it."""
    for event in (Waits.begun, Waits.may_go_on, Waits.closed):
        event.clear()

    worker, spec = EnvWorker(), EnvironmentSpec(name="w", env_id="test/Waits-v0", kwargs={"method": method})
    await worker.reset("other", SPEC, 0)
    slow = asyncio.create_task(worker.reset("a", spec, 0))
    if method == "step":
        await slow
        slow = asyncio.create_task(worker.step("a", "go"))
    assert await asyncio.to_thread(Waits.begun.wait, 60)
    if ended_by == "close":
        await worker.close("a")
        await worker.close("a")
        assert isinstance(await asyncio.wait_for(slow, 60), Crashed)
        assert not Waits.closed.is_set()
    slow.cancel()
    ended = asyncio.create_task(worker.shut_down())
    await asyncio.sleep(0)
    Waits.may_go_on.set()
    await asyncio.wait_for(ended, 60)
    assert Waits.closed.is_set()
    assert await worker.hosted() == 0


class FakeCluster:
    """Workers in this process; `restart` replaces one."""

    name = "environments"
    start_timeout_seconds = 60.0

    def __init__(self, count: int) -> None:
        self.workers = [EnvWorker() for _ in range(count)]
        self.dead: set[int] = set()
        self.restarted: list[int] = []

    def __len__(self) -> int:
        return len(self.workers)

    async def ask(self, rank: int, method: Any, *arguments: Any) -> Any:
        if rank in self.dead:
            raise WorkerDied(f"worker {rank} is gone")
        return await method(self.workers[rank], *arguments)

    def restart(self, rank: int) -> None:
        self.restarted.append(rank)
        self.dead.discard(rank)
        self.workers[rank] = EnvWorker()


def pool_of(cluster: Any, deadline: float = 5.0) -> EnvPool:
    return EnvPool(cluster, deadline_seconds=deadline)


async def test_episodes_go_to_the_worker_with_the_fewest() -> None:
    cluster = FakeCluster(2)
    pool = pool_of(cluster)
    opened = [pool.open(SPEC) for _ in range(4)]
    for one in opened:
        await one.reset(1)
    assert [await worker.hosted() for worker in cluster.workers] == [2, 2]
    for one in opened:
        await one.close()
    assert [await worker.hosted() for worker in cluster.workers] == [0, 0]


async def test_a_crash_is_an_error_of_the_environment() -> None:
    one = pool_of(FakeCluster(1)).open(SPEC)
    await one.reset(1)
    with pytest.raises(EnvError, match=r"(?s)step of test/Echo-v0 failed: .*echo broke") as caught:
        await one.step("crash")
    assert not isinstance(caught.value, EnvironmentLost)


async def test_a_hung_environment_goes_with_its_worker_and_the_others_are_not_to_blame() -> None:
    cluster = FakeCluster(1)
    pool = pool_of(cluster, deadline=0.4)
    guilty, other, bystander = (pool.open(SPEC) for _ in range(3))
    for one in (guilty, other, bystander):
        await one.reset(1)
    with pytest.raises(EnvError, match=r"did not return within 0\.4 s"):
        await guilty.step("hang")
    assert cluster.restarted == [0]
    with pytest.raises(EnvironmentLost):
        await other.step("hello")
    for one in (guilty, other, bystander):
        await one.close()  # nothing of the new worker is touched
    fresh = pool.open(SPEC)
    await fresh.reset(1)
    assert (await fresh.step("hello")).reward == 0.5
    assert pool.worker_restarts.generations[0] == 1


class SlowToStart(FakeCluster):
    ready_at = 0.0

    def restart(self, rank: int) -> None:
        super().restart(rank)
        self.ready_at = time.monotonic() + 1.0

    async def ask(self, rank: int, method: Any, *arguments: Any) -> Any:
        await asyncio.sleep(max(self.ready_at - time.monotonic(), 0))
        return await super().ask(rank, method, *arguments)


async def test_a_worker_that_does_not_start_again_in_time_names_the_key() -> None:
    cluster = SlowToStart(1)
    cluster.start_timeout_seconds = 0.4
    pool = pool_of(cluster, deadline=0.4)
    guilty = pool.open(SPEC)
    await guilty.reset(1)
    with pytest.raises(EnvError, match=r"step of .* did not return within 0\.4 s") as hung:
        await guilty.step("hang")
    assert "env_workers.deadline_seconds" in str(hung.value.fix)
    with pytest.raises(EnvError, match=r"the process of .* did not return within 0\.4 s") as late:
        await pool.open(SPEC).reset(1)
    assert "resources.start_timeout_seconds" in str(late.value.fix)


async def test_the_start_of_a_worker_is_not_the_environments_time() -> None:
    pool = pool_of(SlowToStart(1), deadline=0.4)
    guilty = pool.open(SPEC)
    await guilty.reset(1)
    with pytest.raises(EnvError, match=r"did not return within 0\.4 s"):
        await guilty.step("hang")
    for _ in range(2):
        fresh = pool.open(SPEC)
        await fresh.reset(1)
        assert (await fresh.step("hello")).reward == 0.5
    assert pool.worker_restarts.generations[0] == 1


async def test_a_worker_that_dies_again_and_again_without_a_turn_in_between_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_restarts, "PAUSES", (0.0, 0.01, 0.01, 0.01, 0.01))
    said: list[str] = []

    def report(role: str, text: str, *, seconds: float | None) -> None:
        assert role == "environments"
        said.append(text)

    cluster = FakeCluster(1)
    pool = EnvPool(cluster, deadline_seconds=5.0, report=report)  # type: ignore[arg-type]
    for _ in range(8):  # a turn in between
        await pool.open(SPEC).reset(1)
        cluster.dead.add(0)
        with pytest.raises(EnvError, match="died in reset"):
            await pool.open(SPEC).reset(1)
        await asyncio.wait(pool.worker_restarts._tasks)
    assert [re.sub(r"in \d+ s", "in 0 s", text) for text in said] == [
        "worker 0 is gone; environments 0 was replaced in 0 s, and its episodes are played again"
    ] * 8
    for _ in range(4):
        await pool.worker_restarts.started(0)
        cluster.dead.add(0)
        with pytest.raises(EnvError, match="died in the process"):
            await pool.open(SPEC).reset(1)
    await pool.worker_restarts.started(0)
    cluster.dead.add(0)
    with pytest.raises(WorkerDied, match="lost too often and is not replaced"):
        await pool.open(SPEC).reset(1)
    assert said[-1] == "worker 0 is gone; environments 0 was lost too often and is not replaced again"


async def test_no_episode_goes_on_with_the_worker_that_took_the_place_of_its_own() -> None:
    cluster = FakeCluster(1)
    pool = pool_of(cluster)
    one = pool.open(SPEC)
    await one.reset(1)
    taking_its_turn = asyncio.create_task(one.step("hello"))
    await asyncio.sleep(0)  # asked, and not yet sent
    pool.worker_restarts.replace(0, 0, "a test")
    with pytest.raises(EnvironmentLost, match="took it down"):
        await taking_its_turn
    with pytest.raises(EnvironmentLost):
        await one.reset(1)
    await one.close()
    assert await cluster.workers[0].hosted() == 0


async def test_a_dead_worker_is_replaced_once() -> None:
    cluster = FakeCluster(1)
    pool = pool_of(cluster)
    first, second = pool.open(SPEC), pool.open(SPEC)
    await first.reset(1)
    await second.reset(1)
    cluster.dead.add(0)
    with pytest.raises(EnvError, match="died in step"):
        await first.step("hello")
    with pytest.raises(EnvironmentLost):
        await second.step("hello")
    assert cluster.restarted == [0]
