"""Finds the references that `make oracle` installs, and writes what the comparisons found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# at the end, so that nothing there can hide a package of .venv
sys.path.append(str(Path(__file__).resolve().parents[2] / ".oracle"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--conformance", type=Path, help="page to write the table of differences to")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--conformance", None) and config.getoption("numprocesses", None):
        raise pytest.UsageError("--conformance writes what one process has compared: leave out -n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    page: Path | None = config.getoption("--conformance", None)
    if page is None:
        return
    if exitstatus != pytest.ExitCode.OK:
        terminalreporter.write_line(f"{page} stays as it is: not everything passed")
        return
    import conformance
    from registered import computed

    text = conformance.table(conformance.RESULTS, computed())
    terminalreporter.write_line(text)
    conformance.write(page, text)
