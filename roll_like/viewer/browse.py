"""Finds rollouts of a run, by step, kind, domain, reward or success, and prints them: a list, one, or two compared.

What is read are the files under `rollouts/`, of a run that still goes on too. Steps are read one after another, and
those that a filter leaves out are not.
"""

from __future__ import annotations

import io
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Literal, TypeAlias

from rich.console import Console
from rich.text import Text

from roll_like.errors import ConfigError, DataError
from roll_like.metrics import files
from roll_like.metrics.rollout_text import heading, rollout_line, rollout_lines, table_head
from roll_like.metrics.rollouts import (
    KINDS,
    ROLLOUT_FIELDS,
    RolloutKind,
    RolloutRow,
    read_id,
    rollout_steps,
    solved,
    with_ids,
)
from roll_like.metrics.runs import find_run

#: Rollouts that a list for people shows by default.
LIST_LIMIT = 50
#: Columns of what is not written to a terminal.
PIPE_WIDTH = 120

_Range: TypeAlias = tuple[float, float]
_Phase: TypeAlias = Literal["train", "evaluate"]
_ALL: _Range = (-math.inf, math.inf)
_BROKEN = "restore the file, or move it away: the other steps can be read without it"
_NAMES: dict[RolloutKind, _Phase] = {"step": "train", "eval": "evaluate"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which rollouts are listed; bounds belong to what they bound.

    Attributes:
        steps: First and last training step.
        kind: Those of training or of evaluations; None is both.
        domain: Name of their domain; None is every one.
        rewards: Least and largest reward.
        success: Whether they solved their task, as `solved` says; None is both.
    """

    steps: _Range = _ALL
    kind: _Phase | None = None
    domain: str | None = None
    rewards: _Range = _ALL
    success: bool | None = None

    def takes(self, row: RolloutRow) -> bool:
        """Return whether a row is wanted. A reward that is no number is in no range but the unbounded one."""
        reward = float(row["reward"])
        return (
            (self.domain is None or domain_of(row) == self.domain)
            and (self.rewards == _ALL or self.rewards[0] <= reward <= self.rewards[1])
            and (self.success is None or solved(row) == self.success)
        )


def read_range(option: str, text: str, number: Callable[[str], float] = float) -> _Range:
    """Return the bounds that `3`, `3:5`, `3:` or `:5` name.

    >>> read_range("--step", "3:5", int), read_range("--reward", ":0.5")
    ((3, 5), (-inf, 0.5))

    Raises:
        ConfigError: It is none of these; names the option.
    """
    low, colon, high = text.partition(":")
    try:
        first = number(low) if low else -math.inf
        last = (number(high) if high else math.inf) if colon else first
    except ValueError:
        first, last = math.nan, math.nan
    if not text.strip(":") or not first <= last:
        whole = number is int
        raise ConfigError(
            f"{option} {text}: expected {'a whole number' if whole else 'a number'}, or a range from the smaller to "
            "the larger one",
            fix=f"write it as {option} {'12' if whole else '1'}, {option} {'3:12' if whole else '0.5:1'}, "
            f"{option} {'3:' if whole else '0.5:'} or {option} :{'12' if whole else '0.5'}; "
            f"with a minus sign, {option}=-1:0",
        )
    return first, last


def domain_of(row: RolloutRow) -> str:
    """Return a row's domain, its source where it has none."""
    return str(row.get("domain") or row.get("source") or "")


def find_rollouts(run: str, output_dir: Path) -> Path:
    """Return a run's folder.

    Args:
        run: Its folder, or its name under `output_dir`.

    Raises:
        ConfigError: There is none; names those that there are.
        DataError: It has no rollouts.
    """
    folder = find_run(run, output_dir, command="rollouts")
    if not any(rollout_steps(folder, kind) for kind in KINDS):
        raise DataError(
            f"{folder} has no rollouts",
            fix="they are written with the first evaluation and after each step of training; name another run, "
            "or wait for the first step"
            if (folder / files.RUN).is_file()
            else "name the folder of a run: the one that holds run.json and rollouts/",
        )
    return folder


@dataclass(slots=True)
class Rollouts:
    """The rollouts of a run's folder.

    Attributes:
        run_dir: The folder.
        damaged: Files whose last line is half written, of those that were read.
        looked_at: How many rows were read.
        domains: Their domains.
        rewards: Least and largest of their rewards.
    """

    run_dir: Path
    damaged: list[Path] = field(default_factory=list)
    looked_at: int = 0
    domains: set[str] = field(default_factory=set)
    rewards: _Range = (math.inf, -math.inf)

    def of(self, step: int, kind: RolloutKind) -> list[RolloutRow]:
        """Return the rows of a step, each with `id`, `step` and `kind`.

        Raises:
            DataError: A line that is not the last is not a JSON object, or a row has not all of `ROLLOUT_FIELDS`.
        """
        path = files.rollouts_path(self.run_dir, step, kind=kind)
        try:
            records, half_written = files.read_whole_lines(path)
        except ValueError as error:
            raise DataError(str(error), fix=_BROKEN) from error
        for number, record in enumerate(records, start=1):
            missing = ROLLOUT_FIELDS - record.keys()
            if missing:
                raise DataError(f"{path}: rollout {number} has no {', '.join(sorted(missing))}", fix=_BROKEN)
        rows = [with_place(row) for row in with_ids(step, kind, records)]
        if half_written:
            self.damaged.append(path)
        return rows

    def select(self, wanted: Wanted, *, most_files: int | None = None) -> Iterator[RolloutRow]:
        """Yield what is wanted, step by step; a step's training before the evaluation after it.

        Args:
            most_files: Files to read, evenly over the run; None for all.
        """
        kinds = [kind for kind in KINDS if wanted.kind in {None, _NAMES[kind]}]
        steps = sorted(
            (step, order, kind)
            for order, kind in enumerate(kinds)
            for step in rollout_steps(self.run_dir, kind)
            if wanted.steps[0] <= step <= wanted.steps[1]
        )
        if most_files is not None and len(steps) > most_files:  # the first and the last are among them
            steps = [steps[place * (len(steps) - 1) // (most_files - 1)] for place in range(most_files)]
        for step, _, kind in steps:
            for row in self.of(step, kind):
                reward = float(row["reward"])
                self.looked_at += 1
                self.domains.add(domain_of(row))
                self.rewards = (min(self.rewards[0], reward), max(self.rewards[1], reward))
                if wanted.takes(row):
                    yield row

    def get(self, rollout_id: str) -> RolloutRow:
        """Return one rollout.

        Raises:
            ConfigError: There is none of this id; names those that are near.
        """
        where = read_id(rollout_id)
        if where is None:
            raise ConfigError(
                f"{rollout_id!r} is not a rollout's id, expected STEP/GROUP.SAMPLE",
                fix=f"near it: {self._near(rollout_id)}; the list shows all",
            )
        kind, step = where
        rows = self.of(step, kind) if step in rollout_steps(self.run_dir, kind) else []
        for row in rows:
            if row["id"] == rollout_id:
                return row
        if rows:
            raise ConfigError(f"there is no rollout {rollout_id}", fix=f"near it: {_nearest(rollout_id, rows)}")
        raise ConfigError(
            f"there is no rollout {rollout_id}: nothing was written of {_NAMES[kind]} step {step}",
            fix=f"near it: {self._near(rollout_id)}",
        )

    def _near(self, text: str) -> str:
        """Return ids of the step that is nearest to one that is not there; of training unless it begins with `e`."""
        before, _, rest = text.partition("/")
        kinds = sorted(KINDS, key=lambda kind: before.startswith("e") != (kind == "eval"))
        kind, steps = next((one, there) for one in kinds if (there := rollout_steps(self.run_dir, one)))
        digits = re.search(r"\d+", before)
        aim = int(digits[0]) if digits else steps[0]
        step = min(steps, key=lambda one: abs(one - aim))
        rows = self.of(step, kind)
        prefix = str(rows[0]["id"]).partition("/")[0] if rows else ""
        return _nearest(f"{prefix}/{rest}", rows)


def with_place(row: RolloutRow) -> RolloutRow:
    """Return a row that has an id with `step` and `kind`, which follow from it."""
    kind, step = read_id(row["id"]) or ("step", 0)
    return {"id": row["id"], "step": step, "kind": _NAMES[kind], **row}


def _nearest(text: str, rows: Sequence[RolloutRow]) -> str:
    """Return the first few ids that begin most like a text."""
    ids = [str(row["id"]) for row in rows]
    shared = {
        one: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, text, strict=False))) for one in ids
    }
    return ", ".join(sorted(ids, key=lambda one: -shared[one])[:5]) or "none"


