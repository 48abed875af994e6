"""Engines that die: what is asked of them goes on elsewhere, and new ones serve with the policy's weights only."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_like.cluster import WorkerDied
from roll_like.cluster.driver_loop import DriverLoop
from roll_like.cluster.spans import SPANS
from roll_like.cluster.worker_restarts import RestartBudget
from roll_like.config.resources import ResourcesConfig
from roll_like.errors import EngineError, GenerationError
from roll_like.inference.interface import (
    EngineDied,
    FailedGeneration,
    Fingerprints,
    GenerateRequest,
    Generation,
    InferenceEngine,
    Sampling,
)
from roll_like.inference.weight_transfer.interface import SendReport
from roll_like.inference.weight_transfer.sync import WeightSync
from roll_like.policy_gradient.gpu_sharing import GPUSharing
from roll_like.rollout import engine_pool as engine_pool_module
from roll_like.rollout.engine_pool import ActorReplica, EnginePool
from roll_like.rollout.router import ReplicaLost, Router
from roll_like.types import Segment, StopReason

LIMIT = 60.0
LIMITS: Any = SimpleNamespace(max_running=4, max_in_flight=1000, retries=0)


class FakeEngine:
    """Answers as long as it lives, with the weights that it has."""

    def __init__(self, rank: int, *, fails: Exception | None = None) -> None:
        self.rank, self.fails = rank, fails
        self.alive, self.answers, self.frozen = True, True, False
        self.weights = self.staged = -1
        self.version = -1
        self.dies_in = ""
        self.requests: list[GenerateRequest] = []

    def die(self) -> None:
        self.alive = False

    async def start(self) -> None:
        if self.fails is not None:
            raise self.fails

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self.requests += requests

    async def poll(self, timeout: float) -> list[Generation | FailedGeneration]:
        while self.alive and (not self.requests or not self.answers or self.frozen):
            await asyncio.sleep(0.001)
        if not self.alive:
            raise death(self.rank)
        finished, self.requests = self.requests, []
        return [generation(request, self.weights) for request in finished]

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.requests = [request for request in self.requests if request.request_id not in request_ids]

    async def sleep(self) -> None:
        self.frozen = True

    async def wake(self) -> None:
        """An engine that was started while the others slept has not slept."""

    async def start_weight_update(self) -> None:
        self.frozen = True

    async def update_weights(self, info: dict[str, int]) -> None:
        self.staged = info["weights"]

    async def finish_weight_update(self, version: int) -> None:
        self.weights, self.version = self.staged, version

    async def fingerprints(self, names: Sequence[str], seed: int) -> Fingerprints:
        return Fingerprints(tensors=dict.fromkeys(names, str(self.weights)), tied={})

    async def metrics(self) -> str:
        while not self.answers:
            await asyncio.sleep(0.001)
        return f"engine {self.rank}"

    async def score_prompt(self, token_ids: Any, adapter: str, top_k: int) -> tuple[int, int]:
        return self.rank, self.weights

    async def resume(self) -> None:
        self.frozen = False


def death(rank: int) -> WorkerDied:
    error = WorkerDied("its process is gone")
    error.worker = ("inference", rank)
    return error


def generation(request: GenerateRequest, weights: int) -> Generation:
    return Generation(
        request_id=request.request_id,
        token_ids=np.array([weights], np.int32),
        logprobs=np.zeros(1, np.float32),
        segments=(Segment(start=0, end=1, policy_version=weights),),
        text=request.request_id,
        stop_reason=StopReason.STOP,
    )


class FakeHandle:
    def __init__(self, engines: Sequence[FakeEngine]) -> None:
        self.engines = list(engines)

    def __len__(self) -> int:
        return len(self.engines)

    async def ask(self, place: int, method: Callable[..., Any], *args: Any) -> Any:
        engine = self.engines[place]
        if engine.dies_in == method.__name__:
            engine.die()
        if not engine.alive:
            raise death(engine.rank)
        return await getattr(engine, method.__name__)(*args)

    def everywhere(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        async def ask() -> list[Any]:
            return [await self.ask(place, method, *args) for place in range(len(self))]

        return asyncio.run(ask())


class FakeCluster(FakeHandle):
    """Engines that can be fenced and started anew."""

    name = "inference"
    start_timeout_seconds = 5.0

    def __init__(self, replicas: int) -> None:
        super().__init__([FakeEngine(rank) for rank in range(replicas)])
        self.fenced: list[int] = []
        self.failures: list[Exception] = []

    def only(self, ranks: Sequence[int]) -> FakeHandle:
        return FakeHandle([self.engines[rank] for rank in ranks])

    def fence(self, rank: int) -> None:
        self.engines[rank].die()
        self.fenced.append(rank)

    def restart(self, rank: int) -> None:
        assert not self.engines[rank].alive, "two engines at one place"
        self.engines[rank] = FakeEngine(rank, fails=self.failures.pop(0) if self.failures else None)


class Run:
    """Engines, a trainer whose weights are a number, and the pipeline's thread between them."""

    def __init__(self, runner: DriverLoop, replicas: int = 1, *, follows: bool = True) -> None:
        self.runner = runner
        self.cluster = FakeCluster(replicas)
        self.told: list[str] = []
        cluster: Any = self.cluster
        self.pool = EnginePool(cluster, runner, report=self.report, follows=follows)
        self.trained = 0
        self.sends = 0
        self.sync = WeightSync(self.send, self.pool)
        resources = ResourcesConfig(
            device="cpu", devices_per_node=2, device_mapping={"training": "0", "inference": "1"}
        )
        self.gpu_sharing = GPUSharing(runner=runner, engines=self.pool, resources=resources)
        self.policy: Any = object()
        if follows:
            self.gpu_sharing.follow(self.sync, self.policy)
        self.router = self.pool.router(LIMITS, LIMITS)

    def report(self, role: str, text: str, *, seconds: float | None) -> None:
        assert role == "inference"
        self.told.append(text)

    def send(self, seed: int) -> SendReport:
        self.sends += 1
        self.pool.everywhere(InferenceEngine.update_weights, {"weights": self.trained})
        return SendReport(fingerprints={"w": str(self.trained)}, bytes=4, buckets=1)

    def push(self) -> None:
        self.gpu_sharing.push(self.sync, self.policy)

    def train(self) -> None:
        """Move the weights, which no engine may get before the next push."""
        self.gpu_sharing.policy_moves()
        self.trained += 1

    def sample(self, *names: str) -> list[int]:
        """Return the weights that requests were sampled with; wait until all are."""

        async def work() -> list[Generation]:
            requests = [
                GenerateRequest(
                    request_id=name, prompt_ids=np.array([1], np.int32), sampling=Sampling(max_tokens=1), seed=None
                )
                for name in names
            ]
            return await asyncio.gather(*(self.router.generate(each, each.request_id) for each in requests))

        return [int(each.token_ids[0]) for each in self.runner.wait_for(asyncio.wait_for(work(), LIMIT))]

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.002)


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll_like.cluster.worker_restarts.PAUSES", (0.0,) * 5)
    monkeypatch.setattr(engine_pool_module, "TURN_SECONDS", 0.002)


