"""Environments, programs and rewards: whether each can be begun, its first prompt fits, and rewards can score it."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from roll_like.agents.agent_program import container_problem, found_program
from roll_like.agents.conversation import Conversation
from roll_like.agents.env_manager import episode_task
from roll_like.agents.env_worker import HostedEnvironment
from roll_like.agents.episode import EnvironmentSpec, ProgramSpec, VerifiersSpec, unseen
from roll_like.agents.verifiers_episodes import place_of
from roll_like.agents.verifiers_process import VerifiersProcess, VerifiersRefusal
from roll_like.agents.verifiers_server import TESTED
from roll_like.builtin.pipelines.agentic.config import AgenticConfig, EnvironmentConfig, VerifiersConfig
from roll_like.builtin.pipelines.agentic.environments import environment_spec_of, spec_of, specs_of
from roll_like.check.data import each_reward, task_suits
from roll_like.check.findings import Finding, failed
from roll_like.config.load import import_plugins
from roll_like.data.chat import Renderer, UnseenImages
from roll_like.envs import TaskRows
from roll_like.errors import FOREIGN_ERRORS, EnvError, RollLikeError
from roll_like.rewards.base import RewardConfig
from roll_like.rewards.scorer import scores_task
from roll_like.types import EVALUATION_SEED

#: Keys of what verifiers' messages begin with; None: its own version.
_KEYS = {None: "python", "taskset": "taskset", "harness": "harness", "environment": "options.id"}


def environment_findings(config: AgenticConfig, renderer: Renderer | None) -> Iterator[Finding]:
    """Yield what is wrong: environments are begun once, from their first seed; programs are found; rewards made."""
    import_plugins(config.import_)
    rows: dict[str, TaskRows] = {}
    for index, environment in enumerate(config.environments):
        yield from _playable(config, environment, environment.first_seed, f"environments.{index}", renderer, rows)
    evaluation = config.evaluation
    for index, environment in enumerate(evaluation.environments if evaluation is not None else ()):
        key = f"evaluation.environments.{index}"
        yield from _playable(config, environment, evaluation.first_seed if evaluation else 0, key, renderer, rows)
    yield from _rows_apart(config, rows)
    yield from _tasks_apart(config)
    yield from each_reward(config, partial(_scorable, config))


def _rows_apart(config: AgenticConfig, found: Mapping[str, TaskRows]) -> Iterator[Finding]:
    """Yield where an evaluation sets rows that are trained on.

    Args:
        found: The rows of environments that have some, by their keys.
    """
    if config.evaluation is None:
        return
    keyed = {f"environments.{index}": one for index, one in enumerate(config.environments)}
    trained = {_source(one): found[key] for key, one in keyed.items() if key in found}
    if config.evaluation.environments:
        keyed = {f"evaluation.environments.{index}": one for index, one in enumerate(config.evaluation.environments)}
    for key, environment in keyed.items():
        if key not in found or (source := _source(environment)) not in trained:
            continue
        kept, held_out = trained[source].held_out, found[key].held_out
        if not kept or not held_out:
            text = (
                f"evaluations set rows of {source[0]} that are trained on too; set held_out to so many rows that are "
                "kept for evaluations, or evaluate on another file"
            )
            yield Finding.warning(f"{key}.kwargs", text)
        elif held_out > kept:
            text = f"found {held_out}, and training holds out {kept} rows of {source[0]}; set the same number"
            yield Finding.error(f"{key}.kwargs.held_out", text)
        elif config.evaluation.first_seed < EVALUATION_SEED:
            text = (
                f"found {config.evaluation.first_seed}; rows that are held out are set by seeds from {EVALUATION_SEED} "
                "on; remove the key"
            )
            yield Finding.error("evaluation.first_seed", text)


def _tasks_apart(config: AgenticConfig) -> Iterator[Finding]:
    """Yield where an evaluation plays tasks of verifiers that are trained on."""

    def tasks_of(section: VerifiersConfig) -> object:
        return section.sections, section.select

    trained = [one.verifiers for one in config.environments if one.verifiers is not None]
    where = "evaluation.environments" if config.evaluation and config.evaluation.environments else "environments"
    for index, evaluated in enumerate(config.evaluated):
        if (section := evaluated.verifiers) is None:
            continue
        kept = [one.held_out for one in trained if tasks_of(one) == tasks_of(section)]
        key = f"{where}.{index}.verifiers.held_out"
        if kept and 0 in (*kept, section.held_out):
            text = (
                f"evaluations play tasks of {evaluated.label!r} that are trained on too; set held_out to so many tasks "
                "that are kept for evaluations, or evaluate with another `select`"
            )
            yield Finding.warning(key, text)
        elif kept and section.held_out > min(kept):
            text = f"found {section.held_out}, and training holds out {min(kept)} tasks; set the same number"
            yield Finding.error(key, text)


def _source(environment: EnvironmentConfig) -> tuple[str, str]:
    """Return the dataset of an environment that has one, and its split."""
    kwargs = environment.kwargs
    return str(kwargs.get("path")), str(kwargs.get("split", "train"))


def _scorable(config: AgenticConfig, reward: Any, section: RewardConfig, key: str) -> Iterator[Finding]:
    """Yield why a reward cannot score episodes: they have no rows."""
    for spec in specs_of([*config.environments, *config.evaluated]):
        task = episode_task(spec, 0)
        if not scores_task(section, task, config.domain_rewards):
            continue
        missing = [field for field in reward.required_fields if task.metadata.get(field) is None]
        if missing:
            yield Finding.error(
                key,
                f"reward {section.type!r} needs the field {missing[0]!r}, and episodes of {spec.name!r} have only "
                f"{' and '.join(map(repr, task.metadata))}; use a reward that needs none, or let the environment score",
            )
        else:
            yield from task_suits(reward, section.type, key, task)


def _playable(
    config: AgenticConfig,
    environment: EnvironmentConfig,
    seed: int,
    key: str,
    renderer: Renderer | None,
    rows: dict[str, TaskRows],
) -> Iterator[Finding]:
    """Yield what is wrong with one entry: its environment, its program, or both; and keep its rows, if it has some."""
    spec, hosted = spec_of(environment), environment_spec_of(environment)
    if isinstance(spec, VerifiersSpec):
        yield from asyncio.run(_verifiers_findings(spec, environment, seed, f"{key}.verifiers"))
    if isinstance(spec, ProgramSpec):
        yield from _found(spec, f"{key}.program")
        renderer = None  # what the policy is shown is the program's business
    if hosted is not None:
        yield from _begun(config, hosted, seed, key, renderer, rows)


async def _verifiers_findings(
    spec: VerifiersSpec, environment: EnvironmentConfig, seed: int, key: str
) -> list[Finding]:
    """Return what is wrong with a verifiers environment: its server is started once, and asked for a task."""
    process, selecting = VerifiersProcess(spec, key=""), False
    try:
        about = await process.start(serve=False)
        selecting = True
        count = (await process.read("count"))["count"]
        first = await process.read("tasks", first=0, count=1)
    except VerifiersRefusal as error:
        return [*_refused(error, environment, key, selecting=selecting)]
    except EnvError as error:
        return [failed(f"{key}.{'taskset' if process.answered else 'python'}", error)]
    finally:
        await process.close()
    findings = []
    try:
        place_of(seed, count if first["tasks"] else 0, spec)
    except EnvError as error:
        findings.append(failed(f"{key}.{'held_out' if spec.held_out and first['tasks'] else 'select'}", error))
    if about["verifiers"] != TESTED:
        text = f"found verifiers {about['verifiers']}; this was tested with {TESTED}"
        findings.append(Finding.warning(f"{key}.python", text))
    for name, agent in about["agents"].items():
        if agent["needs_container"] and agent["runtime"] == "subprocess":
            text = (
                f"the harness {agent['harness']!r} of {name!r} needs a container, and `subprocess` is none; use docker "
                "or another runtime of verifiers"
            )
            findings.append(Finding.error(f"{key}.runtime", text))
        if agent["runtime"] == "prime":
            text = f"{name!r} plays in Prime's sandboxes, which need an account and PRIME_API_KEY"
            findings.append(Finding.warning(f"{key}.runtime", text))
    return findings


def _refused(
    error: VerifiersRefusal, environment: EnvironmentConfig, key: str, *, selecting: bool
) -> Iterator[Finding]:
    """Yield verifiers' own words at the keys that they speak of."""
    section = environment.verifiers
    assert section is not None
    for path, message in error.problems:
        first, *rest = (str(part) for part in path)
        where = [first, *rest]
        if selecting:
            where = ["select", *where]
        elif first not in section.sections:  # an agent's: from `harness` or `runtime`, which all agents share
            where = rest or [first]
        elif first != "taskset":
            where = ["options", *where]
        yield Finding.error(".".join([key, *where]), f"verifiers says: {message}")
    if not error.problems:
        at = re.match(r"WrongVersion|\w+: (taskset|harness|environment)\b", error.message)
        kind = None if at is None else _KEYS[at[1]]
        place = key if kind is None and not selecting else f"{key}.{kind or 'taskset'}"
        yield Finding.error(place, f"verifiers says: {error.message}")


