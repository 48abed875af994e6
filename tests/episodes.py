"""Scored episodes of a few turns, as a run has them and as rows of a rollouts file."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from tests_support import scored, task

from roll_like.metrics import files
from roll_like.rollout.metrics import rollout_rows
from roll_like.types import Group, Scored, TurnRecord

BOARD = "SF\nFG"


def turn(number: int, text: str, reward: float, **changes: Any) -> TurnRecord:
    """One turn that began `number` seconds after noon, was sampled in 0.5 s and answered in 0.25 s."""
    began = 1_800_000_000.0 + number
    shown: tuple[dict[str, Any], ...] = ({"role": "user", "content": f"You are at {number}.\n{BOARD}"},)
    if number == 0:
        shown = ({"role": "system", "content": "Walk to G."}, *shown)
    return replace(
        TurnRecord(
            shown=shown,
            text=text,
            tokens=3 + number,
            prompt_tokens=20 + 10 * number,
            reward=reward,
            state=f"at {number}",
            began=began,
            sampled=began + 0.5,
            ended=began + 0.75,
        ),
        **changes,
    )


def episode(words: list[str], *, reward: float = 1.0, index: int = 0, sample: int = 0, **changes: Any) -> Scored:
    """An episode that says `words`; its last turn earns the reward. `changes` are of its last turn."""
    last = len(words) - 1
    records = [turn(number, text, reward if number == last else 0.0) for number, text in enumerate(words)]
    records[-1] = replace(records[-1], **{"after": ({"role": "user", "content": "It is over."},), **changes})
    owner = replace(task(index, source="lake"), messages=records[0].shown, metadata={"seed": index})
    said = scored(owner, reward, sample=sample, response=sum(record.tokens for record in records))
    return replace(
        said,
        trajectory=replace(said.trajectory, record=tuple(records)),
        details={"turns": float(len(words)), "cuts": 0.0, "success": float(reward >= 1)},
        turn_rewards=tuple(record.reward for record in records),
        turn_states=tuple(record.state for record in records),
    )


def rows(*groups: list[Scored]) -> list[dict[str, Any]]:
    """Rows of groups of samples."""
    return rollout_rows([Group(task=group[0].trajectory.task, samples=tuple(group), failures=()) for group in groups])


def read_back(row: dict[str, Any]) -> dict[str, Any]:
    """A row as it is read from its file."""
    back: dict[str, Any] = json.loads(files.json_line(row))
    return back
