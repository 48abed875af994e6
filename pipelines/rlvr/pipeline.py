"""Reinforcement learning with verifiable rewards: sample groups, judge them, update, hand the weights back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.check import Report, check, refuse_errors
from roll_like.check.data import prompt_findings
from roll_like.config.domains import domain_difficulty
from roll_like.metrics.summary import Summary
from roll_like.policy_gradient.objective import with_reference
from roll_like.policy_gradient.reward_workers import Judging, prompt_evaluator, prompt_rollouts
from roll_like.policy_gradient.workers import Workers, evaluate_model, export_model, start_workers
from roll_like.registry import PIPELINES
from roll_like.rollout.evaluate import Evaluator
from roll_like.rollout.metrics import rollout_metrics
from roll_like.rollout.scheduler import GroupPlan
from roll_like.rollout.source import RolloutSource
from roll_like.run.launch import RunContext, RunResult, RunState, launch


@PIPELINES.register("rlvr")
@dataclass(kw_only=True)
class RLVRPipeline:
    """The parts of an RLVR run. `run` is the algorithm; everything else is a part's business."""

    Config: ClassVar[type[RLVRConfig]] = RLVRConfig

    config: RLVRConfig
    run_state: RunState
    workers: Workers
    rollouts: RolloutSource
    evaluator: Evaluator[GroupPlan] | None

    def run(self) -> None:
        """Train to the end: the policy samples, its samples are judged, the results move it."""
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
    def build(cls, config: RLVRConfig, run: RunContext) -> Self:
        """Start the workers and put the parts together, where a resumed run left them."""
        judging = Judging(config, run.resources, run.stack)
        workers = start_workers(config, run, judging, difficulty=domain_difficulty(config))
        scheduler = judging.scheduler(workers.inference, workers.progress)
        rollouts = prompt_rollouts(config, scheduler, workers.runner, run.state.metrics.warn)
        run.state.keep(workers.saved_engines, rollouts=rollouts, advantages=workers.advantages)
        evaluator = prompt_evaluator(config, scheduler, workers.runner)
        return cls(config=config, run_state=run.state, workers=workers, rollouts=rollouts, evaluator=evaluator)

    def export(self, directory: Path, summary: Summary) -> None:
        """Write the trained model as a Hugging Face directory, with a card of the run."""
        export_model(self.workers.actor.cluster, self.config, directory, summary)

    @classmethod
    def launch(cls, config: RLVRConfig, *, resume: str | None = None) -> RunResult:
        """Check the configuration, then train in a folder of its own.

        Args:
            config: The validated configuration.
            resume: None starts anew; "" continues the latest run of this name; else the run to continue.
        """
        refuse_errors(cls.check(config))
        return launch(config, cls.build, resume=resume)

    @classmethod
    def check(cls, config: RLVRConfig) -> Report:
        """Return every problem that can be known before a run, and its plan."""
        return check(config, prompt_findings)

    @classmethod
    def evaluate(cls, config: RLVRConfig, model: str) -> dict[str, float]:
        """Evaluate a model on the configuration's evaluation set and return the figures."""
        return evaluate_model(
            config,
            model,
            Judging,
            lambda config, judging, engines, runner: prompt_evaluator(config, judging.scheduler(engines), runner),
        )
