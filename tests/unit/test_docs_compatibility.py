"""docs/compatibility.md says of every combination what its test says, and speaks of no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from compatibility import CELLS, FAMILIES, PAGE, PAIRS, TESTED, Found, page_cells, tables
from tiny_families import FAMILIES as MODELS

from roll_like.models.tensor_plan import FAMILIES as DIVIDED
from roll_like.registry import INFERENCE_ENGINES, TRAINING_BACKENDS

PATH = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
EXPECTED = {cell.key: f"refused: {cell.refused}" if cell.refused else TESTED for cell in CELLS}


def test_the_page_has_what_the_test_runs() -> None:
    assert page_cells(PATH.read_text(encoding="utf-8")) == EXPECTED, "run `make compatibility`, which writes the tables"


def test_every_family_whose_matrices_ranks_divide_has_a_row() -> None:
    section = PATH.read_text(encoding="utf-8").partition("## Ranks that divide matrices")[2]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| ")]
    assert rows[2:] == list(DIVIDED)


def test_no_combination_runs_twice_and_all_engines_and_backends_are_there() -> None:
    assert len(EXPECTED) == len(CELLS)
    names = set(TRAINING_BACKENDS.names()) - {"megatron"}  # docs/backends.md has its families
    built_in = {(engine, backend) for engine in ("vllm", "hf", "sglang") for backend in names}
    assert set(PAIRS) == built_in
    assert {engine for engine, _ in PAIRS} <= set(INFERENCE_ENGINES.names())
    assert FAMILIES.keys() >= MODELS.keys()
    assert {family for family, _, _ in EXPECTED} == FAMILIES.keys()


def test_tables_are_read_back(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{PAGE.start}\nold\n{PAGE.end}\nafter\n")
    found = {cell.key: Found() if cell.refused else Found(before=1e-7, resumed=3e-6) for cell in CELLS}
    PAGE.write(page, tables(found))
    text = page.read_text()
    assert page_cells(text) == EXPECTED
    assert "tested, 3e-06" in text
    assert "old" not in text
    assert (text.startswith("before\n"), text.endswith("\nafter\n")) == (True, True)
    del found[CELLS[0].key]
    with pytest.raises(ValueError, match=f"nothing is known of {CELLS[0]}: run all of them"):
        tables(found)
