"""Reinforcement learning with verifiable rewards: sample groups, score them, update, hand the weights back."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.check import Report, check
from roll_like.check.data import prompt_findings
from roll_like.cluster import ResourceManager
from roll_like.policy_gradient.objective import with_reference
from roll_like.policy_gradient.pipeline import PolicyGradientPipeline
from roll_like.policy_gradient.reward_workers import RewardWorkers, prompt_evaluator, prompt_groups
from roll_like.policy_gradient.rollouts import start_rollouts
from roll_like.policy_gradient.workers import start_engines, start_replay, start_workers
from roll_like.rollout.metrics import rollout_metrics
from roll_like.run.state import Evaluates, RunContext


@dataclass(kw_only=True)
class RLVRPipeline(PolicyGradientPipeline[RLVRConfig]):
    """The parts of an RLVR run."""

    def run(self) -> None:
        """Train to the end: sample answers, score them, update the policy, hand the weights to the engines."""
        state, workers = self.run_state, self.workers
        workers.push()
        state.evaluate(self.evaluator)
        for step in state.steps():
            with workers.generating():
                collected = self.rollouts.collect(step)
            with workers.training():
                assigned = workers.advantages.assign(collected.groups)
                values = self.training_values(collected.groups, assigned.trained, assigned.samples)
                report = workers.actor.train_step(with_reference(assigned.samples, workers.kl_reference))
            sync = workers.push()
            rollout = rollout_metrics(collected, sync.version - 1)
            state.log(step, rollout, assigned.metrics, report, sync.metrics)
            state.keep_rollouts(collected, values)
            state.evaluate(self.evaluator)

    @classmethod
    def build(cls, config: RLVRConfig, run: RunContext) -> Self:
        """Start the workers and put the parts together, where a resumed run left them."""
        if config.replay is not None:
            workers, replayed = start_replay(config, run, difficulty=config.domain_difficulty)
            return cls(config=config, run_state=run.state, workers=workers, rollouts=replayed, evaluator=None)
        rewards = RewardWorkers(config, run.resources, run.stack)
        workers = start_workers(config, run, rewards, difficulty=config.domain_difficulty)
        scheduler = rewards.scheduler(workers.inference)
        source = prompt_groups(config, scheduler, run.state.metrics.warn)
        rollouts = start_rollouts(config, run, workers, source)
        run.state.keep([*workers.saved_engines, rollouts], rollouts=rollouts, advantages=workers.advantages)
        evaluator = prompt_evaluator(config, scheduler, workers.runner, workers.progress)
        return cls(config=config, run_state=run.state, workers=workers, rollouts=rollouts, evaluator=evaluator)

    @classmethod
    def check(cls, config: RLVRConfig) -> Report:
        """Return every problem that can be known before a run, and its plan."""
        return check(config, prompt_findings)

    @classmethod
    def start_evaluator(cls, config: RLVRConfig, resources: ResourceManager, stack: ExitStack) -> Evaluates | None:
        """Start engines and reward workers."""
        rewards = RewardWorkers(config, resources, stack)
        inference, runner = start_engines(config, resources, stack, rewards)
        return prompt_evaluator(config, rewards.scheduler(inference), runner)
