"""Tasks, rewards and teachers of on-policy distillation."""

from __future__ import annotations

from collections.abc import Iterator

from roll_like.builtin.pipelines.on_policy_distill.config import OnPolicyDistillConfig
from roll_like.check.data import prompt_findings
from roll_like.check.findings import Finding, Report
from roll_like.check.teachers import teacher_findings
from roll_like.data.chat import Renderer


def on_policy_distill_findings(
    config: OnPolicyDistillConfig, renderer: Renderer | None, report: Report
) -> Iterator[Finding]:
    """Yield what is wrong with tasks, rewards and teachers; tell the report what became of each source's rows."""
    yield from prompt_findings(config, renderer, report)
    # only sampled tokens are scored
    yield from teacher_findings(config, config.teachers, renderer, None, top_k=1)
