"""Data of supervised and preference training: where rows are, which fields they have, what happens to bad ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field

from roll_like.config.base import ConfigModel
from roll_like.config.sections import PositiveInt, SourceConfig


class RowSource(SourceConfig):
    """One dataset: what sources of every kind have."""

    tools_field: str = Field(default="tools", description="Field with function schemas for the chat template, if any.")


class ConversationSource(RowSource):
    """Conversations: rows of messages, or of a prompt and its completion."""

    messages_field: str = Field(
        default="messages", description="Field with a list of messages; rows without it have prompt and completion."
    )
    completion_field: str = Field(
        default="completion", description="Field with what follows the prompt: a string or a list of messages."
    )


class LabelledSource(ConversationSource):
    """Conversations that are labelled as desirable or not."""

    label_field: str = Field(default="label", description="Field with the result: true or false, 1 or 0.")


class PairSource(RowSource):
    """Two responses to one prompt, of which one is preferred.

    Rows without the prompt's field hold two conversations, and what they begin with alike is the prompt.
    """

    chosen_field: str = Field(
        default="chosen", description="Field with the preferred response: a string, or messages with or without prompt."
    )
    rejected_field: str = Field(default="rejected", description="Field with the other response, in the same form.")


class ScoredPairSource(PairSource):
    """Two responses to one prompt, the preferred one of which is to be scored higher."""

    margin_field: str | None = Field(
        default=None,
        description="Field with a number of at least 0: by how much the preferred response should score higher; none "
        "by default.",
    )


class RowLimits(ConfigModel):
    """What happens to rows that are too long, or bad."""

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

    def reading(self, sources: Sequence[RowSource]) -> Self:
        """Return the section with other sources, such as those of the evaluation."""
        return self.model_copy(update={"sources": tuple(sources)})


class ConversationData(RowLimits):
    """What supervised training reads."""

    sources: Annotated[tuple[ConversationSource, ...], Field(min_length=1)] = Field(description="Datasets, weighted.")
    train_on: Literal["all", "last"] = Field(
        default="all", description="Which of a conversation's assistant turns are trained: all, or the last one."
    )


class LabelledData(RowLimits):
    """What training on unpaired results reads."""

    sources: Annotated[tuple[LabelledSource, ...], Field(min_length=1)] = Field(description="Datasets, weighted.")


class PairData(RowLimits):
    """What preference training reads."""

    sources: Annotated[tuple[PairSource, ...], Field(min_length=1)] = Field(description="Datasets, weighted.")


class ScoredPairData(RowLimits):
    """What the training of a reward model reads."""

    sources: Annotated[tuple[ScoredPairSource, ...], Field(min_length=1)] = Field(description="Datasets, weighted.")
    max_tokens: PositiveInt = Field(default=1024, description="Longest conversation, prompt included. Tokens.")
    too_long: Literal["skip", "refuse"] = Field(
        default="skip",
        description="Conversations over the limit: leave their pair out and count it, or stop. They are not cut: the "
        "score is read at the end.",
    )
