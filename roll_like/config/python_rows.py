"""Rows that a configuration itself has: in Python lists of mappings or `datasets`, in YAML lists of mappings."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema


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
