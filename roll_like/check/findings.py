"""What a check finds."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from roll_like.config.plan import Plan
from roll_like.config.violations import Finding
from roll_like.data.bad_rows import RowsReport
from roll_like.data.tasks import SourceReport
from roll_like.errors import RollLikeError

if TYPE_CHECKING:
    from roll_like.check.gpu_plan import GPUReport

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*|[\w-]+")
_FILE_SUFFIXES = {".json", ".jsonl", ".parquet", ".csv", ".tsv", ".gz", ".zst", ".gguf"}


def failed(key: str, error: RollLikeError) -> Finding:
    """Return an error as a finding, its remedy included."""
    message = error.message if error.fix is None else f"{error.message}; {error.fix}"
    return Finding("error", key, message.removeprefix(f"{key}: "))


def is_hub_id(path: str) -> bool:
    """Return whether `path` means something on the hub: it has the form of an id and is nothing local."""
    local = Path(path).expanduser()
    return not local.exists() and local.suffix not in _FILE_SUFFIXES and _HUB_ID.fullmatch(path) is not None


@dataclass(slots=True)
class Report:
    """What a check found, the run's plan, what became of the rows of each source that could be read, and its GPUs."""

    plan: Plan
    findings: list[Finding] = field(default_factory=list)
    sources: list[SourceReport | RowsReport] = field(default_factory=list)
    gpus: GPUReport | None = None

    @property
    def errors(self) -> list[Finding]:
        """The findings that stop a run."""
        return self._of("error")

    @property
    def warnings(self) -> list[Finding]:
        """What may not be meant."""
        return self._of("warning")

    @property
    def verdict(self) -> str:
        """What a report without errors comes to, in a few words."""
        if not self.warnings:
            return "no problem found"
        return f"no error, and {len(self.warnings)} warning{'s' * (len(self.warnings) > 1)}: see above"

    def _of(self, level: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == level]


__all__ = ["Finding", "Report", "failed", "is_hub_id"]