@pytest.fixture
def runner() -> Iterator[DriverLoop]:
    with DriverLoop() as loop:
        yield loop


def test_metrics_are_of_the_engines_that_tell(runner: DriverLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(runner, replicas=3)
    assert run.pool.metrics() == {rank: f"engine {rank}" for rank in range(3)}
    run.cluster.engines[0].dies_in = "metrics"
    assert run.pool.metrics() == {1: "engine 1", 2: "engine 2"}
    assert run.told == [], "where it samples its death is noticed"
    monkeypatch.setattr(engine_pool_module, "METRICS_SECONDS", 0.05)
    run.cluster.engines[2].answers = False
    assert run.pool.metrics().get(2) is None


def test_requests_of_the_only_engine_wait_for_another_with_the_policys_weights(runner: DriverLoop) -> None:
    run = Run(runner)
    run.push()
    assert run.sample("a", "b") == [0, 0]
    run.train()
    run.push()
    (engine,) = run.cluster.engines
    engine.answers = False
    threading.Timer(0.05, engine.die).start()
    assert run.sample("c", "d") == [1, 1]
    assert run.cluster.fenced == [0]
    assert (run.cluster.engines[0].version, run.sync.version) == (2, 2), "the same version once more"
    run.until(lambda: len(run.told) == 1)
    (told,) = run.told
    assert re.sub(r"in \d+ s", "soon", told) == (
        "its process is gone; engine 0 was replaced soon, and its requests are sampled again"
    )


def test_an_engine_gets_no_requests_while_the_weights_move(runner: DriverLoop) -> None:
    run = Run(runner)
    run.push()
    run.train()
    (engine,) = run.cluster.engines
    engine.answers = False
    asked = threading.Thread(target=lambda: run.told.append(str(run.sample("a"))))
    asked.start()
    run.until(lambda: bool(engine.requests))
    engine.die()
    run.until(lambda: run.cluster.engines[0] is not engine and run.pool.reachable() == [0])
    assert not run.cluster.engines[0].requests
    assert run.sends == 1, "these weights are no version"
    run.push()
    asked.join()
    assert "[1]" in run.told


def test_others_go_on_and_a_push_goes_to_those_that_are_there(runner: DriverLoop) -> None:
    run = Run(runner, 3)
    run.push()
    run.train()
    run.cluster.engines[1].dies_in = "start_weight_update"
    run.push()
    assert run.sync.version == 2, "one push, one version"
    assert {run.cluster.engines[rank].weights for rank in (0, 2)} == {1}
    run.until(lambda: run.cluster.engines[1].weights == 1)
    assert run.sample(*"abcdef") == [1] * 6


@pytest.mark.parametrize("verb", ["update_weights", "finish_weight_update", "fingerprints", "resume"])
def test_the_only_engine_dies_in_a_push(runner: DriverLoop, verb: str) -> None:
    run = Run(runner)
    run.push()
    run.train()
    run.cluster.engines[0].dies_in = verb
    run.push()
    assert run.sync.version == 2
    assert run.sample("a") == [1]
    assert run.cluster.fenced == [0]


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_engine_is_asked_and_another_with_the_same_weights_where_it_dies(runner: DriverLoop, replicas: int) -> None:
    run = Run(runner, replicas)
    run.push()

    def ask() -> Any:
        asked: Any = run.pool.ask_one(InferenceEngine.score_prompt, np.zeros(2, np.int32), "policy", 0)
        return runner.wait_for(asyncio.wait_for(asked, LIMIT))

    assert {ask() for _ in range(4)} == {(rank, 0) for rank in range(replicas)}, "each in turn"
    for engine in run.cluster.engines:
        engine.dies_in = "score_prompt"
    assert ask()[1] == 0, "an engine that has no weights yet is not asked"
    run.until(lambda: len(run.told) == replicas)


@pytest.mark.parametrize("verb", ["sleep", "wake", "resume"])
def test_an_engine_dies_while_engines_take_turns_with_the_trainer(runner: DriverLoop, verb: str) -> None:
    run = Run(runner, 2)
    run.gpu_sharing.takes_turns = True
    run.push()
    run.cluster.engines[0].dies_in = verb
    run.train()
    run.gpu_sharing.sleep()
    run.push()
    assert run.sample(*"abcdef") == [1] * 6
    run.until(lambda: run.cluster.fenced == [0] and len(run.pool.reachable()) == 2)


def test_an_engine_that_died_counts_as_a_death_of_its_worker(runner: DriverLoop) -> None:
    run = Run(runner)
    run.push()
    error = EngineDied("vLLM's engine process died")
    error.worker = ("inference", 0)
    run.pool._replace_dead(error, {(0, 0)})
    run.until(lambda: bool(run.told))
    run.pool._replace_dead(error, {(0, 0)})  # a second call met the same death
    time.sleep(0.05)
    assert run.cluster.fenced == [0]


@pytest.mark.parametrize("error", [EngineError("not finite"), WorkerDied("a trainer"), GenerationError("too long")])
def test_other_errors_are_not_an_engines_death(runner: DriverLoop, error: Any) -> None:
    run = Run(runner)
    error.worker = ("training", 0) if isinstance(error, WorkerDied) else ("inference", 0)
    with pytest.raises(type(error), match=str(error)):
        run.pool.replace_dead(error)
    assert run.pool.reachable() == [0]


def test_a_start_that_fails_is_tried_again_and_then_given_up(runner: DriverLoop) -> None:
    run = Run(runner, 2)
    run.push()
    run.cluster.failures = [GenerationError("no memory"), WorkerDied("again")]
    run.pool.replace_dead(death(0))
    run.until(lambda: bool(run.told))
    assert run.cluster.fenced == [0, 0, 0]
    assert "its process is gone; engine 0 was replaced" in run.told[0]
    run.cluster.failures = [GenerationError("no memory")] * 9
    run.pool.replace_dead(death(0))
    run.until(lambda: len(run.told) == 2)
    assert run.told[1] == "no memory; engine 0 was lost too often and is not replaced again"
    assert run.pool.reachable() == [1]
    assert run.sample("a") == [0]
    run.cluster.engines[1].die()
    with pytest.raises(ReplicaLost, match="every inference replica is gone"):
        run.sample("b")
    with pytest.raises(ReplicaLost, match="every inference replica is gone"):
        run.push()


def test_nobody_waits_for_an_engine_that_cannot_be_replaced(
    runner: DriverLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(runner)
    run.push()

    def broken(rank: int) -> None:
        raise OSError("Ray is gone")

    monkeypatch.setattr(run.cluster, "restart", broken)
    run.cluster.engines[0].answers = False
    threading.Timer(0.02, run.cluster.engines[0].die).start()
    with pytest.raises(ReplicaLost, match="OSError: Ray is gone"):
        run.sample("a")
    assert run.told == ["its process is gone; engine 0 could not be replaced: OSError: Ray is gone"]
    run.pool.hold_starts()  # nor does it count as one that starts


def test_engines_without_a_trainer_serve_at_once(runner: DriverLoop) -> None:
    run = Run(runner, follows=False)
    run.cluster.engines[0].answers = False
    threading.Timer(0.02, run.cluster.engines[0].die).start()
    assert run.sample("a") == [-1]


def test_engines_start_when_there_is_room(runner: DriverLoop) -> None:
    run = Run(runner)
    run.push()
    run.pool.hold_starts()
    run.pool.replace_dead(death(0))
    run.until(lambda: run.cluster.fenced == [0])
    time.sleep(0.05)
    assert run.pool.reachable() == []
    run.pool.allow_starts()
    assert run.sample("a") == [0]


def test_a_trainer_that_dies_while_the_only_engine_waits_for_its_weights(runner: DriverLoop) -> None:
    run = Run(runner)
    run.push()
    catch_up = run.pool.catch_up

    def fail() -> None:
        error = WorkerDied("training worker 0 is gone")
        error.worker = ("training", 0)
        raise error

    run.pool.catch_up = fail
    run.cluster.engines[0].answers = False
    threading.Timer(0.02, run.cluster.engines[0].die).start()
    with pytest.raises(WorkerDied, match="training worker 0 is gone"):  # as it is: the run starts the trainer again
        run.sample("a")
    run.pool.catch_up = catch_up
    run.train()
    run.push()
    assert run.sample("a", "b") == [1, 1]


def test_a_new_router_knows_the_engines_that_serve(runner: DriverLoop) -> None:
    run = Run(runner, 2)
    run.push()
    run.pool.hold_starts()
    run.pool.replace_dead(death(0))
    router: Router = run.pool.router(LIMITS, LIMITS)
    assert router.replicas == 1
    run.pool.allow_starts()
    run.until(lambda: router.replicas == 2)


def test_a_profile_asks_routers_for_what_is_under_way(runner: DriverLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[Any] = []
    monkeypatch.setattr(SPANS, "watch", watched.append)
    run = Run(runner)
    assert watched == [run.router]


class FakeReplicas:
    """Every call raises the next error."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)

    async def ask(self, rank: int, method: Any, *args: Any) -> Any:
        raise self.errors.pop(0)


@pytest.mark.parametrize("death", [WorkerDied("process gone"), EngineDied("engine gone")])
async def test_a_dead_actor_and_a_dead_engine_are_a_lost_replica(death: Exception) -> None:
    told: list[Exception] = []
    replica = ActorReplica(FakeReplicas(death, death, death), told.append)  # type: ignore[arg-type]
    with pytest.raises(ReplicaLost, match="gone"):
        await replica.submit([])
    assert told == [death]
    with pytest.raises(ReplicaLost, match="gone"):
        await replica.poll(1.0)
    with pytest.raises(ReplicaLost, match="gone"):
        await replica.abort([])


ACTIONS = ("sample", "train and push", "kill", "kill while training", "kill in a push")


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2)), max_size=10))
def test_no_request_is_lost_and_none_is_sampled_with_other_weights(
    replicas: int, actions: list[tuple[str, int]]
) -> None:
    with DriverLoop() as runner:
        run = Run(runner, replicas)
        run.pool._worker_restarts.budget = RestartBudget(clock=lambda: next(hours))
        hours = iter(range(0, 10**9, 3600))
        run.push()
        for number, (action, rank) in enumerate(actions):
            engine = run.cluster.engines[rank % replicas]
            if action.startswith("kill in"):
                engine.dies_in = ["start_weight_update", "update_weights", "fingerprints"][rank]
            elif action == "kill":
                engine.die()
            if action in ("train and push", "kill while training", "kill in a push"):
                run.train()
                if action == "kill while training":
                    engine.die()
                run.push()
            names = [f"{number}-{sample}" for sample in range(5)]
            assert run.sample(*names) == [run.trained] * 5
