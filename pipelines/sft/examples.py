"""What supervised runs are made of: the samples of each step, the evaluation, the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.builtin.pipelines.sft.objective import SupervisedObjective, likelihood_metrics
from roll_like.cluster import ResourceManager
from roll_like.data.bad_rows import RowsReport
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.data.samples import ConversationSample, SampleSet
from roll_like.metrics.manager import MetricsManager
from roll_like.models.load import ResolvedModel, load_tokenizer, resolve_model
from roll_like.run.launch import measuring
from roll_like.training.engine import Timer, TrainingEngine
from roll_like.training.start import rank_spec, start_engine
from roll_like.types import TrainingSample
from roll_like.values import Max, Mean, Metric, Sum, reduce


def conversations_of(config: SFTConfig) -> SampleSet[ConversationSample]:
    """Return the samples that are trained on."""
    return load_conversations(config.data, _renderer(config))


def training_samples(conversations: Sequence[ConversationSample]) -> list[TrainingSample]:
    """Return conversations as the trainer takes them: each for itself."""
    return [
        TrainingSample(group_id=str(index), token_ids=each.token_ids, prompt_length=0, sampled=each.trained)
        for index, each in enumerate(conversations)
    ]


class LikelihoodEvaluator:
    """Measures how likely the model finds answers that it is not trained on.

    Args:
        config: The run's configuration; has an `evaluation` section.
        trainer: Computes log-probabilities.
    """

    def __init__(self, config: SFTConfig, trainer: TrainingEngine[Any]) -> None:
        assert config.evaluation is not None, "the caller asked"
        self._schedule = config.evaluation
        self._trainer = trainer
        data = config.data.reading(config.evaluation.sources)
        loaded = load_conversations(data, _renderer(config), section="evaluation")
        self._samples = training_samples(loaded.samples)
        self._names = [source.name for source in loaded.sources for _ in source.samples]

    def due(self, finished: int, total: int) -> bool:
        """Return whether to evaluate after `finished` of `total` steps."""
        return self._schedule.due(finished, total)

    def evaluate(self) -> tuple[Mapping[str, Metric], None]:
        """Return `eval/loss`, `eval/perplexity` and the loss of each source."""
        return likelihood_metrics(self._samples, self._trainer.logprobs(self._samples), self._names), None

    def score(self, values: Mapping[str, float]) -> float | None:
        """Return what the best checkpoint has most of: likelihood."""
        return -values["eval/loss"] if "eval/loss" in values else None


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


def evaluate_likelihood(config: SFTConfig, model_path: str) -> dict[str, float]:
    """Measure a model by the configuration's evaluation, without training.

    Raises:
        ConfigError: The configuration has no `evaluation` section.
    """
    config = config.evaluating(model_path)
    with measuring(config) as (resources, stack):
        trainer = start_supervised(config, resolve_model(config.model), resources, stack, frozen=True)
        metrics, _ = LikelihoodEvaluator(config, trainer).evaluate()
    return reduce(metrics)


def samples_metrics(samples: Sequence[TrainingSample]) -> dict[str, Metric]:
    """Return how many samples a step has, how many of their tokens are trained, and how long they are."""
    trained = sum(int(sample.sampled.sum()) for sample in samples)
    return length_metrics([len(sample.token_ids) for sample in samples], trained=trained)


def length_metrics(lengths: Sequence[int], *, trained: int) -> dict[str, Metric]:
    """Return the same of samples of so many tokens each, of which so many are trained in all."""
    return {
        "train/samples": Sum(float(len(lengths))),
        "train/tokens": Sum(float(trained)),
        "train/sample_length/mean": Mean(sum(lengths) / len(lengths), len(lengths)),
        "train/sample_length/max": Max(float(max(lengths))),
    }


def warn_of_rows(metrics: MetricsManager, report: Iterable[RowsReport]) -> None:
    """Warn of sources of which rows were left out or shortened."""
    for source in report:
        if source.left_out or source.shortened:
            metrics.warn(str(source))


def _renderer(config: SFTConfig) -> Renderer:
    return Renderer(load_tokenizer(config.model))
