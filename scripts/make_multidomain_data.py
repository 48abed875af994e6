"""Writes the data of `configs/rlvr_multidomain.yaml`: sums of one digit, and functions of one line.

    python scripts/make_multidomain_data.py        # configs/data/{math,code}_{train,eval}.jsonl

Each prompt shows solved examples first: the model is small. Sums are scored by `math` (the boxed
number), functions by `code` (hidden calls in the sandbox). Training and evaluation share no task. The
same arguments always write the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUM_QUESTION, SUM_ANSWER = "What is {} + {}?", "{} + {} = \\boxed{{{}}}"
CODE_QUESTION = "Write a Python function f(x) that returns {}."
CODE_ANSWER = "```python\ndef f(x):\n    return {}\n```"
#: Arguments that each function is called with.
ARGUMENTS = (-7, -1, 0, 1, 2, 5, 12)


@dataclass(frozen=True)
class Operation:
    """A function of x and one number: how it is asked for, how it is written, what it gives."""

    words: str
    code: str
    value: Callable[[int, int], int]


OPERATIONS = (
    Operation("x plus {}", "x + {}", lambda x, n: x + n),
    Operation("x minus {}", "x - {}", lambda x, n: x - n),
    Operation("x times {}", "x * {}", lambda x, n: x * n),
    Operation("the larger of x and {}", "max(x, {})", max),
    Operation("the smaller of x and {}", "min(x, {})", min),
    Operation("the square of x plus {}", "x ** 2 + {}", lambda x, n: x * x + n),
    Operation("the remainder of x divided by {}", "x % {}", lambda x, n: x % n),
)

Row = dict[str, Any]


def shown(question: str, answer: str) -> list[dict[str, str]]:
    """Return a solved example as two messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def math_rows() -> list[Row]:
    """Return every sum of two digits, after three solved ones."""
    examples = [
        message
        for a, b in ((3, 4), (2, 6), (5, 1))
        for message in shown(SUM_QUESTION.format(a, b), SUM_ANSWER.format(a, b, a + b))
    ]
    return [
        {"prompt": [*examples, {"role": "user", "content": SUM_QUESTION.format(a, b)}], "answer": str(a + b)}
        for a in range(1, 10)
        for b in range(1, 10)
        if (a, b) not in ((3, 4), (2, 6), (5, 1))
    ]


def code_rows() -> list[Row]:
    """Return every operation with every number, after two solved ones."""
    examples = [
        message
        for words, code in (("x plus 7", "x + 7"), ("the larger of x and 3", "max(x, 3)"))
        for message in shown(CODE_QUESTION.format(words), CODE_ANSWER.format(code))
    ]
    return [
        {
            "prompt": [*examples, {"role": "user", "content": CODE_QUESTION.format(operation.words.format(number))}],
            "tests": [{"entry_point": "f", "args": [x], "expected": operation.value(x, number)} for x in ARGUMENTS],
            "solution": CODE_ANSWER.format(operation.code.format(number)),
        }
        for operation in OPERATIONS
        for number in range(2, 12)
        if (operation.code, number) not in (("x + {}", 7), ("max(x, {})", 3))
    ]


def split(rows: Sequence[Row], evaluated: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Return the rows in random order, cut into training and evaluation."""
    mixed = list(rows)
    random.Random(seed).shuffle(mixed)
    return mixed[evaluated:], mixed[:evaluated]


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write all four files."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--directory", type=Path, default=Path(__file__).resolve().parents[1] / "configs" / "data")
    arguments.add_argument("--evaluated", type=int, default=12, help="rows of each evaluation file")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    for name, rows in (("math", math_rows()), ("code", code_rows())):
        training, evaluation = split(rows, options.evaluated, options.seed)
        write(options.directory / f"{name}_train.jsonl", training)
        write(options.directory / f"{name}_eval.jsonl", evaluation)
        print(f"{name}: {len(training)} to train on, {len(evaluation)} to evaluate")


if __name__ == "__main__":
    main()
