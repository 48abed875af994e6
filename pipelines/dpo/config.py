"""The configuration of `pipeline: dpo`: a policy learns which answers are preferred."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, Tag

from roll_like.config.base import ConfigModel, PluginConfig, PluginSetting, PositiveInt, Violation
from roll_like.config.data import ConversationSource, PairData, PairSource, RowLimits, pairs_or
from roll_like.config.evaluation import RowsEvaluationConfig
from roll_like.config.model import ModelConfig
from roll_like.config.named import NAME_PATTERN
from roll_like.config.offline import OfflineRunConfig
from roll_like.config.resources import ReferencedResources, ResourcesConfig, RolePlan
from roll_like.config.run import ALWAYS_SHARED, RunConfig
from roll_like.config.training import ReferenceSection
from roll_like.registry import PIPELINES, PREFERENCE_LOSSES


class LabelledSource(ConversationSource):
    """Conversations that are labelled as desirable or not."""

    label_field: str = Field(default="label", description="Field with the result: true or false, 1 or 0.")


class LabelledData(RowLimits):
    """What training on unpaired results reads."""

    sources: Annotated[tuple[LabelledSource, ...], Field(min_length=1)] = Field(description="Datasets, weighted.")


class PreferenceDataConfig(PairData):
    """Pairs of answers, of which one is preferred. A loss on single answers takes each pair as two of them."""

    type: Literal["pairs"] = Field(default="pairs", description="Rows with two answers to one prompt.")
    pairs_per_step: PositiveInt = Field(description="Pairs of one step, which is one optimizer update.")
    shuffle: bool = Field(default=True, description="Shuffle each pass over a source, seeded by `seed`.")


class LabelledDataConfig(LabelledData):
    """Single answers, each desirable or undesirable, for losses that need no pairs."""

    type: Literal["labels"] = Field(default="labels", description="Rows with a prompt, one answer and its label.")
    samples_per_step: PositiveInt = Field(description="Answers of one step, which is one optimizer update.")
    shuffle: bool = Field(default=True, description="Shuffle each pass over a source, seeded by `seed`.")


class LabelledEvaluationConfig(RowsEvaluationConfig[LabelledSource]):
    """How progress is measured: on single answers that are not trained on."""

    type: Literal["labels"] = Field(default="labels", description="Rows with a prompt, one answer and its label.")


class PreferenceReferenceConfig(ReferenceSection):
    """The model that the policy is compared with: a frozen one, by default the policy before its first step."""

    mode: Literal["precomputed", "cluster", "adapter_off", "copy"] = Field(
        default="precomputed",
        description="`precomputed`: its log-probabilities of all answers are computed before the first step and kept "
        "with the run, and no second model stays in memory. `cluster`: a frozen model of its own computes them in "
        "each step. `adapter_off`: the trainer does, with its adapters switched off (`training.lora`). `copy`: the "
        "trainer does, with a copy of what it trains, kept in host memory; the one that can move (`sync_steps`).",
    )


class PreferenceAlgorithmConfig(ConfigModel):
    """How preferences become a gradient."""

    common: ClassVar[tuple[str, ...]] = ("loss",)

    loss: Annotated[PluginConfig, PluginSetting(PREFERENCE_LOSSES)] = Field(
        default_factory=lambda: PREFERENCE_LOSSES.get("dpo").Config(),
        description="A preference loss: on pairs, or on single answers (`kto`).",
    )


class PreferenceEvaluationConfig(RowsEvaluationConfig[PairSource]):
    """How progress is measured: on pairs that are not trained on."""

    type: Literal["pairs"] = Field(default="pairs", description="Rows with two answers to one prompt.")


_BY_ROWS = pairs_or("labels")
PreferenceRows = Annotated[
    Annotated[PreferenceDataConfig, Tag("pairs")] | Annotated[LabelledDataConfig, Tag("labels")], _BY_ROWS
]
PreferenceEvaluation = Annotated[
    Annotated[PreferenceEvaluationConfig, Tag("pairs")] | Annotated[LabelledEvaluationConfig, Tag("labels")], _BY_ROWS
]


class PreferenceRunConfig(RunConfig):
    """What runs have in common that train a policy by a preference loss."""

    algorithm: PreferenceAlgorithmConfig = Field(default_factory=PreferenceAlgorithmConfig)

    if TYPE_CHECKING:  # declared by each pipeline, with the modes that it has
        reference: ReferenceSection | None
        resources: ResourcesConfig

    #: What the reference model starts from, where `model` is another one to measure.
    _starting_model: ModelConfig | None = PrivateAttr(default=None)

    @property
    def row_sharing(self) -> str | None:
        return ALWAYS_SHARED

    @property
    def reference_model(self) -> ModelConfig:
        """The `model` section of a reference model of its own."""
        starting, path = self._starting_model or self.model, None if self.reference is None else self.reference.path
        return starting if path is None else starting.at(path)

    def of_model(self, model: str) -> Self:
        """Return the same configuration for another model, which is compared with the reference of this one."""
        measured = super().of_model(model)
        measured._starting_model = self.model
        return measured

    @property
    def roles(self) -> tuple[RolePlan, ...]:
        """The same, with the reference model where it has ranks of its own."""
        if self.reference is None or self.reference.mode != "cluster":
            return super().roles
        return (*super().roles, self.resources.role("reference", self.reference.workers, "reference.workers"))

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        name, reference = self.algorithm.loss.type, self.reference
        loss = PREFERENCE_LOSSES.get(name)
        if not loss.needs_reference and reference is not None:
            yield Violation(
                ("reference",),
                f"{name!r} compares with no reference model, so it would be computed for nothing; remove the section",
            )
        if loss.needs_reference and reference is None:
            yield Violation(
                ("reference",),
                f"{name!r} compares with a reference model; add `reference: {{}}`"
                + (", or choose simpo, cpo or orpo" if loss.paired else ""),
            )
        if reference is not None:
            yield from reference.violations(
                self.training, self.resources.own_devices("reference"), getattr(self, "steps", None)
            )


@PIPELINES.register("dpo")
class DPOConfig(OfflineRunConfig, PreferenceRunConfig):
    """One run of preference training: everything a YAML file may say."""

    implementation: ClassVar[str] = "roll_like.builtin.pipelines.dpo.pipeline:DPOPipeline"
    takes_images: ClassVar[bool] = True

    pipeline: Literal["dpo"] = Field(default="dpo", description="This pipeline.")
    name: str = Field(default="dpo", pattern=NAME_PATTERN, description="Name of the run and of its folder.")
    data: PreferenceRows = Field(description="What the policy learns from, and how much of it in a step.")
    reference: PreferenceReferenceConfig | None = Field(
        default=None, description="What losses compare with that need a reference; none by default."
    )
    resources: ReferencedResources
    evaluation: PreferenceEvaluation | None = Field(
        default=None, description="How progress is measured, on rows that are not trained on; none by default."
    )

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        paired, reference = PREFERENCE_LOSSES.get(self.algorithm.loss.type).paired, self.reference
        longest, terms = self.longest_sample, self.longest_sample_terms
        yield from self.training.budget_violations("training", longest, terms, pairs=paired)
        yield from self._row_violations()
        streams = [index for index, source in enumerate(self.data.sources) if source.streaming]
        if streams and reference is not None and reference.mode == "precomputed":
            yield Violation(
                ("reference", "mode"),
                f"a precomputed reference reads all data before the first step, and data.sources.{streams[0]} is read "
                "as steps need it; set mode: copy or cluster, or with training.lora mode: adapter_off",
            )

    def _row_violations(self) -> Iterator[Violation]:
        """Yield rows that the loss cannot learn from or be measured on, and steps too small for its baseline."""
        name, (count, what) = self.algorithm.loss.type, self.items_per_step
        loss = PREFERENCE_LOSSES.get(name)
        if not loss.paired:
            if loss.needs_batch and count < 2:
                yield Violation(
                    ("data", f"{what}_per_step"),
                    f"one step has {count} {what.removesuffix('s')}, and {name!r} compares it with answers to other "
                    "prompts of the same step; set it to 2 or more, better 16 or more",
                )
            return
        unpaired = [other for other in PREFERENCE_LOSSES.names() if not PREFERENCE_LOSSES.get(other).paired]
        for section, rows in {"data": self.data, "evaluation": self.evaluation}.items():
            if rows is not None and rows.type == "labels":
                yield Violation(
                    (section, "type"),
                    f"{name!r} compares two answers to one prompt, and rows of `type: labels` have one each; use rows "
                    f"of `type: pairs`, or a loss on single answers: algorithm.loss.type = {' or '.join(unpaired)}",
                )

    @property
    def evaluated_rows(self) -> PairData | LabelledData | None:
        """What the evaluation reads: its sources, with the limits of `data`; nothing without an evaluation."""
        if self.evaluation is None:
            return None
        limits = {name: getattr(self.data, name) for name in RowLimits.model_fields}
        rows = PairData if self.evaluation.type == "pairs" else LabelledData
        return rows.model_validate({**limits, "sources": self.evaluation.sources})
