"""Sources of data: the section `data` of prompts, and rows of conversations and pairs to learn from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar

from pydantic import Discriminator, Field, PlainSerializer, PlainValidator, Tag, WithJsonSchema, model_validator

from roll_like.config.base import (
    ConfigModel,
    PluginConfig,
    PluginSetting,
    PositiveFloat,
    PositiveInt,
    Violation,
    repeated,
)
from roll_like.registry import CURRICULA


def is_dataset(value: Any) -> bool:
    """Return whether a value is a dataset of Hugging Face `datasets`, without importing it."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(
        value, datasets.Dataset | datasets.DatasetDict | datasets.IterableDataset | datasets.IterableDatasetDict
    )


def as_section(value: Any) -> Any:
    """Return what a section of data is written as: in Python, rows or a dataset may stand for the whole of it."""
    if isinstance(value, list) or is_dataset(value):
        return {"sources": [value]}
    if isinstance(value, Mapping) and is_dataset(value.get("sources")):
        return {**value, "sources": [value["sources"]]}
    return value


def _checked(value: Any) -> Any:
    """Return rows as they are.

    Raises:
        ValueError: They are none, or of no kind that is read.
    """
    if is_dataset(value):
        if type(value).__name__.startswith("Iterable"):
            raise ValueError(
                f"an {type(value).__name__} has no rows until it is read; use datasets.Dataset.from_generator, or the "
                "`path` of its files with streaming: true"
            )
        return value
    if not isinstance(value, list | tuple):
        raise ValueError(
            f"expected a list of mappings or a datasets.Dataset, found {type(value).__name__}; a table of pandas "
            "becomes one by datasets.Dataset.from_pandas"
        )
    for number, row in enumerate(value):
        if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
            raise ValueError(
                f"rows[{number}]: expected a mapping from names of fields to values, found {type(row).__name__}"
            )
    return tuple(value)


def _plain(value: Any) -> Any:
    if is_dataset(value):
        return {name: each.to_list() for name, each in value.items()} if isinstance(value, Mapping) else value.to_list()
    return [dict(row) for row in value]


#: Rows in a configuration: mappings from names of fields to values, a `datasets.Dataset` or a `DatasetDict`.
Rows: TypeAlias = Annotated[
    Sequence[Mapping[str, Any]],
    PlainValidator(_checked),
    PlainSerializer(_plain),
    WithJsonSchema({"type": "array", "items": {"type": "object"}}),
]


class SourceConfig(ConfigModel):
    """One dataset."""

    common: ClassVar[tuple[str, ...]] = ("path", "name", "split", "prompt_field", "system_prompt", "answer_field")

    path: str = Field(
        default="",
        description="A file (`.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`), a directory of them, or a hub dataset id.",
    )
    rows: Rows | None = Field(
        default=None, description="The rows themselves, in place of a `path`: a list of mappings from fields to values."
    )
    name: str | None = Field(default=None, description="Name in metrics; default: stem of its path.")
    subset: str | None = Field(
        default=None,
        description="Subset (configuration) of a dataset, such as `main` of `openai/gsm8k`; default: its only one.",
    )
    split: str = Field(
        default="train",
        description="Split of a hub dataset or of a directory, such as `test`, `train[:100]` or `train+test`.",
    )
    revision: str | None = Field(
        default=None, description="Revision of a hub dataset (branch, tag or commit); default: its newest."
    )
    streaming: bool = Field(
        default=False,
        description="Read rows as steps need them, for data that fits neither in memory nor on disk: they come in the "
        "order of the files, shuffled within blocks of `stream_block`. Such a run lasts a number of `steps`.",
    )
    stream_block: PositiveInt = Field(
        default=4096, description="With `streaming`: rows that are shuffled with each other, and are in memory at once."
    )
    weight: PositiveFloat = Field(
        default=1.0, description="How often rows of this source are drawn, relative to the other sources."
    )
    prompt_field: str = Field(default="prompt", description="Field with the prompt: a string or a list of messages.")
    system_prompt: str | None = Field(default=None, description="System message put before every conversation.")
    images_field: str | None = Field(
        default="images",
        description="Field with the row's images: paths from the file's folder, `data:` URLs or bytes. null: none.",
    )
    transcripts: bool = Field(
        default=False,
        description="Texts of conversations are transcripts, as in hh-rlhf, and become messages: a blank line and "
        "`Human:` begin a user's message, a blank line and `Assistant:` the assistant's.",
    )

    @model_validator(mode="before")
    @classmethod
    def _rows_alone(cls, value: Any) -> Any:
        """In Python, rows may stand for a source that has nothing besides."""
        return {"rows": value} if isinstance(value, list) or is_dataset(value) else value

    @model_validator(mode="after")
    def _path_or_rows(self) -> Self:
        if bool(self.path) == (self.rows is not None):
            found = "both are set" if self.path else "neither is set"
            raise ValueError(f"a source has a `path` or `rows`, and {found}")
        if self.rows is not None:
            useless = [key for key in ("subset", "revision", "streaming") if getattr(self, key)]
            if useless:
                raise ValueError(f"`rows` are here as they are, and have no {useless[0]}; remove it, or set a `path`")
        return self

    def violations(self, section: str, index: int, epochs: float | None) -> Iterator[Violation]:
        """Yield what has no meaning for a source that is trained on, or that is measured on.

        What is read as steps need it has no end: neither a pass over it nor an evaluation on all of it is possible.

        Args:
            section: `data`, or the key of an evaluation.
            epochs: Passes that the run makes over its data; None where it counts steps.
        """
        if section == "data":
            if self.streaming and epochs is not None:
                yield Violation(
                    ("epochs",),
                    f"data.sources.{index} is read as steps need it, and how many rows it has is not known; set "
                    "`steps`, and epochs: null",
                )
            return
        if self.streaming:
            yield Violation(
                (section, "sources", index, "streaming"),
                "an evaluation measures all rows; remove it, and take a part of the rows where they are many "
                "(`split: test[:1000]` of a hub dataset)",
            )
        if self.weight != 1.0:
            yield Violation(
                (section, "sources", index, "weight"),
                "an evaluation goes through every row once, so a weight has no effect; remove it (the weights of "
                "data.sources have one)",
            )

    @property
    def label(self) -> str:
        """Its `name`, or the stem of its path."""
        return self.name or (Path(self.path).stem if self.path else "rows")

    @property
    def place(self) -> str:
        """What it is called in messages: its path, or that it is rows."""
        return self.path or "`rows`"

    @property
    def fields(self) -> dict[str, str]:
        """The fields of rows that are read by name: each key with what it is set to."""
        values = ((key, getattr(self, key)) for key in type(self).model_fields if key.endswith("_field"))
        return {key: value for key, value in values if isinstance(value, str)}


