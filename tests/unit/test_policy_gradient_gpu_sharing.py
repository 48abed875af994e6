"""Who holds GPU memory when: never more than there is, and nothing is sampled with old weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
from config_files import MINIMAL, changed
from hypothesis import given
from hypothesis import strategies as st

from roll_like import RLVRConfig
from roll_like.cluster import ResourceManager, WorkerDied
from roll_like.config.resources import DeviceRange, ResourcesConfig
from roll_like.inference.interface import InferenceEngine, JudgeServer
from roll_like.metrics.timing import StepTimer
from roll_like.policy_gradient import workers
from roll_like.policy_gradient.gpu_sharing import GPUSharing
from roll_like.policy_gradient.reward_workers import RewardWorkers

WEIGHTS, CACHE, OPTIMIZER, BUFFER = 2, 12, 12, 1
#: Either the engines fit, or one model in training, or both sets of weights with a buffer between them.
CAPACITY = max(WEIGHTS + CACHE, WEIGHTS + OPTIMIZER, 2 * WEIGHTS + BUFFER)


class GPU:
    """Refuses to hold more than it can."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    def take(self, name: str, size: int) -> None:
        assert name not in self.held, f"{name} is there already"
        self.held[name] = size
        assert sum(self.held.values()) <= CAPACITY, f"out of memory: {self.held}"

    def free(self, *names: str) -> None:
        for name in names:
            del self.held[name]


class Engines:
    """Engines with the contract of vLLM's memory: `sleep`, `wake` for the weights, `resume` for the cache."""

    def __init__(self, gpu: GPU) -> None:
        self.gpu, self.told = gpu, list[str]()
        self.version, self.frozen = -1, True

    def reachable(self) -> list[int]:
        return [0]

    def addressing(self, *states: object) -> AbstractContextManager[None]:
        return nullcontext()

    def hold_starts(self) -> None:
        """No engine has died."""

    allow_starts = synced = hold_starts

    def ask_everywhere(self, method: Callable[..., Any]) -> Callable[[], None]:
        return getattr(self, method.__name__)

    def begin(self, method: Callable[..., Any]) -> Callable[[], None]:
        assert method is InferenceEngine.start
        return self.start

    def start(self) -> None:
        self.told.append("start")
        assert not self.gpu.held, "something else takes memory while vLLM measures what is free"
        self.gpu.take("engine weights", WEIGHTS)
        self.gpu.take("engine cache", CACHE)
        self.frozen = False

    def sleep(self) -> None:
        self.told.append("sleep")
        self.gpu.free("engine weights", "engine cache")
        self.frozen = True

    def wake(self) -> None:
        self.told.append("wake")
        self.gpu.take("engine weights", WEIGHTS)

    def resume(self) -> None:
        self.told.append("resume")
        assert "engine weights" in self.gpu.held
        if "engine cache" not in self.gpu.held:
            self.gpu.take("engine cache", CACHE)
        self.frozen = False


class Model:
    """A trained or frozen model; it can only compute with what is on the GPU."""

    def __init__(self, gpu: GPU, name: str, *, optimizer: int, sleep: bool | None = None) -> None:
        self.gpu, self.name, self.version = gpu, name, 0
        self._sizes = {"weights": WEIGHTS, "optimizer": optimizer}
        self.objective = SimpleNamespace(settings=SimpleNamespace(sleep=sleep))
        self.resident: Any = None
        self.rebuilding: Any = nullcontext
        self.dead = self.frozen = False
        for state in self._sizes:
            self.reload(state)

    def reload(self, state: str) -> None:
        self.gpu.take(f"{self.name} {state}", self._sizes[state])

    def offload(self, state: str) -> None:
        if self.dead:
            raise WorkerDied(f"{self.name} worker 0 is gone")
        self.gpu.free(f"{self.name} {state}")

    def end(self) -> None:
        self.gpu.free(*(name for name in list(self.gpu.held) if name.startswith(self.name)))

    def rebuild(self) -> None:
        with self.rebuilding():
            self.end()
            self.dead = False
            for state in self._sizes:
                self.reload(state)

    def compute(self) -> None:
        with self.resident("weights"):
            assert f"{self.name} weights" in self.gpu.held

    def train(self) -> None:
        with self.resident("weights", "optimizer"):
            self.compute()
            assert f"{self.name} optimizer" in self.gpu.held
            self.version += 1

    def save(self) -> None:
        with self.resident("weights", "optimizer"):
            assert {f"{self.name} weights", f"{self.name} optimizer"} <= set(self.gpu.held)


class Sync:
    """A weight update: the engines and the policy hold weights, and a buffer lies between them."""

    def __init__(self, gpu: GPU, engines: Engines, policy: Model) -> None:
        self.gpu, self.engines, self.policy = gpu, engines, policy

    def push(self, before_resume: Callable[[], None], *, again: bool) -> str:
        assert not again
        assert {"engine weights", "policy weights"} <= set(self.gpu.held)
        self.engines.frozen = True
        self.gpu.take("buffer", BUFFER)
        self.engines.version = self.policy.version
        self.gpu.free("buffer")
        before_resume()
        self.engines.resume()
        return "report"


