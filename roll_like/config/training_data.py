"""Data of supervised and preference training: where rows are, which fields they have, what happens to bad ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from roll_like.config.base import ConfigModel
from roll_like.config.python_rows import as_section
from roll_like.config.sections import PositiveInt, SourceConfig

SourceT = TypeVar("SourceT", bound="RowSource")


class RowSource(SourceConfig):
    """One dataset: what sources of every kind have."""

    tools_field: str = Field(default="tools", description="Field with function schemas for the chat template, if any.")


def without_rows(source: SourceT) -> SourceT:
    """Return a source without the rows that it may have in itself, to be sent to other processes."""
    return source if source.rows is None else source.model_copy(update={"rows": ()})


class ConversationSource(RowSource):
    """Conversations: rows of messages, or of a prompt and its completion."""

    messages_field: str = Field(
        default="messages", description="Field with a list of messages; rows without it have prompt and completion."
    )
    completion_field: str = Field(
        default="completion", description="Field with what follows the prompt: a string or a list of messages."
    )


class PairSource(RowSource):
    """Two responses to one prompt, of which one is preferred.

    Rows without the prompt's field hold two conversations, and what they begin with alike is the prompt.
    """

    chosen_field: str = Field(
        default="chosen", description="Field with the preferred response: a string, or messages with or without prompt."
    )
    rejected_field: str = Field(default="rejected", description="Field with the other response, in the same form.")


class RowLimits(ConfigModel):
    """What happens to rows that are too long, or bad."""

    @model_validator(mode="before")
    @classmethod
    def _rows_alone(cls, value: Any) -> Any:
        return as_section(value)

    max_tokens: PositiveInt = Field(default=1024, description="Longest sample, prompt included. Tokens.")
    too_long: Literal["skip", "cut", "refuse"] = Field(
        default="skip",
        description="Samples over the limit: leave them out and count them, train on their beginning, or stop.",
    )
    bad_rows: Literal["refuse", "skip"] = Field(
        default="refuse",
        description="Rows that cannot be trained on (an empty response, roles that the chat template refuses): stop, "
        "naming file and line, or leave them out and count them.",
    )

    cache_dir: Path | None = Field(
        default=None, description="Where tokenised rows are kept for the next run; default: `~/.cache/roll_like`."
    )
    cache_gib: Annotated[float, Field(ge=0)] = Field(
        default=20.0,
        description="How much of them is kept: beyond, those go that were not used for the longest time. 0 keeps none.",
    )

    def reading(self, sources: Sequence[RowSource]) -> Self:
        """Return the section with other sources, such as those of the evaluation."""
        return self.model_copy(update={"sources": tuple(sources)})


class ConversationData(RowLimits):
    """What supervised training reads."""

    sources: Annotated[tuple[ConversationSource, ...], Field(min_length=1)] = Field(description="Datasets, weighted.")
    train_on: Literal["all", "last"] = Field(
        default="all", description="Which of a conversation's assistant turns are trained: all, or the last one."
    )


class PairData(RowLimits):
    """What preference training reads."""

    sources: Annotated[tuple[PairSource, ...], Field(min_length=1)] = Field(description="Datasets, weighted.")
