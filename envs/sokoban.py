"""Sokoban: push every box onto a target; a new level for each seed, solvable by construction.

A level is made by playing backwards: all boxes start on targets and are pulled away. Every position
that is reached that way can be solved, and a breadth-first search knows with how few moves.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete

from roll_like.envs import DiscreteActions, FewShot, FreeText, Instructions, TurnLimit
from roll_like.envs import examples as solved
from roll_like.envs.actions import Style
from roll_like.errors import EnvError

#: Row and column of a tile.
Tile: TypeAlias = tuple[int, int]
#: Where the player is, and where the boxes are.
Position: TypeAlias = tuple[Tile, frozenset[Tile]]

MOVES: dict[str, Tile] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_STEPS = tuple(MOVES.values())
#: Positions that one search looks at, and rooms that are tried for one level.
_MAX_POSITIONS, _MAX_ROOMS = 4000, 200


@dataclass(frozen=True, slots=True)
class Level:
    """A position, its targets, and the shortest way that the generator found to solve it.

    Attributes:
        rows, columns: Size with the surrounding wall.
        floor: Tiles that are no wall.
        targets: Where boxes belong.
        start: Where player and boxes are.
        solution: Numbers of moves in the order of `MOVES`.
    """

    rows: int
    columns: int
    floor: frozenset[Tile]
    targets: frozenset[Tile]
    start: Position
    solution: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def make_level(size: int, boxes: int, walls: float, min_moves: int, max_moves: int, seed: int) -> Level:
    """Return the level of a seed; members of a group share the work.

    Args:
        size: Rows and columns, the surrounding wall included.
        boxes: Number of boxes.
        walls: Share of inner tiles that are walls.
        min_moves: Fewest moves that solve it, at least.
        max_moves: Fewest moves that solve it, at most.
        seed: Decides everything else.

    Raises:
        EnvError: No room of that size has such a level.
    """
    rng = np.random.default_rng(seed)
    inner = [(row, column) for row in range(1, size - 1) for column in range(1, size - 1)]
    for _ in range(_MAX_ROOMS):
        floor = frozenset(tile for tile in inner if rng.random() >= walls)
        if len(floor) < 2 * boxes + 1:
            continue
        chosen = rng.choice(len(floor), size=boxes, replace=False)
        targets = frozenset(sorted(floor)[at] for at in chosen)
        found = [
            (position, solution)
            for position, solution in _pulled_back(floor, targets, max_moves)
            if len(solution) >= min_moves and not position[1] & targets
        ]
        if found:
            start, solution = found[int(rng.integers(len(found)))]
            return Level(size, size, floor, targets, start, solution)
    raise EnvError(
        f"no Sokoban level of size {size} with {boxes} boxes and a shortest solution of "
        f"{min_moves} to {max_moves} moves was found in {_MAX_ROOMS} rooms",
        fix="allow another number of moves, a larger size, or fewer boxes or walls",
    )


def _pulled_back(
    floor: frozenset[Tile], targets: frozenset[Tile], max_moves: int
) -> Iterator[tuple[Position, tuple[int, ...]]]:
    """Yield positions from which `targets` are reached, nearest first, with the moves that do it."""
    solved: list[Position] = [(tile, targets) for tile in sorted(floor - targets)]
    ways: dict[Position, tuple[int, ...]] = dict.fromkeys(solved, ())
    queue = deque(solved)
    while queue and len(ways) < _MAX_POSITIONS:
        position = queue.popleft()
        way = ways[position]
        yield position, way
        if len(way) == max_moves:
            continue
        for move, before in _before(position, floor):
            if before not in ways:
                ways[before] = (move, *way)
                queue.append(before)


def _before(position: Position, floor: frozenset[Tile]) -> Iterator[tuple[int, Position]]:
    """Yield every position from which one move leads to `position`, with that move."""
    player, boxes = position
    for move, (down, right) in enumerate(_STEPS):
        behind = (player[0] - down, player[1] - right)
        if behind not in floor or behind in boxes:
            continue
        yield move, (behind, boxes)
        ahead = (player[0] + down, player[1] + right)
        if ahead in boxes:  # it may have been pushed there
            yield move, (behind, boxes - {ahead} | {player})


def moved(position: Position, move: int, floor: frozenset[Tile]) -> Position:
    """Return the position after a move; the same one where a wall or a second box is in the way."""
    (row, column), boxes = position
    down, right = _STEPS[move]
    to, beyond = (row + down, column + right), (row + 2 * down, column + 2 * right)
    if to not in floor:
        return position
    if to not in boxes:
        return to, boxes
    return (to, boxes - {to} | {beyond}) if beyond in floor and beyond not in boxes else position


class Sokoban(gymnasium.Env[str, Any]):
    """The game; options are those of `make_sokoban`."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(
        self,
        *,
        size: int,
        boxes: int,
        walls: float,
        min_moves: int,
        max_moves: int,
        box_reward: float,
        step_reward: float,
    ) -> None:
        if not 4 <= size <= 12 or not 1 <= boxes <= 5 or not 0 <= walls <= 0.6 or not 1 <= min_moves <= max_moves:
            raise EnvError(
                f"Sokoban takes size 4 to 12, 1 to 5 boxes, walls 0 to 0.6 and 1 ≤ min_moves ≤ max_moves, "
                f"found {size}, {boxes}, {walls}, {min_moves} and {max_moves}"
            )
        self.render_mode = "ansi"
        self.observation_space = FreeText()
        self.action_space = Discrete(len(MOVES))
        self._make = (size, boxes, walls, min_moves, max_moves)
        self._box_reward, self._step_reward = box_reward, step_reward

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Draw a level."""
        super().reset(seed=seed, options=options)
        self.level = make_level(*self._make, int(self.np_random.integers(2**31)))
        self.position = self.level.start
        self._planned: int | None = 0  # moves of the solution so far; None: left it
        return self.render(), {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Move; what cannot move stays."""
        on_targets = len(self.position[1] & self.level.targets)
        solution = self.level.solution
        on_plan = self._planned is not None and self._planned < len(solution) and solution[self._planned] == action
        self._planned = self._planned + 1 if on_plan and self._planned is not None else None
        self.position = moved(self.position, int(action), self.level.floor)
        now = len(self.position[1] & self.level.targets)
        solved = now == len(self.level.targets)
        reward = self._step_reward + self._box_reward * (now - on_targets) + float(solved)
        info = {"success": True} if solved else {}
        return self.render(), reward, solved, False, info

    def render(self) -> str:
        """Return the level as lines of characters, apart from each other."""
        tiles = range(self.level.columns)
        return "\n".join(" ".join(self._character((row, at)) for at in tiles) for row in range(self.level.rows))

    def best_action(self) -> int | None:
        """Return the next move of the solution; None once another way was taken."""
        return None if self._planned is None else self.level.solution[self._planned]

    def _character(self, tile: Tile) -> str:
        player, boxes = self.position
        if tile not in self.level.floor:
            return "#"
        on_target = tile in self.level.targets
        if tile == player:
            return "S" if on_target else "P"
        if tile in boxes:
            return "*" if on_target else "X"
        return "O" if on_target else "_"