def _found(spec: ProgramSpec, key: str) -> Iterator[Finding]:
    """Yield why a program cannot be started."""
    if spec.container is not None:
        problem = asyncio.run(container_problem(spec.container))
        if problem is not None:
            yield Finding.error(f"{key}.runtime.{problem[0]}", problem[1])
        return
    if spec.directory is not None and not Path(spec.directory).is_dir():
        yield Finding.error(f"{key}.directory", f"{spec.directory!r} is no directory; correct it")
    elif found_program(spec) is None:
        where = "the search path" if os.sep not in spec.command[0] else repr(spec.directory or os.getcwd())
        yield Finding.error(
            f"{key}.command",
            f"there is no program {spec.command[0]!r} in {where}; install it, or correct the command. A path is "
            f"relative to {key}.directory",
        )


def _begun(
    config: AgenticConfig,
    environment: EnvironmentSpec,
    seed: int,
    key: str,
    renderer: Renderer | None,
    rows: dict[str, TaskRows],
) -> Iterator[Finding]:
    """Begin one episode, and yield why that fails, or why it cannot be played."""
    try:
        hosted = HostedEnvironment(environment)
    except RollLikeError as error:
        yield failed(key, error)
        return
    try:
        if hosted.rows is not None:
            rows[key] = hosted.rows
        started = hosted.reset(seed)
        tokens = None if renderer is None else len(Conversation(renderer).start(started.messages, started.tools))
    except UnseenImages:
        yield failed(key, unseen(environment.name))
        return
    except FOREIGN_ERRORS as error:
        yield failed(key, error, f"reset({seed}) of {environment.env_id!r} fails")
        return
    finally:
        hosted.close()
    limit = config.rollout.max_episode_tokens
    if tokens is not None and tokens >= limit:
        yield Finding.error(
            f"{key}",
            f"the first prompt of {environment.env_id!r} has {tokens} tokens, and a conversation {limit} at most, so "
            "no turn could be taken; raise rollout.max_episode_tokens, or shorten the prompt",
        )
    elif tokens is not None and tokens + config.rollout.max_response_tokens > limit:
        yield Finding.warning(
            f"{key}",
            f"the first prompt of {environment.env_id!r} has {tokens} tokens, which leaves {limit - tokens} of "
            f"rollout.max_episode_tokens ({limit}): less than one turn of {config.rollout.max_response_tokens}",
        )
