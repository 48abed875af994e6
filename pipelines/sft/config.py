"""The configuration of `pipeline: sft`: a model learns from conversations that are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from roll_like.config.base import PositiveInt, Violation
from roll_like.config.data import ConversationData, ConversationSource
from roll_like.config.evaluation import RowsEvaluationConfig
from roll_like.config.named import NAME_PATTERN
from roll_like.config.offline import OfflineRunConfig
from roll_like.registry import PIPELINES


class SFTDataConfig(ConversationData):
    """What the model learns from, and how much of it in a step."""

    samples_per_step: PositiveInt = Field(description="Samples of one step, which is one optimizer update.")
    shuffle: bool = Field(default=True, description="Shuffle each pass over a source, seeded by `seed`.")
    packing: bool = Field(
        default=True, description="Compute several samples in one row, none of which sees another: less padding."
    )


class SFTEvaluationConfig(RowsEvaluationConfig[ConversationSource]):
    """How progress is measured: the loss on conversations that are not trained on."""


@PIPELINES.register("sft")
class SFTConfig(OfflineRunConfig):
    """One run of supervised fine-tuning: everything a YAML file may say."""

    implementation: ClassVar[str] = "roll_like.builtin.pipelines.sft.pipeline:SFTPipeline"
    takes_images: ClassVar[bool] = True

    pipeline: Literal["sft"] = Field(default="sft", description="This pipeline.")
    name: str = Field(default="sft", pattern=NAME_PATTERN, description="Name of the run and of its folder.")
    data: SFTDataConfig
    evaluation: SFTEvaluationConfig | None = Field(
        default=None, description="How progress is measured, on conversations that are not trained on; none by default."
    )

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        yield from self.training.budget_violations("training", self.longest_sample, self.longest_sample_terms)
