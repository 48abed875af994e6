"""Preference training: make answers that are preferred likelier than those that are not."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from roll_like.builtin.pipelines.dpo.check import preference_findings
from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.builtin.pipelines.dpo.preferences import (
    References,
    Trainer,
    asked_of,
    batch_of,
    compared,
    evaluated_preferences_of,
    preference_evaluator,
    preferences_of,
    references_of,
    start_preference,
    start_preference_evaluator,
)
from roll_like.check import Report, check_run
from roll_like.cluster import Cluster, ResourceManager
from roll_like.data.order import Order
from roll_like.data.pairs import Preference
from roll_like.data.samples import SampleSet
from roll_like.models.load import resolve_model
from roll_like.offline.check import offline_plan
from roll_like.offline.evaluator import OfflineEvaluator
from roll_like.offline.pipeline import OfflinePipeline
from roll_like.offline.samples import samples_metrics
from roll_like.run.state import RunContext
from roll_like.training.rank import TrainingRank


@dataclass(kw_only=True)
class DPOPipeline(OfflinePipeline[DPOConfig]):
    """The parts of a preference run."""

    preferences: Order[Preference]
    trainer: Trainer
    references: References

    def run(self) -> None:
        """Train to the end: each step prefers what is liked a little more than the reference model does."""
        state = self.run_state
        state.evaluate(self.evaluator)
        for step in state.steps():
            answers = batch_of(self.config, self.preferences.take(self.config.items_per_step[0]))
            answers = compared(answers, self.references)
            with state.timer("train"):
                report = self.trainer.train_step(answers)
            state.log(step, report, samples_metrics(answers.trained))
            state.evaluate(self.evaluator)

    @classmethod
    def build(cls, config: DPOConfig, run: RunContext) -> Self:
        """Start the policy, ask the reference, and put the parts together, where a resumed run left them."""
        data, evaluated = cls.read(config, run), evaluated_preferences_of(config)
        order = data.order(seed=config.seed, shuffle=config.data.shuffle)
        run.state.metrics.phase("starting workers")
        model = resolve_model(config.model)
        trainer = start_preference(config, model, run.resources, run.stack, timer=run.state.timer)
        references = references_of(config, run, trainer, asked_of(config, data, evaluated))
        run.state.keep([trainer], pairs=order)
        evaluator = None
        if evaluated is not None and config.evaluation is not None:
            batch = batch_of(config, evaluated.samples)
            evaluator = preference_evaluator(config.evaluation, batch, trainer, references)
        return cls(
            config=config,
            run_state=run.state,
            preferences=order,
            trainer=trainer,
            references=references,
            evaluator=evaluator,
        )

    @classmethod
    def load(cls, config: DPOConfig) -> SampleSet[Preference]:
        """Return the pairs, or the single answers, that are trained on."""
        return preferences_of(config)

    @classmethod
    def check(cls, config: DPOConfig) -> Report:
        """Return every problem that can be known before a run, and its plan."""
        return check_run(config, offline_plan, preference_findings)

    @classmethod
    def start_evaluator(cls, config: DPOConfig, resources: ResourceManager, stack: ExitStack) -> OfflineEvaluator:
        """Ask the reference about the evaluation's rows, and start the policy."""
        evaluated = evaluated_preferences_of(config)
        assert evaluated is not None, "there is an evaluation"
        assert config.evaluation is not None, "there is an evaluation"
        batch = batch_of(config, evaluated.samples)
        return start_preference_evaluator(config, config.evaluation, batch, resources, stack)

    @property
    def trained(self) -> Cluster[TrainingRank]:
        """The policy's ranks."""
        return self.trainer.cluster
