"""What the pipelines share that learn from given data."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, TypeVar

from roll_like.config.offline import OfflineRunConfig
from roll_like.data.samples import SampleSet
from roll_like.offline.evaluator import OfflineEvaluator
from roll_like.offline.samples import warn_of_rows
from roll_like.run.pipeline import Pipeline
from roll_like.run.state import RunContext

ConfigT = TypeVar("ConfigT", bound=OfflineRunConfig)


@dataclass(kw_only=True)
class OfflinePipeline(Pipeline[ConfigT]):
    """Base of pipelines on given data: `epochs` become steps once the data was read.

    Attributes:
        evaluator: Measures the model; None without an `evaluation` section.
    """

    evaluator: OfflineEvaluator | None

    @classmethod
    @abstractmethod
    def load(cls, config: ConfigT) -> SampleSet[Any]:
        """Return the data that is trained on."""

    @classmethod
    def read(cls, config: ConfigT, run: RunContext) -> SampleSet[Any]:
        """Return the same, and warn of rows that were left out or shortened."""
        run.state.metrics.phase("reading the data")
        data = cls.load(config)
        warn_of_rows(run.state.metrics, data.report)
        return data

    @classmethod
    def with_steps(cls, config: ConfigT) -> ConfigT:
        """Return the configuration with the steps that its `epochs` are, where it has those."""
        return config if config.epochs is None else config.lasting(len(cls.load(config)))
