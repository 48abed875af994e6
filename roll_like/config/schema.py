"""JSON Schema of a pipeline's configuration, for editors; `scripts/config_tables.py` makes reference pages of it."""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, NoDefault
from pydantic_core import core_schema

from roll_like.config.base import ConfigModel, PluginConfig

Schema = dict[str, Any]


def json_schema(config: type[ConfigModel]) -> Schema:
    """Return the JSON Schema (draft 2020-12) of what a YAML file may say.

    Beside the fields of `config` it has `extends`, which loading resolves, and it lists the settings of every
    registered plugin.
    """
    schema = config.model_json_schema(by_alias=True, schema_generator=_WithDefaults)
    _loosen_unions(schema)
    schema["properties"] = {"extends": _EXTENDS, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def write_json(schema: Schema) -> str:
    """Return the schema as text, one form for files and for comparison."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


_EXTENDS: Schema = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    "description": "Another file (or files, later ones win) to start from, relative to this one. Sections are merged "
    "key by key, lists are replaced, and a section with another `type` replaces the former one.",
}


class _WithDefaults(GenerateJsonSchema):
    """States the default of plugin fields too, which pydantic leaves out because a factory makes it."""

    def get_default_value(self, schema: core_schema.WithDefaultSchema) -> Any:
        factory = schema.get("default_factory")
        if factory is None or schema.get("default_factory_takes_data"):
            return super().get_default_value(schema)
        value = factory()  # type: ignore[call-arg]
        # the keys of a section state their own defaults
        if isinstance(value, PluginConfig):
            return {"type": value.type, **value.model_dump(mode="json", exclude_defaults=True)}
        return NoDefault if isinstance(value, ConfigModel) else value


def _loosen_unions(node: Any) -> None:
    """Turn oneOf into anyOf: `{replicas: 2}` is right for both engines, and the default `type` decides."""
    if isinstance(node, dict):
        if "oneOf" in node:
            node["anyOf"] = node.pop("oneOf")
            node.pop("discriminator", None)
        for value in node.values():
            _loosen_unions(value)
    elif isinstance(node, list):
        for value in node:
            _loosen_unions(value)
