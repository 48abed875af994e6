"""Reinforcement learning over many turns: play episodes in environments, update, hand the weights back."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from roll_like.builtin.pipelines.agentic.check import environment_findings
from roll_like.builtin.pipelines.agentic.config import AgenticConfig
from roll_like.builtin.pipelines.agentic.environments import EnvironmentWorkers, episode_evaluator, episode_groups
from roll_like.check import Report, check
from roll_like.cluster import ResourceManager
from roll_like.policy_gradient.objective import with_reference
from roll_like.policy_gradient.pipeline import PolicyGradientPipeline
from roll_like.policy_gradient.rollouts import start_rollouts
from roll_like.policy_gradient.workers import start_engines, start_replay, start_workers
from roll_like.rollout.metrics import rollout_metrics
from roll_like.run.state import Evaluates, RunContext


@dataclass(kw_only=True)
class AgenticPipeline(PolicyGradientPipeline[AgenticConfig]):
    """The parts of an agentic run."""

    def run(self) -> None:
        """Train to the end: play episodes, update the policy, hand the weights to the engines."""
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
    def build(cls, config: AgenticConfig, run: RunContext) -> Self:
        """Start the workers and put the parts together, where a resumed run left them."""
        if config.replay is not None:
            workers, replayed = start_replay(config, run)
            return cls(config=config, run_state=run.state, workers=workers, rollouts=replayed, evaluator=None)
        environments = EnvironmentWorkers(config, run.resources, run.stack)
        workers = start_workers(config, run, environments)
        manager = environments.manager(workers.inference, workers.runner)
        rollouts = start_rollouts(config, run, workers, episode_groups(config, manager))
        run.state.keep([*workers.saved_engines, rollouts], rollouts=rollouts, advantages=workers.advantages)
        evaluator = episode_evaluator(config, manager, workers.runner, workers.progress)
        return cls(config=config, run_state=run.state, workers=workers, rollouts=rollouts, evaluator=evaluator)

    @classmethod
    def check(cls, config: AgenticConfig) -> Report:
        """Return every problem that can be known before a run, and its plan."""
        return check(config, environment_findings)

    @classmethod
    def start_evaluator(cls, config: AgenticConfig, resources: ResourceManager, stack: ExitStack) -> Evaluates | None:
        """Start engines and environments."""
        environments = EnvironmentWorkers(config, resources, stack)
        inference, runner = start_engines(config, resources, stack, environments)
        return episode_evaluator(config, environments.manager(inference, runner), runner)