class Band(ConfigModel):
    """Numbers of a field that are kept."""

    low: float | None = Field(default=None, allow_inf_nan=False, description="Lowest; default: no limit.")
    high: float | None = Field(default=None, allow_inf_nan=False, description="Highest; default: no limit.")

    @model_validator(mode="after")
    def _band_holds_something(self) -> Self:
        if self.low is None and self.high is None:
            raise ValueError("a band without low and high leaves nothing out; set one of them")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"the band is empty: low is {self.low:g}, high is {self.high:g}; set low below high")
        return self


def _filter_of(value: Any) -> str | None:
    if isinstance(value, Band) or (isinstance(value, Mapping) and value.keys() <= Band.model_fields.keys()):
        return "band"
    if isinstance(value, list | tuple):
        return "values" if all(isinstance(each, str | int | float) for each in value) else None
    return "value" if isinstance(value, str | int | float) else None


#: What a row's field has to be: a value, one of several, or a number within a band.
RowFilter: TypeAlias = Annotated[
    Annotated[Band, Tag("band")]
    | Annotated[str | bool | int | float, Tag("value")]
    | Annotated[tuple[str | bool | int | float, ...], Field(min_length=1), Tag("values")],
    Discriminator(
        _filter_of,
        custom_error_type="rule",
        custom_error_message="expected a text, a number, true or false, a list of these, or a band of numbers with "
        "`low` and `high`",
    ),
]


