"""Rules between data, domains and rewards: everything is scored, and nothing is named that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from roll_like.config.base import Violation
from roll_like.config.data import DataSource
from roll_like.config.rewards import BASE_JUDGE_URL, DEFAULT_POOL, JUDGE_URL, reported_name
from roll_like.config.sampling import PromptRunConfig, RewardedRunConfig


def _all_sources(config: PromptRunConfig) -> list[DataSource]:
    return [*config.data.sources, *(config.evaluation.sources if config.evaluation is not None else ())]


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def _sources_have_rewards(config: PromptRunConfig) -> Iterator[Violation]:
    sources = _all_sources(config)
    known = list(dict.fromkeys(source.label for source in sources))
    chosen = [getattr(reward, "sources", None) for reward in config.rewards.use]
    for index, names in enumerate(chosen):
        for name in names or ():
            if name not in known:
                yield Violation(
                    ("rewards", "use", index, "sources"),
                    f"no data source is called {name!r}; known: {', '.join(known)}",
                )
    for label in dict.fromkeys(source.label for source in sources if source.domain_label not in config.domains):
        if all(names is not None and label not in names for names in chosen):
            yield Violation(
                ("rewards", "use"),
                f"no reward scores the data source {label!r}; add it to the `sources` of one, or leave `sources` out "
                "to score all",
            )


def _rewards_have_names(config: RewardedRunConfig) -> Iterator[Violation]:
    names = [reported_name(reward) for reward in config.rewards.use]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Violation(("rewards", "use"), f"two rewards are called {name!r}; give each a `name` of its own")


def _rewards_have_weights(config: PromptRunConfig) -> Iterator[Violation]:
    if all(getattr(reward, "weight", 1.0) == 0 for reward in config.rewards.use):
        yield Violation(("rewards", "use"), "every reward has weight 0, so nothing can be learned; give one a weight")


def _domains_fit(config: PromptRunConfig) -> Iterator[Violation]:
    sources = _all_sources(config)
    domains = list(dict.fromkeys(source.domain_label for source in sources))
    rewards = {reported_name(reward): reward for reward in config.rewards.use}
    for name, domain in config.domains.items():
        if name not in domains:
            yield Violation(("domains", name), f"no data source is of this domain; {_nearest(name, domains)}")
        for index, reward in enumerate(domain.rewards):
            if reward not in rewards:
                yield Violation(
                    ("domains", name, "rewards", index),
                    f"no reward is called {reward!r}; {_nearest(reward, list(rewards))}",
                )
            elif getattr(rewards[reward], "sources", None) is not None:
                yield Violation(
                    ("domains", name, "rewards", index),
                    f"the reward {reward!r} sets itself which `sources` it scores; remove that, or leave it out here",
                )
        yield from _replacing_is_possible(config, name)
    if config.domains and all(domain in config.domains for domain in domains):
        named = {reward for domain in config.domains.values() for reward in domain.rewards}
        for index, name in enumerate(rewards):
            if name not in named:
                yield Violation(
                    ("rewards", "use", index),
                    f"the reward {name!r} scores nothing: no domain names it; add or remove it",
                )


def _pools_fit(config: RewardedRunConfig) -> Iterator[Violation]:
    names = [reported_name(reward) for reward in config.rewards.use]
    owners: dict[str, str] = {}
    if DEFAULT_POOL in config.rewards.pools:
        yield Violation(
            ("rewards", "pools", DEFAULT_POOL), "the pool of all other rewards is called so; choose another name"
        )
    for pool, settings in config.rewards.pools.items():
        for index, reward in enumerate(settings.rewards):
            path = ("rewards", "pools", pool, "rewards", index)
            if reward not in names:
                yield Violation(path, f"no reward is called {reward!r}; {_nearest(reward, names)}")
            elif reward in owners:
                yield Violation(path, f"the reward {reward!r} is in the pool {owners[reward]!r} already; name it once")
            owners.setdefault(reward, pool)


def _replacing_is_possible(config: PromptRunConfig, name: str) -> Iterator[Violation]:
    if not config.domains[name].drop_zero_variance_groups:
        return
    path = ("domains", name, "drop_zero_variance_groups")
    if config.rollout.max_oversampling == 1.0:
        yield Violation(
            path, "rollout.max_oversampling: 1.0 allows no replacement; set it above 1 (2.0 is usual), or this to false"
        )
    if config.rollout.samples_per_group == 1:
        yield Violation(path, "a group of one always has equal rewards, so every group would be dropped")


def _judge_is_used(config: RewardedRunConfig) -> Iterator[Violation]:
    asking = [
        index
        for index, reward in enumerate(config.rewards.use)
        if any(getattr(judge, "url", None) == JUDGE_URL for judge in getattr(reward, "judges", ()))
    ]
    if config.judge is None:
        for index in asking:
            yield Violation(
                ("rewards", "use", index, "judges"),
                f"`url: {JUDGE_URL}` is the run's own judge model, but there is no `judge` section; add "
                "`judge: {path: …}`, or give the address of an endpoint",
            )
        if config.resources.device_mapping.judge is not None:
            yield Violation(
                ("resources", "device_mapping", "judge"),
                "these devices would stay idle, because there is no `judge` section; remove the key, or add one",
            )
    elif not asking:
        yield Violation(
            ("judge",),
            "a judge would be loaded and never called; remove the section, or use a reward `llm_judge` with "
            f"judges: [{{url: {JUDGE_URL}, model: judge}}]",
        )


def _base_judge_has_room(config: RewardedRunConfig) -> Iterator[Violation]:
    if config.base_judges and config.inference.max_model_len is None:
        yield Violation(
            ("inference", "max_model_len"),
            f"the judge `url: {BASE_JUDGE_URL}` reads prompt and answer in a prompt of its own, longer than the "
            f"longest sample ({config.context_window} tokens); set a window for that and the judge's `max_tokens`",
        )


def _evaluation_sources_have_names(config: PromptRunConfig) -> Iterator[Violation]:
    names = [source.label for source in config.evaluation.sources] if config.evaluation is not None else []
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Violation(
            ("evaluation", "sources"), f"two evaluation sources are called {name!r}; give each a `name` of its own"
        )


#: What to check of rewards, whatever they score.
REWARD_RULES = (_rewards_have_names, _pools_fit, _judge_is_used, _base_judge_has_room)

#: What to check between data, domains and rewards.
PROMPT_RULES = (
    _sources_have_rewards,
    _rewards_have_weights,
    _domains_fit,
    *REWARD_RULES,
    _evaluation_sources_have_names,
)
