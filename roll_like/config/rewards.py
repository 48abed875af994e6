"""The sections `rewards` and `domains`: how samples are scored."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from roll_like.config.algorithm import DifficultyConfig
from roll_like.config.base import ConfigModel, PluginConfig, PluginSetting, PositiveFloat, PositiveInt
from roll_like.config.resources import DeviceRange
from roll_like.registry import REWARDS

#: The pool of all rewards that no other pool has.
DEFAULT_POOL = "rewards"


#: The environment's own reward among those of an episode.
RETURN = "return"


#: What a reward writes in place of an address.
JUDGE_URL = "judge"


#: Environment variable of reward workers with the addresses of its replicas, separated by commas.
JUDGE_URLS_VARIABLE = "ROLL_LIKE_JUDGE_URLS"


#: What a reward writes for the model that adapters are trained on, which the policy's engines have.
BASE_JUDGE_URL = "base"


#: Environment variable of reward workers with its address.
BASE_JUDGE_VARIABLE = "ROLL_LIKE_BASE_JUDGE_URL"


class RewardPoolConfig(ConfigModel):
    """Workers of their own for some rewards."""

    rewards: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="Names of the rewards in `rewards.use` that its workers hold; no other pool does."
    )
    workers: PositiveInt = Field(default=1, description="Worker processes.")
    devices: DeviceRange | None = Field(
        default=None, description="Devices that the workers share, for rewards with a model; none by default."
    )


class RewardsConfig(ConfigModel):
    """How answers are scored."""

    use: Annotated[tuple[Annotated[PluginConfig, PluginSetting(REWARDS)], ...], Field(min_length=1)] = Field(
        description="Rewards, weighted; each is reported on its own."
    )
    workers: PositiveInt = Field(default=1, description="Worker processes of the rewards that are in no pool.")
    pools: dict[str, RewardPoolConfig] = Field(
        default_factory=dict, description="Workers of their own for some rewards; none by default."
    )
    groups_per_worker: PositiveInt = Field(
        default=8, description="Groups that one worker scores side by side; further ones wait for room."
    )
    timeout_seconds: PositiveFloat = Field(default=60.0, description="Limit of one group's scoring.")
    retries: Annotated[int, Field(ge=0)] = Field(default=1, description="Further attempts after a failure.")


class OptionalRewardsConfig(RewardsConfig):
    """How samples are scored in a run that also learns from something else; by default they are not."""

    use: tuple[Annotated[PluginConfig, PluginSetting(REWARDS)], ...] = Field(
        default=(), description="Rewards, weighted; each is reported on its own."
    )


def reported_name(reward: Any) -> str:
    """Return the name under which a reward of `rewards.use` is reported."""
    name: str = getattr(reward, "name", None) or reward.type
    return name


class DomainConfig(ConfigModel):
    """How the tasks of one domain are scored and chosen."""

    rewards: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="Names of the rewards in `rewards.use` that score it; no other does."
    )
    difficulty: DifficultyConfig | None = Field(
        default=None, description="Band of its groups that are trained on; default: `algorithm.mask.difficulty`."
    )
    drop_zero_variance_groups: bool | None = Field(
        default=None, description="Replace its groups of equal rewards; default: `rollout`'s setting of this name."
    )
