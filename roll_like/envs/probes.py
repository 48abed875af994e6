"""What `check_env` tries on an environment, one function for each question."""

from __future__ import annotations

import math
import pickle
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from gymnasium.utils.env_checker import check_env as gymnasium_check
from jsonschema import Draft202012Validator, SchemaError

from roll_like.data.images import as_texts, pictures_of
from roll_like.data.shown_images import shows_image
from roll_like.envs.registration import non_text_spaces
from roll_like.envs.returns import (
    INFO_FLAGS,
    RESET,
    STEP,
    Seats,
    info_flag,
    info_rewards,
    info_tool_calls,
    returned,
    shown_messages,
    turn_flag,
    turn_reward,
)
from roll_like.envs.scripts import system_prompt_of, tools_of
from roll_like.envs.wrappers import AnyEnv, Info
from roll_like.errors import FOREIGN_ERRORS, EnvError, describe_error

#: What a policy might say where an action is expected.
GARBAGE = ("", " ", "I do not know.", "<action></action>", "<action>fly</action>", '{"action": 3}', "🙂 äß\n" * 50)
#: Seeds whose starts are compared.
_STARTS = 8
_SHOWN = 80  # characters of a value in a message
_SEED_FIX = "call super().reset(seed=seed) first, and draw from self.np_random only"

#: Chooses an answer from the observation and the info of a turn; None: it knows no way on.
Policy: TypeAlias = Callable[[str, Info], str | None]


@dataclass(frozen=True, slots=True)
class EnvFinding:
    """One thing that is wrong (`error`) or doubtful (`warning`), and what to change."""

    level: Literal["error", "warning"]
    check: str
    what: str
    fix: str | None = None


@dataclass(slots=True)
class EnvFindings:
    """What was found so far; a thing that is found again is kept once."""

    found: list[EnvFinding] = field(default_factory=list)

    def error(self, check: str, what: str, fix: str | None = None) -> None:
        """Add something that keeps the environment from being trained on."""
        self._add(EnvFinding("error", check, what, fix))

    def warning(self, check: str, what: str, fix: str | None = None) -> None:
        """Add something that is allowed and often not meant."""
        self._add(EnvFinding("warning", check, what, fix))

    def _add(self, finding: EnvFinding) -> None:
        if finding not in self.found:
            self.found.append(finding)

    def read(self, check: str, reader: Callable[..., object], *parts: Any) -> None:
        """Add an error found by `check` where a run would refuse what an environment returned."""
        try:
            reader(*parts)
        except EnvError as error:
            self.error(check, error.message, error.fix)

    @contextmanager
    def no_exception(self, check: str, doing: str, fix: str | None = None) -> Iterator[None]:
        """Turn what the environment raises within into an error found by `check`."""
        try:
            yield
        except FOREIGN_ERRORS as error:
            self.error(check, f"{doing} raised {describe_error(error)}", fix)


@dataclass(slots=True)
class Episode:
    """One episode: what was seen at each turn, from the first observation on.

    Attributes:
        turns: What was shown in each turn, with its state, reward, terminated and truncated.
        actions: What was answered.
        success: The last `info["success"]`; None where there was none.
        ended: Whether the environment ended it.
        seconds: Time of each step.
    """

    turns: list[tuple[Any, ...]] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    success: bool | None = None
    ended: bool = False
    seconds: list[float] = field(default_factory=list)

    @property
    def total_reward(self) -> float:
        """Sum of its rewards."""
        return math.fsum(float(turn[1]) for turn in self.turns)


def probe_spaces(env: AnyEnv, findings: EnvFindings) -> bool:
    """Check that observations and actions are text; nothing else can be tried where they are not."""
    for what, fix in non_text_spaces(env):
        findings.error("spaces", what if what.startswith("no ") else f"{what} is not text", fix)
    return not findings.found


def probe_parts(env: AnyEnv, seed: int, findings: EnvFindings) -> bool:
    """Check that `reset` and `step` return as many things as Gymnasium asks for; nothing can be played where not."""
    try:
        returned("reset", env.reset(seed=seed), RESET)
        returned("step", env.step(env.action_space.sample()), STEP)
    except EnvError as error:
        findings.error("episode", error.message, error.fix)
        return False
    except FOREIGN_ERRORS:
        pass  # found again, with what it was doing
    return True


