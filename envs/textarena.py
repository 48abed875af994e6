"""Games of TextArena for one player: GuessTheNumber, Mastermind, Minesweeper, Sudoku, TowerOfHanoi and others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded

from roll_like.builtin.envs.extras import need
from roll_like.builtin.envs.randomness import OwnRandomness
from roll_like.envs import FreeText, answer_of
from roll_like.errors import EnvError
from roll_like.registry import did_you_mean

ENV_ID = "roll_like/TextArena-v0"
PACKAGE = "textarena==0.7.4"


class TextArena(gymnasium.Env[str, str]):
    """`roll_like/TextArena-v0`.

    The first observation holds the rules. Games read moves such as `[5]` from anywhere in an answer, after
    its reasoning.
    The last reward is the game's; solved is a game with a reward of 1.

    Args:
        game: TextArena's id of a game for one player, such as `Mastermind-v0`.
        config: Settings of the game, such as `{"max_number": 50}`.

    Raises:
        EnvError: TextArena is not installed, or knows no such game, or the game needs something else.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(self, game: str = "GuessTheNumber-v0", *, config: dict[str, Any] | None = None) -> None:
        arena = need("textarena", PACKAGE, ENV_ID)
        known = need("textarena.envs.registration", PACKAGE, ENV_ID).ENV_REGISTRY
        if game not in known:
            hint = did_you_mean(game, known, f"it has {len(known)}", count=3)
            raise EnvError(f"TextArena has no game {game!r}; {hint}", fix="correct `game` of the kwargs")
        self.observation_space = FreeText()
        self.action_space = FreeText()
        self._name = game
        self._own_actions = arena.ObservationType.PLAYER_ACTION
        # the raw game: its wrappers would repeat the whole episode in each observation
        raw = f"{game}-raw" if f"{game}-raw" in known else game
        with self._failing("be made"):
            self._game = arena.make(raw, **dict(config or {}))
        self._randomness = OwnRandomness()
        self._open = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start a game.

        Raises:
            EnvError: The game is for several players, or failed.
        """
        super().reset(seed=seed, options=options)
        self._number = number = int(self.np_random.integers(2**31))
        with self._failing("start for one player"), self._randomness.active(number):
            self._game.reset(num_players=1, seed=number)
        self._open = True
        return self._told(self._news(), {})

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make a move.

        Raises:
            ResetNeeded: The game is over.
            EnvError: The game failed.
        """
        if not self._open:
            raise ResetNeeded("the game is over; call reset() first")
        with self._failing("move"), self._randomness.active():
            done, _ = self._game.step(action=answer_of(action))
        if not done:
            # a move that it reads ends the count of those that it could not read
            text, info = self._told(self._news(), {"invalid_action": self._game.state.error_count > 0})
            return text, 0.0, False, False, info
        self._open = False
        with self._failing("say how it ended"):
            rewards, told = self._game.close()
            reward = float(rewards[0])
            text = "\n".join(filter(None, [self._news(), str(told[0].get("reason") or "")]))
        info = {"success": reward >= 1.0, "invalid_action": bool(told[0].get("invalid_move"))}
        text, info = self._told(text, info)
        return text, reward, True, False, info

    def _told(self, text: str, info: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Add the state's key: what the game hides differs between seeds."""
        return text, {**info, "state": f"{self._number}\n{text}"}

    def _news(self) -> str:
        """Return what the game has said since the last call, without the player's own moves."""
        _, messages = self._game.get_observation()
        return "\n".join(str(text).strip() for _, text, kind in messages if kind != self._own_actions)

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise EnvError(
                f"TextArena's game {self._name!r} could not {doing}: {type(error).__name__}: {error}",
                fix="choose a game for one player that needs no download; `check_env` says which games work",
            ) from error
