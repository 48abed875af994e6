"""What runs of a reward model are made of: the pairs of each step, the evaluation, the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from roll_like.builtin.pipelines.reward_model.config import RewardModelRunConfig
from roll_like.builtin.pipelines.reward_model.objective import RewardModelObjective
from roll_like.cluster import ResourceManager
from roll_like.data.samples import SampleSet
from roll_like.data.scored_pairs import ScoredPair, load_scored_pairs
from roll_like.models.classifier import pad_token_id
from roll_like.models.load import ResolvedModel, load_renderer, load_tokenizer
from roll_like.offline.evaluator import OfflineEvaluator, pair_evaluator
from roll_like.offline.samples import length_metrics
from roll_like.training.engine import TrainingEngine
from roll_like.training.start import rank_spec, start_engine
from roll_like.values import Metric


def scored_pairs_of(config: RewardModelRunConfig) -> SampleSet[ScoredPair]:
    """Return the pairs that are trained on."""
    return load_scored_pairs(config.data, load_renderer(config.model))


def scored_pairs_metrics(pairs: Sequence[ScoredPair]) -> dict[str, Metric]:
    """Return how many conversations a step has, and how long they are; all of their tokens are read."""
    lengths = [len(each) for pair in pairs for each in pair.sequences]
    return length_metrics(lengths, trained=sum(lengths))


def start_reward_model(
    config: RewardModelRunConfig, model: ResolvedModel, resources: ResourceManager, stack: ExitStack
) -> TrainingEngine[Sequence[ScoredPair]]:
    """Start the trainer's ranks.

    Args:
        config: The run's configuration.
        model: What is trained: a language model, or a reward model.
        resources: Where the ranks go.
        stack: Ends them when it is closed.
    """
    from transformers import AutoConfig

    devices = config.resources.device_mapping.training
    shape = AutoConfig.from_pretrained(str(model.path), trust_remote_code=config.model.trust_remote_code)
    objective = RewardModelObjective(
        settings=config.training,
        algorithm=config.algorithm,
        pad_token_id=pad_token_id(shape, load_tokenizer(config.model)),
    )
    spec = rank_spec(config, model, devices, objective, total_updates=config.total_steps)
    return start_engine("training", spec, resources, devices, stack=stack)


def score_evaluator_of(
    config: RewardModelRunConfig, trainer: TrainingEngine[Sequence[ScoredPair]]
) -> OfflineEvaluator | None:
    """Return what measures how often the right conversation scores higher, where the run has an evaluation."""
    if config.evaluation is None:
        return None
    data = config.data.reading(config.evaluation.sources)
    pairs = load_scored_pairs(data, load_renderer(config.model), section="evaluation")
    return pair_evaluator(config.evaluation, partial(trainer.measure, pairs.samples))
