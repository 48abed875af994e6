"""What supervised runs are made of: the samples of each step, the evaluation, the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext

from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.builtin.pipelines.sft.objective import SupervisedObjective, likelihood_metrics
from roll_like.cluster import ResourceManager
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.data.samples import ConversationSample, SampleSet
from roll_like.models.load import ResolvedModel, load_renderer
from roll_like.offline.evaluator import OfflineEvaluator
from roll_like.offline.samples import training_samples
from roll_like.training.engine import Timer, TrainingEngine
from roll_like.training.start import rank_spec, start_engine
from roll_like.types import TrainingSample


def conversations_of(config: SFTConfig) -> SampleSet[ConversationSample]:
    """Return the samples that are trained on."""
    return load_conversations(config.data, _renderer(config))


def likelihood_evaluator(
    config: SFTConfig, trainer: TrainingEngine[Sequence[TrainingSample]]
) -> OfflineEvaluator | None:
    """Return what measures how likely the model finds the evaluation's answers, or nothing without an evaluation.

    Args:
        config: The run's configuration.
        trainer: Computes log-probabilities.
    """
    if config.evaluation is None:
        return None
    data = config.data.reading(config.evaluation.sources)
    loaded = load_conversations(data, _renderer(config), section="evaluation")
    samples = training_samples(loaded.samples)
    names = [source.name for source in loaded.sources for _ in source.samples]
    return OfflineEvaluator(config.evaluation, lambda: likelihood_metrics(samples, trainer.logprobs(samples), names))


def start_supervised(
    config: SFTConfig,
    model: ResolvedModel,
    resources: ResourceManager,
    stack: ExitStack,
    *,
    frozen: bool = False,
    timer: Timer = lambda name: nullcontext(),
) -> TrainingEngine[Sequence[TrainingSample]]:
    """Start the trainer's ranks.

    Args:
        config: The run's configuration.
        model: What is trained.
        resources: Where the ranks go.
        stack: Ends them when it is closed.
        frozen: Whether they only compute log-probabilities.
        timer: Times a named part of a step.
    """
    devices = config.resources.device_mapping.training
    objective = SupervisedObjective(settings=config.training, packing=config.data.packing)
    spec = rank_spec(config, model, devices, objective, total_updates=None if frozen else config.total_steps)
    return start_engine("training", spec, resources, devices, stack=stack, timer=timer)


def _renderer(config: SFTConfig) -> Renderer:
    return load_renderer(config.model)
