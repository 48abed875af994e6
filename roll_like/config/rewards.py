"""The sections `rewards` and `domains`: how samples are scored."""

from __future__ import annotations

import re
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

    @property
    def of_policy(self) -> tuple[Any, ...]:
        """The rewards that trainers compute, no reward worker."""
        return tuple(reward for reward in self.use if by_policy(reward))

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
                elif by_policy(self.named[reward]):
                    yield Violation(path, f"{reward!r} is the trainer's to compute, not a worker's; remove it")
                elif reward in owners:
                    yield Violation(
                        path, f"the reward {reward!r} is in the pool {owners[reward]!r} already; name it once"
                    )
                owners.setdefault(reward, pool)

    def policy_violations(self, pipeline: str, *, takes: bool) -> Iterator[Violation]:
        """Yield rewards that trainers compute, where none does, and parts of other rewards among them.

        Args:
            takes: Whether the pipeline computes them.
        """
        for index, reward in enumerate(self.use):
            if by_policy(reward) and not takes:
                yield Violation(
                    ("rewards", "use", index),
                    f"{reward.type!r} is computed by the trainer when the groups of a step are complete, which "
                    f"pipeline: {pipeline} does not do; use pipeline: rlvr, or another reward",
                )
            for path, part in _parts(reward, ("rewards", "use", index)):
                if by_policy(part):
                    yield Violation(
                        path,
                        f"{part.type!r} is computed by the trainer, and {reward.type!r} by reward workers, which do "
                        "not have its value; list it in rewards.use itself",
                    )

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

    def name_violations(self, sources: Sequence[str], domains: Sequence[str] | None, what: str) -> Iterator[Violation]:
        """Yield `sources` and `domains` of rewards that mean nothing.

        Args:
            sources: Names that there are.
            domains: Domains that there are; None where rows say it.
            what: What the sources are, for messages.
        """
        for index, reward in enumerate(self.use):
            for name in getattr(reward, "sources", None) or ():
                if name not in sources:
                    yield Violation(
                        ("rewards", "use", index, "sources"),
                        f"no {what} is called {name!r}; known: {', '.join(sources)}",
                    )
            for name in getattr(reward, "domains", None) or ():
                if domains is not None and not any(of_domain(domain, name) for domain in domains):
                    yield Violation(
                        ("rewards", "use", index, "domains"),
                        f"no {what} is of the domain {name!r}; known: {', '.join(domains)}",
                    )

    def source_violations(
        self, sources: Sequence[DataSource], domains: Mapping[str, DomainConfig]
    ) -> Iterator[Violation]:
        """Yield sources that no reward scores, rewards that score nothing, and names that mean nothing.

        Args:
            sources: Of the data and of its evaluation.
            domains: The section `domains`.
        """
        yield from self.name_violations(
            list(dict.fromkeys(source.label for source in sources)), known_domains(sources), "data source"
        )
        own = {name: domain.rewards for name, domain in domains.items() if domain.rewards is not None}
        for label, domain in dict.fromkeys((source.label, source.domain_label) for source in sources):
            if domain is None or domain in own:
                continue
            if not any(is_meant_for(reward, label, domain) for reward in self.use):
                named = any(getattr(reward, "domains", None) is not None for reward in self.use)
                yield Violation(
                    ("rewards", "use"),
                    f"no reward scores the data source {label!r}; add it to the `sources` of one, or leave `sources` "
                    "out to score all" + (f"; its domain is {domain!r}" if named else ""),
                )
        if all(getattr(reward, "weight", 1.0) == 0 for reward in self.use):
            yield Violation(
                ("rewards", "use"), "every reward has weight 0, so nothing can be learned; give one a weight"
            )
        if own and all(source.domain_label in own for source in sources):
            scoring = {reward for rewards in own.values() for reward in rewards}
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


def _parts(reward: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield what a reward is made of, at every depth, with where it is written."""
    parts = getattr(reward, "use", ())
    for place, part in enumerate(parts if isinstance(parts, tuple) else ()):
        inner = (*path, "use", place)
        yield inner, part
        yield from _parts(part, inner)


def by_policy(reward: Any) -> bool:
    """Return whether a reward of `rewards.use` is computed by the policy's trainer."""
    return bool(getattr(reward, "by_policy", False))


def is_relative(reward: Any) -> bool:
    """Return whether a reward of `rewards.use`, or a part of it, compares the samples of a group with each other."""
    parts = getattr(reward, "use", ())
    compares = REWARDS.get(reward.type).relative or getattr(reward, "relative", False)
    return bool(compares) or any(map(is_relative, parts if isinstance(parts, tuple) else ()))


def of_domain(domain: str, name: str) -> bool:
    """Return whether a domain is the one that is meant, where `*` stands for any text.

    >>> [of_domain("codegen__taco", name) for name in ("codegen__taco", "codegen__*", "taco")]
    [True, True, False]
    """
    return re.fullmatch(".*".join(map(re.escape, name.split("*"))), domain, re.DOTALL) is not None


def is_meant_for(reward: Any, source: str, domain: str) -> bool:
    """Return whether a reward's `sources` and `domains` are for tasks of a source and domain."""
    sources, domains = getattr(reward, "sources", None), getattr(reward, "domains", None)
    return (sources is None or source in sources) and (
        domains is None or any(of_domain(domain, name) for name in domains)
    )


def reported_name(reward: Any) -> str:
    """Return the name under which a reward of `rewards.use` is reported."""
    name: str = getattr(reward, "name", None) or reward.type
    return name


def known_domains(sources: Sequence[DataSource]) -> list[str] | None:
    """Return the domains of sources; None where rows have their own."""
    labels = [source.domain_label for source in sources]
    return None if None in labels else list(dict.fromkeys(label for label in labels if label is not None))


class DomainConfig(ConfigModel):
    """How the tasks of one domain are scored and chosen."""

    rewards: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="Names of the rewards in `rewards.use` that score it, and no other does; default: those whose "
        "`sources` and `domains` fit.",
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
        path, domains = ("domains", name), known_domains(sources)
        if domains is not None and name not in domains:
            yield Violation(path, f"no data source is of this domain; {did_you_mean(name, domains)}")
        for index, reward in enumerate(self.rewards or ()):
            if reward not in rewards.named:
                yield Violation(
                    (*path, "rewards", index),
                    f"no reward is called {reward!r}; {did_you_mean(reward, list(rewards.named))}",
                )
            for key in ("sources", "domains"):
                if getattr(rewards.named.get(reward), key, None) is not None:
                    yield Violation(
                        (*path, "rewards", index),
                        f"the reward {reward!r} sets itself which `{key}` it scores; remove that, or leave it out here",
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
