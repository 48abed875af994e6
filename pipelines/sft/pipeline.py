"""Supervised fine-tuning: make given answers likelier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.builtin.pipelines.sft.objective import SupervisedObjective, likelihood_metrics
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.data.samples import SampleSet
from roll_like.offline.pipeline import OfflinePipeline
from roll_like.offline.samples import numbered
from roll_like.run.evaluation import Evaluation
from roll_like.training.engine import TrainingEngine
from roll_like.types import TrainingSample


class SFTPipeline(OfflinePipeline[SFTConfig, TrainingSample, Sequence[TrainingSample]]):
    """Given conversations; each step makes its samples' answers likelier."""

    position: ClassVar[str] = "examples"

    @classmethod
    def load(cls, config: SFTConfig, rows: Any, renderer: Renderer, section: str) -> SampleSet[TrainingSample]:  # noqa: ARG003
        """Return the conversations of `rows`."""
        return load_conversations(rows, renderer, section=section)

    @classmethod
    def objective(cls, config: SFTConfig) -> SupervisedObjective:
        """Return cross-entropy."""
        return SupervisedObjective(settings=config.training, packing=config.data.packing)

    def batch(self, samples: Sequence[TrainingSample]) -> Sequence[TrainingSample]:
        """Return a step's conversations as the trainer takes them."""
        return numbered(samples)

    @classmethod
    def evaluation_of(cls, config: SFTConfig, trainer: TrainingEngine[Sequence[TrainingSample]]) -> Evaluation | None:
        """Return what measures how likely the model finds the evaluation's answers; None without an evaluation."""
        loaded = cls.evaluated_on(config)
        if config.evaluation is None or loaded is None:
            return None
        samples = numbered(loaded.samples)
        names = [source.name for source in loaded.sources for _ in source.items]
        return Evaluation(
            schedule=config.evaluation,
            measure=lambda: (likelihood_metrics(samples, trainer.logprobs(samples), names), None),
        )