def probe_attributes(env: AnyEnv, findings: EnvFindings) -> None:
    """Check that system prompt and tools are what chat templates take."""
    prompt: Any = system_prompt_of(env)
    if prompt is not None and not isinstance(prompt, str):
        findings.error("prompt", f"system_prompt should be text, found {type(prompt).__name__}")
    for number, tool in enumerate(tools_of(env)):
        _check_tool(tool, number, findings)


def _check_tool(tool: Any, number: int, findings: EnvFindings) -> None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        fix = "give {'type': 'function', 'function': {'name': …, 'description': …, 'parameters': …}}"
        findings.error("tools", f"tools[{number}] is no function schema: {str(tool)[:100]}", fix)
        return
    try:
        Draft202012Validator.check_schema(function.get("parameters", {}))
    except SchemaError as error:
        findings.error("tools", f"the parameters of tool {function['name']!r} are no JSON schema: {error.message}")


def probe_gymnasium(env: AnyEnv, findings: EnvFindings) -> None:
    """Report what Gymnasium's own checker says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            # an environment with wrappers is checked as it is played; its pictures do not matter here
            gymnasium_check(env, skip_render_check=True, skip_close_check=True)
        except AssertionError as error:
            text = str(error)
            if "super().reset(seed=seed)" in text or "non-deterministic" in text or "np_random" in text:
                findings.error("seed", f"reset ignores the seed: {text}", _SEED_FIX)
            else:
                findings.error("gymnasium", text)
        except FOREIGN_ERRORS as error:
            findings.error("gymnasium", f"its checker stopped with {describe_error(error)}")
    for warning in caught:
        text = re.sub(r"\x1b\[[\d;]*m|WARN: ", "", str(warning.message)).strip()
        if "is different from the unwrapped version" not in text:
            findings.warning("gymnasium", text)


def probe_seeds(env: AnyEnv, seeds: Sequence[int], findings: EnvFindings) -> None:
    """Check that a seed decides where an episode starts."""
    starts = {}
    for seed in dict.fromkeys((*seeds, *range(_STARTS))):
        starts[seed], again = _start(env, seed), _start(env, seed)
        if starts[seed] != again:
            shown = f"{_short(starts[seed][0])} and {_short(again[0])}"
            findings.error("seed", f"reset ignores the seed: seed {seed} started twice, with {shown}", _SEED_FIX)
            return
    if len({repr(start) for start in starts.values()}) == 1:
        findings.warning(
            "seed",
            f"all of {len(starts)} seeds start from the same state: every group of a run plays the same task",
            "draw the start from self.np_random, unless one start is what is meant",
        )


def _start(env: AnyEnv, seed: int) -> tuple[Any, ...]:
    return _seen(*env.reset(seed=seed))


def _seen(observation: Any, info: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a policy is shown such that two of them can be compared: images by their bytes."""
    try:
        shown = shown_messages(observation, info)
    except EnvError:  # it is told elsewhere
        return str(observation), str(info.get("messages")), info.get("state")
    text = observation if isinstance(observation, str) else ""
    return text, as_texts(shown), info.get("state"), tuple(one.digest.hex() for one in pictures_of(shown))


def probe_garbage(env: AnyEnv, findings: EnvFindings) -> None:
    """Check that the environment takes whatever a policy says."""
    for text in GARBAGE:
        if text not in env.action_space:
            fix = "use roll_like.envs.FreeText as action space"
            findings.warning("actions", f"the action space does not hold the answer {_short(text)}", fix)
        with findings.no_exception("actions", f"step({_short(text)})", "treat what is no action as a move that fails"):
            env.reset(seed=0)
            env.step(text)


