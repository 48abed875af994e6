"""Domains that rows name: whether rewards and teachers are for all of them, and none is for nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from roll_like.check.findings import Finding
from roll_like.config.data import DataSource
from roll_like.config.rewards import of_domain
from roll_like.config.sampling import PromptRunConfig
from roll_like.config.source import dotted
from roll_like.config.teachers import TeacherConfig, domain_violations
from roll_like.data.choice import counted
from roll_like.data.tasks import TaskSource
from roll_like.registry import likely
from roll_like.rewards.base import RewardConfig
from roll_like.rewards.scorer import reward_name, scores_task


def check_domains(config: PromptRunConfig, sources: Sequence[TaskSource]) -> Iterator[Finding]:
    """Yield rows that no reward scores, and rewards and domains that no row names, where rows name their domains.

    Where sources name them, the rules of the configuration have said so.

    Args:
        sources: Those of `data` and `evaluation` that could be read.
    """
    if not config.rewards.use or all(source.domain_label is not None for source in config.sources):
        return
    rewards = cast(Sequence[RewardConfig], config.rewards.use)
    scoring: set[int] = set()
    for source in sources:
        counts = Counter(task.domain for task in source.items)
        first = {task.domain: task for task in reversed(source.items)}
        scored = {
            domain: [index for index, reward in enumerate(rewards) if scores_task(reward, task, config.domain_rewards)]
            for domain, task in first.items()
        }
        scoring.update(*scored.values())
        lost = {domain: counts[domain] for domain, by in scored.items() if not by}
        if lost:
            yield Finding.error(
                f"{source.key}.domain_field",
                f"no reward scores {sum(lost.values())} of {len(source.items)} rows of {source.name!r}: those of the "
                f"domains {counted(lost)}; first: {first[min(lost)].origin}; add them to the `domains` of a reward, or "
                f"leave them out by {source.key}.where",
            )
    if not _all_known(config.sources, sources):
        return
    domains = Counter(task.domain for source in sources for task in source.items)
    for name in config.domains:
        if name not in domains:
            meant = "".join(f"did you mean {near!r}? " for near in likely(name, list(domains), count=1, cutoff=0.5))
            yield Finding.error(f"domains.{name}", f"no row is of this domain; {meant}there are {counted(domains)}")
    for index, reward in enumerate(rewards):
        key = f"rewards.use.{index}"
        unknown = [name for name in reward.domains or () if not any(of_domain(domain, name) for domain in domains)]
        for name in unknown:
            yield Finding.error(f"{key}.domains", f"no row is of the domain {name!r}; there are {counted(domains)}")
        if index not in scoring and not unknown:
            yield Finding.error(
                key,
                f"the reward {reward_name(reward)!r} scores no row; there are rows of {counted(domains)}; correct its "
                "`domains` and `sources`, name it in the section `domains`, or remove it",
            )


def taught_domains(
    teachers: Mapping[str, TeacherConfig], configured: Sequence[DataSource], sources: Sequence[TaskSource]
) -> Iterator[Finding]:
    """Yield domains of rows without a teacher, and those of teachers that no row names, where rows name their domains.

    Args:
        teachers: The section `teachers`.
        configured: The sources of `data` and `evaluation`.
        sources: Those of them that could be read.
    """
    if _all_known(configured, sources) and any(source.domain_label is None for source in configured):
        domains = {task.domain for source in sources for task in source.items}
        for violation in domain_violations(teachers, domains):
            yield Finding.error(dotted(violation.path), violation.message)


def _all_known(configured: Sequence[DataSource], sources: Sequence[TaskSource]) -> bool:
    """Return whether every row was read, so that what is in none of them is nowhere."""
    return len(configured) == len(sources) and all(source.stream is None for source in sources)
