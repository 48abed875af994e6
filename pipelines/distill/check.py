"""Teachers and conversations of a distillation run."""

from __future__ import annotations

from collections.abc import Iterator

from roll_like.builtin.pipelines.distill.config import DistillConfig
from roll_like.check.findings import Finding, Report
from roll_like.check.model import check_window
from roll_like.check.teachers import teacher_findings
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.models.shape import ModelShape
from roll_like.offline.check import data_findings, data_sections


def distillation_findings(
    config: DistillConfig, renderer: Renderer | None, shape: ModelShape | None, report: Report
) -> Iterator[Finding]:
    """Yield what is wrong with teachers and conversations; tell the report what became of rows, and the steps."""
    yield from check_window(config, shape, "data")
    yield from teacher_findings(config, config.teachers, renderer, shape, top_k=config.algorithm.top_k)
    yield from data_findings(
        config, data_sections(config.data, config.evaluation), load_conversations, renderer, report
    )
