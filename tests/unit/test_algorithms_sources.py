"""Every registered algorithm says where it comes from, and the documentation names the same source."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from roll_like.registry import ADVANTAGES, DISTILLATION_LOSSES, LOSSES, PREFERENCE_LOSSES, Registry

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
ARXIV = re.compile(r"arXiv:\d{4}\.\d{5}(?!\d)")
#: "Williams 1992", "Hinton, Vinyals, Dean 2015", "Shao et al. 2024".
NAMED = re.compile(r"\b[A-Z][\w'-]+(?:, [A-Z][\w'-]+)*(?: et al\.| Team)? (?:19|20)\d\d\b")
DOI = re.compile(r"doi:10\.\d{4,}/\S+")


def built_in() -> list[Any]:
    registries: dict[str, Registry[Any]] = {
        "advantage": ADVANTAGES,
        "loss": LOSSES,
        "preference": PREFERENCE_LOSSES,
        "distillation": DISTILLATION_LOSSES,
    }
    return [
        pytest.param(name, registry.get(name), id=f"{kind}-{name}")
        for kind, registry in registries.items()
        for name in registry.names()
        if registry.origin(name).startswith("roll_like.")  # other test modules register plugins of their own
    ]


@pytest.mark.parametrize(("name", "plugin"), built_in())
def test_its_docstring_names_its_source(name: str, plugin: type) -> None:
    text = plugin.__doc__ or ""
    assert f"`{name}`" in text.splitlines()[0]
    assert any(pattern.search(text) for pattern in (ARXIV, NAMED, DOI)), "add author and year, and an arXiv id or DOI"


@pytest.mark.parametrize(("name", "plugin"), built_in())
def test_the_documentation_has_the_same_papers(name: str, plugin: type) -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    assert rows, "describe it in a table of docs/algorithms.md"
    papers = set(ARXIV.findall(plugin.__doc__ or ""))
    assert papers <= set(ARXIV.findall(" ".join(rows)))


def test_what_counts_as_a_source() -> None:
    named = (
        "Williams 1992",
        "Hinton, Vinyals, Dean 2015",
        "Shao et al. 2024",
        "Kimi Team 2025",
        "D'Oosterlinck et al. 2024",
    )
    assert all(NAMED.search(text) for text in named)
    assert not NAMED.search("equation 8 there, of 2000 tokens")
    assert ARXIV.search("arXiv:2402.03300, section 4")
    assert not ARXIV.search("arXiv:2402.0330")
