"""The policy gradient: what the pipelines share that train a policy on rewards of its own samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any, ClassVar, Self, TypeVar

from roll_like.algorithms.advantages import AdvantageEstimator
from roll_like.algorithms.advantages.base import by_parts, flatten, joined, policy_samples
from roll_like.algorithms.kl import KLController
from roll_like.check import Report, check
from roll_like.check.findings import Finding
from roll_like.cluster import ResourceManager
from roll_like.config.rollout import AsyncSchedule, GroupRolloutConfig, ReplaySchedule
from roll_like.config.sampling import PolicyGradientConfig
from roll_like.data.chat import Renderer
from roll_like.models.load import load_renderer, resolve_model
from roll_like.models.shape import load_model_shape
from roll_like.policy_gradient.advantages import Advantages, Assigned
from roll_like.policy_gradient.objective import PolicyObjective, with_reference
from roll_like.policy_gradient.policy_rewards import PolicyRewards
from roll_like.policy_gradient.start import policy_settings, start_actor, start_critic, start_reference
from roll_like.policy_gradient.step_rewards import with_step_rewards
from roll_like.policy_gradient.supervised import supervised_samples
from roll_like.policy_gradient.workers import AuxiliaryRole, Workers, start_evaluator, starting_workers
from roll_like.registry import ADVANTAGES
from roll_like.rollout.asynchronous import AsyncRollouts
from roll_like.rollout.collection import Collected
from roll_like.rollout.demonstrations import TaskDemonstrations
from roll_like.rollout.metrics import off_policy_metrics, rollout_metrics
from roll_like.rollout.replay import ReplayedRollouts
from roll_like.rollout.replaying import ReplayingRollouts
from roll_like.rollout.source import GroupSource, KeptRollouts, RolloutSource, SynchronousRollouts
from roll_like.run.pipeline import Pipeline
from roll_like.run.state import Evaluates, RunContext
from roll_like.training.engine import TrainingEngine, follow, policy_copies
from roll_like.types import Group, Origin, PolicySample, Scored, TrainingValues
from roll_like.values import Metrics

ConfigT = TypeVar("ConfigT", bound=PolicyGradientConfig)


@dataclass(kw_only=True)
class PolicyGradientPipeline(Pipeline[ConfigT]):
    """Base of pipelines that train a policy on rewards of its own samples.

    A pipeline names its `auxiliary_role`, which samples the groups, and yields its `findings`. It may change what a
    step trains on (`assign`) and what is reported of its samples (`rollout_metrics`).

    Attributes:
        workers: Policy, engines, reference model and critic.
        auxiliary: What the pipeline started beside them, and samples groups with.
        advantages: The estimator, with a KL penalty in the reward where configured.
        rollouts: Brings the groups of a step.
        evaluator: Measures the policy; None without an `evaluation` section, and in a replay.
    """

    auxiliary_role: ClassVar[type[AuxiliaryRole]]

    workers: Workers
    auxiliary: AuxiliaryRole
    advantages: Advantages
    rollouts: RolloutSource
    evaluator: Evaluates | None

    def run(self) -> None:
        """Train to the end: sample groups, assign advantages, update the policy, hand its weights to the engines."""
        state, workers = self.run_state, self.workers
        workers.push()
        state.evaluate(self.evaluator)
        for step in state.steps():
            with workers.generating():
                collected = self.rollouts.collect(step)
            with workers.training():
                collected = self.policy_rewards.add(collected, step)
                assigned = self.assign(collected.groups)
                values = self.training_values(collected.groups, assigned.trained, assigned.samples)
                learned = [*assigned.samples, *self.supervised(step, collected.groups)]
                report = workers.actor.train_step(with_reference(learned, workers.kl_reference))
                moved = follow(workers.copies, step + 1)
            sync = workers.push()
            rollout = self.rollout_metrics(collected, sync.version - 1)
            state.log(step, rollout, assigned.metrics, report, moved, sync.metrics)
            state.keep_rollouts(collected, values)
            state.evaluate(self.evaluator)

    def assign(self, groups: Sequence[Group[Scored]]) -> Assigned:
        """Return what a step trains on: the samples of its groups, each with its advantages."""
        return self.advantages.assign(with_step_rewards(groups, lambda: self.renderer))

    def supervised(self, step: int, groups: Sequence[Group[Scored]]) -> Sequence[PolicySample]:
        """Return what a step, counted from 0, learns by a supervised loss: the demonstrations of its groups' tasks."""
        objective, critic = self.workers.actor.objective, self.config.critic
        weight = objective.sft if isinstance(objective, PolicyObjective) else None
        if weight is None or (critic is not None and step < critic.warmup_steps):
            return []
        weight.begin_step(step)
        if not weight.coefficient:
            return []
        return supervised_samples(groups, self.demonstrations.of)

    @cached_property
    def demonstrations(self) -> TaskDemonstrations:
        """Those of the training tasks."""
        section = self.config.given_answers
        assert section is not None, "asked for where there are some"
        return TaskDemonstrations(self.renderer, section, self.config.rollout.max_response_tokens)

    @cached_property
    def policy_rewards(self) -> PolicyRewards:
        """The rewards that the policy gives; none in most runs."""
        return PolicyRewards.of(self.config, self.workers.actor, lambda: self.renderer)

    @cached_property
    def renderer(self) -> Renderer:
        """The policy's tokenizer with its chat template."""
        return load_renderer(self.config.model)

    def rollout_metrics(self, collected: Collected, policy_version: int) -> Metrics:
        """Return what a step's samples were like; `policy_version` is that of the weights that it trained."""
        figures = rollout_metrics(collected, policy_version, of_steps=self.config.uses_steps)
        there = {one.trajectory.origin for group in collected.groups for one in group.off_policy}  # of a recording
        origins = self.config.off_policy_origins | there
        return {**figures, **off_policy_metrics(collected.groups, policy_version, origins)}

    @property
    def trained(self) -> TrainingEngine[Any]:
        """The policy."""
        return self.workers.actor

    @classmethod
    def build(cls, config: ConfigT, run: RunContext) -> Self:
        """Start the workers and put the parts together, where a resumed run left them."""
        auxiliary = cls.auxiliary_role(config, run.resources, run.stack)
        replayed = None if config.replay is None else _replayed_rollouts(config, config.replay, run)
        kl = KLController(config.algorithm.kl)
        with starting_workers(config, run, auxiliary) as workers:
            model, sharing = workers.model, workers.gpu_sharing
            workers.actor = start_actor(config, run, model, cls.objective(config, kl), sharing)
            workers.copies = policy_copies(workers.actor, config.copies)
            reference = start_reference(config, run, model, workers.actor, workers.copies, sharing)
            workers.critic = start_critic(config, run, model, sharing)
        workers.kl_reference = reference if config.algorithm.kl.use == "loss" else None
        estimator: AdvantageEstimator = ADVANTAGES.get(config.algorithm.advantage.type)(config.algorithm.advantage)
        if estimator.needs_critic and workers.critic is not None:
            estimator.use(workers.critic)
        if estimator.needs_policy:
            estimator.observe(workers.actor)
        advantages = Advantages(
            estimator,
            config.algorithm,
            kl,
            reference,
            max_response_tokens=config.longest_response,
            warmup_steps=config.critic.warmup_steps if config.critic is not None else 0,
            difficulty=config.domain_difficulty,
        )
        rollouts = replayed or _sampled_rollouts(config, run, workers, auxiliary)
        run.state.keep([*workers.saved_engines, rollouts], rollouts=rollouts, advantages=advantages, **workers.copies)
        return cls(
            config=config,
            run_state=run.state,
            workers=workers,
            auxiliary=auxiliary,
            advantages=advantages,
            rollouts=rollouts,
            evaluator=None if replayed else auxiliary.evaluator(run.state.metrics.warn),
        )

    @classmethod
    def objective(cls, config: ConfigT, kl: KLController) -> PolicyObjective:
        """Return what the policy learns; `kl` sets the weight of a KL penalty in its loss."""
        return PolicyObjective(**policy_settings(config, kl))

    @classmethod
    def check(cls, config: ConfigT) -> Report:
        """Return every problem that can be known before a run, and its plan."""
        return check(config, cls.findings)

    @classmethod
    @abstractmethod
    def findings(cls, config: ConfigT, renderer: Renderer | None, report: Report) -> Iterator[Finding]:
        """Yield what is wrong with what groups are sampled from; tell the report what became of rows."""

    @classmethod
    def start_evaluator(cls, config: ConfigT, resources: ResourceManager, stack: ExitStack) -> Evaluates | None:
        """Start engines, and what samples with them."""
        return start_evaluator(config, resources, stack, cls.auxiliary_role(config, resources, stack))

    def training_values(
        self, groups: Sequence[Group[Scored]], trained: Sequence[bool], samples: Sequence[PolicySample]
    ) -> TrainingValues | None:
        """Return what training makes of each token, before the weights move; None unless it is to be written.

        Args:
            groups: What the step trains on.
            trained: Whether the update uses each of their samples.
            samples: What it learns from: the parts of those that it uses, in order.
        """
        rollout: GroupRolloutConfig = self.config.rollout
        if not rollout.save_logprobs or self.run_state.replaying:
            return None
        groups = [group.whole for group in groups]
        scored, everything, used = flatten(groups), policy_samples(groups), iter(samples)
        advantages = [
            next(used).advantages if kept else sample.advantages  # which are 0
            for sample, kept in zip(everything, by_parts(scored, trained), strict=True)
        ]
        own = [sample.trajectory.origin is Origin.SAMPLED for sample in scored]
        return TrainingValues(
            logprobs=list(compress(joined(scored, self.workers.actor.logprobs(everything)), own)),
            advantages=list(compress(joined(scored, advantages), own)),
            trained=list(compress(trained, own)),
        )