def make_sokoban(
    size: int = 6,
    *,
    boxes: int = 1,
    walls: float = 0.15,
    min_moves: int = 2,
    max_moves: int = 10,
    box_reward: float = 0.1,
    step_reward: float = 0.0,
    style: Style = "tag",
    invalid_penalty: float = 0.1,
    max_turns: int | None = None,
    examples: int = 0,
) -> gymnasium.Env[Any, Any]:
    """Return `roll_like/Sokoban-v0`.

    Args:
        size: Rows and columns, the surrounding wall included; 4 to 12.
        boxes: Number of boxes, 1 to 5.
        walls: Share of inner tiles that are walls, 0 to 0.6.
        min_moves: Fewest moves that solve a level, at least.
        max_moves: Fewest moves that solve a level, at most.
        box_reward: Reward of a box put on a target, and price of one taken off; solving gives 1 besides.
        step_reward: Reward of each move.
        style: How an answer holds its action; see `roll_like.envs.DiscreteActions`.
        invalid_penalty: What an answer without an action costs.
        max_turns: Default: 2 · max_moves.
        examples: How many solved positions are shown before the first one.
    """

    def play() -> DiscreteActions:
        base = Sokoban(
            size=size,
            boxes=boxes,
            walls=walls,
            min_moves=min_moves,
            max_moves=max_moves,
            box_reward=box_reward,
            step_reward=step_reward,
        )
        return DiscreteActions(base, list(MOVES), style=style, invalid_penalty=invalid_penalty)

    env = play()
    prompt = (
        "Push every box onto a target. Boxes can be pushed, one at a time, never pulled.\n"
        "P is you, X is a box, O is a target, * is a box on a target, S is you on a target, "
        f"# is a wall, _ is floor.\nAnswer {env.how_to_answer}."
    )
    limited = TurnLimit(env, 2 * max_moves if max_turns is None else max_turns)
    return Instructions(FewShot(limited, solved(play(), examples)), prompt, role="system")
