"""What a check returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll_like.check.findings import Finding
from roll_like.config.plan import Plan
from roll_like.data.bad_rows import RowsReport
from roll_like.data.tasks import SourceReport


@dataclass(slots=True)
class Report:
    """What a check found, the plan of the run, and what became of the rows of each source that could be read."""

    plan: Plan
    findings: list[Finding] = field(default_factory=list)
    sources: list[SourceReport | RowsReport] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """The findings that stop a run."""
        return [finding for finding in self.findings if finding.level == "error"]
