"""What runs of a policy that samples have in actors: engines, models, and what a pipeline adds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from roll_like.cluster import ResourceManager
from roll_like.cluster.driver_loop import DriverLoop
from roll_like.config.sampling import SamplingRunConfig
from roll_like.inference.interface import InferenceEngine
from roll_like.inference.weight_transfer.sync import SyncReport, VersionCounter, WeightSync
from roll_like.models.load import ResolvedModel, resolve_model
from roll_like.policy_gradient.critic import Critic
from roll_like.policy_gradient.gpu_sharing import GPUSharing
from roll_like.policy_gradient.start import start_inference, start_weight_sync
from roll_like.rollout.collection import SampleProgress, no_progress
from roll_like.rollout.engine_pool import EnginePool
from roll_like.rollout.source import GroupSource
from roll_like.run.state import Evaluates, RunContext, RunState
from roll_like.training.engine import PolicyCopy, Reference, TrainingEngine
from roll_like.types import PolicySample
from roll_like.values import Metrics


class AuxiliaryRole(Protocol):
    """What a pipeline starts beside engines and trainer, and samples groups with: rewards, environments, teachers."""

    def __init__(self, config: Any, resources: ResourceManager, stack: ExitStack) -> None:
        pass

    def start(self, gpu_sharing: GPUSharing | None = None) -> None:
        """Start its processes; the engines load their model meanwhile. A replay needs only what training asks.

        Args:
            gpu_sharing: Takes in models that share GPUs with the engines; None for an evaluation alone.
        """

    def wait(self) -> None:
        """Wait until they are ready."""

    def connect(self, inference: EnginePool, runner: DriverLoop, progress: SampleProgress = no_progress) -> None:
        """Sample with these engines from now on; `progress` is told how many samples of a collection are finished."""

    def groups(self, warn: Callable[[str], None]) -> GroupSource:
        """Return where groups to train on come from; `warn` is told about tasks that are left out."""

    def evaluator(self, warn: Callable[[str], None]) -> Evaluates | None:
        """Return what measures the policy, or nothing where there is no `evaluation` section.

        Args:
            warn: Told of figures that an evaluation lacks.
        """


@dataclass(kw_only=True)
class Workers:
    """Everything of a run that lives in actors, and the parts that speak for it.

    Attributes:
        state: The run.
        model: What the policy starts from.
        runner: The driver's event loop.
        engines: The engines; None where recorded rollouts are replayed.
        gpu_sharing: Decides what holds the memory of GPUs that engines and models share.
        actor: The policy being trained.
        copies: Copies of the actor's weights on its ranks, by name.
        critic: The value model that the advantage estimator learns with, where it has one.
        kl_reference: The reference model, where the policy loss needs it.
        weights: Actor to engines.
        on_push: Called with each new policy version, as soon as the engines sample with it.
    """

    state: RunState
    model: ResolvedModel
    runner: DriverLoop
    engines: EnginePool | None
    gpu_sharing: GPUSharing
    actor: TrainingEngine[Any] = field(init=False)
    copies: Mapping[str, PolicyCopy] = field(default_factory=dict)
    critic: Critic | None = None
    kl_reference: Reference[PolicySample] | None = None
    weights: WeightSync | VersionCounter = field(init=False)
    on_push: list[Callable[[int], None]] = field(default_factory=list)
    _moved: bool = False
    _published: int = 0
    _told_unchecked: bool = False

    @property
    def inference(self) -> EnginePool:
        """The engines of a run that samples."""
        assert self.engines is not None, "a replay neither samples nor evaluates"
        return self.engines

    @property
    def saved_engines(self) -> list[TrainingEngine[Any]]:
        """What is trained, for checkpoints."""
        return [self.actor] if self.critic is None else [self.actor, self.critic.engine]

    def progress(self, done: int, total: int) -> None:
        """Show how many samples of a step are finished."""
        self.state.metrics.phase("generating", done, total)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Time the sampling of a step. SIGTERM may cut it short: no weight has moved yet."""
        with self.state.timer("generate"), self.state.interruptible():
            yield

    @contextmanager
    def sampling(self) -> Iterator[Metrics]:
        """The same with the newest weights, for a policy that moves several steps between two rollouts.

        Yields the metrics of the weight update, if one was due. Afterwards shared devices belong to the models again.
        """
        figures: Metrics = {}
        if not self.gpu_sharing.pushed:
            figures = self._send().metrics
        self.gpu_sharing.wake()
        with self.generating():
            yield figures
        self.gpu_sharing.sleep()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Give shared devices to the models. Engines that slept meanwhile sample again after `push`."""
        with self.state.timer("train"):
            self.gpu_sharing.policy_moves()
            self.gpu_sharing.sleep()
            yield
        self._moved = True

    def push(self) -> SyncReport:
        """Hand the actor's weights to the engines, which go on generating then; without engines, count a version."""
        moved, self._moved = self._moved, False
        self.weights.version = self.state.finished + moved
        # after a failure the trainer gets to where it was once more; the engines are there
        if isinstance(self.weights, VersionCounter) or self.weights.version < self.state.reached:
            report = VersionCounter(self.weights.version).push()
            self.weights.version = report.version
            return report
        return self._send()

    def _send(self) -> SyncReport:
        assert isinstance(self.weights, WeightSync)
        with self.state.timer("sync"):
            report = self.gpu_sharing.push(self.weights, self.actor)
        if report.not_read_back is not None and not self._told_unchecked:
            self._told_unchecked = True
            self.state.metrics.warn(report.not_read_back)
        if report.version > self._published:
            self._published = report.version
            for listener in self.on_push:
                listener(report.version)
        return report


