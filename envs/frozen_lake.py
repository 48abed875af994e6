"""Frozen lake: walk over ice to the goal without falling into a hole; a new map for each seed.

Gymnasium's own `FrozenLakeEnv`, its rendering as text and a description of what lies around.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import gymnasium
import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from roll_like.builtin.envs.planning import best_action, state_values
from roll_like.envs import AnsiText, DiscreteActions, FewShot, ImageText, Instructions, Success, TextWrapper, TurnLimit
from roll_like.envs import examples as solved
from roll_like.envs.actions import Style
from roll_like.errors import EnvError

View: TypeAlias = Literal["grid", "words", "both", "image"]
VIEWS: tuple[View, ...] = ("grid", "words", "both", "image")

#: Gymnasium's actions in order, with the step that each takes: rows, columns.
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_TILES = {"S": "ice", "F": "ice", "H": "hole", "G": "goal"}
_RED = 41  # the colour of the tile that the player stands on
#: Colours of an image: ice, holes, the goal, and the player.
_COLOURS = {"S": (205, 230, 245), "F": (205, 230, 245), "H": (25, 55, 110), "G": (70, 175, 75), "P": (215, 45, 40)}


class SeededLake(FrozenLakeEnv):
    """`FrozenLakeEnv` whose map, and where asked for whose start, comes from the seed.

    Options are those of `make_frozen_lake`.
    """

    def __init__(
        self,
        *,
        size: int,
        hole_share: float,
        slippery: bool,
        random_start: bool,
        lake: Sequence[str] | None,
        hole_reward: float,
        step_reward: float,
    ) -> None:
        if not 2 <= size <= 20 or not 0 <= hole_share <= 0.5:
            raise EnvError(f"size should be 2 to 20 and hole_share 0 to 0.5, found {size} and {hole_share}")
        self._size, self._hole_share, self._slippery = size, hole_share, slippery
        self._random_start = random_start
        self._lake = None if lake is None else list(lake)
        self._hole_reward, self._step_reward = hole_reward, step_reward
        self._values: dict[int, float] | None = None
        super().__init__(render_mode="ansi", desc=self._lake or ["SF", "FG"], is_slippery=slippery)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Draw a map, and put the player on its start."""
        gymnasium.Env.reset(self, seed=seed)
        if self._lake is None:
            map_seed = int(self.np_random.integers(2**31))
            rows = generate_random_map(size=self._size, p=1 - self._hole_share, seed=map_seed)
            super().__init__(render_mode="ansi", desc=rows, is_slippery=self._slippery)
            self._values = None
        state, info = super().reset(options=options)
        if self._random_start:
            starts = [tile for tile, value in self._known_values().items() if value > 0]
            self.s = state = int(self.np_random.choice(starts))
        return int(state), info

    def step(self, a: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Take one step."""
        state, reward, terminated, truncated, info = super().step(a)  # type: ignore[no-untyped-call]
        if not reward:
            reward = self._hole_reward if terminated else self._step_reward
        return state, float(reward), bool(terminated), truncated, info

    def best_action(self) -> int:
        """Return the action with the best chance to reach the goal soon."""
        return best_action(self.P, self._known_values(), int(self.s))

    def drawn(self, tile: int) -> np.typing.NDArray[np.uint8]:
        """Return the lake as an image [rows · tile, columns · tile, 3]; the player is a square within its tile."""
        colours = np.array([[_COLOURS[mark] for mark in row] for row in self._rows()], np.uint8)
        image = colours.repeat(tile, 0).repeat(tile, 1)
        image[::tile] = image[:, ::tile] = 120  # lines between tiles
        row, column = divmod(int(self.s), self.ncol)
        edge = tile // 4
        inner = (slice(at * tile + edge, (at + 1) * tile - edge) for at in (row, column))
        image[tuple(inner)] = _COLOURS["P"]
        return image

    def surroundings(self) -> str:
        """Return in words what lies next to the player, and where the goal is."""
        row, column = divmod(int(self.s), self.ncol)
        around = ", ".join(f"{name}: {self._tile(row + down, column + right)}" for name, (down, right) in MOVES.items())
        goal_row, goal_column = divmod("".join(self._rows()).index("G"), self.ncol)
        steps = [_steps(goal_row - row, "down", "up"), _steps(goal_column - column, "right", "left")]
        return f"{around}. Goal: {', '.join(filter(None, steps)) or 'here'}."

    def _tile(self, row: int, column: int) -> str:
        inside = 0 <= row < self.nrow and 0 <= column < self.ncol
        return _TILES[self._rows()[row][column]] if inside else "wall"

    def _rows(self) -> list[str]:
        return [b"".join(row).decode() for row in np.asarray(self.desc)]

    def _known_values(self) -> dict[int, float]:
        if self._values is None:
            self._values = state_values(self.P)
        return self._values


class Drawn(gymnasium.ObservationWrapper[Any, Any, Any]):
    """The lake as an image, of so many rows and columns of tiles; `tile` is the side of one in pixels."""

    def __init__(self, env: gymnasium.Env[Any, Any], tile: int, rows: int, columns: int) -> None:
        super().__init__(env)
        if not 4 <= tile <= 256:
            raise EnvError(f"tile should be 4 to 256 pixels, found {tile}")
        self._tile = tile
        self.observation_space = gymnasium.spaces.Box(0, 255, (rows * tile, columns * tile, 3), np.uint8)

    def observation(self, observation: Any) -> Any:  # noqa: ARG002 - the image shows the same
        """Return the present image."""
        return self.env.get_wrapper_attr("drawn")(self._tile)


class Surroundings(TextWrapper):
    """The lake in words, beside its picture or instead of it; `info["state"]` holds both."""

    def __init__(self, env: gymnasium.Env[Any, Any], view: View) -> None:
        super().__init__(env)
        self._view = view

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._shown(observation, info), info

    def step(self, action: Any) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        """Take one step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._shown(observation, info), reward, terminated, truncated, info

    def _shown(self, picture: str, info: dict[str, Any]) -> str:
        info["state"] = picture
        words: str = self.env.get_wrapper_attr("surroundings")()
        return {"grid": picture, "words": words, "both": f"{picture}\n{words}"}[self._view]


def _steps(count: int, positive: str, negative: str) -> str:
    return f"{abs(count)} {positive if count > 0 else negative}" if count else ""


def make_frozen_lake(
    size: int = 4,
    *,
    hole_share: float = 0.2,
    slippery: bool = False,
    random_start: bool = False,
    lake: Sequence[str] | None = None,
    hole_reward: float = 0.0,
    step_reward: float = 0.0,
    view: View = "both",
    style: Style = "tag",
    invalid_penalty: float = 0.1,
    max_turns: int | None = None,
    examples: int = 0,
    tile: int = 28,
) -> gymnasium.Env[Any, Any]:
    """Return `roll_like/FrozenLake-v0`.

    Args:
        size: Rows and columns.
        hole_share: Probability of a hole on each tile; maps without a way to the goal are drawn again.
        slippery: Moves go astray to either side with probability 1/3 each.
        random_start: Start on any tile from which the goal can be reached, instead of the upper left corner.
        lake: Rows of a fixed map (`SFFF`), instead of random ones.
        hole_reward: Reward of falling into a hole; the goal's is 1.
        step_reward: Reward of a step on ice.
        view: What is shown: the picture in letters (`grid`), what lies around (`words`), both, or an `image`.
        style: How an answer holds its action; see `roll_like.envs.DiscreteActions`.
        invalid_penalty: What an answer without an action costs.
        max_turns: Default: 3 · size, for a shortest way of at least 2 · (size − 1) steps.
        examples: How many solved positions are shown before the first one.
        tile: Side of a tile of an image. Pixels.
    """
    if view not in VIEWS:
        raise EnvError(f"unknown view {view!r}", fix=f"view is one of {', '.join(VIEWS)}")
    if view == "image" and examples:
        raise EnvError(f"examples are texts, found examples: {examples} with view: image", fix="remove examples")

    shape = (len(lake), len(lake[0])) if lake else (size, size)

    def play() -> DiscreteActions:
        base = SeededLake(
            size=size,
            hole_share=hole_share,
            slippery=slippery,
            random_start=random_start,
            lake=lake,
            hole_reward=hole_reward,
            step_reward=step_reward,
        )
        if view == "image":
            shown = ImageText(Drawn(base, tile, *shape), "Where to?")
            return DiscreteActions(shown, list(MOVES), style=style, invalid_penalty=invalid_penalty)
        text = AnsiText(base, highlight={_RED: "P"}, replace={"S": "F"}, spaced=True)
        return DiscreteActions(Surroundings(text, view), list(MOVES), style=style, invalid_penalty=invalid_penalty)

    env = play()
    limited = TurnLimit(
        Success(env, at_least=1.0), 3 * (len(lake) if lake else size) if max_turns is None else max_turns
    )
    shown = FewShot(limited, solved(play(), examples))
    return Instructions(shown, _prompt(env.how_to_answer, view), role="system")


def _prompt(how_to_answer: str, view: View) -> str:
    legend = "" if view == "words" else " P is you, F is ice, H is a hole, G is the goal."
    if view == "image":
        legend = " You are red, ice is light, a hole is dark blue, the goal is green."
    return f"Walk over the ice to the goal. Never step into a hole.{legend}\nAnswer {how_to_answer}."
