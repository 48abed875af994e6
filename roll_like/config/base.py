"""What every configuration class is made of."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from roll_like.config.explain import NOTHING, explain
from roll_like.config.keys import is_common, union_members
from roll_like.config.source import Source
from roll_like.errors import PluginError
from roll_like.registry import Registry

PositiveInt = Annotated[int, Field(ge=1)]
Steps = Annotated[int, Field(ge=1, le=1_000_000_000)]
PositiveFloat = Annotated[float, Field(gt=0)]
Epochs = Annotated[float, Field(gt=0, le=1_000_000)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, slots=True)
class Violation:
    """A combination that cannot work: the key to change, and why."""

    path: tuple[str | int, ...]
    message: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found: an `error` stops a run, a `warning` may not be meant, a `note` was not checked."""

    level: Literal["error", "warning", "note"]
    key: str
    message: str

    @classmethod
    def error(cls, key: str, message: str) -> Self:
        """Return what stops a run."""
        return cls("error", key, message)

    @classmethod
    def warning(cls, key: str, message: str) -> Self:
        """Return what may not be meant."""
        return cls("warning", key, message)

    @classmethod
    def note(cls, key: str, message: str) -> Self:
        """Return what was not checked, or is only to be known."""
        return cls("note", key, message)

    def __str__(self) -> str:
        return f"{self.level}: {self.key}: {self.message}"


def repeated(names: Iterable[str]) -> list[str]:
    """Return the names that are there more than once, sorted."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def raise_violations(title: str, violations: Iterable[Violation]) -> None:
    """Raise one ValidationError that lists `violations`, if there are any."""
    errors = [
        InitErrorDetails(type=PydanticCustomError("rule", violation.message), loc=violation.path, input=None)
        for violation in violations
    ]
    if errors:
        raise ValidationError.from_exception_data(title, errors)


def _mark_common(schema: JsonDict, section: type[BaseModel]) -> None:
    """Say in a section's JSON Schema which keys are common."""
    properties = schema.get("properties")
    for key, entry in properties.items() if isinstance(properties, dict) else ():
        if is_common(section, key) and isinstance(entry, dict):
            entry["common"] = True


class ConfigModel(BaseModel):
    """Base of every section: unknown keys are errors, values are frozen.

    Validators never mutate, read the environment or count devices: a configuration means the
    same on every machine.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        json_schema_extra=_mark_common,
    )
    #: Keys that most files have, beside those that are required; some may be a subclass's. Reference pages begin with
    #: them, and messages name them first.
    common: ClassVar[tuple[str, ...]] = ()

    if not TYPE_CHECKING:  # type checkers know the fields

        def __init__(self, **values: Any) -> None:
            """Take the values of fields.

            Raises:
                ConfigError: Everything that is wrong with them, in one message.
            """
            with _explained(type(self), values, f"{type(self).__name__}(…)"):
                super().__init__(**values)

        # pydantic validates nested sections itself, so that their errors have whole paths
        __init__.__pydantic_base_init__ = True

        @classmethod
        def model_validate(cls, obj: Any, **options: Any) -> Self:
            """Return the configuration that a mapping of values stands for.

            Raises:
                ConfigError: Everything that is wrong with it, in one message.
            """
            with _explained(cls, obj, cls.__name__):
                return super().model_validate(obj, **options)

    @classmethod
    def from_source(cls, source: Source) -> Self:
        """Return the configuration that is written in a file, or in a part of one.

        Raises:
            ConfigError: Everything that is wrong with it, in one message.
        """
        try:
            return cls.from_values(source.values)
        except ValidationError as error:
            raise explain(error, cls, source) from error

    @classmethod
    def from_values(cls, values: Any) -> Self:
        """Return the same for who knows where the values were written.

        Raises:
            ValidationError: Everything that is wrong with it, as pydantic lists it.
        """
        return super().model_validate(values)

    def changed(self, *keys: str) -> list[str]:
        """Return which of some keys, or of all, do not have their defaults."""
        fields = type(self).model_fields
        return [
            key for key in keys or fields if getattr(self, key) != fields[key].get_default(call_default_factory=True)
        ]

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_and_no_word_for_nothing(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would read `steps: true` as 1
        if isinstance(value, bool) and not _takes_bool(cls.model_fields[info.field_name or ""].annotation):
            raise PydanticCustomError("truth", "expected something other than true or false")
        # `null` is YAML's word; a path or a name would be "None"
        if (
            isinstance(value, str)
            and value in NOTHING
            and _takes_nothing_or_text(cls.model_fields[info.field_name or ""])
        ):
            raise PydanticCustomError("nothing", "expected text, or null")
        return value


@contextmanager
def _explained(root: type[BaseModel], values: Any, label: str) -> Iterator[None]:
    """Raise what pydantic finds as one ConfigError."""
    try:
        yield
    except ValidationError as error:
        written = dict(values) if isinstance(values, Mapping) else {}
        raise explain(error, root, Source(written, label=label)) from None


class PipelineConfig(ConfigModel):
    """Base of a whole file; `pipeline` is the name under which the class is registered in `PIPELINES`."""

    #: The class that runs it, as `module:Class`. It is imported when it is needed: it may bring torch and Ray.
    implementation: ClassVar[str]

    pipeline: str = Field(description="Name of the pipeline.")

    @classmethod
    def pipeline_class(cls) -> Any:
        """Return the class that runs it.

        Raises:
            PluginError: There is no such class.
        """
        module, _, name = cls.implementation.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise PluginError(
                f"{cls.__name__}.implementation is {cls.implementation!r}, which cannot be imported: {error}",
                fix="correct it to `module:Class`, or reinstall the package that declares the pipeline",
            ) from error


class PluginConfig(ConfigModel):
    """Base of a plugin's own settings; `type` is the name under which the plugin is registered."""

    type: Annotated[str, Field(description="Registered name of the plugin.")]


