"""Preference training: make answers that are preferred likelier than those that are not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.builtin.pipelines.dpo.preferences import (
    PreferenceEvaluator,
    References,
    Trainer,
    asked_of,
    batch_of,
    compared,
    evaluate_preferences,
    evaluated_preferences_of,
    preferences_of,
    references_of,
    start_preference,
)
from roll_like.builtin.pipelines.online_dpo.iterations import evaluate_iterations, start_iterations
from roll_like.builtin.pipelines.online_dpo.pairs import PreferenceSource
from roll_like.builtin.pipelines.sft.examples import samples_metrics, warn_of_rows
from roll_like.check import Report, check_run, refuse_errors
from roll_like.metrics.summary import Summary
from roll_like.models.load import resolve_model
from roll_like.offline.check import given_plan, preference_findings
from roll_like.policy_gradient.workers import export_model
from roll_like.registry import PIPELINES
from roll_like.run.launch import Evaluates, RunContext, RunResult, RunState, launch


@PIPELINES.register("dpo")
@dataclass(kw_only=True)
class DPOPipeline:
    """The parts of a preference run. `run` is the algorithm; everything else is a part's business."""

    Config: ClassVar[type[DPOConfig]] = DPOConfig

    config: DPOConfig
    run_state: RunState
    preferences: PreferenceSource
    trainer: Trainer
    references: References
    evaluator: Evaluates | None

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
        if config.iterations is not None:
            sampled = start_iterations(config, run)
            return cls(
                config=config,
                run_state=run.state,
                preferences=sampled.pairs,
                trainer=sampled.trainer,
                references=sampled.references,
                evaluator=sampled.evaluator,
            )
        run.state.metrics.phase("reading the data")
        data, evaluated = preferences_of(config), evaluated_preferences_of(config)
        warn_of_rows(run.state.metrics, data.report)
        order = data.order(seed=config.seed, shuffle=config.data.shuffle)
        run.state.metrics.phase("starting workers")
        model = resolve_model(config.model)
        trainer = start_preference(config, model, run.resources, run.stack, timer=run.state.timer)
        references = references_of(config, run, trainer, asked_of(config, data, evaluated))
        run.state.keep([trainer], pairs=order)
        evaluator = None if evaluated is None else PreferenceEvaluator(config, evaluated, trainer, references)
        return cls(
            config=config,
            run_state=run.state,
            preferences=order,
            trainer=trainer,
            references=references,
            evaluator=evaluator,
        )

    def export(self, directory: Path, summary: Summary) -> None:
        """Write the trained model as a Hugging Face directory, with a card of the run."""
        export_model(self.trainer.cluster, self.config, directory, summary)

    @classmethod
    def launch(cls, config: DPOConfig, *, resume: str | None = None) -> RunResult:
        """Check the configuration, then train in a folder of its own.

        Args:
            config: The validated configuration.
            resume: None starts anew; "" continues the latest run of this name; else the run to continue.
        """
        refuse_errors(cls.check(config))
        lasting = config if config.epochs is None else config.lasting(len(preferences_of(config)))
        return launch(lasting, cls.build, resume=resume)

    @classmethod
    def check(cls, config: DPOConfig) -> Report:
        """Return every problem that can be known before a run, and its plan."""
        return check_run(config, given_plan, preference_findings)

    @classmethod
    def evaluate(cls, config: DPOConfig, model: str) -> dict[str, float]:
        """Measure a model by the evaluation's rows, against the configuration's reference, and by its rewards."""
        return evaluate_preferences(config, model) if config.iterations is None else evaluate_iterations(config, model)
