"""Training of a reward model: score preferred answers higher than others, or each answer, or step, as it was."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

from roll_like.builtin.pipelines.reward_model.answer_objective import ScoredAnswerObjective
from roll_like.builtin.pipelines.reward_model.check import score_findings
from roll_like.builtin.pipelines.reward_model.config import RewardModelRunConfig, ScoredPairData, StepData
from roll_like.builtin.pipelines.reward_model.objective import RewardModelObjective, ScoreObjective
from roll_like.builtin.pipelines.reward_model.scored_answers import ScoredAnswer, load_scored_answers
from roll_like.builtin.pipelines.reward_model.scored_pairs import load_scored_pairs
from roll_like.builtin.pipelines.reward_model.step_objective import StepObjective
from roll_like.builtin.pipelines.reward_model.steps import StepAnswer, load_steps
from roll_like.check import Report
from roll_like.check.findings import failed
from roll_like.check.hub import localised
from roll_like.cluster import ResourceManager
from roll_like.data.chat import Renderer
from roll_like.data.samples import SampleSet
from roll_like.errors import RollLikeError
from roll_like.models.classifier import check_outputs, pad_token_id
from roll_like.models.load import load_tokenizer, resolve_model
from roll_like.models.modules import load_model_config
from roll_like.models.shape import ModelShape
from roll_like.offline.pipeline import Findings, OfflinePipeline
from roll_like.offline.samples import length_metrics
from roll_like.run.evaluation import Evaluation, pair_evaluation
from roll_like.training.engine import TrainingEngine
from roll_like.types import Pair
from roll_like.values import Metrics

#: What is learned from.
ScoredItem: TypeAlias = Pair | ScoredAnswer | StepAnswer


class RewardModelPipeline(OfflinePipeline[RewardModelRunConfig, ScoredItem, Sequence[Any]]):
    """Given scored conversations; each step brings the model's scores a little closer to what was said of them."""

    position: ClassVar[str] = "pairs"

    @classmethod
    def load(cls, config: RewardModelRunConfig, rows: Any, renderer: Renderer, section: str) -> SampleSet[Any]:
        """Return the pairs, the single answers, or the answers in steps, of `rows`."""
        if isinstance(rows, ScoredPairData):
            return load_scored_pairs(rows, renderer, section=section)
        if isinstance(rows, StepData):
            return load_steps(rows, renderer, section=section)
        return load_scored_answers(rows, renderer, loss=config.algorithm.loss, section=section)

    @classmethod
    def findings(
        cls, config: RewardModelRunConfig, renderer: Renderer | None, shape: ModelShape | None, report: Report
    ) -> Findings[ScoredItem]:
        """Yield what is wrong with the model to start from and with rows; tell the report what became of these."""
        model = localised(config.model, "model.path", []) if shape is not None else None
        if model is not None:
            try:
                check_outputs(resolve_model(model).path, config.task, trust_remote_code=model.trust_remote_code)
            except RollLikeError as error:
                yield failed("model.path", error)
        loaded = yield from super().findings(config, renderer, shape, report)
        yield from score_findings(config, loaded)
        return loaded

    @classmethod
    def objective(cls, config: RewardModelRunConfig) -> ScoreObjective[Any, Any]:
        """Return the loss, of a language model or a reward model to start from."""
        shape = load_model_config(resolve_model(config.model).path, trust_remote_code=config.model.trust_remote_code)
        shared: Any = {
            "settings": config.training,
            "algorithm": config.algorithm,
            "pad_token_id": pad_token_id(shape, load_tokenizer(config.model)),
        }
        if config.data.type == "steps":
            return StepObjective(**shared, stated=config.stated_in_model)
        return (RewardModelObjective if config.data.type == "pairs" else ScoredAnswerObjective)(**shared)

    def batch(self, samples: Sequence[ScoredItem]) -> Sequence[ScoredItem]:
        """Return a step's pairs, or its answers."""
        return samples

    def figures(self, samples: Sequence[ScoredItem]) -> Metrics:
        """Return how many conversations a step has, and how long they are."""
        lengths = [len(each) for sample in samples for each in sample.sequences]
        return length_metrics(lengths, trained=sum(lengths))  # all of their tokens are read

    @classmethod
    def evaluation_of(cls, config: RewardModelRunConfig, trainer: TrainingEngine[Sequence[Any]]) -> Evaluation | None:
        """Return what measures the scores of other conversations; None without an evaluation."""
        rows = cls.evaluated_on(config)
        if config.evaluation is None or rows is None:
            return None
        measured = pair_evaluation(config.evaluation, partial(trainer.measure, rows.samples))
        # how well single answers are ordered; ratings are to be met as they are
        return measured if config.data.type == "pairs" else replace(measured, best=("eval/auc", "-eval/loss"))

    @classmethod
    def start_evaluator(
        cls, config: RewardModelRunConfig, resources: ResourceManager, stack: ExitStack
    ) -> Evaluation | None:
        once = config.model_copy(update={"steps": 1, "epochs": None})
        return cls.evaluation_of(once, cls.start_trainer(once, resources, stack))
