"""Function schemas out of tables with types, which give every object the fields of all: as null.

    {"properties": {"city": {"type": "string"}}}                                as written
    {"properties": {"city": {"type": "string", "enum": null}, "days": null}}    as read from Parquet

A null is kept where it can be meant: as a value of a list, and as `default` or `const` of a schema that allows null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_VALUES = ("default", "const")


def without_filler(value: Any) -> Any:
    """Return a schema, or what holds one, without the nulls that a table put in."""
    if isinstance(value, list):
        return [without_filler(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    nullable = _allows_null(value)
    return {
        name: without_filler(each) for name, each in value.items() if each is not None or (name in _VALUES and nullable)
    }


def _allows_null(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type")
    options = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return (
        kind == "null"
        or (isinstance(kind, list) and "null" in kind)
        or schema.get("nullable") is True
        or any(isinstance(option, Mapping) and _allows_null(option) for option in options)
    )
