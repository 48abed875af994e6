"""Reinforcement learning with verifiable rewards: sample groups, score them, update, hand the weights back."""

from __future__ import annotations

from collections.abc import Iterator

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.check import Finding, Report
from roll_like.check.data import prompt_findings
from roll_like.data.chat import Renderer
from roll_like.policy_gradient.pipeline import PolicyGradientPipeline
from roll_like.policy_gradient.reward_workers import PromptWorkers


class RLVRPipeline(PolicyGradientPipeline[RLVRConfig]):
    """Answers to prompts, scored by rewards; `PolicyGradientPipeline.run` is the algorithm."""

    auxiliary_role = PromptWorkers

    @classmethod
    def findings(cls, config: RLVRConfig, renderer: Renderer | None, report: Report) -> Iterator[Finding]:
        """Yield what is wrong with prompts and rewards."""
        return prompt_findings(config, renderer, report)
