"""A page of docs/ whose tables a run of tests writes, between two marks; the rest of it is written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class GeneratedPage:
    """The page that an option of pytest names.

    Attributes:
        option: The option, with its dashes.
        start: The line before the tables.
        end: The line after them.
    """

    option: str
    start: str
    end: str

    def refuse_workers(self, config: pytest.Config) -> None:
        """Refuse the option where several processes would each know a part of the results."""
        if config.getoption(self.option, None) and config.getoption("numprocesses", None):
            raise pytest.UsageError(f"{self.option} writes what one process has compared: leave out -n")

    def finish(
        self, reporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config, tables: Callable[[], str]
    ) -> None:
        """Show and write the tables at the end of a run with the option, if all of it has passed."""
        page: Path | None = config.getoption(self.option, None)
        if page is None:
            return
        if exitstatus != pytest.ExitCode.OK:
            reporter.write_line(f"{page} stays as it is: not everything passed")
            return
        text = tables()
        reporter.write_line(text)
        self.write(page, text)

    def rows(self, page: str) -> list[list[str]]:
        """Return the cells of each line between the marks."""
        between = page.partition(self.start)[2].partition(self.end)[0]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in between.splitlines()]

    def write(self, page: Path, text: str) -> None:
        """Replace what is between the marks."""
        before, start, rest = page.read_text().partition(self.start)
        _, end, after = rest.partition(self.end)
        if not start or not end:
            raise ValueError(f"{page} has no {self.start} … {self.end}")
        page.write_text(f"{before}{self.start}\n{text}\n{self.end}{after}")


def one_digit(value: float) -> str:
    """Return a difference with one digit; what is equal is 0."""
    return "0" if value == 0 else f"{value:.0e}"
