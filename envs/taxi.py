"""Taxi: fetch a passenger and take them where they want to go; Gymnasium's own `TaxiEnv` as text.

The picture alone does not show everything (colours fall on top of each other), so a line of words does.
"""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
from gymnasium.envs.toy_text.taxi import TaxiEnv

from roll_like.builtin.envs.planning import best_action, state_values
from roll_like.envs import AnsiText, DiscreteActions, FewShot, Instructions, ScaledReward, Success, TurnLimit
from roll_like.envs import examples as solved
from roll_like.envs.actions import Style

#: Gymnasium's actions in order.
NAMES = ("south", "north", "east", "west", "pickup", "dropoff")
_STOPS = ("R", "G", "Y", "B")
_YELLOW, _GREEN = 43, 42  # behind an empty taxi, behind one with a passenger


class PlannedTaxi(TaxiEnv):
    """`TaxiEnv` that describes itself, and whose player knows the way."""

    def __init__(self, *, rainy: bool) -> None:
        super().__init__(render_mode="ansi", is_rainy=rainy)
        self._rainy = rainy

    def best_action(self) -> int:
        """Return the action with the highest expected return."""
        return best_action(self.P, _values(self._rainy), int(self.s))

    def described(self) -> str:
        """Return in words where taxi and passenger are, and where the passenger wants to go."""
        row, column, passenger, destination = self.decode(self.s)
        where = "in the taxi" if passenger == len(_STOPS) else f"at {_STOPS[passenger]}"
        return f"Taxi: row {row}, column {column}. Passenger: {where}. Destination: {_STOPS[destination]}."


@functools.cache
def _values(rainy: bool) -> dict[int, float]:
    return state_values(TaxiEnv(is_rainy=rainy).P)


class Described(gymnasium.ObservationWrapper[str, Any, str]):
    """The picture, and a line of words below it."""

    def observation(self, observation: str) -> str:
        """Return the picture with the line."""
        return f"{observation}\n{self.env.get_wrapper_attr('described')()}"


def make_taxi(
    *,
    rainy: bool = False,
    reward_scale: float = 0.05,
    style: Style = "tag",
    invalid_penalty: float = 0.1,
    max_turns: int = 30,
    examples: int = 0,
) -> gymnasium.Env[Any, Any]:
    """Return `roll_like/Taxi-v0`.

    Args:
        rainy: Moves go astray with probability 0.2.
        reward_scale: Factor of Gymnasium's rewards: −1 for a step, −10 for a wrong pickup or dropoff, 20 at the end.
        style: How an answer holds its action; see `roll_like.envs.DiscreteActions`.
        invalid_penalty: What an answer without an action costs.
        max_turns: Answers in an episode; the longest of the shortest ways takes 18.
        examples: How many solved positions are shown before the first one.
    """

    def play() -> DiscreteActions:
        text = AnsiText(PlannedTaxi(rainy=rainy), highlight={_YELLOW: "T", _GREEN: "T"})
        return DiscreteActions(
            ScaledReward(Described(text), reward_scale), NAMES, style=style, invalid_penalty=invalid_penalty
        )

    env = play()
    prompt = (
        "Drive the taxi T to the passenger, pick them up, drive to the destination, drop them off. "
        "Stops are R, G, Y and B; | and - are walls. Rows count from the top and columns from the left, from 0.\n"
        f"Answer {env.how_to_answer}."
    )
    shown = FewShot(TurnLimit(Success(env), max_turns), solved(play(), examples))
    return Instructions(shown, prompt, role="system")
