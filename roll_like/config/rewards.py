"""The sections `rewards` and `domains`: how samples are scored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from roll_like.config.algorithm import DifficultyConfig
from roll_like.config.base import (
    ConfigModel,
    PluginConfig,
    PluginSetting,
    PositiveFloat,
    PositiveInt,
    Violation,
    repeated,
)
from roll_like.config.data import DataSource
from roll_like.config.resources import DeviceRange, ResourcesConfig
from roll_like.config.rollout import GroupRolloutConfig
from roll_like.registry import REWARDS, did_you_mean

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

    @property
    def named(self) -> dict[str, Any]:
        """The rewards by the names under which they are reported."""
        return {reported_name(reward): reward for reward in self.use}

    def asking(self, url: str) -> dict[tuple[str | int, ...], Any]:
        """Return the judges at an address by where they are written; rewards inside of other rewards ask, too."""
        judges = _judges(self.use, ("rewards", "use"))
        return {path: judge for path, judge in judges if getattr(judge, "url", None) == url}

    def violations(self) -> Iterator[Violation]:
        """Yield names that mean two rewards, and pools that do not fit."""
        for name in repeated(map(reported_name, self.use)):
            yield Violation(("rewards", "use"), f"two rewards are called {name!r}; give each a `name` of its own")
        if DEFAULT_POOL in self.pools:
            yield Violation(
                ("rewards", "pools", DEFAULT_POOL), "the pool of all other rewards is called so; choose another name"
            )
        owners: dict[str, str] = {}
        for pool, settings in self.pools.items():
            for index, reward in enumerate(settings.rewards):
                path = ("rewards", "pools", pool, "rewards", index)
                if reward not in self.named:
                    yield Violation(path, f"no reward is called {reward!r}; {did_you_mean(reward, list(self.named))}")
                elif reward in owners:
                    yield Violation(
                        path, f"the reward {reward!r} is in the pool {owners[reward]!r} already; name it once"
                    )
                owners.setdefault(reward, pool)

    def judge_violations(self, judge: object | None, resources: ResourcesConfig) -> Iterator[Violation]:
        """Yield a judge model that is asked and not there, or there and not asked."""
        asking = self.asking(JUDGE_URL)
        if judge is not None and not asking:
            yield Violation(
                ("judge",),
                "a judge would be loaded and never called; remove the section, or use a reward `llm_judge` or `rubric` "
                f"with judges: [{{url: {JUDGE_URL}, model: judge}}]",
            )
        if judge is not None:
            return
        for path in dict.fromkeys(path[:-1] for path in asking):
            yield Violation(
                path,
                f"`url: {JUDGE_URL}` is the run's own judge model, but there is no `judge` section; add "
                "`judge: {path: …}`, or give the address of an endpoint",
            )
        if resources.own_devices("judge") is not None:
            yield Violation(
                ("resources", "device_mapping", "judge"),
                "these devices would stay idle, because there is no `judge` section; remove the key, or add one",
            )

    def source_violations(
        self, sources: Sequence[DataSource], domains: Mapping[str, DomainConfig]
    ) -> Iterator[Violation]:
        """Yield sources that no reward scores, rewards that score nothing, and names that mean nothing.

        Args:
            sources: Of the data and of its evaluation.
            domains: The section `domains`.
        """
        known = list(dict.fromkeys(source.label for source in sources))
        chosen = [getattr(reward, "sources", None) for reward in self.use]
        for index, names in enumerate(chosen):
            for name in names or ():
                if name not in known:
                    yield Violation(
                        ("rewards", "use", index, "sources"),
                        f"no data source is called {name!r}; known: {', '.join(known)}",
                    )
        for label in dict.fromkeys(source.label for source in sources if source.domain_label not in domains):
            if all(names is not None and label not in names for names in chosen):
                yield Violation(
                    ("rewards", "use"),
                    f"no reward scores the data source {label!r}; add it to the `sources` of one, or leave `sources` "
                    "out to score all",
                )
        if all(getattr(reward, "weight", 1.0) == 0 for reward in self.use):
            yield Violation(
                ("rewards", "use"), "every reward has weight 0, so nothing can be learned; give one a weight"
            )
        if domains and all(source.domain_label in domains for source in sources):
            scoring = {reward for domain in domains.values() for reward in domain.rewards}
            for index, name in enumerate(self.named):
                if name not in scoring:
                    yield Violation(
                        ("rewards", "use", index),
                        f"the reward {name!r} scores nothing: no domain names it; add or remove it",
                    )


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

    def violations(
        self, name: str, sources: Sequence[DataSource], rewards: RewardsConfig, rollout: GroupRolloutConfig
    ) -> Iterator[Violation]:
        """Yield names that mean nothing, and groups that cannot be replaced."""
        path, domains = ("domains", name), list(dict.fromkeys(source.domain_label for source in sources))
        if name not in domains:
            yield Violation(path, f"no data source is of this domain; {did_you_mean(name, domains)}")
        for index, reward in enumerate(self.rewards):
            if reward not in rewards.named:
                yield Violation(
                    (*path, "rewards", index),
                    f"no reward is called {reward!r}; {did_you_mean(reward, list(rewards.named))}",
                )
            elif getattr(rewards.named[reward], "sources", None) is not None:
                yield Violation(
                    (*path, "rewards", index),
                    f"the reward {reward!r} sets itself which `sources` it scores; remove that, or leave it out here",
                )
        if not self.drop_zero_variance_groups:
            return
        if rollout.max_oversampling == 1.0:
            yield Violation(
                (*path, "drop_zero_variance_groups"),
                "rollout.max_oversampling: 1.0 allows no replacement; set it above 1 (2.0 is usual), or this to false",
            )
        if rollout.samples_per_group == 1:
            yield Violation(
                (*path, "drop_zero_variance_groups"),
                "a group of one always has equal rewards, so every group would be dropped",
            )


def _judges(rewards: Sequence[Any], path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the judges of rewards, and of the parts of those that are made of others, with where they are written."""
    for index, reward in enumerate(rewards):
        for place, judge in enumerate(getattr(reward, "judges", ())):
            yield (*path, index, "judges", place), judge
        parts = getattr(reward, "use", ())
        if isinstance(parts, tuple):
            yield from _judges(parts, (*path, index, "use"))
