"""The configuration of `pipeline: reward_model`: a model learns to score whole conversations from pairs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from roll_like.config.base import ConfigModel, PositiveInt, Violation
from roll_like.config.data import PairSource, RowLimits
from roll_like.config.evaluation import RowsEvaluationConfig
from roll_like.config.model import ModelTask
from roll_like.config.named import NAME_PATTERN
from roll_like.config.offline import OfflineRunConfig
from roll_like.registry import PIPELINES


class ScoredPairSource(PairSource):
    """Two responses to one prompt, the preferred one of which is to be scored higher."""

    margin_field: str | None = Field(
        default=None,
        description="Field with a number of at least 0: by how much the preferred response should score higher; none "
        "by default.",
    )


class ScoredPairData(RowLimits):
    """What the training of a reward model reads."""

    sources: Annotated[tuple[ScoredPairSource, ...], Field(min_length=1)] = Field(description="Datasets, weighted.")
    max_tokens: PositiveInt = Field(default=1024, description="Longest conversation, prompt included. Tokens.")
    too_long: Literal["skip", "refuse"] = Field(
        default="skip",
        description="Conversations over the limit: leave their pair out and count it, or stop. They are not cut: the "
        "score is read at the end.",
    )


class RewardModelDataConfig(ScoredPairData):
    """What the model learns from, and how much of it in a step."""

    pairs_per_step: PositiveInt = Field(description="Pairs of one step, which is one optimizer update.")
    shuffle: bool = Field(default=True, description="Shuffle each pass over a source, seeded by `seed`.")


class RewardModelAlgorithmConfig(ConfigModel):
    """How pairs become a gradient: the Bradley-Terry loss −log σ(score of chosen − score of rejected − margin)."""

    label_smoothing: float = Field(
        default=0.0, ge=0, le=0.5, description="Share of pairs that are taken to be the wrong way round."
    )
    center_coefficient: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the square of a pair's added scores, which keeps scores around 0; 0.01 is usual.",
    )


class RewardModelEvaluationConfig(RowsEvaluationConfig[ScoredPairSource]):
    """How progress is measured: on pairs that are not trained on."""


@PIPELINES.register("reward_model")
class RewardModelRunConfig(OfflineRunConfig):
    """One run that trains a reward model: everything a YAML file may say."""

    implementation: ClassVar[str] = "roll_like.builtin.pipelines.reward_model.pipeline:RewardModelPipeline"
    task: ClassVar[ModelTask] = "text-classification"

    pipeline: Literal["reward_model"] = Field(default="reward_model", description="This pipeline.")
    name: str = Field(default="reward_model", pattern=NAME_PATTERN, description="Name of the run and of its folder.")
    data: RewardModelDataConfig
    algorithm: RewardModelAlgorithmConfig = Field(
        default_factory=RewardModelAlgorithmConfig, description="How pairs become a gradient."
    )
    evaluation: RewardModelEvaluationConfig | None = Field(
        default=None, description="How progress is measured, on pairs that are not trained on; none by default."
    )

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        longest, terms = self.longest_sample, self.longest_sample_terms
        yield from self.training.budget_violations("training", longest, terms, pairs=True)
        for name in self.training.changed("logprob_chunk_tokens", "logprob_chunk_vocab"):
            yield Violation(
                ("training", name),
                "a reward model has one output, a score, and computes no logits that could be cut into chunks; remove "
                "it (max_tokens_per_micro_batch bounds the memory of a forward pass)",
            )
