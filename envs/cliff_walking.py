"""Cliff walking: walk along a cliff to the goal; Gymnasium's own `CliffWalkingEnv` as text.

Every episode starts from the same tile (Sutton and Barto, 2018, example 6.6).
"""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.envs.toy_text.cliffwalking import CliffWalkingEnv

from roll_like.builtin.envs.planning import best_action, state_values
from roll_like.envs import AnsiText, DiscreteActions, FewShot, Instructions, ScaledReward, Success, TurnLimit
from roll_like.envs import examples as solved
from roll_like.envs.actions import Style

#: Gymnasium's actions in order.
NAMES = ("up", "right", "down", "left")


class Cliff(CliffWalkingEnv):
    """`CliffWalkingEnv` with a player that knows the way."""

    def __init__(self, *, slippery: bool) -> None:
        super().__init__(render_mode="ansi", is_slippery=slippery)
        self._values: dict[int, float] | None = None

    def best_action(self) -> int:
        """Return the action with the highest expected return."""
        if self._values is None:
            self._values = state_values(self.P)
        return best_action(self.P, self._values, int(self.s))


def make_cliff_walking(
    *,
    slippery: bool = False,
    reward_scale: float = 0.01,
    style: Style = "tag",
    invalid_penalty: float = 0.1,
    max_turns: int = 40,
    examples: int = 0,
) -> gymnasium.Env[Any, Any]:
    """Return `roll_like/CliffWalking-v0`.

    Args:
        slippery: Moves go astray to either side with probability 1/3 each.
        reward_scale: Factor of Gymnasium's rewards: −1 for a step, −100 for a fall.
        style: How an answer holds its action; see `roll_like.envs.DiscreteActions`.
        invalid_penalty: What an answer without an action costs.
        max_turns: Answers in an episode; the shortest way takes 13.
        examples: How many solved positions are shown before the first one.
    """

    def play() -> DiscreteActions:
        text = ScaledReward(AnsiText(Cliff(slippery=slippery)), reward_scale)
        return DiscreteActions(text, NAMES, style=style, invalid_penalty=invalid_penalty)

    env = play()
    prompt = (
        "Walk to the goal. A step onto the cliff takes you back to the start.\n"
        f"x is you, T is the goal, C is the cliff, o is safe.\nAnswer {env.how_to_answer}."
    )
    shown = FewShot(TurnLimit(Success(env), max_turns), solved(play(), examples))
    return Instructions(shown, prompt, role="system")
