"""Rules between environments, rollout and evaluation of an agentic run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from roll_like.config.violations import Violation
from roll_like.registry import ADVANTAGES

if TYPE_CHECKING:
    from roll_like.config.agentic import AgenticConfig, EnvironmentConfig


def _environments_have_names(config: AgenticConfig) -> Iterator[Violation]:
    sections: dict[tuple[str, ...], tuple[EnvironmentConfig, ...]] = {("environments",): config.environments}
    if config.evaluation is not None and config.evaluation.environments:
        sections["evaluation", "environments"] = config.evaluation.environments
    for path, section in sections.items():
        names = [environment.label for environment in section]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Violation(path, f"two environments are called {name!r}; give each a `name` of its own")


def _no_name_means_two_things(config: AgenticConfig) -> Iterator[Violation]:
    trained = {environment.label: environment for environment in config.environments}
    for index, environment in enumerate(config.evaluation.environments if config.evaluation is not None else ()):
        other = trained.get(environment.label)
        if other is not None and (other.id, other.kwargs) != (environment.id, environment.kwargs):
            yield Violation(
                ("evaluation", "environments", index, "name"),
                f"{environment.label!r} is also what an environment with other settings is called that is trained on; "
                "give this one a `name` of its own",
            )


def _turns_fit(config: AgenticConfig) -> Iterator[Violation]:
    rollout = config.rollout
    limits = {("rollout", "max_response_tokens"): rollout.max_response_tokens}
    if config.evaluation is not None and config.evaluation.max_response_tokens is not None:
        limits["evaluation", "max_response_tokens"] = config.evaluation.max_response_tokens
    for path, limit in limits.items():
        if limit >= rollout.max_episode_tokens:
            yield Violation(
                path,
                f"one turn of {limit} tokens would fill the whole conversation (rollout.max_episode_tokens: "
                f"{rollout.max_episode_tokens}); raise that, or lower this",
            )


def _evaluation_is_of_other_seeds(config: AgenticConfig) -> Iterator[Violation]:
    evaluation = config.evaluation
    if evaluation is None:
        return
    for environment in config.evaluated:
        for trained in config.environments:
            if (trained.id, trained.kwargs) != (environment.id, environment.kwargs):
                continue
            last = trained.first_seed + (trained.seeds or config.seeds_played)
            if trained.first_seed < evaluation.first_seed + evaluation.seeds and evaluation.first_seed < last:
                yield Violation(
                    ("evaluation", "first_seed"),
                    f"the seeds {evaluation.first_seed} to {evaluation.first_seed + evaluation.seeds - 1} of "
                    f"{environment.label!r} are also trained on ({trained.first_seed} to {last - 1}); use others",
                )


def _no_greedy_baseline(config: AgenticConfig) -> Iterator[Violation]:
    name = config.algorithm.advantage.type
    if ADVANTAGES.get(name).greedy_baseline:
        yield Violation(
            ("algorithm", "advantage", "type"),
            f"{name!r} compares with a greedy answer to the same prompt, and episodes have none; use grpo, rloo, "
            "gigpo or turn_returns",
        )


#: What to check between environments, rollout and evaluation.
AGENTIC_RULES = (
    _environments_have_names,
    _no_name_means_two_things,
    _turns_fit,
    _evaluation_is_of_other_seeds,
    _no_greedy_baseline,
)
