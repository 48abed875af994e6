"""Rollouts from the start and the end of a run, in pairs, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roll_like.metrics.rollouts import KINDS, RolloutKind, RolloutRow, read_rollouts, rollout_steps

#: Steps in which a task of the first one is looked for again, from the last on.
MOST_READ = 50


@dataclass(frozen=True, slots=True)
class SamplePair:
    """One rollout from before and one from after.

    Attributes:
        before: Row of the first step or evaluation.
        after: Row of the last; of the same task where that was sampled again.
        before_label: Where `before` is from: `step 1`.
        after_label: Where `after` is from.
    """

    before: RolloutRow
    after: RolloutRow
    before_label: str
    after_label: str


def pick_pairs(run_dir: Path, count: int) -> list[SamplePair]:
    """Choose `count` pairs, evenly spread over the tasks, without looking at rewards.

    Evaluations before and after training are preferred, since they ask the same questions. Of training steps, the tasks
    of the first are compared with the latest step that sampled them again; where none did, the first step and the last
    are, in order, and each answer is shown with its own prompt.
    """
    if count == 0:
        return []
    for kind in reversed(KINDS):
        steps = rollout_steps(run_dir, kind)
        if len(steps) > 1 or (steps and kind == "step"):
            pairs = _pairs(run_dir, kind, steps, count)
            return pairs if len(pairs) <= count else [pairs[place * len(pairs) // count] for place in range(count)]
    return []


def _pairs(run_dir: Path, kind: RolloutKind, steps: Sequence[int], count: int) -> list[SamplePair]:
    before = {str(row["task_id"]): row for row in _one_per_task(read_rollouts(run_dir, steps[0], kind))}
    label, found = _label(kind, steps[0]), {}
    last: list[RolloutRow] = []
    for step in list(reversed(steps[1:]))[:MOST_READ] or [steps[0]]:
        rows = _one_per_task(read_rollouts(run_dir, step, kind))
        last = last or rows
        for row in rows:
            task = str(row["task_id"])
            if task in before and task not in found:
                found[task] = SamplePair(before[task], row, label, _label(kind, step))
        if len(found) >= min(count, len(before)):
            break
    if found:
        return [found[task] for task in before if task in found]
    after = _label(kind, steps[-1])
    return [SamplePair(one, other, label, after) for one, other in zip(before.values(), last, strict=False)]


def _label(kind: str, step: int) -> str:
    if kind == "step":
        return f"step {step}"
    return "before training" if step == 0 else f"after step {step}"


def _one_per_task(rows: Sequence[RolloutRow]) -> list[RolloutRow]:
    first: dict[str, RolloutRow] = {}
    for row in rows:
        first.setdefault(str(row["task_id"]), row)
    return list(first.values())


def later(pairs: Sequence[SamplePair]) -> str:
    """Return where the second answers are from: one step, or several."""
    labels = {pair.after_label for pair in pairs}
    return labels.pop() if len(labels) == 1 else "later steps"
