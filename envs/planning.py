"""Best play where every transition is known: value iteration, for scripted players."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

#: For each state and action the outcomes: probability, next state, reward, whether the episode ends.
Transitions: TypeAlias = Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]

DISCOUNT = 0.99
_TOLERANCE = 1e-6


def state_values(transitions: Transitions) -> dict[int, float]:
    """Return the value of each state under best play (Sutton and Barto, 2018, section 4.4)."""
    values = dict.fromkeys(transitions, 0.0)
    change = 1.0
    while change > _TOLERANCE:
        change = 0.0
        for state, actions in transitions.items():
            value = max(_worth(outcomes, values) for outcomes in actions.values())
            change = max(change, abs(value - values[state]))
            values[state] = value
    return values


def best_action(transitions: Transitions, values: Mapping[int, float], state: int) -> int:
    """Return the action with the highest worth; the first of several."""
    return max(transitions[state], key=lambda action: round(_worth(transitions[state][action], values), 6))


def _worth(outcomes: Sequence[tuple[float, int, float, bool]], values: Mapping[int, float]) -> float:
    return sum(
        probability * (float(reward) + (0.0 if ends else DISCOUNT * values[after]))
        for probability, after, reward, ends in outcomes
    )
