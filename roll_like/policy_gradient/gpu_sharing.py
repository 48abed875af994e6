"""Who holds GPU memory when, where inference engines and trained models share GPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

from roll_like.cluster import WorkerDied
from roll_like.cluster.driver_loop import DriverLoop
from roll_like.config.inference import engines_share_gpus
from roll_like.config.resources import DeviceRange, ResourcesConfig
from roll_like.inference.interface import EngineDied, InferenceEngine
from roll_like.inference.weight_transfer.sync import SyncReport, WeightSync
from roll_like.rollout.engine_pool import EnginePool, ReplicaState
from roll_like.training.backend import State
from roll_like.training.engine import Timer, TrainingEngine, untimed


@dataclass
class _SharedModel:
    """A model that shares GPUs with the engines, and what it holds there."""

    engine: TrainingEngine[Any]
    devices: DeviceRange
    held: set[State]
    timer: Timer

    def take(self, *states: State) -> None:
        for state in states:
            if state not in self.held:
                with self.timer("offload"):
                    self.engine.reload(state)
                self.held.add(state)

    def leave(self, *states: State) -> None:
        for state in states:
            if state in self.held:
                try:
                    with self.timer("offload"):
                        self.engine.offload(state)
                except WorkerDied:  # who asks this model next has all its ranks replaced
                    self.engine.end()
                    self.held.clear()
                    return
                self.held.remove(state)


@dataclass(kw_only=True)
class GPUSharing:
    """Lets inference engines and models take turns with the memory of the GPUs that they share.

    The engines hold weights and key-value cache, or they sleep and one model at a time holds what it computes with.
    Both meet during a weight update only: the policy without its optimizer, the engines without their cache. So nothing
    is sampled with old weights: from `sleep` to the end of `push` no engine has a cache to sample with.

    | phase | engines: weights | engines: cache | the model: weights | the model: optimizer | other models |
    |---|---|---|---|---|---|
    | sampling, evaluation | GPU | GPU | host | host | host |
    | a model computes | host | – | GPU | GPU while it is trained | host |
    | weight update | GPU | – | GPU (the policy) | host | host |

    Where no GPU is shared nothing moves; `takes_turns` may freeze the engines then, for a trainer on the same cores.

    Attributes:
        runner: The driver's event loop.
        engines: The engines; None where nothing is sampled.
        resources: Which devices are whose.
        pushed: Whether the engines were given the weights that the policy has now.
        takes_turns: Whether requests may be under way while a model computes on the engines' devices.
        timer: Times a part of the step: `offload` and `sleep`, what moves models and engines on shared GPUs.
    """

    runner: DriverLoop
    engines: EnginePool | None
    resources: ResourcesConfig
    pushed: bool = False
    takes_turns: bool = False
    timer: Timer = untimed
    _models: list[_SharedModel] = field(default_factory=list)
    _asleep: bool = False
    _syncing: threading.RLock = field(default_factory=threading.RLock)

    @property
    def shares_gpus(self) -> bool:
        """Whether models compute on the engines' GPUs."""
        return self.engines is not None and engines_share_gpus(self.resources)

    @contextmanager
    def starting(self, *, alone: bool) -> Iterator[None]:
        """Start the engines beside what is started within; where they share GPUs with that, before it.

        Args:
            alone: Whether any role has GPUs of theirs, `RunConfig.starts_alone`: models, a judge, rewards.
        """
        wait = self.engines.begin(InferenceEngine.start) if self.engines is not None else lambda: None
        if alone:
            wait()
            if self.shares_gpus:
                self.sleep()
        yield
        if not alone:
            wait()

    def add(self, engine: TrainingEngine[Any], devices: DeviceRange) -> None:
        """Take in a model that has just started, if it is to make room for the engines: then it does so at once."""
        engine.rebuilding = partial(self._rebuilding, None)
        shared = self.shares_gpus and devices.overlaps(self.resources.devices_of("inference"))
        if not shared or engine.objective.settings.sleep is False:
            return
        model = _SharedModel(engine, devices, set(get_args(State)), self.timer)
        model.leave(*get_args(State))
        self._models.append(model)
        engine.resident = partial(self._resident, model)
        engine.rebuilding = partial(self._rebuilding, model)

    def sleep(self) -> None:
        """Freeze the engines; on shared GPUs they free their memory."""
        if self.engines is not None and not self._asleep and (self.shares_gpus or self.takes_turns):
            if self.shares_gpus:
                self.engines.hold_starts()
            self._tell(InferenceEngine.sleep)
            self._asleep = True

    def wake(self) -> None:
        """Let the engines sample again, with the weights that they have."""
        if self._asleep:
            self._vacate()
            self._tell(InferenceEngine.wake)
            self._tell(InferenceEngine.resume)
            self._awake()

    def follow(self, weights: WeightSync, policy: TrainingEngine[Any]) -> None:
        """Hand the policy's weights to engines that were replaced, too, unless the policy is just being trained."""
        assert self.engines is not None
        self.engines.catch_up = partial(self._catch_up, weights, policy)

    def policy_moves(self) -> None:
        """Note that the policy's weights are no version any more, until the next push."""
        with self._syncing:
            self.pushed = False

    def push(self, weights: WeightSync, policy: TrainingEngine[Any]) -> SyncReport:
        """Hand the policy's weights to the engines, which sample again afterwards.

        An engine that dies meanwhile is replaced, and the others get the weights once more.
        """
        with self._syncing:
            report = self._retried(weights, policy, again=False)
            self.pushed = True
        return report

    def _catch_up(self, weights: WeightSync, policy: TrainingEngine[Any]) -> None:
        assert self.engines is not None
        with self._syncing:
            if not self.pushed:  # the next push brings weights
                return
            if self.shares_gpus:  # there is room for this only while no engine samples
                self._retried(weights, policy, again=True)
                return
            with self.engines.addressing(ReplicaState.STALE) as any_stale:
                if not any_stale:
                    return
                try:
                    self._push(weights, policy, again=True)
                except (WorkerDied, EngineDied) as error:
                    self.engines.replace_dead(error)
                else:
                    self.engines.synced()

    def _retried(self, weights: WeightSync, policy: TrainingEngine[Any], *, again: bool) -> SyncReport:
        assert self.engines is not None
        while True:
            if not self.engines.reachable():
                self.wake()
                self.engines.wait_for_one()
            with self.engines.addressing(ReplicaState.SERVING, ReplicaState.STALE):
                try:
                    report = self._push(weights, policy, again=again)
                except (WorkerDied, EngineDied) as error:
                    self.engines.replace_dead(error)
                else:
                    self.engines.synced()
                    return report

    def _push(self, weights: WeightSync, policy: TrainingEngine[Any], *, again: bool) -> SyncReport:
        for model in self._models:
            if model.engine is policy:
                self.sleep()
                self._vacate(but=model)
                model.leave("optimizer")
                model.take("weights")
        if self._asleep:
            self._tell(InferenceEngine.wake)
        report = weights.push(self._vacate, again=again)
        self._awake()
        return report

    def _awake(self) -> None:
        assert self.engines is not None
        self._asleep = False
        self.engines.allow_starts()

    @contextmanager
    def _resident(self, model: _SharedModel, *states: State) -> Iterator[None]:
        """Hold states of a model on its GPUs; engines that were awake are awake again afterwards."""
        sampling = not self._asleep
        self.sleep()
        self._vacate(but=model)
        model.take(*states)
        yield
        if sampling:
            self.wake()

    @contextmanager
    def _rebuilding(self, model: _SharedModel | None) -> Iterator[None]:
        """Make room for a model whose ranks start anew, and keep its weights from engines until the next push."""
        if not (model and model.engine.frozen):
            self.policy_moves()
        if model is None:
            yield
            return
        self.sleep()
        self._vacate(but=model)
        yield
        model.held = set(get_args(State))
        model.leave(*get_args(State))

    def _vacate(self, *, but: _SharedModel | None = None) -> None:
        """Move everything of the models to host memory, but that of one and of those on other GPUs than it."""
        for model in self._models:
            if but is None or (model is not but and model.devices.overlaps(but.devices)):
                model.leave(*get_args(State))

    def _tell(self, method: Any) -> None:
        assert self.engines is not None
        with self.timer("sleep") if self.shares_gpus else nullcontext():
            self.runner.run(self.engines.ask_everywhere(method))