def resources(training: str, inference: str, device: str = "cuda", **others: str) -> ResourcesConfig:
    mapping = {"training": training, "inference": inference, **others}
    return ResourcesConfig(device=device, devices_per_node=4, device_mapping=mapping)


class Run:
    """Everything on one GPU, started as a run starts it."""

    def __init__(self) -> None:
        self.gpu = GPU()
        self.engines = Engines(self.gpu)
        runner: Any = SimpleNamespace(run=lambda told: told())
        self.gpu_sharing = GPUSharing(runner=runner, engines=self.engines, resources=resources("0", "0"))  # type: ignore[arg-type]
        one = DeviceRange.model_validate("0")
        with self.gpu_sharing.starting(alone=True):
            self.policy = Model(self.gpu, "policy", optimizer=OPTIMIZER)
            self.gpu_sharing.add(self.policy, one)  # type: ignore[arg-type]
            self.critic = Model(self.gpu, "critic", optimizer=OPTIMIZER)
            self.gpu_sharing.add(self.critic, one)  # type: ignore[arg-type]
            self.reference = Model(self.gpu, "reference", optimizer=0)
            self.gpu_sharing.add(self.reference, one)  # type: ignore[arg-type]
        assert self.gpu.held == {}
        self.sync = Sync(self.gpu, self.engines, self.policy)
        self.push()

    def push(self) -> None:
        assert self.gpu_sharing.push(self.sync, self.policy) == "report"  # type: ignore[arg-type]

    def sample(self) -> None:
        assert not self.engines.frozen
        assert self.gpu.held == {"engine weights": WEIGHTS, "engine cache": CACHE}
        assert self.engines.version == self.policy.version, "sampled with old weights"

    def step(self) -> None:
        self.sample()
        self.gpu_sharing.sleep()
        self.critic.compute()
        self.reference.compute()
        self.critic.train()
        self.policy.compute()
        self.policy.train()
        assert self.engines.frozen
        self.push()


ACTIONS: dict[str, Callable[[Run], None]] = {
    "step": Run.step,
    "evaluation": Run.sample,
    "checkpoint": lambda run: (run.policy.save(), run.critic.save(), None)[-1],
    "weights again": Run.push,
    "reference": lambda run: run.reference.compute(),
    "engines sleep and wake": lambda run: (run.gpu_sharing.sleep(), run.gpu_sharing.wake(), None)[-1],
    "nothing asleep, wake": lambda run: run.gpu_sharing.wake(),
}


@given(st.lists(st.sampled_from(sorted(ACTIONS)), max_size=12))
def test_whatever_happens_everything_fits_and_only_new_weights_sample(actions: list[str]) -> None:
    run = Run()
    for action in actions:
        ACTIONS[action](run)
        run.sample()  # between two actions the engines are awake


@pytest.mark.parametrize("order", [("policy", "critic"), ("critic", "policy")])
def test_models_that_die_at_once_make_room_for_each_other(order: tuple[str, str]) -> None:
    run = Run()
    run.gpu_sharing.sleep()
    run.critic.compute()
    run.policy.dead = run.critic.dead = True
    for name in order:
        getattr(run, name).rebuild()
    run.push()
    run.step()


def test_a_step_moves_only_what_it_has_to() -> None:
    run = Run()
    run.engines.told.clear()
    run.step()
    assert run.engines.told == ["sleep", "wake", "resume"]
    run.engines.told.clear()
    run.policy.save()
    assert run.engines.told == ["sleep", "wake", "resume"]


def test_moves_are_timed() -> None:
    run = Run()
    timer = StepTimer()
    run.gpu_sharing.timer = timer
    for model in run.gpu_sharing._models:
        model.timer = timer
    run.step()
    assert timer.metrics().keys() == {"time/offload", "time/sleep", "time/step", "time/idle"}


@pytest.mark.parametrize(
    ("mapping", "sleep", "moves"),
    [
        (resources("0-1", "0-1"), None, True),
        (resources("0-1", "0-1"), False, False),
        (resources("0-1", "2-3"), None, False),
        (resources("0-1", "0-1", device="cpu"), None, False),
        (
            resources("0-1", "2-3", critic="2-3"),
            None,
            False,
        ),  # the critic shares the engines' GPUs, the policy does not
    ],
)
def test_only_what_shares_gpus_with_the_engines_moves(
    mapping: ResourcesConfig, sleep: bool | None, moves: bool
) -> None:
    engines: Any = Engines(GPU())
    gpu_sharing = GPUSharing(runner=None, engines=engines, resources=mapping)  # type: ignore[arg-type]
    policy: Any = Model(GPU(), "policy", optimizer=OPTIMIZER, sleep=sleep)
    gpu_sharing.add(policy, mapping.device_mapping.training)
    assert (policy.gpu.held == {}) == moves
    assert (policy.resident is not None) == moves