class Screen(Console):
    """A console that lets `BrokenPipeError` out: what reads a list may stop, as `head` does."""

    def on_broken_pipe(self) -> None:
        """Leave it to whoever prints."""
        raise BrokenPipeError


def browse(
    rollouts: Rollouts,
    wanted: Wanted,
    *,
    show: Sequence[str] = (),
    limit: int | None = None,
    as_json: bool = False,
) -> None:
    """Print rollouts to standard output, and what is to be known about the files to standard error.

    Args:
        show: Ids of those to print whole.
        limit: Longest list; 0 is endless. None is `LIST_LIMIT`, and endless as JSON.
        as_json: One JSON object a line, as in the files, each with `step` and `kind`.

    Raises:
        ConfigError: There is no rollout of an id.
        DataError: A file cannot be read.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a policy writes what a terminal may not have
    # rich takes COLUMNS where it is set, else the width of the terminal
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    screen = Screen(width=width, highlight=False, markup=False, emoji=False)
    try:
        if not show:
            _list(screen, rollouts, wanted, limit, as_json)
        for row in map(rollouts.get, show):
            if as_json:
                sys.stdout.write(files.json_line(row))
            else:
                _print(screen, heading(row, rollouts.run_dir.name))
                _print(screen, rollout_lines(row, screen.width))
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader has closed the pipe; what is left in the buffer would fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    for path in rollouts.damaged:
        print(f"warning: the last line of {path} is half written and was left out", file=sys.stderr)


def _list(screen: Screen, rollouts: Rollouts, wanted: Wanted, limit: int | None, as_json: bool) -> None:
    if limit is None:
        limit = 0 if as_json else LIST_LIMIT
    count = 0
    for row in rollouts.select(wanted):
        if limit and count == limit:
            print(f"the list ends after {limit}; --limit N lists more, --limit 0 all", file=sys.stderr)
            break
        if as_json:
            sys.stdout.write(files.json_line(row))
        else:
            _print(screen, [*([table_head()] if count == 0 else []), rollout_line(row, domain_of(row), screen.width)])
        count += 1
    if count == 0:
        print(nothing_found(rollouts), file=sys.stderr)


def nothing_found(rollouts: Rollouts) -> str:
    """Say why a list is empty."""
    if rollouts.looked_at == 0:
        steps = {_NAMES[kind]: rollout_steps(rollouts.run_dir, kind) for kind in KINDS}
        ranges = [f"{name} {there[0]} to {there[-1]}" for name, there in steps.items() if there]
        return f"no rollout of these steps; there are: {', '.join(ranges)}"
    low, high = rollouts.rewards
    return (
        f"none of {rollouts.looked_at} rollouts is like that; their domains: {', '.join(sorted(rollouts.domains))}; "
        f"their rewards: {low:.4g} to {high:.4g}"
    )


def _print(screen: Screen, lines: Iterable[Text]) -> None:
    for line in lines:
        screen.print(line, no_wrap=True, crop=False, soft_wrap=True)
