"""Domains: which rewards, filters and masks go with which data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from roll_like.config.algorithm import DifficultyConfig
from roll_like.config.base import ConfigModel

if TYPE_CHECKING:
    from roll_like.config.prompts import PromptConfig


class DomainConfig(ConfigModel):
    """How the tasks of one domain are judged and chosen."""

    rewards: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="Names of the rewards in `rewards.use` that judge it; no other does."
    )
    difficulty: DifficultyConfig | None = Field(
        default=None, description="Band of its groups that are trained on; default: `algorithm.mask.difficulty`."
    )
    drop_zero_variance_groups: bool | None = Field(
        default=None, description="Replace its groups of equal rewards; default: `rollout`'s setting of this name."
    )


def domain_rewards(config: PromptConfig) -> dict[str, tuple[str, ...]]:
    """Return the names of the rewards of each domain that names its own."""
    return {name: domain.rewards for name, domain in config.domains.items()}


def domain_difficulty(config: PromptConfig) -> dict[str, DifficultyConfig]:
    """Return the difficulty band of each domain that has its own."""
    return {name: domain.difficulty for name, domain in config.domains.items() if domain.difficulty is not None}


def domain_filters(config: PromptConfig) -> dict[str, bool]:
    """Return, of each domain that says so itself, whether its groups with zero reward variance are replaced."""
    settings = {name: domain.drop_zero_variance_groups for name, domain in config.domains.items()}
    return {name: setting for name, setting in settings.items() if setting is not None}