@pytest.mark.parametrize(("takes_turns", "told"), [(False, ["resume"]), (True, ["sleep", "wake", "resume"])])
def test_cores_are_shared_without_moving_anything(takes_turns: bool, told: list[str]) -> None:
    run, cores = Run(), resources("0-1", "0-1", device="cpu")
    gpu_sharing = GPUSharing(runner=run.gpu_sharing.runner, engines=run.gpu_sharing.engines, resources=cores)
    gpu_sharing.takes_turns = takes_turns
    run.engines.told.clear()
    gpu_sharing.sleep()
    sync: Any = SimpleNamespace(push=lambda before_resume, again: (before_resume(), run.engines.resume()))
    gpu_sharing.push(sync, run.policy)  # type: ignore[arg-type]
    assert run.engines.told == told


def test_a_role_on_other_gpus_stays_while_another_one_computes() -> None:
    run = Run()
    run.gpu_sharing.sleep()
    everywhere: Any = Model(GPU(), "elsewhere", optimizer=0)
    run.gpu_sharing.resources = resources("0", "0-1")
    run.gpu_sharing.add(everywhere, DeviceRange.model_validate("1"))
    everywhere.compute()
    run.policy.compute()
    assert "elsewhere weights" in everywhere.gpu.held
    run.critic.compute()
    assert "policy weights" not in run.gpu.held


# ---- the order of starts ----------------------------------------------------------------------------


def judged(device: str = "cuda", **mapping: str) -> RLVRConfig:
    """A trainer, engines and a judge."""
    devices = {"training": "0", "inference": "1", "judge": "2", **mapping}
    return RLVRConfig.model_validate(
        changed(
            MINIMAL,
            resources={"device": device, "devices_per_node": 4, "device_mapping": devices},
            inference={"type": "vllm"},
            judge={"type": "vllm", "path": "org/judge"},
            rewards={"use": [{"type": "llm_judge", "judges": [{"url": "judge", "model": "judge"}]}]},
        )
    )


@pytest.mark.parametrize(
    ("config", "alone"),
    [
        (judged(), set()),
        (judged(judge="1"), {"inference", "judge"}),
        (judged(judge="0"), {"training", "judge"}),
        (judged(inference="0"), {"training", "inference"}),
        (judged("cpu", judge="1"), set()),
    ],
)
def test_what_measures_free_memory_starts_alone_on_gpus_that_it_shares(config: RLVRConfig, alone: set[str]) -> None:
    assert {role.name for role in config.roles if config.starts_alone(role.name)} == alone


@pytest.mark.parametrize("alone", [True, False])
def test_engines_that_share_gpus_with_a_judge_alone_have_started_before_it(alone: bool) -> None:
    engines: Any = Engines(GPU())
    gpu_sharing = GPUSharing(runner=None, engines=engines, resources=resources("0", "2-3"))  # type: ignore[arg-type]
    with gpu_sharing.starting(alone=alone):
        assert engines.told == (["start"] if alone else [])
    assert engines.told == ["start"]  # and they stay awake: the judge keeps its share


class Order:
    """Engines or servers of a judge, whose start takes until it is waited for; keeps what happened when."""

    def __init__(self, told: list[str], name: str) -> None:
        self.told, self.name = told, name

    def everywhere(self, method: Any) -> list[str]:
        return ["http://judge"]

    def begin(self, method: Any) -> Callable[[], None]:
        assert method in (InferenceEngine.start, JudgeServer.start)
        self.told.append(f"{self.name} begins")
        return lambda: self.told.append(f"{self.name} has started")

    def close(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("config", "order"),
    [
        (judged(judge="1"), ["judge begins", "judge has started", "rewards"]),
        (judged(), ["judge begins", "rewards"]),
    ],
    ids=["shared", "own"],
)
def test_a_judge_on_shared_gpus_has_started_before_anything_else_starts(
    config: RLVRConfig, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(RewardWorkers, "_start_judge", lambda *_: Order(told, "judge"))
    monkeypatch.setattr(RewardWorkers, "_start_rewards", lambda *_: told.append("rewards"))
    with ExitStack() as stack:
        RewardWorkers(config, create_autospec(ResourceManager, report=lambda: None), stack).start()
        assert told == order


@pytest.mark.parametrize(
    ("config", "order"),
    [
        (judged(judge="1"), ["engine begins", "engine has started", "judge"]),
        (judged(), ["engine begins", "judge", "engine has started"]),
    ],
    ids=["shared", "own"],
)
def test_engines_of_an_evaluation_have_started_before_a_judge_on_their_gpus(
    config: RLVRConfig, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(workers, "start_inference", lambda *_, **__: Order(told, "engine"))
    monkeypatch.setattr(workers, "resolve_model", lambda model: model)
    judge: Any = SimpleNamespace(
        start=lambda: told.append("judge"), wait=lambda: None, connect=lambda *_: None, evaluator=lambda _: None
    )
    with ExitStack() as stack:
        workers.start_evaluator(config, create_autospec(ResourceManager), stack, judge)
    assert told[:3] == order
