"""Makes the parts that pipelines share out of a configuration: each function starts or builds one part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from roll_like.algorithms.advantages import AdvantageEstimator
from roll_like.algorithms.kl import KLController
from roll_like.cluster import Cluster, RaySession, ResourceManager
from roll_like.config.domains import domain_difficulty, domain_filters
from roll_like.config.load import dump_config
from roll_like.config.rlvr import RLVRConfig
from roll_like.data.order import TaskOrder
from roll_like.data.tasks import TaskSet, load_tasks
from roll_like.errors import ConfigError
from roll_like.inference.server import ServerWorker
from roll_like.inference.worker import InferenceWorker
from roll_like.loop import DriverLoop
from roll_like.metrics.summary import Summary
from roll_like.models.export import ModelCard
from roll_like.models.load import ResolvedModel, load_tokenizer, resolve_model
from roll_like.registry import ADVANTAGES
from roll_like.rollout.evaluate import Evaluator
from roll_like.rollout.handles import ActorReplica
from roll_like.rollout.scheduler import GenerateScheduler
from roll_like.rollout.source import SynchronousRollouts
from roll_like.run import RunContext, RunState
from roll_like.start import (
    start_critic,
    start_inference,
    start_judge,
    start_reference,
    start_rewards,
    start_weight_sync,
    time_shared,
    trainer_spec,
)
from roll_like.training.advantages import Advantages
from roll_like.training.critic import CriticEngine
from roll_like.training.engine import TrainingEngine
from roll_like.training.start import start_trainer
from roll_like.training.worker import DeepSpeedWorker
from roll_like.values import reduce
from roll_like.weights.sync import SyncReport, WeightSync

Timer = Callable[[str], AbstractContextManager[None]]


@dataclass(kw_only=True)
class Workers:
    """Everything of a run that lives in actors, and the parts that speak for it.

    Attributes:
        state: The run.
        runner: The driver's event loop.
        model: The starting model, as a local directory.
        actor: The policy being trained.
        critic: The value model that the advantage estimator learns with, where it has one.
        kl_reference: The reference model, where the loss needs it.
        advantages: The estimator, with a KL penalty in the reward where configured.
        inference: The engines' cluster.
        scheduler: Fills groups from the engines and the reward workers.
        weights: Actor to engines.
        time_shared: What is trained on the inference engines' GPUs: they must make room for each other.
    """

    state: RunState
    runner: DriverLoop
    model: ResolvedModel
    actor: TrainingEngine
    critic: CriticEngine | None
    kl_reference: TrainingEngine | None
    advantages: Advantages
    inference: Cluster[InferenceWorker]
    scheduler: GenerateScheduler
    weights: WeightSync
    time_shared: Sequence[TrainingEngine | CriticEngine]

    @property
    def saved_engines(self) -> list[TrainingEngine | CriticEngine]:
        """What is trained, for checkpoints."""
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Give the devices to the inference engines. SIGTERM may cut this short: no weight has moved yet."""
        with self.state.timer("generate"):
            for engine in self.time_shared:
                engine.offload()
            with self.state.interruptible():
                yield

    def push(self) -> SyncReport:
        """Hand the actor's weights to the engines."""
        with self.state.timer("sync"):
            return self.weights.push()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Give the devices to the trainer."""
        with self.state.timer("train"):
            if self.time_shared:
                self.runner.run(self.inference.ask_everywhere(InferenceWorker.sleep))
                for engine in self.time_shared:
                    engine.reload()
            yield
            if self.time_shared:
                self.runner.run(self.inference.ask_everywhere(InferenceWorker.wake))


def start_workers(config: RLVRConfig, run: RunContext) -> Workers:
    """Start every actor of a run, side by side, and wait until all are ready.

    Raises:
        RollLikeError: One of them did not start.
    """
    timer = run.state.timer
    run.state.metrics.phase("preparing the model")
    model = resolve_model(config.model)
    runner = run.stack.enter_context(DriverLoop())
    run.state.metrics.phase("starting workers")
    inference = start_inference(config, model, run.resources, run.stack)
    wait_for_inference = inference.begin(InferenceWorker.start)  # loads while the trainer does
    judge = start_judge(config, run.resources, run.stack)
    wait_for_judge = judge.begin(ServerWorker.start) if judge is not None else None
    rewards = start_rewards(config, run.resources, run.stack, judge)
    kl = KLController(config.algorithm.kl)
    actor = start_trainer(
        "training",
        trainer_spec(config, model, config.training, frozen=False),
        run.resources,
        config.resources.spans.training,
        max_response_tokens=config.rollout.max_response_tokens,
        stack=run.stack,
        kl_controller=kl,
        span_timer=timer,
    )
    reference = start_reference(config, run, model)
    critic = start_critic(config, run, model)
    wait_for_inference()
    if wait_for_judge is not None:
        wait_for_judge()
    rewards.wait_until_ready()
    estimator: AdvantageEstimator = ADVANTAGES.get(config.algorithm.advantage.type)(config.algorithm.advantage)
    if estimator.needs_critic and critic is not None:
        estimator.use(critic)
    return Workers(
        state=run.state,
        runner=runner,
        model=model,
        actor=actor,
        critic=critic,
        kl_reference=reference if config.algorithm.kl.use == "loss" else None,
        advantages=Advantages(
            estimator,
            config.algorithm,
            kl,
            reference,
            max_response_tokens=config.rollout.max_response_tokens,
            warmup_steps=config.critic.warmup_steps if config.critic is not None else 0,
            difficulty=domain_difficulty(config),
        ),
        inference=inference,
        scheduler=GenerateScheduler(
            [ActorReplica(inference, rank) for rank in range(len(inference))],
            rewards,
            max_in_flight=config.rollout.max_in_flight,
            retries=config.rollout.retries,
            progress=lambda done, total: run.state.metrics.phase("generating", done, total),
        ),
        weights=start_weight_sync(config, actor, inference),
        time_shared=time_shared(config, actor, critic),
    )


def tasks_of(config: RLVRConfig) -> TaskSet:
    """Return the training tasks."""
    return load_tasks(config.data.sources, load_tokenizer(config.model), config.data.max_prompt_tokens)


def build_rollouts(config: RLVRConfig, workers: Workers) -> SynchronousRollouts:
    """Return the source of a step's groups."""
    tasks = tasks_of(config)
    for report in tasks.report:
        if report.too_long:
            workers.state.metrics.warn(str(report))
    return SynchronousRollouts(
        workers.scheduler,
        tasks,
        TaskOrder(tasks, seed=config.seed, shuffle=config.data.shuffle),
        config.rollout,
        seed=config.seed,
        runner=workers.runner,
        greedy_baseline=ADVANTAGES.get(config.algorithm.advantage.type).greedy_baseline,
        filters=domain_filters(config),
    )


