"""Preference training: make answers that are preferred likelier than those that are not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from roll_like.builtin.pipelines.dpo.check import label_findings
from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.builtin.pipelines.dpo.labelled_data import Preference, load_preferences
from roll_like.builtin.pipelines.dpo.objective import AnswersObjective
from roll_like.builtin.pipelines.dpo.preferences import (
    PreferenceStep,
    SequenceReference,
    batch_of,
    live_reference,
    objective_of,
    precomputed_reference,
    preference_evaluator,
    reference_inputs,
    start_preference_evaluator,
    with_reference_logprobs,
)
from roll_like.check import Report
from roll_like.check.model import check_reference
from roll_like.cluster import ResourceManager
from roll_like.data.chat import Renderer
from roll_like.data.samples import SampleSet
from roll_like.models.shape import ModelShape
from roll_like.offline.pipeline import Findings, OfflinePipeline
from roll_like.run.evaluation import Evaluation
from roll_like.run.state import RunContext
from roll_like.training.engine import policy_copies


@dataclass(kw_only=True)
class DPOPipeline(OfflinePipeline[DPOConfig, Preference, Any]):
    """Given preferences; each step makes preferred or desirable answers likelier relative to the reference."""

    position: ClassVar[str] = "pairs"

    reference: SequenceReference | None

    @classmethod
    def build(cls, config: DPOConfig, run: RunContext) -> Self:
        """Start policy and reference, and put the parts together, where a resumed run left them."""
        data, evaluated = cls.read(config, run), cls.evaluated_on(config)
        run.state.metrics.phase("starting workers")
        trainer = cls.start_trainer(config, run.resources, run.stack, timer=run.state.timer)
        copies = policy_copies(trainer, config.copies)
        reference: SequenceReference | None
        if config.reference is not None and config.reference.mode == "precomputed":
            reference = precomputed_reference(config, run, trainer, reference_inputs(config, data, evaluated))
        else:
            reference = live_reference(config, run, trainer, copies)
        evaluator = None
        if evaluated is not None and config.evaluation is not None:
            batch = batch_of(config, evaluated.samples)
            evaluator = preference_evaluator(config.evaluation, batch, trainer, reference)
        return cls.resumed(config, run, data, trainer, evaluator, copies, reference=reference)

    @classmethod
    def load(cls, config: DPOConfig, rows: Any, renderer: Renderer, section: str) -> SampleSet[Preference]:  # noqa: ARG003
        """Return the pairs, or the single answers, of `rows`."""
        return load_preferences(rows, renderer, section=section)

    @classmethod
    def findings(
        cls, config: DPOConfig, renderer: Renderer | None, shape: ModelShape | None, report: Report
    ) -> Findings[Preference]:
        """Yield what is wrong with preferences and the reference model; tell the report what became of rows."""
        yield from check_reference(config, config.reference, shape)
        loaded = yield from super().findings(config, renderer, shape, report)
        yield from label_findings(config, loaded)
        return loaded

    @classmethod
    def objective(cls, config: DPOConfig) -> AnswersObjective[Any, Any]:
        """Return the preference loss."""
        return objective_of(config)

    def batch(self, samples: Sequence[Preference]) -> PreferenceStep:
        """Return a step's answers, with the reference's log-probabilities."""
        return with_reference_logprobs(batch_of(self.config, samples), self.reference)

    @classmethod
    def start_evaluator(cls, config: DPOConfig, resources: ResourceManager, stack: ExitStack) -> Evaluation | None:
        """Compute the reference's log-probabilities of the evaluation's rows, and start the policy."""
        evaluated = cls.evaluated_on(config)
        if evaluated is None or config.evaluation is None:
            return None
        batch = batch_of(config, evaluated.samples)
        return start_preference_evaluator(config, config.evaluation, batch, resources, stack)