@contextmanager
def starting_workers(config: SamplingRunConfig, run: RunContext, auxiliary: AuxiliaryRole) -> Iterator[Workers]:
    """Start every actor of a run, side by side: the models within the context, which sets `actor`.

    Afterwards all are ready, and the actor's weights can be pushed.

    Raises:
        RollLikeError: One of them did not start.
    """
    state = run.state
    state.metrics.phase("preparing the model")
    model = resolve_model(config.model)
    runner = run.stack.enter_context(DriverLoop())
    state.metrics.phase("starting workers")
    inference: EnginePool | None = None
    if config.replay is None:
        inference = start_inference(config, model, run.resources, run.stack, runner, watched=True)
        state.metrics.watch(engines=inference.metrics)
        run.stack.callback(state.metrics.watch, engines=dict)  # before the loop ends that asks them
    gpu_sharing = GPUSharing(runner=runner, engines=inference, resources=config.resources, timer=state.timer)
    workers = Workers(state=state, model=model, runner=runner, engines=inference, gpu_sharing=gpu_sharing)
    alone = config.starts_alone("inference")
    with gpu_sharing.starting(alone=alone):
        if alone:
            state.metrics.phase("starting models")
        auxiliary.start(gpu_sharing)
        yield workers
    auxiliary.wait()
    # one push a step: a resumed run's first push has the number that it had in the run before
    version = state.first_step
    if inference is None:
        workers.weights = VersionCounter(version)
        return
    workers.weights = start_weight_sync(config, workers.actor, inference, version=version)
    gpu_sharing.follow(workers.weights, workers.actor)
    auxiliary.connect(inference, runner, workers.progress)


def start_evaluator(
    config: SamplingRunConfig, resources: ResourceManager, stack: ExitStack, auxiliary: AuxiliaryRole
) -> Evaluates | None:
    """Start engines and auxiliary roles without a trainer; return what measures the model when they are ready."""
    runner = stack.enter_context(DriverLoop())
    inference = start_inference(config, resolve_model(config.model), resources, stack, runner, follows=False)
    wait_for_inference = inference.begin(InferenceEngine.start)
    if config.starts_alone("inference"):
        wait_for_inference()
    auxiliary.start()
    wait_for_inference()
    auxiliary.wait()
    auxiliary.connect(inference, runner)
    return auxiliary.evaluator(partial(print, file=sys.stderr))
