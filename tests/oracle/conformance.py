"""How far our numbers are from a reference's, collected over all random cases, and the page that shows it.

`docs/conformance.md` is written by hand but for its table, which stands between two marks and is
replaced by `make oracle`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
from generated_page import GeneratedPage, one_digit

TOLERANCE = 1e-5
PAGE = GeneratedPage("--conformance", "<!-- table: written by make oracle -->", "<!-- end of table -->")
HAND_COMPUTED = "hand-computed only"
#: What is compared, in the order of the page.
KINDS = (
    "advantage",
    "loss",
    "demonstrations",
    "preference",
    "reward model",
    "distillation",
    "aggregation",
    "kl",
    "entropy",
    "correction",
    "figure",
    "shaping",
    "value",
    "logprobs",
)

#: Distribution whose version the table names, by the first word of a reference.
PACKAGES = {
    "verl": "verl",
    "TRL": "trl",
    "liger-kernel": "liger-kernel",
    "torchrl": "torchrl",
    "stable-baselines3": "stable-baselines3",
    "torch": "torch",
}


#: The keys of all rows of the test modules that were imported.
DECLARED: set[tuple[str, str, str]] = set()


@dataclass(frozen=True)
class Row:
    """One comparison: `ours(case)` and `theirs(case)` return a value each, or a value and a gradient.

    Attributes:
        kind: One of `KINDS`.
        name: Ours, as YAML names it.
        reference: Theirs: the library, and what of it.
        cases: Hypothesis strategy that draws a case.
        gradient: Whether the functions return `(value, gradient, …)`.
    """

    kind: str
    name: str
    reference: str
    ours: Callable[[Any], Any]
    theirs: Callable[[Any], Any]
    cases: Any
    gradient: bool = False

    def __post_init__(self) -> None:
        DECLARED.add(self.key)

    def __str__(self) -> str:
        return f"{self.kind}-{self.name}-{self.reference}".replace(" ", "_")

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.name, self.reference

    def check(self, case: Any) -> None:
        """Compare one case; raises AssertionError beyond the tolerance."""
        ours, theirs = self.ours(case), self.theirs(case)
        # gradients of several arrays count as one
        parts = [(ours[0], theirs[0]), (ours[1:], theirs[1:])] if self.gradient else [(ours, theirs)]
        differences = [_difference(mine, other) for mine, other in parts]
        found = RESULTS.setdefault(self.key, Found())
        found.cases += 1
        found.differences = [max(pair) for pair in zip(found.differences, differences, strict=False)] or differences
        for what, difference in zip(("value", "gradient"), differences, strict=False):
            assert difference <= TOLERANCE, f"{self}: {what}s differ by {difference:.3g}\nours {ours}\ntheirs {theirs}"


@dataclass
class Found:
    """What the cases of one row showed so far: how many there were, and the largest differences."""

    cases: int = 0
    differences: list[float] = field(default_factory=list)


RESULTS: dict[tuple[str, str, str], Found] = {}


def _difference(ours: Any, theirs: Any) -> float:
    a, b = _array(ours), _array(theirs)
    assert a.shape == b.shape, f"shapes differ: ours {a.shape}, theirs {b.shape}"
    assert np.isfinite(a).all(), f"ours is not finite: {a}"
    assert np.isfinite(b).all(), f"theirs is not finite: {b}"
    return float(np.abs(a - b).max()) if a.size else 0.0


def _array(values: Any) -> npt.NDArray[np.float64]:
    if isinstance(values, (list, tuple)):
        return np.concatenate([_array(value).ravel() for value in values]) if values else np.zeros(0)
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values, np.float64)


def table(results: Mapping[tuple[str, str, str], Found], expected: Iterable[tuple[str, str]]) -> str:
    """Return the Markdown table: every result, and what nothing but our own tests covers."""
    rows = [
        (kind, name, _with_version(reference), str(found.cases), *_columns(found.differences))
        for (kind, name, reference), found in results.items()
    ]
    compared = {(kind, name) for kind, name, _ in results}
    rows += [(kind, name, HAND_COMPUTED, "–", "–", "–") for kind, name in expected if (kind, name) not in compared]
    order = {kind: place for place, kind in enumerate(KINDS)}
    rows.sort(key=lambda row: (order[row[0]], row[1], row[2] == HAND_COMPUTED, row[2].lower()))
    lines = ["| kind | ours | reference | cases | values | gradients |", "|---|---|---|---:|---:|---:|"]
    lines += [f"| {kind} | `{name}` | " + " | ".join(rest) + " |" for kind, name, *rest in rows]
    return "\n".join(lines)


def _columns(differences: list[float]) -> tuple[str, str]:
    shown = [one_digit(value) for value in differences]
    return shown[0], shown[1] if len(shown) > 1 else "–"


def _with_version(reference: str) -> str:
    library, _, rest = reference.partition(" ")
    return f"{library} {version(PACKAGES[library])} {rest}".strip()


def page_rows(page: str) -> set[tuple[str, str, str]]:
    """Return (kind, name, reference) of every row in the page's table, references without their versions."""
    found = set()
    for cells in PAGE.rows(page):
        if len(cells) == 6 and cells[0] in KINDS:
            library, _, rest = cells[2].partition(" ")
            reference = f"{library} {rest.partition(' ')[2]}".strip() if library in PACKAGES else cells[2]
            found.add((cells[0], cells[1].strip("`"), reference))
    return found
