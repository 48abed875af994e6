"""Write the table of docs/rewards.md that says how well the `math` reward grades answers.

.venv/bin/python scripts/make_math_table.py

The answers and the verdicts that a mathematician gives are in tests/data/math_answers.jsonl.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from roll_like.builtin.rewards.mathematics.grader import grade

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "rewards.md"
CORPUS = ROOT / "tests" / "data" / "math_answers.jsonl"
BEGIN, END = "<!-- table of scripts/make_math_table.py -->\n", "<!-- end of the table -->\n"


@dataclass(frozen=True)
class Pair:
    """A reference answer and a response, with the verdict of a mathematician and that of the reward.

    Attributes:
        verdict: 1 for a right answer, 0 for a wrong one.
        given: The reward's value; None where it refuses the reference answer.
    """

    shape: str
    reference: str
    response: str
    verdict: int
    given: int | None


def graded() -> Iterator[Pair]:
    """Yield the pairs of the corpus with the reward's verdict."""
    sys.set_int_max_str_digits(0)  # as in the process that grades
    for line in CORPUS.read_text(encoding="utf-8").split("\n"):
        if line:
            row = json.loads(line)
            found = grade(row["reference"], row["response"], boxed=False)
            given = None if found.unreadable else int(found.equal)
            yield Pair(row["shape"], row["reference"], row["response"], row["verdict"], given)


def table(pairs: Iterable[Pair]) -> str:
    """Return the table, by shape of the answer."""
    shapes: dict[str, Counter[str]] = defaultdict(Counter)
    for pair in pairs:
        for name in (pair.shape, "all"):
            shapes[name]["right" if pair.verdict else "wrong"] += 1
            shapes[name]["false 0"] += bool(pair.verdict) and pair.given != 1
            shapes[name]["false 1"] += not pair.verdict and pair.given == 1
    columns = ("right", "wrong", "false 0", "false 1")
    lines = ["| shape of the answer | right answers | wrong answers | right ones scored 0 | wrong ones scored 1 |"]
    lines.append("|---|--:|--:|--:|--:|")
    for name, counts in sorted(shapes.items(), key=lambda item: (item[0] == "all", item[0].lower())):
        lines.append(f"| {name} | {' | '.join(str(counts[column]) for column in columns)} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, made: str) -> str:
    """Return the page with its table replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main() -> None:
    """Write the page."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(graded())), encoding="utf-8")


if __name__ == "__main__":
    main()
