"""What every configuration class is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from roll_like.errors import PluginError
from roll_like.registry import Registry


class ConfigModel(BaseModel):
    """Base of every section: unknown keys are errors, values are frozen.

    Validators never mutate, read the environment or count devices: a configuration means the
    same on every machine.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())


class PluginConfig(ConfigModel):
    """Base of a plugin's own settings; `type` is the name under which the plugin is registered."""

    type: Annotated[str, Field(description="Registered name of the plugin.")]


class PluginSetting:
    """Annotation for a field that holds any registered plugin's configuration.

    `Annotated[PluginConfig, PluginSetting(REWARDS)]` takes `{type: name, …}`, looks `name` up and
    validates the rest against that plugin's own `Config`. An unknown name or key is an error at
    the field's own path.
    """

    def __init__(self, registry: Registry[Any]) -> None:
        self.registry = registry

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.validate,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value.model_dump(mode="json")),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        options = [self.registry.get(name).Config for name in self.registry.names()]
        return {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"type": "string"}},
            "anyOf": [_closed_schema(option, name) for option, name in zip(options, self.registry.names(), strict=True)]
            + [{"properties": {"type": {"not": {"enum": self.registry.names()}}}}],
        }

    def validate(self, value: Any) -> PluginConfig:
        """Return the plugin's validated configuration.

        Raises:
            ValueError: The value is no mapping with a known `type`.
        """
        if isinstance(value, PluginConfig):
            return value
        if isinstance(value, str):
            value = {"type": value}
        if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
            raise ValueError(f"expected a mapping with `type: <name of a {self.registry.kind}>`, found {value!r}")
        try:
            plugin = self.registry.get(value["type"])
        except PluginError as error:
            raise ValueError(str(error)) from error
        config: PluginConfig = plugin.Config.model_validate(dict(value))
        return config


def _closed_schema(config: type[ConfigModel], name: str) -> dict[str, Any]:
    schema = config.model_json_schema(ref_template="#/$defs/{model}")
    schema["properties"]["type"] = {"const": name}
    return schema
