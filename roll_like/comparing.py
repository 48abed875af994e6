"""What preference runs are made of: the pairs of each step, what the reference model says of them, the evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from roll_like.cluster import RaySession, ResourceManager
from roll_like.config.dpo import DPOConfig
from roll_like.config.sections import Span, TrainingConfig
from roll_like.data.chat import Renderer
from roll_like.data.order import Order
from roll_like.data.pairs import PairSample, load_pairs
from roll_like.data.samples import SampleSet
from roll_like.errors import ConfigError
from roll_like.models.load import ResolvedModel, load_tokenizer, resolve_model
from roll_like.run import RunContext
from roll_like.training.preference import PreferenceEngine
from roll_like.training.preference_worker import PreferenceSpec, PreferenceWorker
from roll_like.training.start import Timer, start_ranks
from roll_like.types import FloatArray, TrainingSample
from roll_like.values import Max, Mean, Metric, Sum, reduce

#: Where a run keeps what its reference model said.
REFERENCE_FILE = "pair_logprobs.npz"


def pairs_of(config: DPOConfig) -> SampleSet[PairSample]:
    """Return the pairs that are trained on."""
    return load_pairs(config.data, Renderer(load_tokenizer(config.model)))


def evaluated_pairs_of(config: DPOConfig) -> SampleSet[PairSample] | None:
    """Return the pairs of the evaluation, where there is one."""
    if config.evaluation is None:
        return None
    data = config.data.model_copy(update={"sources": config.evaluation.sources})
    return load_pairs(data, Renderer(load_tokenizer(config.model)), section="evaluation")


def answers_of(pairs: Sequence[PairSample]) -> list[TrainingSample]:
    """Return the answers of pairs, chosen and rejected in turn."""
    return [
        TrainingSample(
            group_id=str(index),
            token_ids=answer.token_ids,
            prompt_length=pair.prompt_length,
            sampled=answer.trained,
        )
        for index, pair in enumerate(pairs)
        for answer in pair.sequences
    ]


class References(Protocol):
    """Says how likely the reference model finds answers."""

    def sums(self, pairs: Sequence[PairSample]) -> FloatArray | None:
        """Return the log-probability of each answer, chosen and rejected in turn; None without a reference."""


class NoReference:
    """For losses that compare with nothing."""

    def sums(self, pairs: Sequence[PairSample]) -> None:  # noqa: ARG002 - what all references are asked
        """Return nothing."""
        return


class ReferenceCluster:
    """A frozen model that is asked in each step.

    Args:
        engine: Its ranks.
    """

    def __init__(self, engine: PreferenceEngine) -> None:
        self._engine = engine

    def sums(self, pairs: Sequence[PairSample]) -> FloatArray:
        """Return the log-probability of each answer."""
        return self._engine.sums(answers_of(pairs))


class PrecomputedReference:
    """What a reference model said of all pairs before the first step.

    Args:
        sums: Log-probability of the chosen and of the rejected answer, by the content of the pair.
    """

    def __init__(self, sums: Mapping[bytes, tuple[float, float]]) -> None:
        self._sums = sums

    def sums(self, pairs: Sequence[PairSample]) -> FloatArray:
        """Return the log-probability of each answer."""
        return np.array([each for pair in pairs for each in self._sums[pair.content()]], np.float32)

    @classmethod
    def compute(cls, engine: PreferenceEngine, pairs: Sequence[PairSample]) -> PrecomputedReference:
        """Ask an engine now."""
        sums = engine.sums(answers_of(pairs)).reshape(-1, 2)
        return cls({pair.content(): (float(c), float(r)) for pair, (c, r) in zip(pairs, sums, strict=True)})

    @classmethod
    def read(cls, path: Path, pairs: Sequence[PairSample], fingerprint: str) -> PrecomputedReference | None:
        """Return what an earlier process of the run wrote, or nothing where it wrote none, or of other data."""
        if not path.is_file():
            return None
        with np.load(path) as kept:
            if str(kept["fingerprint"]) != fingerprint:
                return None
            sums = kept["sums"]
        return cls({pair.content(): (float(c), float(r)) for pair, (c, r) in zip(pairs, sums, strict=True)})

    def write(self, path: Path, pairs: Sequence[PairSample], fingerprint: str) -> None:
        """Keep it for a resumed run."""
        sums = np.array([self._sums[pair.content()] for pair in pairs], np.float32)
        part = path.with_name(f"{path.stem}.part.npz")
        np.savez(part, sums=sums, fingerprint=np.array(fingerprint))
        part.replace(path)


def references_of(
    config: DPOConfig, run: RunContext, trainer: PreferenceEngine, sets: Sequence[SampleSet[PairSample]]
) -> References:
    """Return what the reference model says; the trainer has not taken a step yet.

    Args:
        config: The run's configuration.
        run: What it is built on.
        trainer: The policy before its first step.
        sets: Everything that will be asked about.
    """
    reference = config.reference
    if reference is None:
        return NoReference()
    if reference.mode == "cluster":
        return ReferenceCluster(_start_reference(config, run.resources, run.stack, run.state.timer))
    pairs = [pair for each in sets for pair in each]
    fingerprint = "/".join([reference.path or config.model.path, *(each.fingerprint for each in sets)])
    path = run.state.directory / REFERENCE_FILE
    kept = PrecomputedReference.read(path, pairs, fingerprint)
    if kept is not None:
        return kept
    run.state.metrics.phase("asking the reference model")
    with ExitStack() as stack:
        engine = trainer if reference.path is None else _start_reference(config, run.resources, stack)
        computed = PrecomputedReference.compute(engine, pairs)
    computed.write(path, pairs, fingerprint)
    return computed


class PairFeed:
    """Brings a step's pairs.

    Args:
        order: In which order they come.
        pairs_per_step: How many a step has.
    """

    def __init__(self, order: Order[PairSample], pairs_per_step: int) -> None:
        self._order = order
        self._pairs_per_step = pairs_per_step

    def take(self) -> list[PairSample]:
        """Return the pairs of the next step."""
        return [self._order.next() for _ in range(self._pairs_per_step)]

    def state(self) -> dict[str, Any]:
        """Return the data position."""
        return self._order.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._order.load_state(state)


class PreferenceEvaluator:
    """Measures how often the policy prefers what it should, on pairs that it is not trained on.

    Args:
        config: The run's configuration; has an `evaluation` section.
        pairs: What to evaluate on.
        trainer: The policy.
        references: What it is compared with.
    """

    def __init__(
        self, config: DPOConfig, pairs: SampleSet[PairSample], trainer: PreferenceEngine, references: References
    ) -> None:
        assert config.evaluation is not None, "the caller asked"
        self._schedule = config.evaluation
        self._pairs = pairs.samples
        self._trainer = trainer
        self._references = references

    def due(self, finished: int, total: int) -> bool:
        """Return whether to evaluate after `finished` of `total` steps."""
        return self._schedule.due(finished, total)

    def evaluate(self) -> tuple[Mapping[str, Metric], None]:
        """Return `eval/loss`, `eval/accuracy`, `eval/reward_margin` and the other figures of pairs."""
        measured = self._trainer.measure(answers_of(self._pairs), self._references.sums(self._pairs))
        figures = {"train/loss": "eval/loss"} | {
            name: f"eval/{name.removeprefix('preference/')}" for name in measured if name.startswith("preference/")
        }
        return {figures[name]: metric for name, metric in measured.items() if name in figures}, None

    def score(self, values: Mapping[str, float]) -> float | None:
        """Return what the best checkpoint has most of: right preferences."""
        return values.get("eval/accuracy")


def start_preference(
    config: DPOConfig,
    model: ResolvedModel,
    resources: ResourceManager,
    stack: ExitStack,
    *,
    span_timer: Timer = lambda name: nullcontext(),
) -> PreferenceEngine:
    """Start the policy's ranks."""
    span = config.resources.spans.training
    return _start(config, model, config.training, "training", span, resources, stack, span_timer, frozen=False)


