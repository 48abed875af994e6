"""Training of a reward model: score preferred answers higher than others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

from roll_like.builtin.pipelines.reward_model.config import RewardModelRunConfig
from roll_like.builtin.pipelines.reward_model.objective import RewardModelObjective
from roll_like.builtin.pipelines.reward_model.scored_pairs import load_scored_pairs
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


class RewardModelPipeline(OfflinePipeline[RewardModelRunConfig, Pair, Sequence[Pair]]):
    """Given pairs of conversations; each step scores what was chosen a little higher than what was not."""

    position: ClassVar[str] = "pairs"

    @classmethod
    def load(cls, config: RewardModelRunConfig, rows: Any, renderer: Renderer, section: str) -> SampleSet[Pair]:  # noqa: ARG003
        """Return the pairs of `rows`."""
        return load_scored_pairs(rows, renderer, section=section)

    @classmethod
    def findings(
        cls, config: RewardModelRunConfig, renderer: Renderer | None, shape: ModelShape | None, report: Report
    ) -> Findings[Pair]:
        """Yield what is wrong with the model to start from and with pairs; tell the report what became of rows."""
        model = localised(config.model, "model.path", []) if shape is not None else None
        if model is not None:
            try:
                check_outputs(resolve_model(model).path, trust_remote_code=model.trust_remote_code)
            except RollLikeError as error:
                yield failed("model.path", error)
        return (yield from super().findings(config, renderer, shape, report))

    @classmethod
    def objective(cls, config: RewardModelRunConfig) -> RewardModelObjective:
        """Return the Bradley-Terry loss, of a language model or a reward model to start from."""
        shape = load_model_config(resolve_model(config.model).path, trust_remote_code=config.model.trust_remote_code)
        return RewardModelObjective(
            settings=config.training,
            algorithm=config.algorithm,
            pad_token_id=pad_token_id(shape, load_tokenizer(config.model)),
        )

    def batch(self, samples: Sequence[Pair]) -> Sequence[Pair]:
        """Return a step's pairs."""
        return samples

    def figures(self, samples: Sequence[Pair]) -> Metrics:
        """Return how many conversations a step has, and how long they are."""
        lengths = [len(each) for pair in samples for each in pair.sequences]
        return length_metrics(lengths, trained=sum(lengths))  # all of their tokens are read

    @classmethod
    def evaluation_of(cls, config: RewardModelRunConfig, trainer: TrainingEngine[Sequence[Pair]]) -> Evaluation | None:
        """Return what measures how often the right conversation scores higher; None without an evaluation."""
        pairs = cls.evaluated_on(config)
        if config.evaluation is None or pairs is None:
            return None
        return pair_evaluation(config.evaluation, partial(trainer.measure, pairs.samples))

    @classmethod
    def start_evaluator(
        cls, config: RewardModelRunConfig, resources: ResourceManager, stack: ExitStack
    ) -> Evaluation | None:
        once = config.model_copy(update={"steps": 1, "epochs": None})
        return cls.evaluation_of(once, cls.start_trainer(once, resources, stack))
