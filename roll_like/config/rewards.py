"""How samples are scored: the section `rewards`, and the run's own judge model."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field

from roll_like.config.base import ConfigModel, PluginConfig, PluginSetting
from roll_like.config.inference import JudgeServerConfig
from roll_like.config.policy_gradient import SamplingRunConfig
from roll_like.config.reward_names import BASE_JUDGE_URL
from roll_like.config.roles import RolePlan, model_role
from roll_like.config.sections import DeviceRange, PositiveFloat, PositiveInt
from roll_like.errors import ConfigError
from roll_like.registry import REWARDS


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


class RewardedRunConfig(SamplingRunConfig):
    """A run whose samples are scored by reward workers."""

    rewards: RewardsConfig
    judge: JudgeServerConfig | None = Field(
        default=None, description="A model that judges, for `llm_judge` rewards; none by default."
    )

    @property
    def base_judges(self) -> tuple[int, ...]:
        """Places in `rewards.use` of the rewards that ask the base model in the policy's engines."""
        return tuple(
            index
            for index, reward in enumerate(self.rewards.use)
            if any(getattr(judge, "url", None) == BASE_JUDGE_URL for judge in getattr(reward, "judges", ()))
        )

    @property
    def adapter_keys(self) -> tuple[str, ...]:
        """Keys that need an engine with the base model beside the policy's adapter."""
        return (*super().adapter_keys, *(f"rewards.use.{index}.judges" for index in self.base_judges))

    def evaluating(self, model: str) -> Self:
        """Return the same configuration for another model.

        Raises:
            ConfigError: There is no `evaluation` section, or the model that training starts from judges.
        """
        for index in self.base_judges:
            raise ConfigError(
                f"rewards.use.{index}.judges: `url: {BASE_JUDGE_URL}` is the model that training starts from, which is "
                "not loaded to evaluate another one",
                fix="give the address of an endpoint, or `url: judge` with a `judge` section",
            )
        return super().evaluating(model)

    @property
    def roles(self) -> tuple[RolePlan, ...]:
        """The same, with the judge, and reward pools that have devices of their own."""
        resources, roles = self.resources, [*super().roles]
        if self.replay is not None:
            return tuple(roles)
        if self.judge is not None:
            devices = resources.device_mapping.judge or resources.device_mapping.inference
            roles.append(model_role(resources, "judge", self.judge.replicas, "judge.replicas", devices))
        for name, pool in self.rewards.pools.items():
            if pool.devices is not None:
                key, path = f"rewards.pools.{name}.workers", ("rewards", "pools", name, "devices")
                roles.append(model_role(resources, f"rewards {name}", pool.workers, key, pool.devices, path))
        return tuple(roles)

    @property
    def processes(self) -> dict[str, int]:
        """The reward workers; none without rewards, and in a replay."""
        if self.replay is not None:
            return {}
        pools = self.rewards.pools.values()
        pooled = {name for pool in pools for name in pool.rewards}
        others = any(reported_name(reward) not in pooled for reward in self.rewards.use)
        workers = sum(pool.workers for pool in pools) + self.rewards.workers * others
        return {**super().processes, **({"reward workers": workers} if workers else {})}

    @property
    def domain_rewards(self) -> dict[str, tuple[str, ...]]:
        """The names of the rewards of each domain that names its own."""
        return {}
