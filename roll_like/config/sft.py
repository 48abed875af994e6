"""The configuration of `pipeline: sft`: a model learns from conversations that are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from roll_like.config.rules import RUN_RULES, budget_holds
from roll_like.config.run import NAME_PATTERN, Rule, RunConfig, ScheduleConfig
from roll_like.config.sections import PositiveFloat, PositiveInt, TrainerResourcesConfig
from roll_like.config.training_data import ConversationData, ConversationSource
from roll_like.config.violations import Violation


class SFTDataConfig(ConversationData):
    """What the model learns from, and how much of it in a step."""

    samples_per_step: PositiveInt = Field(description="Samples of one step, which is one optimizer update.")
    shuffle: bool = Field(default=True, description="Shuffle each pass over a source, seeded by `seed`.")
    packing: bool = Field(
        default=True, description="Compute several samples in one row, none of which sees another: less padding."
    )


class SFTEvaluationConfig(ScheduleConfig):
    """How progress is measured: the loss on conversations that are not trained on."""

    sources: Annotated[tuple[ConversationSource, ...], Field(min_length=1)] = Field(
        description="Datasets; their limits are those of `data`."
    )


def _steps_or_epochs(config: SFTConfig) -> Iterator[Violation]:
    if (config.steps is None) == (config.epochs is None):
        found = "both are set" if config.steps is not None else "neither is set"
        yield Violation(("steps",), f"a run lasts a number of `steps`, or of `epochs`, and {found}; set one of them")


def _budget_holds_a_sample(config: SFTConfig) -> Iterator[Violation]:
    yield from budget_holds(
        config, ("training", "max_tokens_per_micro_batch"), config.training.max_tokens_per_micro_batch
    )


def _ranks_have_work(config: SFTConfig) -> Iterator[Violation]:
    samples, workers = config.data.samples_per_step, config.training.workers
    if samples < workers:
        yield Violation(
            ("training", "workers"),
            f"one step has {samples} samples, fewer than {workers} workers, so some would have nothing to do; use at "
            f"most {samples} workers, or raise data.samples_per_step",
        )


class SFTConfig(RunConfig):
    """One run of supervised fine-tuning: everything a YAML file may say."""

    rules: ClassVar[tuple[Rule, ...]] = (*RUN_RULES, _steps_or_epochs, _budget_holds_a_sample, _ranks_have_work)

    pipeline: Literal["sft"] = Field(default="sft", description="This pipeline.")
    name: str = Field(default="sft", pattern=NAME_PATTERN, description="Name of the run and of its folder.")
    steps: PositiveInt | None = Field(default=None, description="Steps to train; or set `epochs`.")
    epochs: PositiveFloat | None = Field(
        default=None, description="Passes over the data, as many steps as that takes; or set `steps`."
    )
    data: SFTDataConfig = Field(description="What the model learns from, and how much of it in a step.")
    resources: TrainerResourcesConfig = Field(
        description="What hardware the run takes. A device is a GPU, or a core with `device: cpu`."
    )
    evaluation: SFTEvaluationConfig | None = Field(
        default=None, description="How progress is measured, on conversations that are not trained on; none by default."
    )

    @property
    def total_steps(self) -> int:
        """Steps of the whole run; known for `epochs` once the data was read."""
        if self.steps is None:
            raise ValueError("the steps of `epochs` follow from the data: see pipelines/sft.py")
        return self.steps

    @property
    def longest_sample(self) -> int:
        """Longest sample, in tokens."""
        return self.data.max_tokens

    @property
    def longest_sample_terms(self) -> str:
        """The same by its key."""
        return f"data.max_tokens = {self.longest_sample}"
