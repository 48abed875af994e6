"""What supervised runs are made of: the samples of each step, the evaluation, the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

from roll_like.cluster import RaySession, ResourceManager
from roll_like.config.sft import SFTConfig
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.data.order import Order
from roll_like.data.samples import ConversationSample, SampleSet
from roll_like.errors import ConfigError
from roll_like.models.load import ResolvedModel, load_tokenizer, resolve_model
from roll_like.training.language_model import LanguageModelSpec
from roll_like.training.start import Timer, start_ranks
from roll_like.training.supervised import SupervisedEngine, likelihood_metrics
from roll_like.training.supervised_worker import SupervisedWorker
from roll_like.types import TrainingSample
from roll_like.values import Max, Mean, Metric, Sum, reduce


def conversations_of(config: SFTConfig) -> SampleSet[ConversationSample]:
    """Return the samples that are trained on."""
    return load_conversations(config.data, _renderer(config))


class ExampleSource:
    """Brings a step's samples.

    Args:
        order: In which order they come.
        samples_per_step: How many a step has.
    """

    def __init__(self, order: Order[ConversationSample], samples_per_step: int) -> None:
        self._order = order
        self._samples_per_step = samples_per_step

    def take(self) -> list[TrainingSample]:
        """Return the samples of the next step."""
        return [_training_sample(self._order.next(), index) for index in range(self._samples_per_step)]

    def state(self) -> dict[str, Any]:
        """Return the data position."""
        return self._order.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._order.load_state(state)


class LikelihoodEvaluator:
    """Measures how likely the model finds answers that it is not trained on.

    Args:
        config: The run's configuration; has an `evaluation` section.
        trainer: Computes log-probabilities.
    """

    def __init__(self, config: SFTConfig, trainer: SupervisedEngine) -> None:
        assert config.evaluation is not None, "the caller asked"
        self._schedule = config.evaluation
        self._trainer = trainer
        data = config.data.model_copy(update={"sources": config.evaluation.sources})
        loaded = load_conversations(data, _renderer(config), section="evaluation")
        self._samples = [_training_sample(sample, index) for index, sample in enumerate(loaded)]
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
    span_timer: Timer = lambda name: nullcontext(),
) -> SupervisedEngine:
    """Start the trainer's ranks.

    Args:
        config: The run's configuration.
        model: What is trained.
        resources: Where the ranks go.
        stack: Ends them when it is closed.
        frozen: Whether they only compute log-probabilities.
        span_timer: Times a named part of a step.
    """
    span, training = config.resources.spans.training, config.training
    spec = LanguageModelSpec(
        model_path=str(model.path),
        dtype=config.model.dtype,
        device=config.resources.device,
        threads=len(span) // training.workers,
        seed=config.seed,
        total_updates=1 if frozen else config.total_steps,
        trust_remote_code=config.model.trust_remote_code,
        imports=config.import_,
        training=training,
        frozen=frozen,
    )
    cluster = start_ranks("training", SupervisedWorker, spec, training.workers, resources, span, stack=stack)
    return SupervisedEngine(cluster, training, packing=config.data.packing, span=span_timer)


def evaluate_likelihood(config: SFTConfig, model_path: str) -> dict[str, float]:
    """Measure a model by the configuration's evaluation, without training.

    Raises:
        ConfigError: The configuration has no `evaluation` section.
    """
    if config.evaluation is None:
        raise ConfigError("this configuration has no `evaluation` section", fix="add one")
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": model_path})})
    with ExitStack() as stack:
        stack.enter_context(RaySession(config.resources, config.output_dir / "evaluation-logs"))
        resources = stack.enter_context(ResourceManager(config.resources))
        resources.allocate()
        trainer = start_supervised(config, resolve_model(config.model), resources, stack, frozen=True)
        metrics, _ = LikelihoodEvaluator(config, trainer).evaluate()
    return reduce(metrics)


def samples_metrics(samples: Sequence[TrainingSample]) -> dict[str, Metric]:
    """Return how many samples a step has, and their lengths."""
    lengths = [len(sample.token_ids) for sample in samples]
    return {
        "train/samples": Sum(float(len(samples))),
        "train/sample_length/mean": Mean(sum(lengths) / len(lengths), len(lengths)),
        "train/sample_length/max": Max(float(max(lengths))),
    }


def _renderer(config: SFTConfig) -> Renderer:
    return Renderer(load_tokenizer(config.model))


def _training_sample(sample: ConversationSample, index: int) -> TrainingSample:
    return TrainingSample(group_id=str(index), token_ids=sample.token_ids, prompt_length=0, sampled=sample.trained)
