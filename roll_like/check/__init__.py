"""Everything about a configuration that can be known without starting Ray, in seconds.

Problems are collected, so that one attempt shows all of them. What depends on the network or on hardware that
another machine has is a note, not an error: a configuration for GPUs is checked on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from roll_like.check.findings import Finding
from roll_like.check.machine import (
    check_engine_args,
    check_hardware,
    check_output,
    check_settings,
    idle_devices,
)
from roll_like.check.model import (
    check_critic,
    check_engines,
    check_model,
    check_reference,
    check_tokenizer,
    check_window,
)
from roll_like.config.plan import Plan, plan
from roll_like.config.policy_gradient import PolicyGradientConfig
from roll_like.config.run import RunConfig
from roll_like.data.bad_rows import RowsReport
from roll_like.data.tasks import SourceReport
from roll_like.errors import ConfigError
from roll_like.models.precision import settled
from roll_like.models.shape import ModelShape

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

ConfigT = TypeVar("ConfigT", bound=RunConfig)
PolicyT = TypeVar("PolicyT", bound=PolicyGradientConfig)


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


#: What a pipeline checks besides: given the configuration, the tokenizer (None where it cannot be had) and the report.
Further: TypeAlias = "Callable[[PolicyT, PreTrainedTokenizerBase | None, Report], Iterator[Finding]]"


def check(config: PolicyT, further: Further[PolicyT]) -> Report:
    """Return every problem of a policy's run that can be known before it, and its plan."""

    def of_policies(
        config: PolicyT, tokenizer: PreTrainedTokenizerBase | None, shape: ModelShape | None, report: Report
    ) -> Iterator[Finding]:
        yield from check_window(config, shape, "rollout")
        yield from check_engines(config, shape)
        yield from check_reference(config, shape)
        yield from check_critic(config, shape)
        yield from further(config, tokenizer, report)
        yield from check_engine_args(config)
        yield from check_settings(config, report.plan)

    return check_run(config, plan, of_policies)


def check_run(
    config: ConfigT,
    planned: Callable[[ConfigT, ModelShape | None], Plan],
    further: Callable[[ConfigT, PreTrainedTokenizerBase | None, ModelShape | None, Report], Iterator[Finding]],
) -> Report:
    """Return every problem of any run that can be known before it, and its plan.

    Args:
        config: The run's configuration.
        planned: Makes its plan.
        further: Yields what is wrong beside model, tokenizer, disk and hardware.
    """
    config = settled(config)
    findings: list[Finding] = []
    model, shape = check_model(config, findings)
    tokenizer = check_tokenizer(config, model, findings)
    report = Report(planned(config, shape), findings)
    findings += further(config, tokenizer, shape, report)
    findings += check_output(config, shape)
    findings += check_hardware(config, report.plan)
    findings += idle_devices(report.plan)
    return report


def refuse_errors(report: Report) -> Report:
    """Return a report without errors as it is.

    Raises:
        ConfigError: Every error, in one message.
    """
    if len(report.errors) == 1:
        raise ConfigError(f"{report.errors[0].key}: {report.errors[0].message}")
    if report.errors:
        listed = (f"  {number}. {error.key}: {error.message}" for number, error in enumerate(report.errors, 1))
        raise ConfigError("\n".join([f"{len(report.errors)} problems; nothing was started:", *listed]))
    return report


def show(report: Report, out: Console, err: Console) -> None:
    """Print errors and warnings to `err`, notes and (without errors) the plan to `out`."""
    order = {"error": 0, "warning": 1, "note": 2}
    for finding in sorted(report.findings, key=lambda finding: order[finding.level]):
        style = {"error": "red", "warning": "yellow", "note": "dim"}[finding.level]
        console = out if finding.level == "note" else err
        console.print(str(finding), style=style, markup=False, highlight=False, soft_wrap=True)
    if report.errors:
        err.print(f"{_count(len(report.errors), 'problem')} found; nothing was started", style="bold red")
    else:
        for source in report.sources:
            out.print(f"tasks of {source}", markup=False, highlight=False, soft_wrap=True)
        out.print(report.plan.render())
        out.print("no problem found", style="bold green")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


__all__ = ["Finding", "Report", "check", "check_run", "refuse_errors", "show"]
