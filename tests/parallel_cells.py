"""What layouts of ranks have shown: the table of docs/parallel.md, which `make parallel` prints and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from generated_page import GeneratedPage, one_digit

PAGE = GeneratedPage("--parallel", "<!-- table: written by make parallel -->", "<!-- end of table -->")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Largest differences between some ranks and one rank.

    Attributes:
        layout: The backend, and what its ranks divide.
        ranks: How many.
        family: Of the model.
        objective: What it learned.
        loss: Of each of three updates.
        gradient: Of the first one, as a share of the largest value where that is above 1.
        weights: After the third.
        synced: Of the trainer's log-probabilities from those of a model that was sent these weights; None without any.
    """

    layout: str
    ranks: int
    family: str
    objective: str
    loss: float
    gradient: float
    weights: float
    synced: float | None


#: What the tests of this process have compared.
RESULTS: list[Cell] = []


def table(cells: Sequence[Cell]) -> str:
    """Return a row for each cell."""
    lines = [
        "| layout | ranks | family | objective | loss | gradient | weights | log-probability after a sync |",
        "|---|---:|---|---|---:|---:|---:|---:|",
    ]
    for cell in sorted(cells, key=lambda each: (each.layout, each.ranks, each.family, each.objective)):
        figures = [cell.loss, cell.gradient, cell.weights]
        synced = "–" if cell.synced is None else one_digit(cell.synced)
        lines.append(
            f"| {cell.layout} | {cell.ranks} | {cell.family} | {cell.objective} | "
            f"{' | '.join(map(one_digit, figures))} | {synced} |"
        )
    return "\n".join(lines)
