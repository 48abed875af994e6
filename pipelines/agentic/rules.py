"""Rules between environments, rollout and evaluation of an agentic run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from roll_like.config.violations import Violation
from roll_like.registry import ADVANTAGES

if TYPE_CHECKING:
    from roll_like.builtin.pipelines.agentic.config import AgenticConfig, EnvironmentConfig


#: Environment variables that a run sets for each episode of a program.
SET_FOR_PROGRAMS = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ROLL_LIKE_SEED", "ROLL_LIKE_TASK", "ROLL_LIKE_EPISODE")


def _sections(config: AgenticConfig) -> dict[tuple[str, ...], tuple[EnvironmentConfig, ...]]:
    """Return the lists of environments by their keys."""
    sections: dict[tuple[str, ...], tuple[EnvironmentConfig, ...]] = {("environments",): config.environments}
    if config.evaluation is not None and config.evaluation.environments:
        sections["evaluation", "environments"] = config.evaluation.environments
    return sections


def _something_is_played(config: AgenticConfig) -> Iterator[Violation]:
    for section, environments in _sections(config).items():
        for index, environment in enumerate(environments):
            path: tuple[str | int, ...] = (*section, index)
            if environment.id is None and environment.program is None:
                yield Violation(path, "neither `id` nor `program` is set; name an environment, or a program that plays")
            if environment.id is None and environment.kwargs:
                yield Violation(
                    (*path, "kwargs"), "these are an environment's options, and there is no `id`; add it or remove them"
                )


def _programs_fit(config: AgenticConfig) -> Iterator[Violation]:
    programs = False
    for section, environments in _sections(config).items():
        for index, environment in enumerate(environments):
            if (program := environment.program) is None:
                continue
            programs = True
            path: tuple[str | int, ...] = (*section, index, "program")
            if (
                environment.id is not None
                and program.limit_reward != type(program).model_fields["limit_reward"].default
            ):
                yield Violation(
                    (*path, "limit_reward"),
                    f"{environment.id!r} scores every episode of this program, so this has no effect; remove it, or "
                    "remove `id` and let the program post its rewards",
                )
            for name in sorted(program.env.keys() & set(SET_FOR_PROGRAMS)):
                yield Violation(
                    (*path, "env", name), "the run sets this for every episode; remove it, or give it another name"
                )
    if not programs and config.proxy is not None:
        yield Violation(
            ("proxy",),
            "no environment has a `program`, so nothing would call the server; remove the section, or add one",
        )


def _environments_have_names(config: AgenticConfig) -> Iterator[Violation]:
    for path, section in _sections(config).items():
        names = [environment.label for environment in section]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Violation(path, f"two environments are called {name!r}; give each a `name` of its own")


def _no_name_means_two_things(config: AgenticConfig) -> Iterator[Violation]:
    trained = {environment.label: environment for environment in config.environments}
    for index, environment in enumerate(config.evaluation.environments if config.evaluation is not None else ()):
        other = trained.get(environment.label)
        if other is not None and other.played != environment.played:
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
            if trained.played != environment.played:
                continue
            last = trained.first_seed + (trained.seeds or config.seeds_played)
            if trained.first_seed < evaluation.first_seed + evaluation.seeds and evaluation.first_seed < last:
                yield Violation(
                    ("evaluation", "first_seed"),
                    f"the seeds {evaluation.first_seed} to {evaluation.first_seed + evaluation.seeds - 1} of "
                    f"{environment.label!r} are also trained on ({trained.first_seed} to {last - 1}); use others",
                )


def _evaluation_plays_every_seed(config: AgenticConfig) -> Iterator[Violation]:
    why = {
        "weight": "an evaluation plays each environment on every seed, so a weight has no effect; remove it",
        "seeds": "how many seeds are evaluated is set once, by evaluation.seeds; set that and remove this",
        "first_seed": "where evaluations begin is set once, by evaluation.first_seed; set that and remove this",
    }
    for index, environment in enumerate(config.evaluation.environments if config.evaluation is not None else ()):
        for name, message in why.items():
            if getattr(environment, name) != type(environment).model_fields[name].default:
                yield Violation(("evaluation", "environments", index, name), message)


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
    _something_is_played,
    _programs_fit,
    _environments_have_names,
    _no_name_means_two_things,
    _turns_fit,
    _evaluation_is_of_other_seeds,
    _evaluation_plays_every_seed,
    _no_greedy_baseline,
)