def _replayed_rollouts(config: PolicyGradientConfig, schedule: ReplaySchedule, run: RunContext) -> ReplayedRollouts:
    """Return recorded rollouts.

    Raises:
        ConfigError: There are none for some step.
    """
    shape = load_model_shape(resolve_model(config.model).path)
    return ReplayedRollouts(config, schedule, vocabulary=shape.vocab_size, note=run.state.metrics.warn)


def _sampled_rollouts(
    config: PolicyGradientConfig, run: RunContext, workers: Workers, auxiliary: AuxiliaryRole
) -> RolloutSource:
    """Return what brings the groups of each step, by the run's schedule; it is closed before the engines."""
    source, schedule, checkpoint = auxiliary.groups(run.state.metrics.warn), config.rollout.schedule, config.checkpoint
    written = checkpoint.every > 0 or checkpoint.every_minutes > 0
    if not isinstance(schedule, AsyncSchedule):
        synchronous = SynchronousRollouts(
            source, config.rollout, seed=config.seed, runner=workers.runner, progress=workers.progress
        )
        return KeptRollouts(_replaying(synchronous, source), until_checkpoint=written)
    rollouts = AsyncRollouts(
        source,
        config.rollout,
        schedule,
        steps=config.total_steps,
        seed=config.seed,
        runner=workers.runner,
        progress=workers.progress,
    )
    run.stack.callback(rollouts.close)
    workers.gpu_sharing.takes_turns = config.resources.devices_of("training").overlaps(
        config.resources.devices_of("inference")
    )
    workers.on_push.append(rollouts.published)
    return KeptRollouts(_replaying(rollouts, source), until_checkpoint=written)


def _replaying(rollouts: RolloutSource, source: GroupSource) -> RolloutSource:
    """Return what brings groups, and keeps their right answers where these join later ones."""
    return rollouts if source.experience is None else ReplayingRollouts(rollouts, source.experience)
