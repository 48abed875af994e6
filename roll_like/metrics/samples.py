"""Rollouts from the start and the end of a run, side by side, for people to read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_like.metrics import files

SAMPLES = "samples.md"
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SamplePair:
    """One rollout from before and one from after.

    Attributes:
        before: Row of the first step or evaluation.
        after: Row of the last; of the same task where that was sampled again.
        before_label: Where `before` is from: `step 1`.
        after_label: Where `after` is from.
    """

    before: Row
    after: Row
    before_label: str
    after_label: str


def pick_pairs(run_dir: Path, count: int) -> list[SamplePair]:
    """Choose `count` pairs, evenly spread over the tasks, without looking at rewards.

    Evaluations before and after training are preferred, since they ask the same questions.
    Training steps are compared otherwise: by task where both sampled it, else in order.
    """
    if count == 0:
        return []
    for kind in ("eval", "step"):
        paths = sorted((run_dir / files.ROLLOUTS).glob(f"{kind}_*.jsonl"), key=_step_of)
        if len(paths) > 1 or (paths and kind == "step"):
            labels = [_label(kind, _step_of(path)) for path in (paths[0], paths[-1])]
            pairs = _match(_one_per_task(files.read(paths[0])), _one_per_task(files.read(paths[-1])))
            return [SamplePair(a, b, labels[0], labels[1]) for a, b in _spread(pairs, count)]
    return []


def _step_of(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def _label(kind: str, step: int) -> str:
    if kind == "step":
        return f"step {step}"
    return "before training" if step == 0 else f"after step {step}"


def _one_per_task(rows: Sequence[Row]) -> list[Row]:
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(str(row["task_id"]), row)
    return list(first.values())


def _match(before: Sequence[Row], after: Sequence[Row]) -> list[tuple[Row, Row]]:
    later = {row["task_id"]: row for row in after}
    same = [(row, later[row["task_id"]]) for row in before if row["task_id"] in later]
    matched = {row["task_id"] for row, _ in same}
    rest = [[row for row in rows if row["task_id"] not in matched] for rows in (before, after)]
    return same + list(zip(*rest, strict=False))


def _spread(pairs: Sequence[tuple[Row, Row]], count: int) -> list[tuple[Row, Row]]:
    if len(pairs) <= count:
        return list(pairs)
    return [pairs[index * len(pairs) // count] for index in range(count)]


def samples_markdown(name: str, pairs: Sequence[SamplePair]) -> str:
    """Return the pairs as a page, answers in full."""
    lines = [f"# Sampled rollouts of {name}", "", f"{pairs[0].before_label} beside {pairs[0].after_label}.", ""]
    for index, pair in enumerate(pairs, start=1):
        same = pair.before["prompt"] == pair.after["prompt"]
        lines += [f"## {index}", ""]
        for label, row in ((pair.before_label, pair.before), (pair.after_label, pair.after)):
            if row is pair.before or not same:
                lines += ["Prompt:", "", *_block(row["prompt"]), ""]
            lines += [f"{label}, reward {float(row['reward']):.3f}:", "", *_block(row["text"]), ""]
    return "\n".join(lines)


def _block(text: str) -> list[str]:
    """Fence a text with more backticks than it has in a row."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", text, fence]
