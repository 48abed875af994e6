"""Form: tags in their order, a pattern, JSON that fits a schema.

- type: format
  tags: [think, answer]                     # <think>…</think> <answer>…</answer> and nothing else
- type: format
  json_schema: {type: object, required: [name]}
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from roll_like import Completion, Outcome, Reward, RewardCase, RewardConfig, RewardResult, register_reward
from roll_like.builtin.rewards.patterns import check_pattern, matches_whole
from roll_like.errors import RewardError
from roll_like.rewards.base import refusing_row
from roll_like.types import Task

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_FENCE = re.compile(r"\A```(?:json|JSON)?[ \t]*\r?\n(.*?)(?:\r?\n)?```\Z", re.DOTALL)
Tag = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]*$")]


class FormatConfig(RewardConfig):
    """Settings of the `format` reward. At least one check has to be set."""

    type: Literal["format"] = "format"
    tags: tuple[Tag, ...] = Field(
        default=(), description="Tags that have to be there once each, in this order, closed and not empty."
    )
    outside: bool = Field(default=False, description="Let text stand before, between and after the tags.")
    pattern: Annotated[str | None, AfterValidator(check_pattern)] = Field(
        default=None, description="Regular expression that the whole response has to match; `.` matches line breaks."
    )
    json_schema: dict[str, Any] | None = Field(
        default=None, description="JSON Schema (draft 2020-12) that the response, one JSON value, has to fit."
    )
    schema_field: str | None = Field(
        default=None, description="Row field with the JSON Schema, as a mapping or as JSON text; else as json_schema."
    )
    fence: bool = Field(default=True, description="Let the JSON be wrapped in one code fence.")
    partial: bool = Field(default=False, description="Reward the fraction of checks passed; else all or none.")

    @model_validator(mode="after")
    def _has_a_check(self) -> Self:
        if not (self.tags or self.pattern or self.json_schema is not None or self.schema_field):
            raise ValueError("no check is set; set tags, pattern, json_schema or schema_field")
        if self.json_schema is not None and self.schema_field is not None:
            raise ValueError("json_schema and schema_field both give a schema; keep one of them")
        if len(set(self.tags)) != len(self.tags):
            raise ValueError(f"a tag is named twice in {list(self.tags)}; each has to be there once")
        if self.json_schema is not None:
            _validator(self.json_schema)
        return self


@register_reward("format")
class Format(Reward):
    """1 where a response has the required form, else 0; each check is a figure of its own."""

    Config: ClassVar[type[RewardConfig]] = FormatConfig
    per_sample: ClassVar[bool] = True

    config: FormatConfig

    def __init__(self, config: FormatConfig) -> None:
        super().__init__(config)
        self._schema = None if config.json_schema is None else _validator(config.json_schema)

    def check_row(self, task: Task) -> None:
        """Check the row's own JSON Schema.

        Raises:
            DataError: It is missing or no JSON Schema.
        """
        if self.config.schema_field is None:
            return
        with refusing_row(task, "correct the row, or `schema_field` of the reward"):
            _validator(_schema_of(task.metadata, self.config.schema_field))

    def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
        """Return a value from 0 to 1 for each completion; a `RewardError` where a pattern took too long."""
        return [self._score_one(completion) for completion in completions]

    def cases(self) -> Sequence[RewardCase]:
        """Return tagged answers; none where a pattern or a schema decides the form."""
        tags = self.config.tags
        if not tags or self.config.pattern or self.config.json_schema is not None or self.config.schema_field:
            return ()
        gold = "\n".join(f"<{tag}>some text</{tag}>" for tag in tags)
        wrong = ["some text", gold.replace(f"</{tags[-1]}>", ""), gold.replace("some text", " ")]
        hostile = [gold * 2, "".join(f"<{tag}></{tag}>" for tag in tags), "".join(f"</{tag}>x<{tag}>" for tag in tags)]
        return (RewardCase(prompt="Say something.", gold=(gold,), wrong=tuple(wrong), hostile=tuple(hostile)),)

    def _score_one(self, completion: Completion) -> Outcome:
        text, whole, own = completion.text.strip(), _whole(completion), completion.tags
        checks: dict[str, bool] = {}
        try:
            if tags := self.config.tags:
                of = whole if own is not None and own.open in [f"<{tag}>" for tag in tags] else text
                checks["tags"] = has_tags(of, tags, outside=self.config.outside)
            if (pattern := self.config.pattern) is not None:
                of = whole if own is not None and own.close in pattern.replace("\\", "") else text
                checks["pattern"] = matches_whole(pattern, of)
            schema = self._schema
            if self.config.schema_field is not None:
                schema = _validator(_schema_of(completion.metadata, self.config.schema_field))
            if schema is not None:
                checks["json"] = fits(text, schema, fence=self.config.fence)
        except RewardError as error:
            return error
        except ValueError as error:
            return RewardError(str(error), fix="correct the row")
        passed = sum(checks.values()) / len(checks)
        value = passed if self.config.partial else float(passed == 1.0)
        return RewardResult(value if whole else 0.0, {name: float(held) for name, held in checks.items()})


def _whole(completion: Completion) -> str:
    """Return a response with its reasoning, and with the opening tag that the prompt wrote."""
    opening = completion.tags.open if completion.tags is not None and completion.tags.opened else ""
    return f"{opening}{completion.full_text}".strip()


def has_tags(text: str, tags: Sequence[str], *, outside: bool = False) -> bool:
    """Return whether each tag opens and closes once, in order, around something, and nothing is around them."""
    at = 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return False
        start, end = text.find(opening), text.find(closing)
        inner = text[start + len(opening) : end]
        if start < at or not _says_something(inner):
            return False
        if not outside and text[at:start].strip():
            return False
        at = end + len(closing)
    return outside or not text[at:].strip()


def _says_something(text: str) -> bool:
    """Return whether there is a letter, a digit or a symbol (∞, +), and not only blanks and punctuation."""
    return any(char.isalnum() or unicodedata.category(char).startswith("S") for char in text)


def fits(text: str, schema: Validator, *, fence: bool) -> bool:
    """Return whether `text` is one JSON value that fits the schema. Keys that occur twice are no JSON here."""
    text = text.removeprefix("\ufeff")
    match = _FENCE.match(text) if fence else None
    try:
        value = json.loads(match[1] if match else text, parse_constant=_refuse, object_pairs_hook=_unique)
        return bool(schema.is_valid(value))
    except (ValueError, RecursionError):
        return False


def _schema_of(metadata: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    found = metadata.get(field)
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError as error:
            raise ValueError(f"the field {field!r} is not valid JSON: {error}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"the field {field!r} should hold a JSON Schema, found {found!r}")
    return found


def _validator(schema: Mapping[str, Any]) -> Validator:
    # imported here: nearly half a second, and only this reward needs it
    from jsonschema import Draft202012Validator, SchemaError
    from referencing import Registry

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"this is not a JSON Schema: {error.message}") from error
    # an empty registry: a `$ref` to an address must not make a request
    return Draft202012Validator(schema, registry=Registry())


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")
