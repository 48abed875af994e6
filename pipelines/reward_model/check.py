"""Pairs that a reward model learns from, and the model that it starts from."""

from __future__ import annotations

from collections.abc import Iterator

from roll_like.builtin.pipelines.reward_model.config import RewardModelRunConfig
from roll_like.check.findings import Finding, Report
from roll_like.check.model import check_score, check_window
from roll_like.data.chat import Renderer
from roll_like.data.scored_pairs import load_scored_pairs
from roll_like.models.shape import ModelShape
from roll_like.offline.check import data_findings, data_sections


def scored_pair_findings(
    config: RewardModelRunConfig,
    renderer: Renderer | None,
    shape: ModelShape | None,
    report: Report,
) -> Iterator[Finding]:
    """Yield what is wrong with pairs and with the model to start from; tell the report what became of rows."""
    yield from check_window(config, shape, "data")
    yield from check_score(config, shape)
    yield from data_findings(config, data_sections(config.data, config.evaluation), load_scored_pairs, renderer, report)
