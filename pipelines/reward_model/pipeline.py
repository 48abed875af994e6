"""Training of a reward model: score preferred answers higher than others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from roll_like.builtin.pipelines.reward_model.check import check_score
from roll_like.builtin.pipelines.reward_model.config import RewardModelRunConfig
from roll_like.builtin.pipelines.reward_model.objective import RewardModelObjective
from roll_like.builtin.pipelines.reward_model.scored_pairs import load_scored_pairs
from roll_like.check import Report
from roll_like.cluster import ResourceManager
from roll_like.data.chat import Renderer
from roll_like.data.samples import SampleSet
from roll_like.models.classifier import pad_token_id
from roll_like.models.load import load_tokenizer, resolve_model
from roll_like.models.modules import load_model_config
from roll_like.models.shape import ModelShape
from roll_like.offline.evaluator import OfflineEvaluator, pair_evaluator
from roll_like.offline.pipeline import Findings, OfflinePipeline
from roll_like.offline.samples import length_metrics
from roll_like.run.state import RunContext
from roll_like.training.engine import TrainingEngine
from roll_like.training.start import start_trainer
from roll_like.types import Pair
from roll_like.values import Metric

_Trainer = TrainingEngine[Sequence[Pair]]


@dataclass(kw_only=True)
class RewardModelPipeline(OfflinePipeline[RewardModelRunConfig, Pair, Sequence[Pair]]):
    """The parts of a run that trains a reward model."""

    def batch(self, samples: list[Pair]) -> list[Pair]:
        """Return the pairs, of which each chosen conversation will score a little higher than the other."""
        return samples

    def figures(self, samples: Sequence[Pair]) -> dict[str, Metric]:
        """Return how many tokens a step trains on: all are read."""
        lengths = [len(each) for pair in samples for each in pair.sequences]
        return length_metrics(lengths, trained=sum(lengths))

    @classmethod
    def build(cls, config: RewardModelRunConfig, run: RunContext) -> Self:
        """Start the trainer and put the parts together, where a resumed run left them."""
        samples = cls.read(config, run).order(seed=config.seed, shuffle=config.data.shuffle)
        run.state.metrics.phase("starting workers")
        trainer = start_reward_model(config, run.resources, run.stack)
        run.state.keep([trainer], pairs=samples)
        evaluator = cls.evaluator_of(config, trainer)
        return cls(config=config, run_state=run.state, samples=samples, trainer=trainer, evaluator=evaluator)

    @classmethod
    def load(cls, config: RewardModelRunConfig, rows: Any, renderer: Renderer, section: str) -> SampleSet[Pair]:  # noqa: ARG003
        """Return the pairs of `rows`."""
        return load_scored_pairs(rows, renderer, section=section)

    @classmethod
    def findings(
        cls, config: RewardModelRunConfig, renderer: Renderer | None, shape: ModelShape | None, report: Report
    ) -> Findings[Pair]:
        """Yield what is wrong with pairs and with the model to start from; tell the report what became of rows."""
        yield from check_score(config, shape)
        return (yield from super().findings(config, renderer, shape, report))

    @classmethod
    def start_evaluator(
        cls, config: RewardModelRunConfig, resources: ResourceManager, stack: ExitStack
    ) -> OfflineEvaluator | None:
        """Start a trainer that takes no step."""
        once = config.model_copy(update={"steps": 1, "epochs": None})
        return cls.evaluator_of(once, start_reward_model(once, resources, stack))

    @classmethod
    def evaluator_of(cls, config: RewardModelRunConfig, trainer: _Trainer) -> OfflineEvaluator | None:
        """Return what measures how often the right conversation scores higher; None without an evaluation."""
        pairs = cls.evaluated_on(config)
        if config.evaluation is None or pairs is None:
            return None
        return pair_evaluator(config.evaluation, partial(trainer.measure, pairs.samples))


def start_reward_model(config: RewardModelRunConfig, resources: ResourceManager, stack: ExitStack) -> _Trainer:
    """Start the trainer's ranks, of a language model or a reward model."""
    model = resolve_model(config.model)
    shape = load_model_config(model.path, trust_remote_code=config.model.trust_remote_code)
    objective = RewardModelObjective(
        settings=config.training,
        algorithm=config.algorithm,
        pad_token_id=pad_token_id(shape, load_tokenizer(config.model)),
    )
    return start_trainer(config, model, objective, resources, stack)
