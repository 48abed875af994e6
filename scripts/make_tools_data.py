"""Writes the data of `configs/agentic_tools.yaml`: sums in words that are too large to be done in the head.

    python scripts/make_tools_data.py        # configs/data/tools_{train,eval}.jsonl

Each file ends with the solved examples, which `roll_like/Tools-v0` shows and never sets. Training and evaluation share
no task. The same arguments always write the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Wording:
    """A question about two numbers: how it is asked, how it is written for a calculator, what it gives."""

    question: str
    expression: str
    value: Callable[[int, int], int]


WORDINGS = (
    Wording("What is {a} plus {b}?", "{a} + {b}", lambda a, b: a + b),
    Wording("Add {a} and {b}.", "{a} + {b}", lambda a, b: a + b),
    Wording("What is {a} minus {b}?", "{a} - {b}", lambda a, b: a - b),
    Wording("Subtract {b} from {a}.", "{a} - {b}", lambda a, b: a - b),
    Wording("What is {a} times {b}?", "{a} * {b}", lambda a, b: a * b),
    Wording("Multiply {a} by {b}.", "{a} * {b}", lambda a, b: a * b),
)
EXAMPLES = ((WORDINGS[0], 128, 364), (WORDINGS[5], 57, 12))

Row = dict[str, Any]


def row(wording: Wording, a: int, b: int) -> Row:
    """Return a task with the turns that solve it."""
    call = {"name": "calculator", "arguments": {"expression": wording.expression.format(a=a, b=b)}}
    value = str(wording.value(a, b))
    return {
        "prompt": wording.question.format(a=a, b=b),
        "answer": value,
        "script": [f"<tool_call>{json.dumps(call)}</tool_call>", value],
    }


def rows(count: int, seed: int) -> list[Row]:
    """Return so many different tasks, no example among them."""
    source = random.Random(seed)
    found: dict[str, Row] = {}
    shown = {row(*example)["prompt"] for example in EXAMPLES}
    while len(found) < count:
        wording = WORDINGS[len(found) % len(WORDINGS)]
        a, b = source.randint(101, 999), source.randint(11, 99)
        task = row(wording, a, b)
        if task["prompt"] not in shown:
            found[task["prompt"]] = task
    return list(found.values())


def write(path: Path, tasks: Sequence[Row]) -> None:
    """Write one JSON object a line, the examples last."""
    lines = [json.dumps(task) + "\n" for task in [*tasks, *(row(*example) for example in EXAMPLES)]]
    path.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Write both files."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--directory", type=Path, default=Path(__file__).resolve().parents[1] / "configs" / "data")
    arguments.add_argument("--trained", type=int, default=300, help="tasks of the training file")
    arguments.add_argument("--evaluated", type=int, default=36, help="tasks of the evaluation file")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    tasks = rows(options.trained + options.evaluated, options.seed)
    evaluation, training = tasks[: options.evaluated], tasks[options.evaluated :]
    write(options.directory / "tools_train.jsonl", training)
    write(options.directory / "tools_eval.jsonl", evaluation)
    print(f"tools: {len(training)} to train on, {len(evaluation)} to evaluate")


if __name__ == "__main__":
    main()
