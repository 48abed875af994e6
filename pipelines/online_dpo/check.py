"""Pairs that the policy samples itself: prompts, rewards, engines, and what they add to the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.builtin.pipelines.online_dpo.config import in_iterations, prompts_of
from roll_like.check.data import prompt_findings
from roll_like.check.findings import Finding
from roll_like.check.machine import check_engine_args, warm_up_that_never_ends
from roll_like.check.model import check_engines, check_window
from roll_like.config.plan import plan
from roll_like.models.shape import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll_like.check import Report


def iteration_findings(
    config: DPOConfig, tokenizer: PreTrainedTokenizerBase | None, shape: ModelShape | None, report: Report
) -> Iterator[Finding]:
    """Yield what is wrong with prompts, rewards and engines; add them to the plan, and each source to the report."""
    prompts = prompts_of(config)
    sampling = plan(prompts, shape)
    report.plan = replace(
        report.plan, processes=sampling.processes, placement=sampling.placement, memory=sampling.memory
    )
    findings = [
        *check_window(prompts, shape, "rollout"),
        *check_engines(prompts, shape),
        *prompt_findings(prompts, tokenizer, report),
        *check_engine_args(prompts),
    ]
    for found in findings:
        message = in_iterations(found.message).replace("a step ", "an iteration ")
        yield replace(found, key=in_iterations(found.key), message=message)
    yield from warm_up_that_never_ends("training", config.training, report.plan.updates)
