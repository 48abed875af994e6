"""Training of a reward model: score preferred answers higher than others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from roll_like.builtin.pipelines.reward_model.check import scored_pair_findings
from roll_like.builtin.pipelines.reward_model.config import RewardModelRunConfig
from roll_like.builtin.pipelines.reward_model.pairs import (
    score_evaluator_of,
    scored_pairs_metrics,
    scored_pairs_of,
    start_reward_model,
)
from roll_like.check import Report, check_run
from roll_like.cluster import Cluster, ResourceManager
from roll_like.data.order import Order
from roll_like.data.samples import SampleSet
from roll_like.data.scored_pairs import ScoredPair
from roll_like.models.load import resolve_model
from roll_like.offline.check import offline_plan
from roll_like.offline.evaluator import OfflineEvaluator
from roll_like.offline.pipeline import OfflinePipeline
from roll_like.run.state import RunContext
from roll_like.training.engine import TrainingEngine
from roll_like.training.rank import TrainingRank


@dataclass(kw_only=True)
class RewardModelPipeline(OfflinePipeline[RewardModelRunConfig]):
    """The parts of a run that trains a reward model."""

    pairs: Order[ScoredPair]
    trainer: TrainingEngine[Sequence[ScoredPair]]

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
        pairs = cls.read(config, run).order(seed=config.seed, shuffle=config.data.shuffle)
        run.state.metrics.phase("starting workers")
        trainer = start_reward_model(config, resolve_model(config.model), run.resources, run.stack)
        run.state.keep([trainer], pairs=pairs)
        evaluator = score_evaluator_of(config, trainer)
        return cls(config=config, run_state=run.state, pairs=pairs, trainer=trainer, evaluator=evaluator)

    @classmethod
    def load(cls, config: RewardModelRunConfig) -> SampleSet[ScoredPair]:
        """Return the pairs that are trained on."""
        return scored_pairs_of(config)

    @classmethod
    def check(cls, config: RewardModelRunConfig) -> Report:
        """Return every problem that can be known before a run, and its plan."""
        return check_run(config, offline_plan, scored_pair_findings)

    @classmethod
    def start_evaluator(
        cls,
        config: RewardModelRunConfig,
        resources: ResourceManager,
        stack: ExitStack,
    ) -> OfflineEvaluator:
        """Start a trainer that takes no step."""
        once = config.model_copy(update={"steps": 1, "epochs": None})
        trainer = start_reward_model(once, resolve_model(once.model), resources, stack)
        evaluator = score_evaluator_of(once, trainer)
        assert evaluator is not None, "there is an evaluation"
        return evaluator

    @property
    def trained(self) -> Cluster[TrainingRank]:
        """The trainer's ranks."""
        return self.trainer.cluster
