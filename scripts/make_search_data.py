"""Writes the data of `configs/agentic_search_8gpu.yaml`: questions, and the paragraphs that an agent searches.

    python scripts/make_search_data.py                             # HotpotQA from the hub → search_data/
    python scripts/make_search_data.py --train train.parquet --eval validation.parquet --folder search_data

A row of HotpotQA (subset `distractor`; arXiv:1809.09600) has `question`, `answer`, and `context`: the `title` and the
`sentences` of ten paragraphs. All paragraphs of all rows, each once, are the corpus, so both files search the same one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from roll_like.config.data import RowSource
from roll_like.data.rows import read_rows
from roll_like.errors import DataError


def read(path: str | None, split: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a file, or of a split of the hub's data set."""
    named = {"path": path} if path else {"path": "hotpotqa/hotpot_qa", "subset": "distractor", "split": split}
    for row in read_rows(RowSource.model_validate(named), "--train" if split == "train" else "--eval"):
        found = row.fields
        if any(found.get(field) is None for field in ("question", "answer", "context")):
            there = ", ".join(field for field, value in found.items() if value is not None)
            raise DataError(
                f"{row.origin}: expected the fields question, answer and context, found {there}",
                fix="give files of HotpotQA's subset `distractor`",
            )
        yield found


def paragraphs(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield titles and texts of a row's context, in either form: lists beside each other, or a list of pairs."""
    context = row["context"]
    pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, Mapping) else context
    for title, sentences in pairs:
        yield str(title), "".join(sentences).strip()


def main(arguments: Sequence[str] | None = None) -> None:
    """Write `train.jsonl`, `eval.jsonl` and `corpus.jsonl`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", help="file of training rows; default: the hub's")
    parser.add_argument("--eval", help="file of rows for evaluation; default: the hub's")
    parser.add_argument("--folder", type=Path, default=Path("search_data"))
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    corpus: dict[tuple[str, str], None] = {}
    for name, path, split in (("train", given.train, "train"), ("eval", given.eval, "validation")):
        count = 0
        with (given.folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for row in read(path, split):
                file.write(json.dumps({"prompt": row["question"], "answer": row["answer"]}, ensure_ascii=False) + "\n")
                corpus.update(dict.fromkeys(each for each in paragraphs(row) if each[1]))
                count += 1
        print(f"{given.folder / name}.jsonl: {count} questions")
    with (given.folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        for title, text in corpus:
            file.write(json.dumps({"title": title, "text": text}, ensure_ascii=False) + "\n")
    print(f"{given.folder}/corpus.jsonl: {len(corpus)} paragraphs")


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        sys.exit(f"error: {error}")
