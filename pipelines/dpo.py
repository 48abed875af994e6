"""Preference training: make chosen answers likelier than rejected ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from roll_like.build import export_model
from roll_like.check import Report, check_run, refuse_errors
from roll_like.check.given import given_plan, pair_findings
from roll_like.comparing import (
    PairFeed,
    PreferenceEvaluator,
    References,
    answers_of,
    evaluate_preferences,
    evaluated_pairs_of,
    pairs_of,
    references_of,
    start_preference,
    step_metrics,
)
from roll_like.config.dpo import DPOConfig
from roll_like.metrics.summary import Summary
from roll_like.models.load import resolve_model
from roll_like.registry import PIPELINES
from roll_like.run import RunContext, RunResult, RunState, launch
from roll_like.training.preference import PreferenceEngine


@PIPELINES.register("dpo")
@dataclass(kw_only=True)
class DPOPipeline:
    """The parts of a preference run. `run` is the algorithm; everything else is a part's business."""

    Config: ClassVar[type[DPOConfig]] = DPOConfig

    config: DPOConfig
    run_state: RunState
    pairs: PairFeed
    trainer: PreferenceEngine
    references: References
    evaluator: PreferenceEvaluator | None

    def run(self) -> None:
        """Train to the end: each step prefers what was chosen a little more than the reference model does."""
        state = self.run_state
        state.evaluate(self.evaluator)
        for step in state.steps():
            pairs = self.pairs.take()
            answers = answers_of(pairs)
            reference = self.references.sums(pairs)
            with state.timer("train"):
                report = self.trainer.train_step(answers, reference)
            state.log(step, report, step_metrics(answers))
            state.evaluate(self.evaluator)

    @classmethod
    def build(cls, config: DPOConfig, run: RunContext) -> Self:
        """Start the policy, ask the reference, and put the parts together, where a resumed run left them."""
        run.state.metrics.phase("reading the data")
        data, evaluated = pairs_of(config), evaluated_pairs_of(config)
        for source in data.report:
            if source.left_out or source.shortened:
                run.state.metrics.warn(str(source))
        feed = PairFeed(data.order(seed=config.seed, shuffle=config.data.shuffle), config.data.pairs_per_step)
        run.state.metrics.phase("starting workers")
        model = resolve_model(config.model)
        trainer = start_preference(config, model, run.resources, run.stack, span_timer=run.state.timer)
        references = references_of(config, run, trainer, [data, *([] if evaluated is None else [evaluated])])
        run.state.keep([trainer], pairs=feed)
        evaluator = None if evaluated is None else PreferenceEvaluator(config, evaluated, trainer, references)
        return cls(
            config=config, run_state=run.state, pairs=feed, trainer=trainer, references=references, evaluator=evaluator
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
        lasting = config if config.epochs is None else config.lasting(len(pairs_of(config)))
        return launch(lasting, cls.build, resume=resume)

    @classmethod
    def check(cls, config: DPOConfig) -> Report:
        """Return every problem that can be known before a run, and its plan."""
        return check_run(config, given_plan, pair_findings)

    @classmethod
    def evaluate(cls, config: DPOConfig, model: str) -> dict[str, float]:
        """Measure a model by the evaluation's pairs, against the configuration's reference."""
        return evaluate_preferences(config, model)
