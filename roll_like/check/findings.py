"""What a check finds."""

from __future__ import annotations

import io
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from roll_like.check.plan import Plan
from roll_like.config.base import Finding
from roll_like.data.bad_rows import RowsReport
from roll_like.errors import RollLikeError, describe_error, shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_like.check.disk import DiskUse
    from roll_like.check.gpu_plan import GPUReport
    from roll_like.models.ends import EndToken

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*|[\w-]+")
_FILE_SUFFIXES = {".json", ".jsonl", ".parquet", ".csv", ".tsv", ".gz", ".zst", ".gguf"}


#: What shows the lines that are left out of a message.
DEBUG = "--check --debug shows them"


def failed(key: str, error: BaseException, doing: str = "") -> Finding:
    """Return an error as a finding: one of ours with its remedy, another one with where it comes from.

    Args:
        doing: What went wrong, in words that an error of other code does not have.
    """
    if not isinstance(error, RollLikeError):
        return Finding.error(key, f"{doing}: {describe_error(error)}")
    message = error.message if error.fix is None else f"{error.message}; {error.fix}"
    return Finding.error(key, message.removeprefix(f"{key}: "))


def is_repo_id(path: str) -> bool:
    """Return whether `path` means something on the hub: it has the form of an id and is nothing local."""
    local = Path(os.path.expanduser(path))  # leaves a user's home that is not known
    return not local.exists() and local.suffix not in _FILE_SUFFIXES and _HUB_ID.fullmatch(path) is not None


@dataclass(slots=True, repr=False)
class Report:
    """What a check found, the run's plan, what became of the rows of each source that could be read, and its GPUs.

    `complete` is whether the files of all models are there, and not only config.json or nothing; `precision` says what
    `model.dtype: auto` is on this CPU; `ends` are the tokens that end a response; `sized` is whether the model's sizes
    are known, without which there is no plan of memory.
    """

    plan: Plan
    findings: list[Finding] = field(default_factory=list)
    sources: list[RowsReport] = field(default_factory=list)
    gpus: GPUReport | None = None
    disk: DiskUse | None = None
    complete: bool = False
    precision: str | None = None
    sized: bool = True
    ends: Sequence[EndToken] = ()

    @property
    def errors(self) -> list[Finding]:
        """The findings that stop a run."""
        return self._of("error")

    @property
    def warnings(self) -> list[Finding]:
        """What may not be meant."""
        return self._of("warning")

    @property
    def conclusion(self) -> str:
        """What a report without errors comes to, in a few words."""
        if not self.sized:
            return "no error in what could be checked; the model was not, and there is no plan of memory: see above"
        if not self.warnings:
            return "no problem found"
        return f"no error, and {len(self.warnings)} warning{'s' * (len(self.warnings) > 1)}: see above"

    def __repr__(self) -> str:
        """Return what `--check` prints."""
        console = Console(file=io.StringIO(), width=100, record=True)
        show(self, console, console)
        return console.export_text().rstrip()

    def _of(self, level: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == level]


def show(report: Report, out: Console, err: Console, *, whole: bool = False) -> None:
    """Print errors and warnings to `err`, and without errors notes and the plan to `out`; that of GPUs always.

    Args:
        out: Standard output.
        err: Standard error.
        whole: Whether long messages of other code are printed with all of their lines.
    """
    order = {"error": 0, "warning": 1, "note": 2}
    for finding in sorted(report.findings, key=lambda finding: order[finding.level]):
        style = {"error": "red", "warning": "yellow", "note": "dim"}[finding.level]
        console = out if finding.level == "note" else err
        if finding.level == "note" and report.errors:
            continue  # nothing has to be done about it
        text = str(finding) if whole else shortened(str(finding), DEBUG)
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
    if report.errors:
        count = len(report.errors)
        err.print(f"{count} problem{'s' * (count != 1)} found; nothing was started", style="bold red")
        if report.gpus is not None:  # says where what does not fit comes from
            out.print(report.gpus.render())
    else:
        for source in report.sources:
            out.print(f"tasks of {source}", markup=False, highlight=False, soft_wrap=True)
        out.print(report.plan.render())
        if report.precision is not None:
            out.print(report.precision, highlight=False, soft_wrap=True)
        if report.gpus is not None:
            out.print(report.gpus.render())
        if report.ends:
            ends = ", ".join(map(str, report.ends))
            out.print(f"responses end at {ends}", markup=False, highlight=False, soft_wrap=True)
        if report.disk is not None:
            out.print(str(report.disk), highlight=False, soft_wrap=True)
        style = "bold yellow" if report.warnings else "bold green"
        out.print(report.conclusion, style=style, highlight=False, soft_wrap=True)


__all__ = ["Finding", "Report", "failed", "is_repo_id", "show"]
