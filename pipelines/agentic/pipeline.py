"""Reinforcement learning over many turns: play episodes in environments, update, hand the weights back."""

from __future__ import annotations

from collections.abc import Iterator

from roll_like.builtin.pipelines.agentic.check import environment_findings
from roll_like.builtin.pipelines.agentic.config import AgenticConfig
from roll_like.builtin.pipelines.agentic.environments import EnvironmentWorkers
from roll_like.check import Finding, Report
from roll_like.data.chat import Renderer
from roll_like.policy_gradient.pipeline import PolicyGradientPipeline


class AgenticPipeline(PolicyGradientPipeline[AgenticConfig]):
    """Episodes of environments and programs; `PolicyGradientPipeline.run` is the algorithm."""

    auxiliary_role = EnvironmentWorkers

    @classmethod
    def findings(cls, config: AgenticConfig, renderer: Renderer | None, report: Report) -> Iterator[Finding]:  # noqa: ARG003
        """Yield what is wrong with environments, programs and rewards."""
        return environment_findings(config, renderer)
