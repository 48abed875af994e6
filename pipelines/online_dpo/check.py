"""Prompts, rewards, engines, reference and given pairs of online DPO, and the plan of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from roll_like.builtin.pipelines.online_dpo.config import OnlineDPOConfig
from roll_like.check.data import prompt_findings
from roll_like.check.findings import Finding, Report
from roll_like.check.machine import check_engine, warm_up_that_never_ends
from roll_like.check.model import check_engines, check_reference, check_window
from roll_like.config.plan import Plan, plan
from roll_like.data.chat import Renderer
from roll_like.data.pairs import load_pairs
from roll_like.models.shape import ModelShape
from roll_like.offline.check import load_findings


def online_dpo_plan(config: OnlineDPOConfig, model: ModelShape | None) -> Plan:
    """Return the plan of a run; a step trains on pairs."""
    pairs = config.pairs.pairs_per_step
    return replace(plan(config, model), groups_per_step=pairs, samples_per_group=1, units=("pairs", "pairs"))


def online_dpo_findings(
    config: OnlineDPOConfig, renderer: Renderer | None, shape: ModelShape | None, report: Report
) -> Iterator[Finding]:
    """Yield what is wrong with prompts, rewards, engines, reference and given pairs; tell the report about sources."""
    yield from check_window(config, shape, "rollout")
    yield from check_engines(config, shape)
    yield from check_reference(config, config.reference, shape)
    yield from prompt_findings(config, renderer, report)
    if config.pair_evaluation is not None:
        yield from load_findings({"pair_evaluation": config.pair_evaluation}, load_pairs, renderer, report)
    yield from check_engine(config)
    yield from warm_up_that_never_ends("training", config.training, report.plan.updates)
