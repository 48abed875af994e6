"""Makes the parts that pipelines share out of a configuration: each function starts or builds one part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from roll_like.algorithms.advantages import AdvantageEstimator
from roll_like.algorithms.kl import KLController
from roll_like.cluster import ResourceManager
from roll_like.cluster.driver_loop import DriverLoop
from roll_like.config.algorithm import DifficultyConfig
from roll_like.config.sampling import PolicyGradientConfig, SamplingRunConfig
from roll_like.inference.interface import InferenceEngine
from roll_like.inference.weight_transfer.sync import SyncReport, VersionCounter, WeightSync
from roll_like.models.load import resolve_model
from roll_like.models.shape import load_model_shape
from roll_like.policy_gradient.advantages import Advantages
from roll_like.policy_gradient.critic import Critic
from roll_like.policy_gradient.gpu_sharing import GPUSharing
from roll_like.policy_gradient.start import (
    start_actor,
    start_critic,
    start_inference,
    start_reference,
    start_weight_sync,
)
from roll_like.registry import ADVANTAGES
from roll_like.rollout.engine_pool import EnginePool
from roll_like.rollout.replay import ReplayedRollouts
from roll_like.run.state import RunContext, RunState
from roll_like.training.engine import Reference, TrainingEngine
from roll_like.types import PolicySample


class AuxiliaryRole(Protocol):
    """Workers that a pipeline starts beside engines and trainer: reward workers, environment workers, teachers."""

    def start(self) -> None:
        """Start its processes; the engines load their model meanwhile."""

    def wait(self) -> None:
        """Wait until they are ready."""


@dataclass(kw_only=True)
class Workers:
    """Everything of a run that lives in actors, and the parts that speak for it.

    Attributes:
        state: The run.
        runner: The driver's event loop.
        actor: The policy being trained.
        critic: The value model that the advantage estimator learns with, where it has one.
        kl_reference: The reference model, where the loss needs it.
        advantages: The estimator, with a KL penalty in the reward where configured.
        engines: The engines; None where recorded rollouts are replayed.
        weights: Actor to engines.
        gpu_sharing: Decides what holds the memory of GPUs that engines and models share.
        on_push: Called with each new policy version, as soon as the engines sample with it.
    """

    state: RunState
    runner: DriverLoop
    actor: TrainingEngine[Sequence[PolicySample]]
    critic: Critic | None
    kl_reference: Reference[PolicySample] | None
    advantages: Advantages
    engines: EnginePool | None
    weights: WeightSync | VersionCounter
    gpu_sharing: GPUSharing
    on_push: list[Callable[[int], None]] = field(default_factory=list)
    _moved: bool = False
    _published: int = 0

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

    def push(self) -> SyncReport:
        """Hand the actor's weights to the engines, which go on generating then; without engines, count a version."""
        moved, self._moved = self._moved, False
        self.weights.version = self.state.finished + moved
        # after a failure the trainer gets to where it was once more; the engines are there
        if not isinstance(self.weights, WeightSync) or self.weights.version < self.state.reached:
            return self._counted()
        with self.state.timer("sync"):
            report = self.gpu_sharing.push(self.weights, self.actor)
        if report.version > self._published:
            self._published = report.version
            for listener in self.on_push:
                listener(report.version)
        return report

    def _counted(self) -> SyncReport:
        report = VersionCounter(self.weights.version).push()
        self.weights.version = report.version
        return report

    @contextmanager
    def training(self) -> Iterator[None]:
        """Give shared devices to the models. Engines that slept meanwhile sample again after `push`."""
        with self.state.timer("train"):
            self.gpu_sharing.policy_moves()
            self.gpu_sharing.sleep()
            yield
        self._moved = True


