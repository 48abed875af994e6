"""docs/conformance.md speaks of everything that is registered, and of nothing else."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from conformance import DECLARED, HAND_COMPUTED, page_rows
from registered import computed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"


@pytest.fixture(autouse=True)
def _page_stays(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--conformance", None):
        pytest.skip("this run is about to replace the table")


def test_every_built_in_has_a_row() -> None:
    shown = {(kind, name) for kind, name, _ in page_rows(PAGE.read_text())}
    assert not set(computed()) - shown, "run `make oracle`, which writes the table"


def test_no_row_is_of_something_that_is_gone() -> None:
    kinds = {kind for kind, _ in computed()}
    shown = {(kind, name) for kind, name, _ in page_rows(PAGE.read_text()) if kind in kinds}
    assert not shown - set(computed()), "run `make oracle`, which writes the table"


def test_hand_computed_is_only_what_has_no_reference() -> None:
    rows = page_rows(PAGE.read_text())
    compared = {(kind, name) for kind, name, reference in rows if reference != HAND_COMPUTED}
    assert not {(kind, name) for kind, name, reference in rows if reference == HAND_COMPUTED} & compared


def test_the_rows_are_those_of_the_tests() -> None:
    for module in Path(__file__).parent.glob("test_oracle_*.py"):
        importlib.import_module(module.stem)  # skips this test where there are no references
    shown = {row for row in page_rows(PAGE.read_text()) if row[2] != HAND_COMPUTED}
    assert shown == DECLARED, "run `make oracle`, which writes the table"
