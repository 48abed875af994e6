"""Reinforcement learning over many turns: play episodes in environments, update, hand the weights back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from roll_like.agents.env_manager import EpisodePlan
from roll_like.builtin.pipelines.agentic.check import environment_findings
from roll_like.builtin.pipelines.agentic.config import AgenticConfig
from roll_like.builtin.pipelines.agentic.environments import Playing, episode_evaluator, episode_rollouts
from roll_like.check import Report, check, refuse_errors
from roll_like.metrics.summary import Summary
from roll_like.policy_gradient.objective import with_reference
from roll_like.policy_gradient.workers import Workers, evaluate_model, export_model, start_workers
from roll_like.registry import PIPELINES
from roll_like.rollout.evaluate import Evaluator
from roll_like.rollout.metrics import rollout_metrics
from roll_like.rollout.source import RolloutSource
from roll_like.run.launch import RunContext, RunResult, RunState, launch


@PIPELINES.register("agentic")
@dataclass(kw_only=True)
class AgenticPipeline:
    """The parts of an agentic run. `run` is the algorithm; everything else is a part's business."""

    Config: ClassVar[type[AgenticConfig]] = AgenticConfig

    config: AgenticConfig
    run_state: RunState
    workers: Workers
    rollouts: RolloutSource
    evaluator: Evaluator[EpisodePlan] | None

    def run(self) -> None:
        """Train to the end: the policy plays, its episodes earn rewards, the rewards move it."""
        state, workers = self.run_state, self.workers
        workers.push()
        state.evaluate(self.evaluator)
        for step in state.steps():
            with workers.generating():
                collected = self.rollouts.collect(step)
            with workers.training():
                assigned = workers.advantages.assign(collected.groups)
                report = workers.actor.train_step(with_reference(assigned.samples, workers.kl_reference))
            sync = workers.push()
            rollout = rollout_metrics(collected, sync.version - 1)
            state.log(step, rollout, assigned.metrics, report, sync.metrics)
            state.keep_rollouts(collected)
            state.evaluate(self.evaluator)

    @classmethod
    def build(cls, config: AgenticConfig, run: RunContext) -> Self:
        """Start the workers and put the parts together, where a resumed run left them."""
        playing = Playing(config, run.resources, run.stack)
        workers = start_workers(config, run, playing)
        manager = playing.manager(workers.inference, workers.runner, workers.progress)
        rollouts = episode_rollouts(config, manager, workers.runner)
        run.state.keep(workers.saved_engines, rollouts=rollouts, advantages=workers.advantages)
        evaluator = episode_evaluator(config, manager, workers.runner)
        return cls(config=config, run_state=run.state, workers=workers, rollouts=rollouts, evaluator=evaluator)

    def export(self, directory: Path, summary: Summary) -> None:
        """Write the trained model as a Hugging Face directory, with a card of the run."""
        export_model(self.workers.actor.cluster, self.config, directory, summary)

    @classmethod
    def launch(cls, config: AgenticConfig, *, resume: str | None = None) -> RunResult:
        """Check the configuration, then train in a folder of its own.

        Args:
            config: The validated configuration.
            resume: None starts anew; "" continues the latest run of this name; else the run to continue.
        """
        refuse_errors(cls.check(config))
        return launch(config, cls.build, resume=resume)

    @classmethod
    def check(cls, config: AgenticConfig) -> Report:
        """Return every problem that can be known before a run, and its plan."""
        return check(config, environment_findings)

    @classmethod
    def evaluate(cls, config: AgenticConfig, model: str) -> dict[str, float]:
        """Evaluate a model on the evaluation's seeds and return the figures."""
        return evaluate_model(
            config,
            model,
            Playing,
            lambda config, playing, engines, runner: episode_evaluator(
                config, playing.manager(engines, runner), runner
            ),
        )
