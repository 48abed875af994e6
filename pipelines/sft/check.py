"""Conversations: whether rows are there, fit, and can be trained on."""

from __future__ import annotations

from collections.abc import Iterator

from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.check.findings import Finding, Report
from roll_like.check.model import check_window
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.models.shape import ModelShape
from roll_like.offline.check import data_findings, data_sections


def conversation_findings(
    config: SFTConfig, renderer: Renderer | None, shape: ModelShape | None, report: Report
) -> Iterator[Finding]:
    """Yield what is wrong with conversations; tell the report what became of each source's rows, and the steps."""
    yield from check_window(config, shape, "data")
    yield from data_findings(
        config, data_sections(config.data, config.evaluation), load_conversations, renderer, report
    )