def start_workers(
    config: PolicyGradientConfig,
    run: RunContext,
    auxiliary: AuxiliaryRole | None,
    *,
    difficulty: Mapping[str, DifficultyConfig] | None = None,
) -> Workers:
    """Start every actor of a run, side by side, and wait until all are ready.

    Args:
        config: The run's configuration.
        run: What it is built on.
        auxiliary: What the pipeline starts beside engines and trainer; None if that is nothing.
        difficulty: Bands of domains that have their own.

    Raises:
        RollLikeError: One of them did not start.
    """
    run.state.metrics.phase("preparing the model")
    model = resolve_model(config.model)
    runner = run.stack.enter_context(DriverLoop())
    run.state.metrics.phase("starting workers")
    inference = None if config.replay is not None else start_inference(config, model, run.resources, run.stack, runner)
    gpu_sharing = GPUSharing(runner=runner, engines=inference, resources=config.resources, timer=run.state.timer)
    with gpu_sharing.starting(alone=config.starts_alone("inference")):
        if auxiliary is not None:
            auxiliary.start()
        kl = KLController(config.algorithm.kl)
        actor = start_actor(config, run, model, kl, gpu_sharing)
        reference = start_reference(config, run, model, actor, gpu_sharing)
        critic = start_critic(config, run, model, gpu_sharing)
    if auxiliary is not None:
        auxiliary.wait()
    estimator: AdvantageEstimator = ADVANTAGES.get(config.algorithm.advantage.type)(config.algorithm.advantage)
    if estimator.needs_critic and critic is not None:
        estimator.use(critic)
    # one push a step: a resumed run's first push has the number that it had in the run before
    version = run.state.first_step
    weights: WeightSync | VersionCounter = VersionCounter(version)
    if inference is not None:
        weights = start_weight_sync(config, actor, inference, version=version)
        gpu_sharing.follow(weights, actor)
    return Workers(
        state=run.state,
        runner=runner,
        actor=actor,
        critic=critic,
        kl_reference=reference if config.algorithm.kl.use == "loss" else None,
        advantages=Advantages(
            estimator,
            config.algorithm,
            kl,
            reference,
            max_response_tokens=config.longest_response,
            warmup_steps=config.critic.warmup_steps if config.critic is not None else 0,
            difficulty=difficulty or {},
        ),
        engines=inference,
        weights=weights,
        gpu_sharing=gpu_sharing,
    )


def start_replay(
    config: PolicyGradientConfig,
    run: RunContext,
    auxiliary: AuxiliaryRole | None = None,
    *,
    difficulty: Mapping[str, DifficultyConfig] | None = None,
) -> tuple[Workers, ReplayedRollouts]:
    """Start the trainer of a run that replays recorded rollouts, where a resumed run left it; return the rollouts too.

    Args:
        config: The run's configuration; its schedule is `replay`.
        run: What it is built on.
        auxiliary: What the pipeline needs to train on groups that are scored already, such as teachers.
        difficulty: Bands of domains that have their own.

    Raises:
        RollLikeError: A worker did not start, or there are no recorded rollouts for some step.
    """
    assert config.replay is not None
    shape = load_model_shape(resolve_model(config.model).path)
    rollouts = ReplayedRollouts(config, config.replay, vocabulary=shape.vocab_size, note=run.state.metrics.warn)
    workers = start_workers(config, run, auxiliary, difficulty=difficulty)
    run.state.keep(workers.saved_engines, rollouts=rollouts, advantages=workers.advantages)
    return workers, rollouts


def start_engines(
    config: SamplingRunConfig, resources: ResourceManager, stack: ExitStack, auxiliary: AuxiliaryRole
) -> tuple[EnginePool, DriverLoop]:
    """Start engines and auxiliary roles without a trainer, to evaluate a model; return them when they are ready.

    Args:
        config: The configuration of the model to evaluate.
        resources: Where workers go.
        stack: Ends them when it is closed.
        auxiliary: What the pipeline starts beside the engines.
    """
    runner = stack.enter_context(DriverLoop())
    inference = start_inference(config, resolve_model(config.model), resources, stack, runner, follows=False)
    wait_for_inference = inference.begin(InferenceEngine.start)
    if config.starts_alone("inference"):
        wait_for_inference()
    auxiliary.start()
    wait_for_inference()
    auxiliary.wait()
    return inference, runner
