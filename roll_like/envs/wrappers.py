"""Wrappers that turn Gymnasium environments into ones that a language model can play.

AnsiText         rendered text instead of numbers as observation
DiscreteActions  names in the answer instead of numbers as actions
Instructions     what to do, before the first observation or as system prompt
TurnLimit        ends an episode after so many answers
TokenLimit       ends an episode after so many tokens
History          shows the last turns in each observation, and starts every turn's prompt afresh
Success          says in `info["success"]` whether the episode was solved
ScaledReward     multiplies rewards
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat, TypeAlias

import gymnasium
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Discrete

from roll_like.envs.actions import STYLES, Style, read_action, write_action
from roll_like.envs.returns import agents_of, state_of, turn_reward
from roll_like.envs.spaces import Commands, FreeText
from roll_like.errors import EnvError

Info: TypeAlias = dict[str, Any]
Reset: TypeAlias = tuple[str, Info]
Step: TypeAlias = tuple[str, SupportsFloat, bool, bool, Info]
AnyEnv: TypeAlias = gymnasium.Env[Any, Any]

_COLOURS = re.compile(r"\x1b\[([\d;]*)m")
#: A line that only names the last action, as Gymnasium's toy-text environments print it: `  (Down)`.
_ACTION_LINE = re.compile(r"^[ \t]*\([A-Za-z ]+\)[ \t]*(?:\n|$)", flags=re.MULTILINE)


class TextWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Base of wrappers whose observations are text."""


class AnsiText(gymnasium.ObservationWrapper[str, Any, Any]):
    """The environment's `ansi` rendering as observation, without colours.

    Args:
        env: Made with `render_mode="ansi"`.
        highlight: For each colour code (41: on red) the text that stands in place of what is printed in it.
            Where several apply, the first one counts.
        replace: Characters to write differently.
        spaced: Put a space between the characters of a line. Tokenizers join letters; apart, one is one token.

    Raises:
        EnvError: The environment renders nothing, or not as text.
    """

    def __init__(
        self,
        env: AnyEnv,
        *,
        highlight: Mapping[int, str] | None = None,
        replace: Mapping[str, str] | None = None,
        spaced: bool = False,
    ) -> None:
        super().__init__(env)
        if env.render_mode not in {"ansi", "ascii"}:
            raise EnvError(
                f"AnsiText needs an environment that renders text, found render_mode={env.render_mode!r} "
                f"of {_modes(env)}",
                fix="make it with render_mode='ansi'"
                if "ansi" in _modes(env)
                else "describe its observations in a gymnasium.ObservationWrapper of your own",
            )
        self._highlight = dict(highlight or {})
        self._replace = str.maketrans(dict(replace or {}))
        self._spaced = spaced
        self.observation_space = FreeText()

    def observation(self, observation: Any) -> str:  # noqa: ARG002 - the picture shows the same
        """Return the present picture."""
        rendered: Any = self.env.render()
        if not isinstance(rendered, str):
            raise EnvError(f"render() should return text, found {type(rendered).__name__}", fix="return a str")
        plain = _without_colours(rendered, self._highlight).translate(self._replace)
        lines = [line.rstrip() for line in _ACTION_LINE.sub("", plain).strip("\n").splitlines()]
        return "\n".join(" ".join(line) for line in lines) if self._spaced else "\n".join(lines)


def _modes(env: AnyEnv) -> list[str]:
    return list(env.metadata.get("render_modes") or [])


def _without_colours(text: str, highlight: Mapping[int, str]) -> str:
    """Return `text` without colour codes; what is printed in a highlighted colour is replaced."""
    parts, active = [], set[int]()
    for place, part in enumerate(_COLOURS.split(text)):
        if place % 2:  # the codes between two stretches of text
            codes = {int(code) for code in part.split(";") if code} or {0}
            active = set() if 0 in codes else active | codes
        elif part:
            parts.append(next((mark for code, mark in highlight.items() if code in active), part))
    return "".join(parts)


