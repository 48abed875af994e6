"""Writes the data of `configs/reward_model_steps.yaml`: somebody counts, and may go wrong on the way.

    python scripts/make_steps_data.py       # configs/data/counting_steps_{train,eval}.jsonl

From the first wrong number on all are wrong. The same bytes every time; no row of one file is in the other.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "configs" / "data"
SIZES = {"train": 240, "eval": 48}
SHARE_WRONG = 0.6
SHIFTS = (-7, -4, -3, 3, 4, 6, 8, 9)


def counted(rng: random.Random) -> dict[str, Any]:
    """Return a row: what to count, the numbers as steps, and which of them are right."""
    first, by, count = rng.randint(8, 40), rng.choice((1, 2, 5, 10)), rng.randint(3, 5)
    wrong = rng.randrange(1, count) if rng.random() < SHARE_WRONG else count
    shift = rng.choice(SHIFTS)
    numbers = [first + by * at + (shift if at >= wrong else 0) for at in range(count)]
    return {
        "prompt": f"Count by {by} from {first}, {count} numbers.",
        "completions": [str(number) for number in numbers],
        "labels": [at < wrong for at in range(count)],
    }


def files() -> dict[Path, str]:
    """Return each file's text."""
    rng = random.Random(7)
    lines: dict[str, None] = {}
    while len(lines) < sum(SIZES.values()):
        lines[json.dumps(counted(rng)) + "\n"] = None
    rest = iter(lines)
    return {
        DATA / f"counting_steps_{part}.jsonl": "".join(next(rest) for _ in range(size)) for part, size in SIZES.items()
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