def build_evaluator(config: RLVRConfig, scheduler: GenerateScheduler, runner: DriverLoop) -> Evaluator | None:
    """Return what measures the policy, or nothing where there is no `evaluation` section."""
    if config.evaluation is None:
        return None
    tasks = load_tasks(
        config.evaluation.sources,
        load_tokenizer(config.model),
        config.data.max_prompt_tokens,
        key="evaluation.sources",
    )
    return Evaluator(
        scheduler,
        tasks,
        config.evaluation,
        max_response_tokens=config.rollout.max_response_tokens,
        max_failure_fraction=config.rollout.max_failure_fraction,
        seed=config.seed,
        runner=runner,
    )


def export_model(actor: TrainingEngine, config: RLVRConfig, directory: Path, summary: Summary) -> None:
    """Write the actor's model as a Hugging Face directory, with a card of the run."""
    figures = summary.figures
    card = ModelCard(
        name=str(figures["name"]),
        base_model=config.model.path,
        pipeline=config.pipeline,
        steps=int(figures["steps"]),
        evaluation={"eval/avg": (figures["eval_before"], figures["eval_after"])},
        figures={name: figures[name] for name in ("reward_first", "reward_last") if figures[name] is not None},
        config_yaml=dump_config(config),
    )
    actor.cluster.everywhere(DeepSpeedWorker.export, str(directory), config.model, card)


def evaluate_model(config: RLVRConfig, model_path: str) -> dict[str, float]:
    """Evaluate a model on the configuration's evaluation set, without a trainer.

    Raises:
        ConfigError: The configuration has no `evaluation` section.
    """
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": model_path})})
    with ExitStack() as stack:
        runner = stack.enter_context(DriverLoop())
        stack.enter_context(RaySession(config.resources, config.output_dir / "evaluation-logs"))
        resources = stack.enter_context(ResourceManager(config.resources))
        resources.allocate()
        inference = start_inference(config, resolve_model(config.model), resources, stack)
        judge = start_judge(config, resources, stack)
        pool = start_rewards(config, resources, stack, judge)
        inference.everywhere(InferenceWorker.start)
        if judge is not None:
            judge.everywhere(ServerWorker.start)
        pool.wait_until_ready()
        scheduler = GenerateScheduler(
            [ActorReplica(inference, rank) for rank in range(len(inference))],
            pool,
            max_in_flight=config.rollout.max_in_flight,
            retries=config.rollout.retries,
        )
        evaluator = build_evaluator(config, scheduler, runner)
        if evaluator is None:
            raise ConfigError("this configuration has no `evaluation` section", fix="add evaluation.sources")
        metrics, _ = evaluator.evaluate()
    return reduce(metrics)