class DiscreteActions(TextWrapper):
    """Actions by name: the policy answers `<action>left</action>` or `{"action": "left"}`.

    An answer without a valid action costs `invalid_penalty`, leaves the environment as it is, and shows
    how to answer. `info["invalid_action"]` is then True.

    Args:
        env: Has a `Discrete` action space.
        names: Name of each action in order, or names with their numbers (several names may share one).
        style: How the answer holds the name; see `roll_like.envs.actions`.
        invalid_penalty: What an answer without valid action costs; ≥ 0.

    Raises:
        EnvError: The action space is another one, names and actions do not fit, or the style is unknown.
    """

    def __init__(
        self,
        env: AnyEnv,
        names: Sequence[str] | Mapping[str, int],
        *,
        style: Style = "tag",
        invalid_penalty: float = 0.1,
    ) -> None:
        super().__init__(env)
        if not isinstance(env.action_space, Discrete):
            raise EnvError(f"DiscreteActions needs a Discrete action space, found {env.action_space}")
        if style not in STYLES:
            raise EnvError(f"unknown action style {style!r}", fix=f"style is one of {', '.join(STYLES)}")
        if invalid_penalty < 0:
            raise EnvError(f"invalid_penalty is what an answer costs: ≥ 0, found {invalid_penalty}")
        self._numbers = _numbered(names, env.action_space)
        self._style = style
        self._penalty = invalid_penalty
        self._shown: tuple[Any, Info] | None = None  # observation, state and images, while an episode goes on
        self.action_space = Commands([write_action(name, style) for name in self.names])

    @property
    def names(self) -> list[str]:
        """One name for each action, in the order of their numbers."""
        first = {number: name for name, number in reversed(self._numbers.items())}
        return [first[number] for number in sorted(first)]

    @property
    def how_to_answer(self) -> str:
        """The answers that are valid, in words: `<action>left</action>, … or <action>up</action>`."""
        answers = [write_action(name, self._style) for name in self.names]
        return answers[0] if len(answers) == 1 else f"{', '.join(answers[:-1])} or {answers[-1]}"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Start an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._show(observation, info)
        return observation, info

    def step(self, action: str) -> Step:
        """Take the action that the answer names, if there is one.

        Raises:
            ResetNeeded: The episode is over, or has not begun.
        """
        if self._shown is None:
            raise ResetNeeded("step() was called after the end of an episode; call reset() first")
        number = self._numbers.get(_plain(read_action(action, self._style) or ""))
        if number is None:
            observation, shown = self._shown
            text, info = f"That names no action. Answer {self.how_to_answer}.", {"invalid_action": True, **shown}
            if isinstance(observation, str):
                observation = f"{text}\n{observation}"
            else:
                info["messages"] = [{"role": "user", "content": [observation, text]}]
            return observation, -self._penalty, False, False, info
        observation, reward, terminated, truncated, info = self.env.step(number)
        info["invalid_action"] = False
        self._show(observation, info)
        self._shown = None if terminated or truncated else self._shown
        return observation, reward, terminated, truncated, info

    def _show(self, observation: Any, info: Info) -> None:
        info.setdefault("state", state_of(observation, info))
        self._shown = observation, {name: info[name] for name in ("state", "images") if name in info}

    def scripted_action(self) -> str | None:
        """Return the answer that the environment's own player would give; None where it has none.

        The player is a method `best_action() -> int | None` of the environment or of a wrapper below.
        """
        if not self.env.has_wrapper_attr("best_action"):
            return None
        number = self.env.get_wrapper_attr("best_action")()
        if number is None:
            return None
        return write_action(next(name for name, known in self._numbers.items() if known == number), self._style)


def _plain(name: str) -> str:
    return " ".join(name.casefold().split())