def probe_episode(env: AnyEnv, seed: int, policy: Policy, max_turns: int, name: str, findings: EnvFindings) -> Episode:
    """Play one episode and check each turn of it."""
    episode = Episode()
    observation, info = env.reset(seed=seed)
    _check_shown(env, "reset", observation, info, findings)
    seats = Seats()
    findings.read("agent", seats.reset, env, info)
    episode.turns.append((_seen(observation, info), 0.0, False, False))
    while not episode.ended and len(episode.actions) < max_turns:
        action = policy(observation, info)
        if action is None:
            return episode
        began = time.perf_counter()
        observation, reward, terminated, truncated, info = env.step(action)
        episode.seconds.append(time.perf_counter() - began)
        _check_shown(env, "step", observation, info, findings)
        findings.read("agent", info_rewards, info, seats.agents, seats.agent)
        findings.read("agent", seats.step, info)
        findings.read("reward", turn_reward, reward)
        findings.read("flags", turn_flag, "terminated", terminated)
        findings.read("flags", turn_flag, "truncated", truncated)
        episode.actions.append(action)
        episode.turns.append((_seen(observation, info), reward, terminated, truncated))
        episode.success = info.get("success", episode.success)
        episode.ended = bool(terminated or truncated)
    if not episode.ended:
        findings.warning(
            "end", f"the {name} policy played {max_turns} turns without end", "wrap it in roll_like.envs.TurnLimit"
        )
    elif episode.success is None:
        findings.warning("success", 'info["success"] is missing at the end', "set it, or wrap it in Success")
    return episode


def _check_shown(env: AnyEnv, method: str, observation: Any, info: Any, found: EnvFindings) -> None:
    if not isinstance(observation, str) and not shows_image(observation):
        found.error("observation", f"{method}() should return a text or an image, found {type(observation).__name__}")
    elif observation not in env.observation_space:
        found.error("observation", f"{method}() returned {_short(observation)}, which observation_space does not hold")
    if not isinstance(info, Mapping):
        found.error("info", f"{method}() should return a dict as info, found {type(info).__name__}")
        return
    found.read("messages", shown_messages, observation if shows_image(observation) else "", info)
    found.read("tool_calls", info_tool_calls, info)
    for name in INFO_FLAGS:
        found.read("info", info_flag, info, name)


def probe_replay(env: AnyEnv, seed: int, episode: Episode, which: str, findings: EnvFindings) -> None:
    """Check that the same seed and the same answers give the same episode."""
    if env.spec is not None and env.spec.nondeterministic:
        return
    remaining = iter(episode.actions)
    again = probe_episode(
        env, seed, lambda _observation, _info: next(remaining, None), len(episode.actions), which, EnvFindings()
    )
    for turn, (first, second) in enumerate(zip(episode.turns, again.turns, strict=False)):
        if repr(first) != repr(second):
            findings.error(
                "seed",
                f"seed {seed} and the same answers gave another turn {turn} in {which}: "
                f"{_short(first)} and {_short(second)}",
                _SEED_FIX + "; say nondeterministic=True in gymnasium.register where it cannot be repeated",
            )
            return


def probe_after_end(env: AnyEnv, findings: EnvFindings) -> None:
    """Check, right after an episode's end, that the environment does not go on."""
    try:
        _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
    except FOREIGN_ERRORS:  # to refuse is right, in whatever words
        return
    if not terminated and not truncated:
        findings.warning(
            "end",
            f"after its end the environment goes on: step() gave an observation and the reward {reward}",
            "raise gymnasium.error.ResetNeeded, or go on returning terminated=True",
        )


def probe_pickle(env: AnyEnv, findings: EnvFindings) -> None:
    """Check that an episode can be saved and gone on with."""
    env.reset(seed=0)
    action = env.action_space.sample()
    try:
        copy = pickle.loads(pickle.dumps(env))
    except FOREIGN_ERRORS as error:  # what is not picklable raises whatever it likes
        findings.warning(
            "pickle",
            f"its state is not picklable: {type(error).__name__}: {error}",
            "keep no lambda, generator, lock, open file or module in it, or define __getstate__",
        )
        return
    here, there = (_turn(*one.step(action)) for one in (env, copy))
    if repr(here) != repr(there):
        findings.warning("pickle", f"a pickled copy plays on differently: {_short(here)} and {_short(there)}")


def _turn(observation: Any, *rest: Any) -> tuple[Any, ...]:
    return (_seen(observation, rest[-1]), *rest[:-1])


def probe_close(env: AnyEnv, findings: EnvFindings) -> None:
    """Check that the environment can be closed, twice."""
    with findings.no_exception("close", "close(), called twice,", "let close() do nothing the second time"):
        env.close()
        env.close()


def _short(thing: Any) -> str:
    text = repr(thing)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
