"""Rollouts as rows of JSON: how each is called, which are shown, how an episode reads.

A rollout's id is `STEP/GROUP.SAMPLE`: `120/3.5` is sample 5 of group 3 of training step 120, `eval120/3.5` one of the
evaluation after that step. Groups count from 0 in a step's file, samples as they were drawn.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from roll_like.metrics import files

RolloutRow: TypeAlias = dict[str, Any]
RolloutKind: TypeAlias = Literal["step", "eval"]
KINDS: tuple[RolloutKind, ...] = ("step", "eval")
#: What every row has.
ROLLOUT_FIELDS = frozenset({"task_id", "prompt", "text", "reward"})

#: A reward of (nearly) 1 solves a task, as in pass@k.
SOLVED = 1 - 1e-6
_ID = re.compile(r"(eval)?(\d+)/(\d+)\.(\d+)")


def with_ids(step: int, kind: RolloutKind, rows: Iterable[Mapping[str, Any]]) -> list[RolloutRow]:
    """Return a step's rows, in their order, each with its `id`."""
    prefix = "eval" if kind == "eval" else ""
    named: list[RolloutRow] = []
    group, last, task = -1, -1, None
    for row in rows:
        sample = row.get("sample_index")
        same = row["task_id"] == task and (sample is None or int(sample) > last)
        if not same:
            group, last, task = group + 1, -1, row["task_id"]
        last = last + 1 if sample is None else int(sample)
        named.append({"id": f"{prefix}{step}/{group}.{last}", **row})
    return named


def group_of(rollout_id: str) -> str:
    """Return the part of an id that a group's members share.

    >>> group_of("eval120/3.5")
    'eval120/3'
    """
    return rollout_id.rpartition(".")[0]


def read_id(text: str) -> tuple[RolloutKind, int] | None:
    """Return kind and step of an id, None where it is none.

    >>> read_id("eval120/3.5"), read_id("3.5")
    (('eval', 120), None)
    """
    match = _ID.fullmatch(text)
    return None if match is None else ("eval" if match[1] else "step", int(match[2]))


def read_rollouts(run_dir: Path, step: int, kind: RolloutKind) -> list[RolloutRow]:
    """Return the rows of a training step or an evaluation, none where nothing was written.

    Raises:
        ValueError: A line is not a JSON object; names file and line.
    """
    return with_ids(step, kind, files.read_jsonl(files.rollouts_path(run_dir, step, kind=kind)))


def rollout_steps(run_dir: Path, kind: RolloutKind) -> list[int]:
    """Return the steps of which there are rollouts, in order."""
    paths = (run_dir / files.ROLLOUTS).glob(f"{kind}_*.jsonl")
    return sorted(int(number) for path in paths if (number := path.stem.rpartition("_")[2]).isdigit())


def subsample(rows: Sequence[RolloutRow], limit: int | None) -> list[RolloutRow]:
    """Return at most `limit` rows with ids, in order: as many of each group, evenly over groups where that is too many.

    Rewards play no part in the choice, so that it shows what is usual.
    """
    if limit is None or len(rows) <= limit:
        return list(rows)
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(group_of(row["id"]), []).append(index)
    chosen: list[int] = []
    for members in itertools.zip_longest(*groups.values()):
        present = [index for index in members if index is not None]
        room = min(limit - len(chosen), len(present))
        chosen += [present[len(present) * place // room] for place in range(room)]
    return [rows[index] for index in sorted(chosen)]


def solved(row: Mapping[str, Any]) -> bool:
    """Return whether an episode succeeded; without a `success` of its own, whether its reward is 1."""
    success = row.get("success")
    return float(row["reward"]) >= SOLVED if success is None else bool(success)


def message_text(message: Mapping[str, Any]) -> str:
    """Return what a chat message says; parts of other kinds than text, and calls, as JSON."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [] if content is None else [content]
    texts = [part.get("text") or _json(part) if isinstance(part, Mapping) else str(part) for part in parts]
    return "\n".join([*texts, *(_json(call) for call in message.get("tool_calls") or ())])


def transcript(turns: Sequence[Mapping[str, Any]]) -> str:
    """Return an episode as text: `‹` what the policy wrote, `›` what it was shown after its first prompt.

    >>> turns = [{"shown": [{"role": "user", "content": "Which way?"}], "text": "left"},
    ...          {"shown": [{"role": "user", "content": "A wall."}], "text": "right"}]
    >>> print(transcript(turns))
    ‹ left
    › A wall.
    ‹ right
    """
    blocks: list[str] = []
    for number, turn in enumerate(turns):
        blocks += [_block("›", text) for text in (shown_texts(turn["shown"]) if number else ())]
        blocks.append(_block("‹", str(turn["text"])))
    blocks += [_block("›", text) for text in shown_texts(turns[-1].get("after", ()) if turns else ())]
    return "\n".join(blocks)


def shown_texts(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what messages of an environment say, empty ones left out; instructions and examples are no news."""
    texts = (message_text(message) for message in messages if message.get("role") not in {"system", "assistant"})
    return [text for text in texts if text.strip()]


def _block(mark: str, text: str) -> str:
    return f"{mark} " + "\n  ".join(text.strip().splitlines() or [""])


def _json(value: Any) -> str:
    return json.dumps(files.plain(value), ensure_ascii=False, default=str)