def _numbered(names: Sequence[str] | Mapping[str, int], space: Discrete) -> dict[str, int]:
    first, count = int(space.start), int(space.n)
    numbers = dict(names) if isinstance(names, Mapping) else {name: first + at for at, name in enumerate(names)}
    wanted = set(range(first, first + count))
    if set(numbers.values()) != wanted or len({_plain(name) for name in numbers}) != len(numbers):
        raise EnvError(
            f"names should name each of the actions {first} to {first + count - 1} differently, found {list(names)}",
            fix="give one name for each action, in order",
        )
    return {_plain(name): number for name, number in numbers.items()}


class TurnLimit(TextWrapper):
    """Ends an episode (`truncated`) after `max_turns` answers, valid or not.

    `info["turn"]` counts them. What an environment says about its own end goes first.
    """

    def __init__(self, env: AnyEnv, max_turns: int) -> None:
        super().__init__(env)
        if max_turns < 1:
            raise EnvError(f"max_turns should be at least 1, found {max_turns}")
        self.max_turns = max_turns
        self._turn = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Start an episode; no turn is used yet."""
        self._turn = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Step:
        """Take one action and count it.

        Raises:
            ResetNeeded: All turns are used.
        """
        if self._turn >= self.max_turns:
            raise ResetNeeded(f"all {self.max_turns} turns are used; call reset() first")
        self._turn += 1
        observation, reward, terminated, truncated, info = self.env.step(action)
        info["turn"] = self._turn
        return _cut(observation, reward, terminated, truncated, info, over=self._turn >= self.max_turns)


class TokenLimit(TextWrapper):
    """Ends an episode (`truncated`) once observations and answers together have `max_tokens` tokens.

    Args:
        env: Has text observations and actions.
        max_tokens: Tokens of an episode; those of the chat template are not counted.
        count: Number of tokens of a text, from the policy's tokenizer.
    """

    def __init__(self, env: AnyEnv, max_tokens: int, count: Callable[[str], int]) -> None:
        super().__init__(env)
        if max_tokens < 1:
            raise EnvError(f"max_tokens should be at least 1, found {max_tokens}")
        self._max_tokens = max_tokens
        self._count = count
        self._used = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Start an episode; its first observation counts."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._used = self._count(observation)
        return observation, info

    def step(self, action: str) -> Step:
        """Take one action; the answer and what comes back count."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._used += self._count(action) + self._count(observation)
        info["tokens"] = self._used
        return _cut(observation, reward, terminated, truncated, info, over=self._used >= self._max_tokens)


def _cut(observation: str, reward: SupportsFloat, terminated: bool, truncated: bool, info: Info, *, over: bool) -> Step:
    """Truncate what a limit ends; not solved in time is not solved."""
    if over and not terminated:
        truncated = True
        info.setdefault("success", False)
    return observation, reward, terminated, truncated, info


class Success(TextWrapper):
    """Says in `info["success"]`, at the end, whether the episode was solved.

    Args:
        env: Any environment.
        at_least: Solved is an episode that terminates with a last reward of at least this; None: that terminates. With
            several agents the last reward is that of the agent that took the last turn.
    """

    def __init__(self, env: AnyEnv, at_least: float | None = None) -> None:
        super().__init__(env)
        self._at_least = at_least

    def step(self, action: Any) -> Step:
        """Take one action."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        solved = bool(terminated) and (self._at_least is None or float(reward) >= self._at_least)
        if terminated or truncated or solved:
            info["success"] = solved
        return observation, reward, terminated, truncated, info


class ScaledReward(TextWrapper):
    """Multiplies rewards, of all agents, by `factor`, so that returns of different environments have one size."""

    def __init__(self, env: AnyEnv, factor: float) -> None:
        super().__init__(env)
        self._factor = factor

    def step(self, action: Any) -> Step:
        """Take one action."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if isinstance(rewards := info.get("rewards"), Mapping) and agents_of(self.env):
            info["rewards"] = {agent: turn_reward(one) * self._factor for agent, one in rewards.items()}
        return observation, float(reward) * self._factor, terminated, truncated, info
