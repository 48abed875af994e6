"""What `reset` and `step` of an environment return, read as a run and `check_env` take it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import gymnasium
import numpy as np

from roll_like.data.images import as_text, is_image, pictures_of
from roll_like.data.shown_images import is_image_shape, picture_of, read_content
from roll_like.errors import EnvError

#: What an environment's methods return, by the names that Gymnasium's documentation gives it.
RESET, STEP = ("observation", "info"), ("observation", "reward", "terminated", "truncated", "info")
#: What is true or false in `info`, where it is there.
INFO_FLAGS = ("success", "fresh", "invalid_action")


def returned(method: str, result: Any, parts: Sequence[str]) -> Any:
    """Return what an environment's method returned, which has the parts that Gymnasium asks for.

    Raises:
        EnvError: It has not.
    """
    if isinstance(result, tuple) and len(result) == len(parts):
        if not isinstance(result[-1], Mapping):
            raise EnvError(f"{method}() should return a dict as info, found {result[-1]!r}", fix="return {}")
        return result
    count = f" of {len(result)}" if isinstance(result, tuple) else ""
    expected = ", ".join(parts)
    raise EnvError(
        f"{method}() should return {expected}, found {type(result).__name__}{count}: {str(result)[:80]}",
        fix=f"end it with `return {expected}`",
    )


def shown_messages(observation: Any, info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what a policy is shown: the messages in `info`, else the observation as a user's message.

    The images in `info["images"]` belong to the observation, and are shown before its text.

    Raises:
        EnvError: They are no messages, or an image cannot be read.
    """
    shown = info.get("messages") or [{"role": "user", "content": observed(observation, info)}]
    return [_message(one) for one in (shown if isinstance(shown, list | tuple) else [shown])]


def observed(observation: Any, info: Mapping[str, Any]) -> Any:
    """Return an observation with its images as the content of a message.

    Raises:
        EnvError: An image cannot be read.
    """
    images = info_images(info)
    if not images:
        return observation
    return [*images, *([observation] if observation != "" else [])]


def info_images(info: Mapping[str, Any]) -> list[Any]:
    """Return the images that belong to an observation, in order.

    Raises:
        EnvError: They are no list, or one cannot be read.
    """
    images = info.get("images")
    if images is None:
        return []
    if not isinstance(images, list | tuple):
        raise EnvError(f'info["images"] is {type(images).__name__}', fix="give a list of images")
    return [{"type": "image", "image": picture_of(one)} for one in images]


def state_of(observation: Any, info: Mapping[str, Any]) -> str:
    """Return the key of a state: `info["state"]`, else the observation with its images, by the hash of their bytes."""
    if "state" in info:
        return str(info["state"])
    shown = observed(observation, info)
    if isinstance(shown, np.ndarray) and (shown.dtype != np.uint8 or not is_image_shape(shown.shape)):
        return str(shown)
    content = read_content(shown)
    if not isinstance(content, list):
        return str(content)
    seen = [picture.digest.hex() for picture in pictures_of([{"content": content}])]
    return " ".join([*seen, as_text([part for part in content if not is_image(part)])]).strip()


def _message(shown: Any) -> dict[str, Any]:
    """Return a message that an environment shows: of any role, with a text or with tool calls.

    Raises:
        EnvError: It is none. Templates would write another value as Python does: `{'image': …}`, `None`.
    """
    message = dict(shown) if isinstance(shown, Mapping) else {}
    content = read_content(message.get("content"))
    if isinstance(message.get("role"), str) and (
        isinstance(content, str | list) or (content is None and message.get("tool_calls"))
    ):
        return {**message, "content": content} if "content" in message else message
    raise EnvError(
        f"expected messages with a role and a content of texts and images, found {str(shown)[:80]}",
        fix='return a text or an image as observation, or {"role": …, "content": …} in info["messages"]',
    )


def turn_reward(value: Any) -> float:
    """Return a reward.

    Raises:
        EnvError: It is no finite number.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise EnvError(f"the reward is {value!r}", fix="return a finite number")
    return number


def turn_flag(what: str, value: Any) -> bool:
    """Return a flag; `"False"` and 0.5 would be true to Python.

    Raises:
        EnvError: It is neither true nor false.
    """
    if isinstance(value, bool | np.bool_ | Real) and value in (0, 1):
        return bool(value)
    raise EnvError(f"{what} is {value!r}", fix="return True or False")


def info_flag(info: Mapping[str, Any], name: str) -> bool | None:
    """Return a flag in `info`; None where it is not there.

    Raises:
        EnvError: It is neither true nor false.
    """
    value = info.get(name)
    return None if value is None else turn_flag(f'info["{name}"]', value)


def info_tool_calls(info: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return what a turn called.

    Raises:
        EnvError: They are no mappings.
    """
    calls = info.get("tool_calls", ())
    if isinstance(calls, list | tuple) and all(isinstance(call, Mapping) for call in calls):
        return tuple(map(dict, calls))
    raise EnvError(
        f'info["tool_calls"] is {str(calls)[:80]}', fix="give a list of mappings with name, arguments, result, error"
    )


def agents_of(env: gymnasium.Env[Any, Any]) -> tuple[str, ...]:
    """Return the names of an environment's agents, which it may set in `reset`; empty where only one acts.

    Raises:
        EnvError: They are no names.
    """
    agents = env.get_wrapper_attr("agents") if env.has_wrapper_attr("agents") else None
    if agents is None:
        return ()
    if not isinstance(agents, list | tuple) or not all(isinstance(one, str) and one for one in agents):
        raise EnvError(f"`agents` is {agents!r}", fix='give names, such as agents = ("white", "black")')
    return tuple(agents)


def info_agent(info: Mapping[str, Any], agents: Sequence[str]) -> str | None:
    """Return who takes the next turn, in an environment of several agents; None where `info` does not say.

    Raises:
        EnvError: It is none of the environment's agents.
    """
    agent = info.get("agent") if agents else None
    if agent is None or agent in agents:
        return agent
    raise EnvError(f'info["agent"] is {agent!r}', fix=f"give one of the environment's agents: {', '.join(agents)}")


def info_rewards(info: Mapping[str, Any], agents: Sequence[str], acted: str) -> dict[str, float]:
    """Return what a turn earned the agents that did not take it.

    Raises:
        EnvError: They are no finite numbers of other agents.
    """
    rewards = (info.get("rewards") if agents else None) or {}
    others = [agent for agent in agents if agent != acted]
    if not isinstance(rewards, Mapping) or not set(rewards) <= set(others):
        raise EnvError(
            f'info["rewards"] is {str(rewards)[:80]}; expected rewards of {", ".join(others) or "no agent"} by name',
            fix="return the reward of the agent that acted as `reward`",
        )
    return {agent: turn_reward(reward) for agent, reward in rewards.items()}


class Seats:
    """Who of an environment's agents takes the next turn; always "" where there are none.

    Attributes:
        agents: All of them.
        agent: Takes the next turn.
    """

    def __init__(self) -> None:
        self.agents: tuple[str, ...] = ()
        self.agent = ""
        self._shown = {""}

    def reset(self, env: gymnasium.Env[Any, Any], info: Mapping[str, Any]) -> None:
        """Take note of what an episode began with."""
        self.agents = agents_of(env)
        self.agent = info_agent(info, self.agents) or next(iter(self.agents), "")
        self._shown = {self.agent}

    def step(self, info: Mapping[str, Any]) -> bool:
        """Take note of a turn, and return whether who is next is shown something for the first time."""
        self.agent = info_agent(info, self.agents) or self.agent
        first = self.agent not in self._shown
        self._shown.add(self.agent)
        return first
