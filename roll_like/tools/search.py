"""Search in a local corpus by BM25."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roll_like.data.files import read_json_lines
from roll_like.errors import DataError
from roll_like.tools.base import Tool, ToolError, text_tool

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of the corpus."""

    title: str
    text: str


class SearchIndex:
    """An inverted index with BM25 scores (Robertson & Zaragoza 2009, "The Probabilistic Relevance Framework").

    A passage scores, for each word of the query, idf · tf·(k1 + 1) / (tf + k1·(1 − b + b·length/mean length)), with
    idf = log(1 + (N − n + ½)/(n + ½)) over N passages of which n hold the word.

    Args:
        k1: How soon further occurrences of a word stop counting.
        b: How much long passages are held back, 0 to 1.
    """

    def __init__(self, passages: Sequence[Passage], *, k1: float = 1.5, b: float = 0.75) -> None:
        self.passages = tuple(passages)
        words = [_words(f"{passage.title} {passage.text}") for passage in self.passages]
        mean = sum(map(len, words)) / max(len(words), 1) or 1.0
        found: dict[str, tuple[array[int], array[float]]] = defaultdict(lambda: (array("q"), array("d")))
        for number, each in enumerate(words):
            for word, count in Counter(each).items():
                numbers, scores = found[word]
                numbers.append(number)
                scores.append(count * (k1 + 1) / (count + k1 * (1 - b + b * len(each) / mean)))
        self._scores = {
            word: (np.frombuffer(numbers, np.int64), self._rarity(len(numbers)) * np.frombuffer(scores))
            for word, (numbers, scores) in found.items()
        }

    def _rarity(self, holding: int) -> float:
        return math.log(1 + (len(self.passages) - holding + 0.5) / (holding + 0.5))

    def search(self, query: str, count: int) -> list[tuple[Passage, float]]:
        """Return the best passages with their scores, best first; only such as hold a word of the query."""
        totals_N = np.zeros(len(self.passages))
        for word in _words(query):
            if word in self._scores:
                numbers, scores = self._scores[word]
                totals_N[numbers] += scores
        found = np.flatnonzero(totals_N)
        if len(found) > count:
            found = found[totals_N[found] >= np.partition(totals_N[found], -count)[-count]]
        best = found[np.argsort(-totals_N[found], kind="stable")][:count]
        return [(self.passages[number], float(totals_N[number])) for number in best]


def read_corpus(path: Path) -> list[Passage]:
    """Read passages: JSON lines with `text` and perhaps `title`, or a text file with a blank line between passages.

    Raises:
        DataError: The file cannot be read, holds nothing, or a line is wrong.
    """
    if path.suffix == ".jsonl":
        rows = read_json_lines(path.expanduser(), "`corpus` of the tool")
        found = [_passage(row, f"{path}:{number}") for number, row in rows]
    else:
        try:
            text = path.expanduser().read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"the corpus {path} cannot be read: {error}", fix="correct `corpus` of the tool") from error
        blocks = [block.strip() for block in re.split(r"\n\s*\n", text)]
        found = [Passage("", block) for block in blocks if block]
    if not found:
        raise DataError(f"the corpus {path} holds no passages", fix="correct `corpus` of the tool")
    return found


def search_tool(index: SearchIndex, *, results: int = 3, max_characters: int = 600) -> Tool:
    """Return the tool `search(query)`."""

    async def call(query: str) -> str:
        found = index.search(query, results)
        if not found:
            raise ToolError(f"nothing in the corpus has a word of {query!r}")
        return "\n".join(f"[{place}] {_shown(passage, max_characters)}" for place, (passage, _) in enumerate(found, 1))

    return text_tool("search", "Search the corpus and return the best passages.", "query", "A few words.", call)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _shown(passage: Passage, max_characters: int) -> str:
    text = passage.text if len(passage.text) <= max_characters else f"{passage.text[:max_characters]}…"
    return f"{passage.title}: {text}" if passage.title else text


def _passage(row: dict[str, Any], origin: str) -> Passage:
    if not isinstance(row.get("text"), str) or not isinstance(row.get("title", ""), str):
        raise DataError(f'{origin}: expected {{"text": …}} with an optional "title"', fix="correct the line")
    return Passage(row.get("title", ""), row["text"])
