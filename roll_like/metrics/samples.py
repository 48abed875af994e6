"""Rollouts from the start and the end of a run, side by side, for people to read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roll_like.metrics import files
from roll_like.metrics.rollouts import RolloutRow

SAMPLES = "samples.md"
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
    for kind in ("eval", "step"):
        paths = sorted((run_dir / files.ROLLOUTS).glob(f"{kind}_*.jsonl"), key=_step_of)
        if len(paths) > 1 or (paths and kind == "step"):
            return _spread(_pairs(kind, paths, count), count)
    return []


def _pairs(kind: str, paths: Sequence[Path], count: int) -> list[SamplePair]:
    before = {str(row["task_id"]): row for row in _one_per_task(files.read_jsonl(paths[0]))}
    label, found = _label(kind, _step_of(paths[0])), {}
    last: list[RolloutRow] = []
    for path in list(reversed(paths[1:]))[:MOST_READ] or [paths[0]]:
        rows = _one_per_task(files.read_jsonl(path))
        last = last or rows
        for row in rows:
            task = str(row["task_id"])
            if task in before and task not in found:
                found[task] = SamplePair(before[task], row, label, _label(kind, _step_of(path)))
        if len(found) >= min(count, len(before)):
            break
    if found:
        return [found[task] for task in before if task in found]
    after = _label(kind, _step_of(paths[-1]))
    return [SamplePair(one, other, label, after) for one, other in zip(before.values(), last, strict=False)]


def _step_of(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def _label(kind: str, step: int) -> str:
    if kind == "step":
        return f"step {step}"
    return "before training" if step == 0 else f"after step {step}"


def _one_per_task(rows: Sequence[RolloutRow]) -> list[RolloutRow]:
    first: dict[str, RolloutRow] = {}
    for row in rows:
        first.setdefault(str(row["task_id"]), row)
    return list(first.values())


def _spread(pairs: Sequence[SamplePair], count: int) -> list[SamplePair]:
    if len(pairs) <= count:
        return list(pairs)
    return [pairs[index * len(pairs) // count] for index in range(count)]


def later(pairs: Sequence[SamplePair]) -> str:
    """Return where the second answers are from: one step, or several."""
    labels = {pair.after_label for pair in pairs}
    return labels.pop() if len(labels) == 1 else "later steps"


def samples_markdown(name: str, pairs: Sequence[SamplePair]) -> str:
    """Return the pairs as a page, answers in full."""
    lines = [f"# Sampled rollouts of {name}", "", f"{pairs[0].before_label} beside {later(pairs)}.", ""]
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
