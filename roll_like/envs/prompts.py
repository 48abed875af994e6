"""Wrappers that decide what a policy reads: instructions, examples, how much of the past.

Instructions     what to do, before the first observation or as system prompt
FewShot          solved turns before the first observation
History          the last turns in each observation; every turn's prompt starts afresh
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import gymnasium

from roll_like.data.reasoning import answer_of
from roll_like.envs.returns import Seats, observed, state_of
from roll_like.envs.spaces import FreeText
from roll_like.envs.wrappers import AnyEnv, Info, Reset, Step, TextWrapper
from roll_like.errors import EnvError

ROLES_OF_A_TURN = ("user", "assistant")


class Instructions(TextWrapper):
    """Task text before the first observation of each agent, or as system prompt.

    Args:
        env: Has text observations.
        text: What to do and how to answer.
        role: `user` puts it before the first observation; `system` makes it `env.system_prompt`.

    Raises:
        EnvError: Observations are no text.
    """

    def __init__(self, env: AnyEnv, text: str, *, role: Literal["user", "system"] = "user") -> None:
        super().__init__(env)
        if not isinstance(env.observation_space, gymnasium.spaces.Text):
            raise EnvError(
                f"Instructions needs text observations, found {env.observation_space}",
                fix="wrap the environment in AnsiText first",
            )
        self._text = text
        self._seats = Seats()
        self._in_first = role == "user"
        if role == "system":
            self.system_prompt = text
        self.observation_space = FreeText()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Start an episode and return the instructions and its first observation."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._seats.reset(self.env, info)
        return self._instructed(observation, info), info

    def step(self, action: Any) -> Step:
        """Take one action; an agent that is shown its first observation gets the instructions."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self._seats.step(info):
            observation = self._instructed(observation, info)
        return observation, reward, terminated, truncated, info

    def _instructed(self, observation: str, info: Info) -> str:
        info.setdefault("state", state_of(observation, info))
        if not self._in_first:
            return observation
        if "messages" in info:
            info["messages"] = [{"role": "user", "content": self._text}, *info["messages"]]
        return f"{self._text}\n\n{observation}"


class FewShot(TextWrapper):
    """Shows solved turns, as questions and answers of a conversation, before the first observation of each agent.

    A small model imitates a conversation far better than a description of one.

    Args:
        env: Has text observations.
        solved: Observations with the right answer to each, such as `examples(env, 4)` gives; may be empty.
    """

    def __init__(self, env: AnyEnv, solved: Sequence[tuple[str, str]]) -> None:
        super().__init__(env)
        self._seats = Seats()
        self._turns = [
            {"role": role, "content": text} for pair in solved for role, text in zip(ROLES_OF_A_TURN, pair, strict=True)
        ]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Start an episode; `info["messages"]` holds the solved turns and what the episode begins with."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._seats.reset(self.env, info)
        self._show(observation, info)
        return observation, info

    def step(self, action: Any) -> Step:
        """Take one action; an agent that is shown its first observation gets the solved turns."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self._seats.step(info):
            self._show(observation, info)
        return observation, reward, terminated, truncated, info

    def _show(self, observation: str, info: Info) -> None:
        if self._turns:
            own = info.get("messages", [{"role": "user", "content": observed(observation, info)}])
            info["messages"] = [*(dict(turn) for turn in self._turns), *own]


class History(TextWrapper):
    """Shows the last turns in each observation; every turn's prompt starts afresh (`info["fresh"]` is True).

    Without this wrapper the policy sees the whole conversation. With it, an episode of many turns has
    short prompts, each of them a segment of its own (GiGPO, arXiv:2505.10978, plays so). Examples that
    `FewShot` put before the first observation come before every turn's. Each agent is shown its own turns. Of images
    the present ones are shown.

    Args:
        env: Has text observations and actions.
        turns: How many earlier turns to show, without their reasoning; 0 shows the present observation alone.
    """

    def __init__(self, env: AnyEnv, turns: int) -> None:
        super().__init__(env)
        if turns < 0:
            raise EnvError(f"History(turns) should be at least 0, found {turns}")
        self._past: defaultdict[str, deque[tuple[str, str]]] = defaultdict(partial(deque, maxlen=turns))  # by agent
        self._last = {"": ""}
        self._seats = Seats()
        self._prefix: list[dict[str, Any]] = []
        self.observation_space = FreeText()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Start an episode with nothing to remember."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._seats.reset(self.env, info)
        self._past.clear()
        self._last = {self._seats.agent: observation}
        self._prefix = list(info.get("messages", ()))[:-1]
        return observation, self._marked(info, observation, observation)

    def step(self, action: str) -> Step:
        """Take one action and return what happened before together with what is there now."""
        acted = self._seats.agent
        self._past[acted].append((self._last[acted], answer_of(action)))
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._seats.step(info)
        self._last[self._seats.agent] = observation
        before = "\n".join(f"{shown}\nYour answer: {answer}" for shown, answer in self._past[self._seats.agent])
        text = f"Before:\n{before}\n\nNow:\n{observation}" if before else observation
        return text, reward, terminated, truncated, self._marked(info, observation, text)

    def _marked(self, info: Info, observation: str, text: str) -> Info:
        info.setdefault("state", state_of(observation, info))
        info["fresh"] = True
        if self._prefix:
            info["messages"] = [*self._prefix, {"role": "user", "content": observed(text, info)}]
        return info