class DataSource(SourceConfig):
    """One dataset and how its rows become tasks."""

    name: str | None = Field(default=None, description="Name in metrics and in `rewards.use[].sources`; default: stem.")
    domain: str | None = Field(
        default=None, description="Domain of its tasks, in metrics and in `domains`; default: its name."
    )
    domain_field: str | None = Field(
        default=None,
        description="Field with each row's domain, a text such as verl's `data_source`; in place of `domain`. Rows of "
        "such a source may lack a reference answer.",
    )
    domain_weights: dict[str, PositiveFloat] = Field(
        default_factory=dict,
        description="With `domain_field`: how often rows of each domain are drawn, relative to the source's other "
        "domains; default: as often as the source has them.",
    )
    where: dict[str, RowFilter] = Field(
        default_factory=dict,
        description="Rows that are kept, by a field: its value, a list of values, or a band of numbers such as "
        "`{low: 0.1, high: 0.9}`. Others are left out and counted.",
    )
    answer_field: str | None = Field(
        default=None,
        description="Field with the reference answer, if there is one. That of `prompt_field`: its conversations end "
        "with the assistant's answer, and what is before it is the prompt.",
    )

    answer_after: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="The reference answer is what follows this text in `answer_field`, its last occurrence: `####` in "
        "GSM8K. Default: the whole field.",
    )
    answer_boxed: bool = Field(
        default=False,
        description="The reference answer is what the last `\\boxed{…}` in `answer_field` holds, as in MATH's "
        "solutions.",
    )

    @model_validator(mode="after")
    def _domains_have_a_field(self) -> Self:
        if self.domain is not None and self.domain_field is not None:
            raise ValueError("domain and domain_field both say what the rows' domain is; remove one of them")
        if self.domain_weights and self.domain_field is None:
            raise ValueError("domain_weights are of the domains that `domain_field` finds in rows; set that too")
        if self.domain_weights and self.streaming:
            raise ValueError(
                "domain_weights choose among all rows, and with streaming: true rows come in the order of the files; "
                "remove one of them, or make each domain a source with a `weight`"
            )
        return self

    @model_validator(mode="after")
    def _answers_have_a_field(self) -> Self:
        asked = [key for key in ("answer_after", "answer_boxed") if getattr(self, key)]
        if asked and self.answer_field is None:
            raise ValueError(f"{asked[0]} says where in `answer_field` the reference answer is; set that too")
        if len(asked) > 1:
            raise ValueError("answer_after and answer_boxed both say where the reference answer is; remove one of them")
        return self

    @property
    def holds_conversations(self) -> bool:
        """Whether prompts and reference answers are in one field."""
        return self.answer_field == self.prompt_field

    @property
    def domain_label(self) -> str | None:
        """Its `domain`, or its label; None where each row has its own."""
        return None if self.domain_field is not None else self.domain or self.label

    @property
    def fields(self) -> dict[str, str]:
        """The same, and the fields that say which rows are kept."""
        return {**super().fields, **{f"where.{name}": name for name in self.where}}

    def violations(self, section: str, index: int, epochs: float | None) -> Iterator[Violation]:
        """Yield the same, and weights of domains in an evaluation."""
        yield from super().violations(section, index, epochs)
        if section != "data" and self.domain_weights:
            yield Violation(
                (section, "sources", index, "domain_weights"),
                "an evaluation goes through every row once, so weights have no effect; remove them",
            )


class SourcesSection(ConfigModel):
    """A section of sources, for which rows or a dataset may stand in Python."""

    @model_validator(mode="before")
    @classmethod
    def _rows_alone(cls, value: Any) -> Any:
        return as_section(value)


class DataConfig(SourcesSection):
    """What the policy is trained on."""

    common: ClassVar[tuple[str, ...]] = ("max_prompt_tokens",)

    sources: Annotated[tuple[DataSource, ...], Field(min_length=1)] = Field(description="Datasets, weighted.")
    max_prompt_tokens: PositiveInt = Field(default=512, description="Longer prompts are left out, and counted. Tokens.")
    shuffle: bool = Field(default=True, description="Shuffle each pass over a source, seeded by `seed`.")
    curriculum: Annotated[PluginConfig, PluginSetting(CURRICULA)] | None = Field(
        default=None,
        description="Decides by a task's solve rate whether it is attempted or skipped when its turn comes; by default "
        "none is skipped.",
    )

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        if twice := repeated(source.label for source in self.sources):
            raise ValueError(f"two sources are called {twice[0]!r}; give each a `name` of its own")
        return self


SourceT = TypeVar("SourceT", bound="RowSource")


class RowSource(SourceConfig):
    """One dataset: what sources of every kind have."""

    tools_field: str = Field(default="tools", description="Field with function schemas for the chat template, if any.")


class ConversationSource(RowSource):
    """Conversations: rows of messages, or of a prompt and its completion."""

    common: ClassVar[tuple[str, ...]] = ("messages_field", "completion_field")

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

    common: ClassVar[tuple[str, ...]] = ("chosen_field", "rejected_field")

    chosen_field: str = Field(
        default="chosen", description="Field with the preferred response: a string, or messages with or without prompt."
    )
    rejected_field: str = Field(default="rejected", description="Field with the other response, in the same form.")


class RowLimits(SourcesSection):
    """What happens to rows that are too long, or bad."""

    common: ClassVar[tuple[str, ...]] = ("max_tokens", "pairs_per_step", "samples_per_step")

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


def pairs_or(*others: str) -> Discriminator:
    """Return what tells sections of `type: pairs` from those of other types; they are of pairs where they do not say.

    Args:
        others: The other types.
    """
    listed = " or ".join(["`type: pairs` (the default)", *(f"`type: {other}`" for other in others)])
    return Discriminator(
        _rows_type,
        custom_error_type="rule",
        custom_error_message=f"expected a section with {listed}",
    )


def _rows_type(value: Any) -> str | None:
    kind = value.get("type", "pairs") if isinstance(value, Mapping) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None
