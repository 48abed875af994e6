"""The configuration of `pipeline: distill`: a student learns what teachers would say of given conversations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, cast

from pydantic import Field

from roll_like.algorithms.distillation.base import DistillationConfig
from roll_like.config.base import ConfigModel, PluginConfig, PluginSetting, PositiveInt, Violation
from roll_like.config.data import ConversationData, ConversationSource
from roll_like.config.evaluation import RowsEvaluationConfig
from roll_like.config.named import NAME_PATTERN
from roll_like.config.offline import OfflineRunConfig
from roll_like.config.resources import RolePlan
from roll_like.config.teachers import TeacherConfigs, teacher_roles, teacher_violations
from roll_like.registry import DISTILLATION_LOSSES, PIPELINES


class DistillationSource(ConversationSource):
    """Conversations that a teacher is asked about."""

    domain: str | None = Field(default=None, description="Its domain, in `teachers`; default: its name.")

    @property
    def domain_label(self) -> str:
        """Its `domain`, or its label."""
        return self.domain or self.label


class DistillationDataConfig(ConversationData):
    """What the student learns on, and how much of it in a step."""

    sources: Annotated[tuple[DistillationSource, ...], Field(min_length=1)] = Field(description="Datasets, weighted.")
    samples_per_step: PositiveInt = Field(description="Samples of one step, which is one optimizer update.")
    shuffle: bool = Field(default=True, description="Shuffle each pass over a source, seeded by `seed`.")
    packing: bool = Field(
        default=True, description="Compute several samples in one row, none of which sees another: less padding."
    )


class DistillationAlgorithmConfig(ConfigModel):
    """How a teacher's distributions become a gradient."""

    common: ClassVar[tuple[str, ...]] = ("loss",)

    loss: Annotated[PluginConfig, PluginSetting(DISTILLATION_LOSSES)] = Field(
        default_factory=lambda: DISTILLATION_LOSSES.get("forward_kl").Config(),
        description="A distillation loss.",
    )
    top_k: PositiveInt | None = Field(
        default=64,
        description="How many of its most likely tokens a teacher sends for each token; what becomes of the others is "
        "the loss's `tail`. `null`: the whole distribution; hidden states are sent, and the student's ranks hold the "
        "teacher's output projection.",
    )


class DistillationEvaluationConfig(RowsEvaluationConfig[DistillationSource]):
    """How progress is measured: how near the student is to its teachers on conversations that are not trained on."""


@PIPELINES.register("distill")
class DistillConfig(OfflineRunConfig):
    """One run of distillation on given data: everything a YAML file may say."""

    implementation: ClassVar[str] = "roll_like.builtin.pipelines.distill.pipeline:DistillPipeline"

    pipeline: Literal["distill"] = Field(default="distill", description="This pipeline.")
    name: str = Field(default="distill", pattern=NAME_PATTERN, description="Name of the run and of its folder.")
    teachers: TeacherConfigs = Field(
        description="Models that the student (`model`) learns from, by names of your choice."
    )
    data: DistillationDataConfig
    algorithm: DistillationAlgorithmConfig = Field(default_factory=DistillationAlgorithmConfig)
    evaluation: DistillationEvaluationConfig | None = Field(
        default=None, description="How progress is measured, on conversations that are not trained on; none by default."
    )

    @property
    def roles(self) -> tuple[RolePlan, ...]:
        """The trainer and the teachers."""
        return (*super().roles, *teacher_roles(self.resources, self.teachers))

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        longest, terms = self.longest_sample, self.longest_sample_terms
        yield from self.training.budget_violations("training", longest, terms)
        yield from self._other_tokenizer_violations()
        loss = cast(DistillationConfig, self.algorithm.loss)
        if loss.unmatched_weight and not any(teacher.other_tokenizer for teacher in self.teachers.values()):
            yield Violation(
                ("algorithm", "loss", "unmatched_weight"),
                "it compares tokens that only one of two vocabularies has, and no teacher has another tokenizer; "
                "remove it, or set other_tokenizer: true for such a teacher",
            )
        sources = [*self.data.sources, *(() if self.evaluation is None else self.evaluation.sources)]
        yield from teacher_violations(self.teachers, [each.domain_label for each in sources], longest, terms)

    def _other_tokenizer_violations(self) -> Iterator[Violation]:
        for name in (name for name, teacher in self.teachers.items() if teacher.other_tokenizer):
            path = ("teachers", name, "other_tokenizer")
            if self.algorithm.top_k is None:
                yield Violation(
                    path,
                    "texts are compared by the teacher's most likely tokens, and algorithm.top_k is null; set it to 64",
                )
            if self.training.sequence_parallel > 1:
                yield Violation(
                    path,
                    "stretches of text have several tokens, and with training.sequence_parallel a rank has a part of "
                    "them; set that to 1",
                )
            if self.data.too_long == "cut":
                yield Violation(
                    path,
                    "the beginning of an answer ends at different places in the two models' tokens, and data.too_long "
                    "is cut; set it to skip or refuse",
                )
            if any(source.streaming for source in self.data.sources):
                yield Violation(
                    path, "conversations are read once for each tokenizer, before the run; set streaming: false"
                )
