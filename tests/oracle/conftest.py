"""Finds the references that `make oracle` installs, and writes what the comparisons found."""

from __future__ import annotations

import sys
from pathlib import Path

import conformance
import pytest

# at the end, so that nothing there can hide a package of .venv
sys.path.append(str(Path(__file__).resolve().parents[2] / ".oracle"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--conformance", type=Path, help="page to write the table of differences to")


def pytest_configure(config: pytest.Config) -> None:
    conformance.PAGE.refuse_workers(config)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    def table() -> str:
        from registered import computed

        return conformance.table(conformance.RESULTS, computed())

    conformance.PAGE.finish(terminalreporter, exitstatus, config, table)
