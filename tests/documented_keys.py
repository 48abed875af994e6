"""The keys that the generated pages docs/configuration*.md list, plugins' own included, by pipeline."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from loose_modules import SCRIPTS, load_module

SCHEMAS = Path(__file__).resolve().parents[1] / "docs" / "schema"


@cache
def documented_keys() -> dict[str, frozenset[str]]:
    """Return the dotted keys of each pipeline; items of lists have no number: `data.sources.path`."""
    keys_of_schema = load_module(SCRIPTS / "config_tables.py").keys_of_schema
    return {
        path.stem: frozenset(keys_of_schema(json.loads(path.read_text("utf-8")))) for path in SCHEMAS.glob("*.json")
    }
