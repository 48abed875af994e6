"""The configuration of `pipeline: dpo`: a policy learns which answers are preferred."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from roll_like.builtin.pipelines.dpo.label_rules import (
    VerdictDataConfig,
    VerdictEvaluationConfig,
    budget_holds_a_row,
    loss_suits_rows,
    rows_type,
)
from roll_like.builtin.pipelines.online_dpo.config import ITERATION_RULES, IterationsConfig, sampling_roles
from roll_like.config.base import ConfigModel, PluginConfig, PluginSetting
from roll_like.config.lora import adapter_off_means_something
from roll_like.config.offline import GivenDataConfig
from roll_like.config.plan import RolePlan, model_role
from roll_like.config.run import NAME_PATTERN, Rule, ScheduleConfig
from roll_like.config.sections import DeviceRange, PositiveInt, TrainerDeviceMappingConfig, TrainerResourcesConfig
from roll_like.config.training_data import LabelledData, PairData, PairSource, RowLimits
from roll_like.config.violations import Violation
from roll_like.registry import PREFERENCE_LOSSES


class PreferenceDataConfig(PairData):
    """Pairs of answers, of which one is preferred. A loss on single answers takes each pair as two of them."""

    type: Literal["pairs"] = Field(default="pairs", description="Rows with two answers to one prompt.")
    sources: tuple[PairSource, ...] = Field(default=(), description="Datasets, weighted; none with `iterations`.")
    pairs_per_step: PositiveInt = Field(description="Pairs of one step, which is one optimizer update.")
    shuffle: bool = Field(default=True, description="Shuffle each pass over a source, seeded by `seed`.")


class PreferenceReferenceConfig(ConfigModel):
    """The model that the policy is compared with: a frozen one, by default the policy before its first step."""

    path: str | None = Field(default=None, description="Another model with the same vocabulary; default: `model.path`.")
    mode: Literal["precomputed", "cluster", "adapter_off"] = Field(
        default="precomputed",
        description="`precomputed`: its log-probabilities of all answers are computed before the first step and kept "
        "with the run, and no second model stays in memory. `cluster`: a frozen model of its own computes them in "
        "each step. `adapter_off`: the trainer does, with its adapters switched off (`training.lora`).",
    )
    refresh: Literal["never", "iteration"] = Field(
        default="never",
        description="`never`: one reference for the whole run. `iteration`: with `iterations`, the policy at the start "
        "of each, which computes its log-probabilities of the iteration's pairs before the first step on them.",
    )
    workers: PositiveInt = Field(default=1, description="Ranks of the frozen model.")
    max_tokens_per_micro_batch: PositiveInt = Field(default=8192, description="Budget of one forward pass. Tokens.")


class PreferenceAlgorithmConfig(ConfigModel):
    """How preferences become a gradient."""

    loss: Annotated[PluginConfig, PluginSetting(PREFERENCE_LOSSES)] = Field(
        default_factory=lambda: PREFERENCE_LOSSES.get("dpo").Config(),
        description="A preference loss: on pairs, or on single answers (`kto`).",
    )


class PreferenceEvaluationConfig(ScheduleConfig):
    """How progress is measured: on pairs that are not trained on."""

    type: Literal["pairs"] = Field(default="pairs", description="Rows with two answers to one prompt.")
    sources: Annotated[tuple[PairSource, ...], Field(min_length=1)] = Field(
        description="Datasets; their limits are those of `data`."
    )


_BY_ROWS = Discriminator(
    rows_type,
    custom_error_type="rule",
    custom_error_message="expected a section with `type: pairs` (the default) or `type: labels`",
)
PreferenceRows = Annotated[
    Annotated[PreferenceDataConfig, Tag("pairs")] | Annotated[VerdictDataConfig, Tag("labels")], _BY_ROWS
]
PreferenceEvaluation = Annotated[
    Annotated[PreferenceEvaluationConfig, Tag("pairs")] | Annotated[VerdictEvaluationConfig, Tag("labels")], _BY_ROWS
]


class PreferenceDeviceMappingConfig(TrainerDeviceMappingConfig):
    """Which devices each role has. Equal device ranges are colocated (time-shared), disjoint ones run side by side."""

    inference: DeviceRange | None = Field(
        default=None, description="Devices of the inference engines; needed with `iterations`."
    )
    reference: DeviceRange | None = Field(
        default=None, description="Devices of the reference model; default: `training`."
    )
    judge: DeviceRange | None = Field(default=None, description="Devices of the judge model; default: `inference`.")


class PreferenceResourcesConfig(TrainerResourcesConfig):
    """What hardware the run takes and how roles divide it. A device is a GPU, or a core with `device: cpu`."""

    device_mapping: PreferenceDeviceMappingConfig = Field(description="Devices of each role.")


def _per_step(data: PreferenceDataConfig | VerdictDataConfig) -> tuple[int, str]:
    if data.type == "pairs":
        return data.pairs_per_step, "pairs"
    return data.samples_per_step, "samples"


def _loss_and_reference_agree(config: DPOConfig) -> Iterator[Violation]:
    loss = PREFERENCE_LOSSES.get(config.algorithm.loss.type)
    if not loss.needs_reference and config.reference is not None:
        yield Violation(
            ("reference",),
            f"{config.algorithm.loss.type!r} compares with no reference model, so it would be computed for nothing; "
            "remove the section",
        )
    if loss.needs_reference and config.reference is None:
        yield Violation(
            ("reference",),
            f"{config.algorithm.loss.type!r} compares with a reference model; add `reference: {{}}`"
            + (", or choose simpo, cpo or orpo" if loss.paired else ""),
        )


def _adapters_can_be_switched_off(config: DPOConfig) -> Iterator[Violation]:
    yield from adapter_off_means_something(config.reference, config.training, config.resources.device_mapping.reference)


class DPOConfig(GivenDataConfig):
    """One run of preference training: everything a YAML file may say."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *GivenDataConfig.rules,
        budget_holds_a_row,
        loss_suits_rows,
        _loss_and_reference_agree,
        _adapters_can_be_switched_off,
        *ITERATION_RULES,
    )

    pipeline: Literal["dpo"] = Field(default="dpo", description="This pipeline.")
    name: str = Field(default="dpo", pattern=NAME_PATTERN, description="Name of the run and of its folder.")
    data: PreferenceRows = Field(description="What the policy learns from, and how much of it in a step.")
    iterations: IterationsConfig | None = Field(
        default=None,
        description="Pairs out of the policy's own answers, instead of given ones (`data.sources`); none by default.",
    )
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
    evaluation: PreferenceEvaluation | None = Field(
        default=None, description="How progress is measured, on rows that are not trained on; none by default."
    )

    @property
    def items_per_step(self) -> tuple[int, str]:
        """How many pairs, or single answers, one step takes."""
        return _per_step(self.data)

    @property
    def evaluated_rows(self) -> PairData | LabelledData | None:
        """What the evaluation reads: its sources, with the limits of `data`; nothing without an evaluation."""
        if self.evaluation is None:
            return None
        limits = {name: getattr(self.data, name) for name in RowLimits.model_fields}
        rows = PairData if self.evaluation.type == "pairs" else LabelledData
        return rows.model_validate({**limits, "sources": self.evaluation.sources})

    @property
    def further_roles(self) -> tuple[RolePlan, ...]:
        """What samples and judges, and the reference model, where they have devices."""
        sampling = sampling_roles(self)
        if self.reference is None or self.reference.mode != "cluster":
            return sampling
        device_mapping = self.resources.device_mapping
        devices, workers = device_mapping.reference or device_mapping.training, self.reference.workers
        return (*sampling, model_role(self.resources, "reference", workers, "reference.workers", devices))
