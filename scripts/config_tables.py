"""The tables of docs/configuration*.md, made from JSON Schemas of configurations (`roll_like.config.schema`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]


@dataclass(slots=True)
class _Table:
    """A section of a reference page.

    Attributes:
        path: The section's key; empty for the top of the file.
        title: The same as a heading has it.
        text: What the section is.
        rows: Type, default and description of each key, as cells.
        common: The keys that most files have.
    """

    path: str
    title: str
    text: str
    rows: dict[str, str]
    common: set[str]

    def dotted(self) -> set[str]:
        """Return the dotted keys."""
        return {f"{self.path}.{key}".lstrip(".") for key in self.rows}


def markdown(schema: Schema, elsewhere: Schema | None = None, page: str = "") -> Iterator[str]:
    """Yield the lines of a reference page: a table of common keys, then one of the further keys of each section.

    Keys that an earlier section has too are only named, with that section.

    Args:
        elsewhere: Another pipeline's; sections that are the same in both are only named.
        page: The page that describes `elsewhere`.
    """
    tables, described = _by_section(schema), _by_section(elsewhere or {})
    yield from ("## Common keys", "", *_HEAD)
    for key, row in _common_rows(tables):
        yield f"| `{key}` | {row} |"
    yield from ("", "## Advanced keys", "")
    same = [name for name, found in tables.items() if name and described.get(name) == found]
    if same:
        named = ", ".join(f"`{name}`" for name in same)
        yield from (f"The sections {named} are those of [{page}]({page}).", "")
    before: list[_Table] = []
    as_before: tuple[str, ...] = ()
    for table in (table for name, found in tables.items() if name not in same for table in found):
        if table.path.startswith(as_before or ("\0",)):
            continue
        other, shared = max(
            ((other, _shared(table, other)) for other in before), key=lambda pair: len(pair[1]), default=(None, [])
        )
        rows = {key: row for key, row in table.rows.items() if key not in table.common}
        if other is not None and len(shared) >= _ENOUGH:
            rows = {key: row for key, row in rows.items() if key not in shared}
            as_before += tuple(f"{table.path}.{key}" for key in shared)
        before.append(table)
        if rows or table.text:
            yield from (f"### {table.title}", "", *([table.text, ""] if table.text else []))
        if rows:
            yield from (*_HEAD, *(f"| `{key}` | {row} |" for key, row in rows.items()), "")
        if other is not None and len(shared) >= _ENOUGH:
            yield from (f"As in {other.title}: {', '.join(f'`{key}`' for key in shared)}.", "")


_HEAD = ("| key | type | default | description |", "|---|---|---|---|")
#: Keys that two sections share where one of them only names these.
_ENOUGH = 4


def keys_of_schema(schema: Schema) -> set[str]:
    """Return all dotted keys of a page; items of lists have no number: `data.sources.path`."""
    return {key for tables in _by_section(schema).values() for table in tables for key in table.dotted()}


def _shared(table: _Table, other: _Table) -> list[str]:
    """Return the keys that are not common and mean the same in both sections."""
    keys = [key for key, row in table.rows.items() if key not in table.common]
    return [key for key in keys if other.rows.get(key) == table.rows[key]]


def _common_rows(tables: Mapping[str, list[_Table]]) -> Iterator[tuple[str, str]]:
    """Yield each common key with its row; a section whose own keys follow is left out."""
    found: dict[str, str] = {}
    before: list[dict[str, str]] = []
    for table in (table for each in tables.values() for table in each):
        rows = {key: row for key, row in table.rows.items() if key in table.common}
        if len(rows) < _ENOUGH or rows not in before:
            found |= {f"{table.path}.{key}".lstrip("."): row for key, row in rows.items()}
        before.append(rows)
    for key, row in found.items():
        if not any(other.startswith(f"{key}.") for other in found):
            yield key, row


def _by_section(schema: Schema) -> dict[str, list[_Table]]:
    """Return the table of the keys at the top, and the tables of each section among them."""
    tables: dict[str, list[_Table]] = {name: [] for name in ("", "model", "data")}  # the others in their order
    for table in _tables("", "Top level", "", schema, schema.get("$defs", {}), common=True):
        tables.setdefault(table.path.partition(".")[0], []).append(table)
    return tables


def _tables(
    path: str, title: str, text: str, section: Schema, definitions: Schema, *, common: bool
) -> Iterator[_Table]:
    """Yield the table of a section, and those of the sections in it; `common` is whether most files have it."""
    entries: dict[str, Schema] = section.get("properties", {})
    required = section.get("required", [])
    # what only one of several types requires is not common
    needed = () if "const" in entries.get("type", {}) else required
    often = {key for key, entry in entries.items() if common and (entry.get("common") or key in needed)}
    rows = {key: _row(entry, required=key in required, definitions=definitions) for key, entry in entries.items()}
    if rows:
        yield _Table(path, title, " ".join(text.split()), rows, often)
    for key, entry in entries.items():
        here = f"{path}.{key}".lstrip(".")
        for name, option in _sections(entry, definitions):
            titled = f"`{here}`" + (", each item" if entry.get("type") == "array" else "")
            # one section is described by its key, one of several by its own words
            texts = [entry.get("description"), option.get("description")]
            described = next(filter(None, texts if name is None else texts[::-1]), "")
            titled += "" if name is None else f" with `type: {name}`"
            yield from _tables(here, titled, str(described), option, definitions, common=key in often)


def _row(entry: Schema, *, required: bool, definitions: Schema) -> str:
    kind, description = _type(entry), entry.get("description", "")
    options = _sections(entry, definitions)
    if options:
        kind = "list of sections" if entry.get("type") == "array" else "section"
        # pydantic leaves out a description that the section itself has
        description = description or options[0][1].get("description", "")
    absent = "its keys' own" if options else ""
    default = absent if "default" not in entry else f"`{json.dumps(entry['default'], ensure_ascii=False)}`"
    text = " ".join(str(description).split())
    return f"{_cell(kind)} | {_cell('required' if required else default)} | {_cell(text)}"


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