def evaluate_preferences(config: DPOConfig, model_path: str) -> dict[str, float]:
    """Measure a model by the configuration's evaluation, against the configuration's reference, without training.

    Raises:
        ConfigError: The configuration has no `evaluation` section.
    """
    pairs = evaluated_pairs_of(config)
    if pairs is None:
        raise ConfigError("this configuration has no `evaluation` section", fix="add one")
    measured = config.model_copy(update={"model": config.model.model_copy(update={"path": model_path}), "steps": 1})
    with ExitStack() as stack:
        stack.enter_context(RaySession(config.resources, config.output_dir / "evaluation-logs"))
        resources = stack.enter_context(ResourceManager(config.resources))
        resources.allocate()
        references: References = NoReference()
        if config.reference is not None:
            with ExitStack() as short:
                asked = _start_reference(config, resources, short)
                references = PrecomputedReference.compute(asked, pairs.samples)
        trainer = start_preference(measured, resolve_model(measured.model), resources, stack)
        metrics, _ = PreferenceEvaluator(config, pairs, trainer, references).evaluate()
    return reduce(metrics)


def step_metrics(answers: Sequence[TrainingSample]) -> dict[str, Metric]:
    """Return how many answers a step has, and their lengths."""
    lengths = [len(answer.token_ids) for answer in answers]
    return {
        "train/samples": Sum(float(len(answers))),
        "train/tokens": Sum(float(sum(int(answer.sampled.sum()) for answer in answers))),
        "train/sample_length/mean": Mean(sum(lengths) / len(lengths), len(lengths)),
        "train/sample_length/max": Max(float(max(lengths))),
    }


def _start_reference(
    config: DPOConfig,
    resources: ResourceManager,
    stack: ExitStack,
    span_timer: Timer = lambda name: nullcontext(),
) -> PreferenceEngine:
    assert config.reference is not None, "the caller asked"
    path = config.reference.path
    model = resolve_model(config.model if path is None else config.model.model_copy(update={"path": path}))
    training = TrainingConfig(
        workers=config.reference.workers,
        max_tokens_per_micro_batch=config.reference.max_tokens_per_micro_batch,
        logprob_chunk_tokens=config.training.logprob_chunk_tokens,
        logprob_chunk_vocab=config.training.logprob_chunk_vocab,
    )
    span = config.resources.spans.reference or config.resources.spans.training
    return _start(config, model, training, "reference", span, resources, stack, span_timer, frozen=True)


def _start(
    config: DPOConfig,
    model: ResolvedModel,
    training: TrainingConfig,
    role: str,
    span: Span,
    resources: ResourceManager,
    stack: ExitStack,
    span_timer: Timer,
    *,
    frozen: bool,
) -> PreferenceEngine:
    spec = PreferenceSpec(
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
        loss=config.algorithm.loss,
    )
    cluster = start_ranks(role, PreferenceWorker, spec, training.workers, resources, span, stack=stack)
    return PreferenceEngine(cluster, training, span=span_timer)
