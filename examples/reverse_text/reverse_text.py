"""Text to write backwards: its data, made from the docstrings of Python's standard library, and its reward.

    python examples/reverse_text/reverse_text.py reverse_text_data    # sft.jsonl, train.jsonl, eval.jsonl

Rows have `prompt`, `completion` and `answer`, the text backwards. No text is in two of the files. The same
Python always writes the same bytes.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path

from roll_like import Completion, register_reward

ASK = "Write this text backwards, letter by letter, between <backwards> and </backwards>: {}"
SAY = "<backwards>{}</backwards>"
SAID = re.compile(r"<backwards>(.*?)</backwards>", re.DOTALL)


@register_reward("backwards")
def backwards(completion: Completion) -> float:
    """How alike what stands between the tags and the row's `answer` are, from 0 to 1: the ratio of difflib."""
    if completion.answer is None:
        raise ValueError("the row has no answer")
    said = SAID.search(completion.text)
    return SequenceMatcher(None, said[1].strip(), completion.answer, autojunk=False).ratio() if said else 0.0


def texts(shortest: int, longest: int) -> list[str]:
    """Return pieces of sentences in the standard library's docstrings: whole words of so many characters."""
    pieces = (piece.strip(", ") for sentence in sentences() for piece in textwrap.wrap(sentence, longest))
    return sorted({piece for piece in pieces if shortest <= len(piece) <= longest})


def sentences() -> Iterator[str]:
    """Yield sentences of letters, spaces and commas."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            for sentence in re.split(r"[.:;]\s", " ".join((text or "").split())):
                if re.fullmatch(r"[A-Za-z, ]+", sentence):
                    yield sentence


def row(text: str) -> dict[str, str]:
    """Return the row of a text."""
    answer = text[::-1]
    return {"prompt": ASK.format(text), "completion": SAY.format(answer), "answer": answer}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--characters", type=int, nargs=2, default=(8, 24), metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--tasks", type=int, default=1000, help="rows of train.jsonl; the rest is for sft.jsonl")
    parser.add_argument("--evaluate", type=int, default=100, help="rows of eval.jsonl")
    options = parser.parse_args(arguments)
    found = texts(*options.characters)
    if len(found) < 2 * (options.tasks + options.evaluate):
        parser.error(f"{len(found)} texts are too few for --tasks {options.tasks} and --evaluate {options.evaluate}")
    random.Random(0).shuffle(found)
    rows = [row(text) for text in found]
    held, tasks = options.evaluate, options.evaluate + options.tasks
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("eval", rows[:held]), ("train", rows[held:tasks]), ("sft", rows[tasks:])):
        path = options.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in content), encoding="utf-8")
        print(f"{path}: {len(content)} rows")


if __name__ == "__main__":
    main()
