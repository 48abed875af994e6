"""JSON Schema of a pipeline's configuration, for editors, and the reference page made from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
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


def markdown(schema: Schema, elsewhere: Schema | None = None, page: str = "") -> Iterator[str]:
    """Yield the lines of a reference page: a table for each section, with key, type, default and description.

    Args:
        schema: Of the configuration.
        elsewhere: Another pipeline's; sections that are the same in both are only named.
        page: The page that describes `elsewhere`.
    """
    described = _top_level(elsewhere or {})[1]
    top, sections = _top_level(schema)
    same = [name for name, lines in sections.items() if described.get(name) == lines]
    yield from top
    if same:
        named = ", ".join(f"`{name}`" for name in same)
        yield from (f"The sections {named} are those of [{page}]({page}).", "")
    for name, lines in sections.items():
        if name not in same:
            yield from lines


def _top_level(schema: Schema) -> tuple[list[str], dict[str, list[str]]]:
    """Return the table of the keys at the top, and the tables of each section among them."""
    definitions = schema.get("$defs", {})
    sections = {
        key: list(_tables_below("", {"properties": {key: entry}}, definitions))
        for key, entry in schema.get("properties", {}).items()
    }
    return list(_table("Top level", "", schema, definitions)), {key: lines for key, lines in sections.items() if lines}


def _table(title: str, description: str, section: Schema, definitions: Schema) -> Iterator[str]:
    yield from (f"## {title}", "")
    if description:
        yield from (description, "")
    properties: dict[str, Schema] = section.get("properties", {})
    if properties:
        yield from ("| key | type | default | description |", "|---|---|---|---|")
        for key, entry in properties.items():
            yield _row(key, entry, required=key in section.get("required", []), definitions=definitions)
        yield ""


def _tables_below(path: str, section: Schema, definitions: Schema) -> Iterator[str]:
    for key, entry in section.get("properties", {}).items():
        here = f"{path}{key}"
        options = _sections(entry, definitions)
        for name, option in options:
            titled = f"`{here}`" + (", each item" if entry.get("type") == "array" else "")
            # one section is described by its key, one of several by its own words
            texts = [entry.get("description"), option.get("description")]
            text = next(filter(None, texts if name is None else texts[::-1]), "")
            titled += "" if name is None else f" with `type: {name}`"
            yield from _table(titled, " ".join(str(text).split()), option, definitions)
            yield from _tables_below(f"{here}.", option, definitions)


def _row(key: str, entry: Schema, *, required: bool, definitions: Schema) -> str:
    kind, description = _type(entry), entry.get("description", "")
    options = _sections(entry, definitions)
    if options:
        kind = "list of sections" if entry.get("type") == "array" else "section"
        # pydantic leaves out a description that the section itself has
        description = description or options[0][1].get("description", "")
    absent = "its keys' own" if options else ""
    default = absent if "default" not in entry else f"`{json.dumps(entry['default'], ensure_ascii=False)}`"
    text = " ".join(str(description).split())
    return f"| `{key}` | {_cell(kind)} | {_cell('required' if required else default)} | {_cell(text)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _sections(entry: Schema, definitions: Schema) -> list[tuple[str | None, Schema]]:
    """Return the sections that an entry can be, each with its `type` where there are several."""
    if "$ref" in entry:
        target = definitions[entry["$ref"].rpartition("/")[2]]
        return [(None, target)] if "properties" in target else []
    if entry.get("type") == "array":
        return _sections(entry.get("items", {}), definitions)
    if "properties" in entry and "const" in entry["properties"].get("type", {}):
        return [(entry["properties"]["type"]["const"], entry)]
    if "properties" in entry and entry.get("additionalProperties") is False:
        return [(None, entry)]
    found = [section for option in entry.get("anyOf", []) for section in _sections(option, definitions)]
    if len(found) > 1:
        return [(section["properties"].get("type", {}).get("const", name), section) for name, section in found]
    return found


def _type(entry: Schema) -> str:
    """Return a type in words, with its bounds."""
    if "const" in entry:
        return f"`{entry['const']}`"
    if "enum" in entry:
        return ", ".join(f"`{option}`" for option in entry["enum"])
    if "anyOf" in entry:
        options = [_type(option) for option in entry["anyOf"]]
        return " or ".join(dict.fromkeys(option for option in options if option != "null"))
    if "$ref" in entry:
        return "device range" if entry["$ref"].endswith("/DeviceRange") else "section"
    kind = str(entry.get("type", "anything"))
    if kind == "array":
        return f"list of {_type(entry['items'])}" if "items" in entry else f"list of {entry['minItems']}"
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {entry[bound]:g}" for bound, sign in bounds.items() if bound in entry]
    named = {"object": "mapping", "boolean": "true or false"}.get(kind, kind)
    return " ".join([named, " and ".join(limits)]).strip()
