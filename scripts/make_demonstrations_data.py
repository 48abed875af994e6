"""Writes the data of `configs/recipes/luffy.yaml`: sums to answer within tags, each with a demonstration.

    python scripts/make_demonstrations_data.py       # configs/data/demonstrations_{train,eval}.jsonl

A small model does not write the tags when it is asked to. No row of one file is in the other.
"""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "configs" / "data"
EVALUATED = 17


def row(a: int, b: int) -> str:
    """Return a sum, its answer, and the answer within tags."""
    answer = str(a + b)
    fields = {
        "prompt": f"What is {a} + {b}? Write it as <answer>…</answer>.",
        "answer": answer,
        "demonstration": f"<answer>{answer}</answer>",
    }
    return json.dumps(fields, ensure_ascii=False) + "\n"


def files() -> dict[Path, str]:
    """Return each file's text."""
    sums = list(product(range(1, 10), repeat=2))
    random.Random(0).shuffle(sums)
    parts = {"train": sums[EVALUATED:], "eval": sums[:EVALUATED]}
    return {DATA / f"demonstrations_{name}.jsonl": "".join(row(a, b) for a, b in part) for name, part in parts.items()}


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")
