"""The keys that the generated pages docs/configuration*.md list, plugins' own included, by pipeline."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


@cache
def documented_keys() -> dict[str, frozenset[str]]:
    """Return the dotted keys of each pipeline; items of lists have no number: `data.sources.path`.

    A page lists what is not as in configuration.md, which is that of `rlvr`, and names the sections that are.
    """
    pages = {
        path.stem.removeprefix("configuration_").replace("configuration", "rlvr"): path.read_text(encoding="utf-8")
        for path in DOCS.glob("configuration*.md")
    }
    rlvr = _listed(pages["rlvr"])
    return {
        pipeline: frozenset(
            _listed(page) | {key for key in rlvr if key.partition(".")[0] in _shared(page) and pipeline != "rlvr"}
        )
        for pipeline, page in pages.items()
    }


def _listed(page: str) -> set[str]:
    found = set()
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        heading = section.partition("\n")[0]
        place = re.match(r"`([^`]+)`", heading)
        prefix = f"{place[1]}." if place else ""
        found |= {prefix + key for key in re.findall(r"^\| `(\w+)` \|", section, flags=re.M)}
    return found


def _shared(page: str) -> set[str]:
    sentence = re.search(r"^The sections? (.+?) (?:are|is) (?:those|that) of \[", page, flags=re.M | re.S)
    return set(re.findall(r"`(\w+)`", sentence[1])) if sentence else set()
