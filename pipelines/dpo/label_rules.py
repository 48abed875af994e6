"""Single verdicts in `pipeline: dpo`: data and evaluation of `type: labels`, and which losses take which rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from roll_like.config.rules import budget_holds, budget_holds_a_pair
from roll_like.config.run import ScheduleConfig
from roll_like.config.sections import PositiveInt
from roll_like.config.training_data import LabelledData, LabelledSource
from roll_like.config.violations import Violation
from roll_like.registry import PREFERENCE_LOSSES

if TYPE_CHECKING:
    from roll_like.builtin.pipelines.dpo.config import DPOConfig


class VerdictDataConfig(LabelledData):
    """Single answers, each liked or not, for losses that need no pairs."""

    type: Literal["labels"] = Field(default="labels", description="Rows with a prompt, one answer and its label.")
    samples_per_step: PositiveInt = Field(description="Answers of one step, which is one optimizer update.")
    shuffle: bool = Field(default=True, description="Shuffle each pass over a source, seeded by `seed`.")


class VerdictEvaluationConfig(ScheduleConfig):
    """How progress is measured: on single answers that are not trained on."""

    type: Literal["labels"] = Field(default="labels", description="Rows with a prompt, one answer and its label.")
    sources: Annotated[tuple[LabelledSource, ...], Field(min_length=1)] = Field(
        description="Datasets; their limits are those of `data`."
    )


def rows_type(value: Any) -> str | None:
    """Return which rows a section is of; pairs where it does not say."""
    kind = value.get("type", "pairs") if isinstance(value, Mapping) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


def budget_holds_a_row(config: DPOConfig) -> Iterator[Violation]:
    """Yield a micro-batch that is too small for the two answers of a pair, or for one answer."""
    if PREFERENCE_LOSSES.get(config.algorithm.loss.type).paired:
        yield from budget_holds_a_pair(config)
    else:
        yield from budget_holds(
            config, ("training", "max_tokens_per_micro_batch"), config.training.max_tokens_per_micro_batch
        )


def loss_suits_rows(config: DPOConfig) -> Iterator[Violation]:
    """Yield what a loss on pairs cannot learn from or be measured on, and steps too small for a baseline."""
    name = config.algorithm.loss.type
    loss = PREFERENCE_LOSSES.get(name)
    unpaired = [other for other in PREFERENCE_LOSSES.names() if not PREFERENCE_LOSSES.get(other).paired]
    if loss.paired:
        for section, rows in {"data": config.data, "evaluation": config.evaluation}.items():
            if rows is not None and rows.type == "labels":
                yield Violation(
                    (section, "type"),
                    f"{name!r} compares two answers to one prompt, and rows of `type: labels` have one each; use rows "
                    f"of `type: pairs`, or a loss on single answers: algorithm.loss.type = {' or '.join(unpaired)}",
                )
    elif loss.needs_batch and config.items_per_step[0] < 2:
        count, what = config.items_per_step
        yield Violation(
            ("data", f"{what}_per_step"),
            f"one step has {count} {what.removesuffix('s')}, and {name!r} compares it with answers to other prompts of "
            "the same step; set it to 2 or more, better 16 or more",
        )
