"""The configuration of `pipeline: dpo`: a policy learns which of two answers is preferred."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from roll_like.config.base import ConfigModel, PluginConfig, PluginSetting
from roll_like.config.given import GivenDataConfig
from roll_like.config.plan import RolePlan, model_role
from roll_like.config.run import NAME_PATTERN, Rule, ScheduleConfig
from roll_like.config.sections import PositiveInt, Span, TrainerResourcesConfig, TrainerSpansConfig
from roll_like.config.training_data import PairData, PairSource
from roll_like.config.violations import Violation
from roll_like.registry import PREFERENCE_LOSSES


class PreferenceDataConfig(PairData):
    """What the policy learns from, and how much of it in a step."""

    pairs_per_step: PositiveInt = Field(description="Pairs of one step, which is one optimizer update.")
    shuffle: bool = Field(default=True, description="Shuffle each pass over a source, seeded by `seed`.")


class PreferenceReferenceConfig(ConfigModel):
    """The model that the policy is compared with: a frozen one, by default the policy before its first step."""

    path: str | None = Field(default=None, description="Another model with the same vocabulary; default: `model.path`.")
    mode: Literal["precomputed", "cluster"] = Field(
        default="precomputed",
        description="`precomputed`: its log-probabilities of all pairs are computed before the first step and kept "
        "with the run, and no second model stays in memory. `cluster`: a frozen model of its own computes them in "
        "each step.",
    )
    workers: PositiveInt = Field(default=1, description="Ranks of the frozen model.")
    max_tokens_per_micro_batch: PositiveInt = Field(default=8192, description="Budget of one forward pass. Tokens.")


class PreferenceAlgorithmConfig(ConfigModel):
    """How preferences become a gradient."""

    loss: Annotated[PluginConfig, PluginSetting(PREFERENCE_LOSSES)] = Field(
        default_factory=lambda: PREFERENCE_LOSSES.get("dpo").Config(),
        description="A preference loss on pairs.",
    )


class PreferenceEvaluationConfig(ScheduleConfig):
    """How progress is measured: on pairs that are not trained on."""

    sources: Annotated[tuple[PairSource, ...], Field(min_length=1)] = Field(
        description="Datasets; their limits are those of `data`."
    )


class PreferenceSpansConfig(TrainerSpansConfig):
    """Which devices each role has. Equal spans are colocated (time-shared), disjoint ones run side by side."""

    reference: Span | None = Field(default=None, description="Devices of the reference model; default: `training`.")


class PreferenceResourcesConfig(TrainerResourcesConfig):
    """What hardware the run takes and how roles divide it. A device is a GPU, or a core with `device: cpu`."""

    spans: PreferenceSpansConfig = Field(description="Devices of each role.")


def _budget_holds_a_pair(config: DPOConfig) -> Iterator[Violation]:
    budget, needed = config.training.max_tokens_per_micro_batch, 2 * config.data.max_tokens
    if budget < needed:
        yield Violation(
            ("training", "max_tokens_per_micro_batch"),
            f"{budget} tokens cannot hold the two answers of one pair (2 × data.max_tokens = {needed}); set it to "
            f"{needed} or more",
        )


def _loss_and_reference_agree(config: DPOConfig) -> Iterator[Violation]:
    loss = PREFERENCE_LOSSES.get(config.algorithm.loss.type)
    if not loss.paired:
        yield Violation(
            ("algorithm", "loss", "type"),
            f"{config.algorithm.loss.type!r} learns from single answers, and this pipeline has pairs; use one of "
            f"{', '.join(name for name in PREFERENCE_LOSSES.names() if PREFERENCE_LOSSES.get(name).paired)}",
        )
    if not loss.needs_reference and config.reference is not None:
        yield Violation(
            ("reference",),
            f"{config.algorithm.loss.type!r} compares with no reference model, so it would be computed for nothing; "
            "remove the section",
        )
    if loss.needs_reference and config.reference is None:
        yield Violation(
            ("reference",),
            f"{config.algorithm.loss.type!r} compares with a reference model; add `reference: {{}}`, or choose simpo, "
            "cpo or orpo",
        )


class DPOConfig(GivenDataConfig):
    """One run of preference training: everything a YAML file may say."""

    rules: ClassVar[tuple[Rule, ...]] = (*GivenDataConfig.rules, _budget_holds_a_pair, _loss_and_reference_agree)

    pipeline: Literal["dpo"] = Field(default="dpo", description="This pipeline.")
    name: str = Field(default="dpo", pattern=NAME_PATTERN, description="Name of the run and of its folder.")
    data: PreferenceDataConfig = Field(description="What the policy learns from, and how much of it in a step.")
    algorithm: PreferenceAlgorithmConfig = Field(
        default_factory=PreferenceAlgorithmConfig, description="How preferences become a gradient."
    )
    reference: PreferenceReferenceConfig | None = Field(
        default=None, description="What losses compare with that need a reference; none by default."
    )
    resources: PreferenceResourcesConfig = Field(
        description="What hardware the run takes and how roles divide it. A device is a GPU, or a core with "
        "`device: cpu`."
    )
    evaluation: PreferenceEvaluationConfig | None = Field(
        default=None, description="How progress is measured, on pairs that are not trained on; none by default."
    )

    @property
    def items_per_step(self) -> tuple[int, str]:
        """How many pairs one step takes."""
        return self.data.pairs_per_step, "pairs"

    @property
    def longest_sample(self) -> int:
        """Longest answer with its prompt, in tokens."""
        return self.data.max_tokens

    @property
    def longest_sample_terms(self) -> str:
        """The same by its key."""
        return f"data.max_tokens = {self.longest_sample}"

    @property
    def further_roles(self) -> tuple[RolePlan, ...]:
        """The reference model, where it has a cluster of its own."""
        if self.reference is None or self.reference.mode == "precomputed":
            return ()
        spans = self.resources.spans
        span, workers = spans.reference or spans.training, self.reference.workers
        return (model_role(self.resources, "reference", workers, "reference.workers", span),)
