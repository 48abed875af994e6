"""Environments of GEM: its games, questions from reasoning-gym, and questions and programs from datasets."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded

from roll_like.builtin.envs.extras import need
from roll_like.builtin.envs.randomness import OwnRandomness
from roll_like.envs import FreeText, answer_of
from roll_like.errors import EnvError
from roll_like.registry import did_you_mean

ENV_ID = "roll_like/GEM-v0"
PACKAGE = "gem-llm==0.1.0"
#: It pins older versions of packages than roll_like's other environments are tested with.
INSTALL = f"pip install 'roll-like[envs]', then pip install --no-deps '{PACKAGE}'"
#: A sum of rewards from here on is 1: that of a solved game, whose rewards are shares of 1.
SOLVED = 1 - 1e-6


class GEM(gymnasium.Env[str, str]):
    """`roll_like/GEM-v0`.

    A seed starts what GEM's own `reset(seed)` starts. Where GEM says both `terminated` and `truncated`, as it does at
    a game's last turn and after each answer to a question, the episode was scored, and has ended.

    Args:
        env: GEM's id, such as `game:Sokoban-v0-easy`, `rg:chain_sum` or `math:GSM8K`, or one that was registered with
            `gem.register` in a module that the run imports.
        config: The environment's own settings, such as `{"max_turns": 4}`.
        tools: One of GEM's wrappers with tools, such as `python_tool`. It runs what the policy writes on this machine,
            not isolated.

    Raises:
        EnvError: GEM is not installed, or knows no such environment or wrapper.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(self, env: str, *, config: Mapping[str, Any] | None = None, tools: str | None = None) -> None:
        gem = need("gem.envs.registration", PACKAGE, ENV_ID, INSTALL)
        known = gem.ENV_REGISTRY
        if env not in known:
            hint = did_you_mean(env, known, f"it has {len(known)}", count=3)
            raise EnvError(f"GEM has no environment {env!r}; {hint}", fix="correct `env` of the kwargs")
        self._end_text = need("gem.utils.constants", PACKAGE, ENV_ID, INSTALL).TERMINAL_STATE
        self.observation_space = FreeText()
        randomness = OwnRandomness()
        with randomness.active():
            self._game = _Game(gem.make(env, **dict(config or {})), randomness)
        self.action_space = _Moves(self._game.env)
        self._env: Any = self._game if tools is None else _with_tools(self._game, tools)
        self._open = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed, options=options)
        self._seed = int(self.np_random.integers(2**31)) if seed is None else seed % 2**31
        text, told = self._env.reset(seed=self._seed)
        self._open = True
        return self._shown(text, told, {})

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a turn: what follows its reasoning is GEM's action.

        Raises:
            ResetNeeded: The episode is over.
        """
        if not self._open:
            raise ResetNeeded("the episode is over; call reset() first")
        text, reward, terminated, truncated, told = self._env.step(answer_of(action))
        self._open = not (terminated or truncated)
        info = {} if self._open else {"success": bool(told.get("correct", self._game.earned >= SOLVED))}
        text, info = self._shown("" if text == self._end_text else text, told, info)
        return text, reward, terminated, truncated and not terminated, info

    def close(self) -> None:
        """Release what the environment holds, if it can."""
        if (close := getattr(self._game.env, "close", None)) is not None:
            close()

    def _shown(self, text: Any, told: Mapping[str, Any], info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return what the policy reads, with the state's key: what a game hides differs between seeds.

        GEM has parts that are of the present turn alone, such as Sokoban's board, in `prefix` and `suffix`.
        """
        if isinstance(text, str):
            parts = (told.get("prefix"), text, told.get("suffix"))
            text = "\n".join(part.strip("\n") for part in parts if part)
        return text, {**info, "state": f"{self._seed}\n{text}"}


class _Moves(FreeText):
    """Any string; `sample` gives a move of the environment's own, where it has some."""

    def __init__(self, env: Any) -> None:
        super().__init__()
        self._env = env

    def _drawn(self) -> str:
        try:
            with OwnRandomness().active(int(self.np_random.integers(2**31))):
                return str(self._env.sample_random_action())
        except NotImplementedError:
            return super()._drawn()


class _Game:
    """An environment of GEM with its own randomness, as GEM's wrappers take one.

    Attributes:
        env: It.
        earned: Its rewards since `reset`, without those of tools.
    """

    def __init__(self, env: Any, randomness: OwnRandomness) -> None:
        self.env = env
        self.earned = 0.0
        self._randomness = randomness
        # those from datasets draw in `reset` alone, and may run programs for seconds in `step`
        self._draws = not hasattr(env, "dataset")

    def reset(self, seed: int | None = None) -> Any:
        self.earned = 0.0
        with self._randomness.active():
            return self.env.reset(seed=seed)

    def step(self, action: str) -> Any:
        with self._randomness.active() if self._draws else nullcontext():
            stepped = self.env.step(action)
        self.earned += float(stepped[1])
        return stepped


def _with_tools(game: _Game, tools: str) -> Any:
    wrappers = need("gem.wrappers.wrapper_factory", PACKAGE, ENV_ID, INSTALL).WRAPPER_FACTORY
    known = [name for name in wrappers if "_tool" in name]  # the others repeat the conversation in each observation
    if tools not in known:
        raise EnvError(f"GEM has no tools {tools!r}; {did_you_mean(tools, known)}", fix="correct `tools` of the kwargs")
    return wrappers[tools](game)