class PluginSetting:
    """Annotation for a field that holds any registered plugin's configuration.

    `Annotated[PluginConfig, PluginSetting(REWARDS)]` takes `{type: name, …}`, looks `name` up and
    validates the rest against that plugin's own `Config`. An unknown name or key is an error at
    the field's own path.

    Args:
        registry: Where plugins are looked up.
        default: Name of the plugin whose section has no `type`; None makes `type` required.
        section: Attribute of a plugin that holds the class of this section; None there says that it has none.
    """

    def __init__(self, registry: Registry[Any], *, default: str | None = None, section: str = "Config") -> None:
        self.registry = registry
        self.default = default
        self._section = section

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.validate,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value.model_dump(mode="json")),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        names = self.names()
        options = [self._closed_schema(name) for name in names]
        others = {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"type": "string", "not": {"enum": names}}},
        }
        return {"anyOf": [{"type": "string"}, *options, others]}

    def names(self) -> list[str]:
        """Return the plugins that have this section."""
        return [name for name in self.registry.names() if getattr(self.registry.get(name), self._section) is not None]

    def config_of(self, value: Any) -> type[PluginConfig]:
        """Return the class that a section is validated against.

        Raises:
            ValueError: The value is no mapping with a known `type`.
            PluginError: There is no such plugin, or it has no such section.
        """
        name = value.get("type", self.default) if isinstance(value, Mapping) else value
        if not isinstance(name, str):
            raise ValueError(f"expected a mapping with `type: <name of a {self.registry.kind}>`, found {value!r}")
        config: type[PluginConfig] | None = getattr(self.registry.get(name), self._section)
        if config is None:
            raise PluginError(
                f"the {self.registry.kind} {name!r} cannot be used here", fix=f"use one of: {', '.join(self.names())}"
            )
        return config

    def validate(self, value: Any) -> PluginConfig:
        """Return the plugin's validated configuration.

        Raises:
            ValueError: The value is no mapping with a known `type`.
        """
        if isinstance(value, PluginConfig):
            return value
        try:
            config = self.config_of(value)
        except PluginError as error:
            raise ValueError(f"{error.message}; {error.fix}") from error
        return config.from_values({"type": value} if isinstance(value, str) else {"type": self.default, **value})

    def _closed_schema(self, name: str) -> dict[str, Any]:
        whole = self.config_of(name).model_json_schema()
        # pydantic refuses references to definitions that it did not make, so nested sections are written in place
        schema: dict[str, Any] = _in_place(whole, whole.pop("$defs", {}))
        required = [key for key in schema.get("required", []) if key != "type"]
        chosen = {"default": name} if name == self.default else {}
        schema["properties"]["type"] = {"const": name, **chosen, "description": f"This {self.registry.kind}."}
        schema["required"] = required if chosen else ["type", *required]
        return schema


def _in_place(node: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_in_place(value, definitions) for value in node]
    if not isinstance(node, dict):
        return node
    written = {key: _in_place(value, definitions) for key, value in node.items() if key != "$ref"}
    if "$ref" not in node:
        return written
    name = node["$ref"].rpartition("/")[2]
    # a section that holds itself is described down to where it begins again
    rest = {key: value for key, value in definitions.items() if key != name}
    return {**_in_place(definitions.get(name, {}), rest), **written}


def _takes_nothing_or_text(info: FieldInfo) -> bool:
    """Return whether a field takes null, and any text beside it."""
    taken = union_members(info.annotation)
    return type(None) in taken and any(option in (str, Path) for option in taken)


def _takes_bool(annotation: Any) -> bool:
    return annotation in (bool, Any, object) or any(_takes_bool(part) for part in get_args(annotation))
