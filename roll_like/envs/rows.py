"""Rows of a dataset, for environments that set a task from each.

    class Riddles(gymnasium.Env[str, str]):
        def __init__(self, path: str, held_out: int = 0) -> None:
            self.rows = TaskRows(read_task_rows(path, ("prompt", "answer")), held_out=held_out)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.row = self.rows.row(seed, self.np_random)
            return self.row["prompt"], {"state": self.row["origin"]}

A run gives every episode of a group the same seed, and so the same row.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from roll_like.config.data import DataSource
from roll_like.data.bad_rows import refuse_odd_text, refused
from roll_like.data.fields import value_at
from roll_like.data.messages import read_messages
from roll_like.data.rows import Row, read_rows
from roll_like.errors import DataError, EnvError
from roll_like.types import EVALUATION_SEED


def read_task_rows(
    path: str | Sequence[Mapping[str, Any]],
    required: tuple[str, ...],
    *,
    split: str = "train",
    subset: str | None = None,
) -> tuple[dict[str, Any], ...]:
    """Return the rows of a dataset, read once per process, each with its place as `origin`.

    Args:
        path: A file, a directory or a hub dataset, as sources of `data` have it; or the rows themselves.
        required: Fields that each row must have; `reward_model.ground_truth` is a field of an object.
        split: Split of a directory or of a hub dataset.
        subset: Subset of a directory or of a hub dataset, such as `main` of `openai/gsm8k`.

    Raises:
        DataError: There is no such dataset, it has no rows, or a row lacks a field.
    """
    if isinstance(path, str):
        return _rows_at(path, required, split, subset)
    return _checked(DataSource(rows=path, split=split), required)


@functools.lru_cache(maxsize=8)
def _rows_at(path: str, required: tuple[str, ...], split: str, subset: str | None) -> tuple[dict[str, Any], ...]:
    return _checked(DataSource(path=path, split=split, subset=subset), required)


def _checked(source: DataSource, required: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    rows = []
    for row in read_rows(source, "kwargs"):
        for name in required:
            if field_of(row.fields, name) is None:
                has = ", ".join(key for key, value in row.fields.items() if value is not None)
                raise DataError(f"{row.origin}: the field {name!r} is missing; found {has or 'none'}")
        with refused(row.origin):
            refuse_odd_text(row.fields)
        rows.append({**row.fields, "origin": row.origin})
    if not rows:
        raise DataError(f"{source.place} has no rows", fix="correct `path` of the environment's kwargs")
    return tuple(rows)


def field_of(row: Mapping[str, Any], name: str) -> Any:
    """Return a field of a row, or of an object in it; None where there is none.

    >>> field_of({"reward_model": {"ground_truth": "4"}}, "reward_model.ground_truth")
    '4'
    """
    if name in row:
        return row[name]
    try:
        return value_at(row, name)
    except LookupError:
        return None


def prompt_messages(row: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the prompt of a row, a text or a list of messages, as messages.

    Args:
        row: As `read_task_rows` returns it.

    Raises:
        DataError: It is neither, does not end with a user's message, or shows images.
    """
    origin = str(row["origin"])
    value = field_of(row, name)
    value = value if isinstance(value, str | list | Mapping) else str(value)
    messages = read_messages(Row({name: value}, origin), name, "user", "the environment's kwargs: prompt", plain=True)
    for message in messages:
        if not isinstance(message["content"], str):
            raise DataError(f"{origin}: {name!r} shows images, and this environment takes texts")
    if messages[-1]["role"] != "user":
        raise DataError(
            f"{origin}: the last message in {name!r} is of the role {messages[-1]['role']!r}, expected 'user'",
            fix="remove it, or set `prompt` to the field that has the prompt",
        )
    return [dict(message) for message in messages]


class TaskRows:
    """Which row each seed sets: seeds that count up walk through the rows, and begin anew after the last.

    Examples:
        >>> rows = TaskRows([{"n": 0}, {"n": 1}, {"n": 2}], held_out=1)
        >>> [rows.row(seed)["n"] for seed in (0, 1, 2, EVALUATION_SEED, EVALUATION_SEED + 1)]
        [0, 1, 0, 2, 2]

    Args:
        rows: At least one.
        held_out: So many rows at the end are set by the seeds of evaluations only, which are `EVALUATION_SEED` and
            those above it, and no other row is; 0 sets all rows by all seeds.

    Raises:
        EnvError: No row would be left to train on.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, held_out: int = 0) -> None:
        if not 0 <= held_out < len(rows):
            raise EnvError(
                f"held_out is {held_out}, and there are {len(rows)} rows",
                fix="hold out fewer rows than there are, or 0 to evaluate on those that are trained on",
            )
        self.held_out = held_out
        self._trained = rows[: len(rows) - held_out]
        self._evaluated = rows[len(rows) - held_out :]

    def row(self, seed: int | None, generator: np.random.Generator | None = None) -> Mapping[str, Any]:
        """Return the row of a seed; without one, any row that is trained on."""
        if seed is None:
            return self._trained[int((generator or np.random.default_rng()).integers(len(self._trained)))]
        if seed >= EVALUATION_SEED and self._evaluated:
            return self._evaluated[(seed - EVALUATION_SEED) % len(self._evaluated)]
        return self._trained[seed % len(self._trained)]
