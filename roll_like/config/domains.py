"""Domains: which rewards, filters and masks go with which data."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from roll_like.config.algorithm import DifficultyConfig
from roll_like.config.base import ConfigModel


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
