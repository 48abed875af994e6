"""Names of settings in other tools, and what they are called here: `other_names.yaml`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml


@dataclass(frozen=True, slots=True)
class OtherNames:
    """The tables of `other_names.yaml`, where each is explained."""

    names: dict[str, list[str]]
    remarks: dict[str, str]
    needless: dict[str, str]
    sections: dict[str, str]
    values: dict[str, str]


@cache
def other_names() -> OtherNames:
    """Return the tables; they are read when the first message needs them."""
    return OtherNames(**yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")))


def translated(key: str, known: Collection[str]) -> str | None:
    """Return what to write for a setting of another tool; None for what is of none.

    >>> translated("num_generations", ["rollout.samples_per_prompt"])
    'here it is called `rollout.samples_per_prompt`'
    >>> translated("logging_steps", [])
    'there is no such setting: every step is logged'
    >>> translated("kl_coef", ["data.samples_per_step"])
    'this pipeline has no such setting; those that have it call it `algorithm.kl.coefficient`'
    """
    tables = other_names()
    names = tables.names.get(key, [])
    here = [name for name in dict.fromkeys(_known(name, known) for name in names) if name]
    if here:
        remark = f", and {tables.remarks[key]}" if key in tables.remarks else ""
        return f"here it is called {_either(here)}{remark}"
    if key in tables.needless:
        return f"there is no such setting: {tables.needless[key]}"
    if (tool := tables.sections.get(key)) is not None:
        return f"that is a section of {tool}; docs/coming_from.md says what its settings are called here"
    if names:
        return f"this pipeline has no such setting; those that have it call it {_either(names)}"
    return None


def _either(names: Sequence[str]) -> str:
    return " or ".join(f"`{name}`" for name in names[:2])


def _known(name: str, known: Collection[str]) -> str:
    """Return a key, or the section that it would be in; nothing where the configuration has neither."""
    while name not in known and name.count(".") > 1:
        name = name.rpartition(".")[0]
    return name if name in known else ""
