"""The configuration of `pipeline: reward_model`: what a model learns to score conversations, or steps, from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, Tag, model_validator

from roll_like.config.base import ConfigModel, PositiveInt, Violation
from roll_like.config.data import ConversationSource, PairSource, RowLimits, RowSource, pairs_or
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


class ScoredAnswerSource(ConversationSource):
    """Conversations, the last answer of which has a score."""

    score_field: str = Field(
        default="score",
        description="Field with the score: a number, for the loss `bce` from 0 to 1. true and false count as 1 and 0.",
    )


class StepSource(RowSource):
    """Answers in steps, with a label for each step."""

    common: ClassVar[tuple[str, ...]] = ("steps_field", "labels_field")

    steps_field: str = Field(default="completions", description="Field with the answer's steps: a list of texts.")
    labels_field: str = Field(
        default="labels",
        description="Field with a label for each step: true or false, `+` or `-`, a number from 0 (wrong) to 1 "
        "(right), or null for a step without a label. Or one whole number: the first wrong step, counted from 0, and "
        "−1 where none is wrong (ProcessBench).",
    )
    step_tag: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Rows as in Math-Shepherd (`ки` there): `steps_field` has one text, the question and from "
        "`Step 1:` on the steps, each followed by this tag; `labels_field` has the same text with `+` or `-` in the "
        "place of each tag, or a list of labels.",
    )

    @model_validator(mode="after")
    def _one_question(self) -> Self:
        if self.step_tag is not None and self.changed("prompt_field"):
            raise ValueError("with step_tag the question stands in `steps_field`; remove prompt_field")
        return self


class WholeConversations(RowLimits):
    """How long conversations may be that are scored as a whole."""

    max_tokens: PositiveInt = Field(default=1024, description="Longest conversation, prompt included. Tokens.")
    too_long: Literal["skip", "refuse"] = Field(
        default="skip",
        description="Conversations over the limit: leave their row out and count it, or stop. They are not cut: the "
        "score is read at the end.",
    )


class ScoredPairData(WholeConversations):
    """What training on pairs reads."""

    sources: Annotated[tuple[ScoredPairSource, ...], Field(min_length=1)] = Field(description="Datasets, weighted.")


class ScoredAnswerData(WholeConversations):
    """What training on single answers reads."""

    sources: Annotated[tuple[ScoredAnswerSource, ...], Field(min_length=1)] = Field(description="Datasets, weighted.")


class StepData(WholeConversations):
    """What training on steps reads."""

    sources: Annotated[tuple[StepSource, ...], Field(min_length=1)] = Field(description="Datasets, weighted.")
    step_separator: Annotated[str, Field(min_length=1)] = Field(
        default="\n\n",
        description="Written behind every step, the last one too; a step's score is read at the last token of it. The "
        "exported model's config.json states it.",
    )
    train_on: Literal["all", "last"] = Field(
        default="all", description="Which of an answer's labelled steps are trained: all, or the last one."
    )


class RewardModelDataConfig(ScoredPairData):
    """Pairs of answers, of which one is preferred."""

    type: Literal["pairs"] = Field(default="pairs", description="Rows with two answers to one prompt.")
    pairs_per_step: PositiveInt = Field(description="Pairs of one step, which is one optimizer update.")
    shuffle: bool = Field(default=True, description="Shuffle each pass over a source, seeded by `seed`.")


class ScoredAnswerDataConfig(ScoredAnswerData):
    """Single answers, each with a score: right or wrong, or a rating."""

    type: Literal["scores"] = Field(default="scores", description="Rows with a prompt, one answer and its score.")
    samples_per_step: PositiveInt = Field(description="Answers of one step, which is one optimizer update.")
    shuffle: bool = Field(default=True, description="Shuffle each pass over a source, seeded by `seed`.")


class StepDataConfig(StepData):
    """Answers in steps, each step with a label: right or wrong, or how likely it leads to the right answer."""

    type: Literal["steps"] = Field(
        default="steps", description="Rows with a prompt, an answer's steps and their labels."
    )
    samples_per_step: PositiveInt = Field(description="Answers of one optimizer update.")
    shuffle: bool = Field(default=True, description="Shuffle each pass over a source, seeded by `seed`.")


class RewardModelAlgorithmConfig(ConfigModel):
    """How pairs, scores or labels of steps become a gradient."""

    common: ClassVar[tuple[str, ...]] = ("loss",)

    loss: Literal["bradley_terry", "bce", "mse"] = Field(
        default="bradley_terry",
        description="`bradley_terry`, of pairs: −log σ(score of chosen − score of rejected − margin). Of single "
        "answers and of steps (`data.type: scores`, `steps`): `bce`, the cross-entropy of σ(score) with the given "
        "score, which is 0, 1 or between; `mse`, the square of the difference from the given score.",
    )
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

    type: Literal["pairs"] = Field(default="pairs", description="Rows with two answers to one prompt.")


class ScoredAnswerEvaluationConfig(RowsEvaluationConfig[ScoredAnswerSource]):
    """How progress is measured: on single answers that are not trained on."""

    type: Literal["scores"] = Field(default="scores", description="Rows with a prompt, one answer and its score.")


class StepEvaluationConfig(RowsEvaluationConfig[StepSource]):
    """How progress is measured: on the steps of answers that are not trained on."""

    type: Literal["steps"] = Field(
        default="steps", description="Rows with a prompt, an answer's steps and their labels."
    )


_BY_ROWS = pairs_or("scores", "steps")
ScoredRows = Annotated[
    Annotated[RewardModelDataConfig, Tag("pairs")]
    | Annotated[ScoredAnswerDataConfig, Tag("scores")]
    | Annotated[StepDataConfig, Tag("steps")],
    _BY_ROWS,
]
ScoredEvaluation = Annotated[
    Annotated[RewardModelEvaluationConfig, Tag("pairs")]
    | Annotated[ScoredAnswerEvaluationConfig, Tag("scores")]
    | Annotated[StepEvaluationConfig, Tag("steps")],
    _BY_ROWS,
]
#: What is read of rows, by their type.
_READ: Mapping[str, type[ScoredPairData | ScoredAnswerData | StepData]] = {
    "pairs": ScoredPairData,
    "scores": ScoredAnswerData,
    "steps": StepData,
}


@PIPELINES.register("reward_model")
class RewardModelRunConfig(OfflineRunConfig):
    """One run that trains a reward model: everything a YAML file may say."""

    implementation: ClassVar[str] = "roll_like.builtin.pipelines.reward_model.pipeline:RewardModelPipeline"
    pipeline: Literal["reward_model"] = Field(default="reward_model", description="This pipeline.")
    name: str = Field(default="reward_model", pattern=NAME_PATTERN, description="Name of the run and of its folder.")
    data: ScoredRows = Field(description="What the model learns from, and how much of it in a step.")
    algorithm: RewardModelAlgorithmConfig = Field(
        default_factory=RewardModelAlgorithmConfig,
        description="How pairs, scores or labels of steps become a gradient.",
    )
    evaluation: ScoredEvaluation | None = Field(
        default=None, description="How progress is measured, on rows that are not trained on; none by default."
    )

    @property
    def task(self) -> ModelTask:
        return "token-classification" if self.data.type == "steps" else "text-classification"

    @property
    def stated_in_model(self) -> Mapping[str, Any]:
        if self.data.type != "steps":
            return {}
        # as transformers calls an output that is a probability's logit, and one that is a value
        kind = "multi_label_classification" if self.algorithm.loss == "bce" else "regression"
        return {"step_separator": self.data.step_separator, "problem_type": kind}

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        longest, terms = self.longest_sample, self.longest_sample_terms
        yield from self.training.budget_violations("training", longest, terms, pairs=self.data.type == "pairs")
        yield from self._row_violations()
        for name in self.training.changed("logprob_chunk_tokens", "logprob_chunk_vocab"):
            yield Violation(
                ("training", name),
                "a reward model has one output, a score, and computes no logits that could be cut into chunks; remove "
                "it (max_tokens_per_micro_batch bounds the memory of a forward pass)",
            )

    def _row_violations(self) -> Iterator[Violation]:
        """Yield a loss, options and an evaluation that do not fit the rows."""
        rows, loss = self.data.type, self.algorithm.loss
        if rows == "pairs" and loss != "bradley_terry":
            yield Violation(
                ("algorithm", "loss"),
                f"{loss!r} learns from answers that have a score each, or steps that have a label, and rows of "
                "data.type = pairs have none; set data.type: scores or steps, or loss: bradley_terry",
            )
        if rows != "pairs" and loss == "bradley_terry":
            for_rows = "mse for ratings" if rows == "scores" else "mse for the squared difference from the label"
            yield Violation(
                ("algorithm", "loss"),
                f"'bradley_terry' compares two answers to one prompt, and rows of data.type = {rows} have one each; "
                f"set bce for scores from 0 to 1 (right or wrong), or {for_rows}",
            )
        if rows != "pairs":
            for name, instead in (
                ("label_smoothing", "write soft scores into the rows (0.95 for 1, 0.05 for 0)"),
                ("center_coefficient", "scores are centred by those of the rows"),
            ):
                if getattr(self.algorithm, name):
                    yield Violation(
                        ("algorithm", name), f"it is of pairs, and data.type is {rows}; remove it: {instead}"
                    )
        if self.evaluation is not None and self.evaluation.type != rows:
            yield Violation(
                ("evaluation", "type"),
                f"a model that learns from data.type = {rows} is measured on rows of the same kind; set type: {rows}",
            )

    @property
    def evaluated_rows(self) -> ScoredPairData | ScoredAnswerData | StepData | None:
        """What the evaluation reads: its sources, with the limits of `data`; nothing without an evaluation."""
        if self.evaluation is None:
            return None
        rows = _READ[self.evaluation.type]
        limits = {name: getattr(self.data, name) for name in rows.model_fields}
        # `train_on` is of training: every labelled step is measured
        measured = {"train_on": "all"} if rows is StepData else {}
        return rows.model_validate({**limits, **measured, "sources": self.evaluation.sources})
