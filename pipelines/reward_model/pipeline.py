"""Training of a reward model: score preferred answers higher than others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from roll_like.builtin.pipelines.dpo.preferences import PairEvaluator
from roll_like.builtin.pipelines.reward_model.config import RewardModelRunConfig
from roll_like.builtin.pipelines.reward_model.pairs import (
    evaluate_scores,
    score_evaluator_of,
    scored_pairs_metrics,
    scored_pairs_of,
    start_reward_model,
)
from roll_like.builtin.pipelines.sft.examples import warn_of_rows
from roll_like.check import Report, check_run, refuse_errors
from roll_like.data.order import Order
from roll_like.data.scored_pairs import ScoredPair
from roll_like.metrics.summary import Summary
from roll_like.models.load import resolve_model
from roll_like.offline.check import given_plan, scored_pair_findings
from roll_like.policy_gradient.workers import export_model
from roll_like.registry import PIPELINES
from roll_like.run.launch import RunContext, RunResult, RunState, launch
from roll_like.training.engine import TrainingEngine


@PIPELINES.register("reward_model")
@dataclass(kw_only=True)
class RewardModelPipeline:
    """The parts of a run that trains a reward model. `run` is the algorithm; everything else is a part's business."""

    Config: ClassVar[type[RewardModelRunConfig]] = RewardModelRunConfig

    config: RewardModelRunConfig
    run_state: RunState
    pairs: Order[ScoredPair]
    trainer: TrainingEngine[Sequence[ScoredPair]]
    evaluator: PairEvaluator | None

    def run(self) -> None:
        """Train to the end: each step scores what was chosen a little higher than what was not."""
        state = self.run_state
        state.evaluate(self.evaluator)
        for step in state.steps():
            pairs = self.pairs.take(self.config.data.pairs_per_step)
            with state.timer("train"):
                report = self.trainer.train_step(pairs)
            state.log(step, report, scored_pairs_metrics(pairs))
            state.evaluate(self.evaluator)

    @classmethod
    def build(cls, config: RewardModelRunConfig, run: RunContext) -> Self:
        """Start the trainer and put the parts together, where a resumed run left them."""
        run.state.metrics.phase("reading the data")
        data = scored_pairs_of(config)
        warn_of_rows(run.state.metrics, data.report)
        pairs = data.order(seed=config.seed, shuffle=config.data.shuffle)
        run.state.metrics.phase("starting workers")
        trainer = start_reward_model(config, resolve_model(config.model), run.resources, run.stack)
        run.state.keep([trainer], pairs=pairs)
        evaluator = score_evaluator_of(config, trainer)
        return cls(config=config, run_state=run.state, pairs=pairs, trainer=trainer, evaluator=evaluator)

    def export(self, directory: Path, summary: Summary) -> None:
        """Write the model as the directory of a sequence classifier, which the `reward_model` reward loads."""
        export_model(self.trainer.cluster, self.config, directory, summary)

    @classmethod
    def launch(cls, config: RewardModelRunConfig, *, resume: str | None = None) -> RunResult:
        """Check the configuration, then train in a folder of its own.

        Args:
            config: The validated configuration.
            resume: None starts anew; "" continues the latest run of this name; else the run to continue.
        """
        refuse_errors(cls.check(config))
        lasting = config if config.epochs is None else config.lasting(len(scored_pairs_of(config)))
        return launch(lasting, cls.build, resume=resume)

    @classmethod
    def check(cls, config: RewardModelRunConfig) -> Report:
        """Return every problem that can be known before a run, and its plan."""
        return check_run(config, given_plan, scored_pair_findings)

    @classmethod
    def evaluate(cls, config: RewardModelRunConfig, model: str) -> dict[str, float]:
        """Measure a reward model by the evaluation's pairs.

        Raises:
            ConfigError: The configuration has no `evaluation` section.
        """
        return evaluate_scores(config, model)
