"""Rows that cannot be trained on: refused with file and line, or left out and counted by what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Self

from roll_like.content.unicode import problem_of
from roll_like.errors import DataError


class Problem(StrEnum):
    """What is wrong with a row, as reports say it."""

    TEXT = "with half a surrogate pair, or nested too deeply"
    NO_ASSISTANT = "without an assistant turn"
    UNTRAINED = "without a turn to be trained"
    EMPTY = "with an empty response"
    ROLES = "with roles that the chat template refuses"
    REWRITTEN = "with a turn that the chat template does not write as it is"
    TOOLS = "with tools that the chat template does not write"
    IDENTICAL = "with identical chosen and rejected"
    NO_SHARED_PROMPT = "without a prompt that chosen and rejected share"
    UNKNOWN = "with tokens that the model does not have"
    IMAGE = "with an image that cannot be read"
    OTHER_TEXT = "with other text in the teacher's tokens"
    TOO_LONG = "over the limit of tokens"


class BadRow(Exception):
    """A row, or a part of one, cannot be trained on; whoever reads the rows decides what that means.

    Args:
        message: What is wrong here, to be read after the row's origin.
    """

    def __init__(self, problem: Problem, message: str, fix: str | None = None) -> None:
        super().__init__(problem, message, fix)
        self.problem = problem
        self.message = message
        self.fix = fix


def refuse_odd_text(fields: Mapping[str, Any]) -> None:
    """Check that tokenizers and files can take what a row holds.

    Raises:
        BadRow: A text holds half of a surrogate pair, or a value is nested too deeply.
    """
    if (problem := problem_of(fields)) is not None:
        raise BadRow(Problem.TEXT, problem, "correct the row")


@contextmanager
def refused(origin: str) -> Iterator[None]:
    """Raise a DataError that names the row, where what is done with it finds it bad."""
    try:
        yield
    except BadRow as bad:
        raise DataError(f"{origin}: {bad.message}", fix=bad.fix) from bad


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Rows left out for one reason.

    Attributes:
        problem: The reason, a `Problem` of samples.
        count: Rows; of a conversation that was cut into parts, each part that is over the limit.
        first: Origin of the first of them, with what is wrong there.
    """

    problem: str
    count: int
    first: str


@dataclass(frozen=True, kw_only=True)
class RowsReport:
    """What became of one source's rows.

    Attributes:
        name: The source.
        rows: Rows read.
        kept: Rows that became tasks or samples.
        longest: Tokens of the longest prompt or sample, kept or not.
        left_out: What was left out, by reason, in the order of `Problem`.
    """

    name: str
    rows: int
    kept: int
    longest: int
    left_out: tuple[LeftOut, ...]

    def __str__(self) -> str:
        text = f"{self.name}: {self.kept} of {self.rows} rows{self._samples()}"
        return text + "".join(f"; {left.count} {left.problem} left out, first {left.first}" for left in self.left_out)

    def _samples(self) -> str:
        return ""


@dataclass(frozen=True, kw_only=True)
class SamplesReport(RowsReport):
    """What became of the rows of a source of samples.

    Attributes:
        samples: Samples of the rows that were kept: more than rows where conversations were cut into parts.
        tokens: Tokens of the samples.
        trained: Tokens among them that the loss applies to.
        shortened: Samples that were cut at the limit.
        first_shortened: Origin of the first of them.
    """

    samples: int
    tokens: int
    trained: int
    shortened: int
    first_shortened: str | None

    def _samples(self) -> str:
        text = "" if self.samples == self.kept else f" as {self.samples} samples"
        text += f", {self.trained} of {self.tokens} tokens trained"
        return text + (f"; {self.shortened} shortened, first {self.first_shortened}" if self.shortened else "")


_SUMS = ("rows", "kept", "samples", "tokens", "trained", "shortened")


@dataclass(slots=True)
class RowCounter:
    """Counts what becomes of rows.

    Args:
        bad_rows: Whether a bad row is an error, or left out. What is over the limit is always left out: whoever
            refuses it does not ask here.
        key: The section that has `bad_rows`, for messages.
    """

    bad_rows: Literal["refuse", "skip"]
    key: str
    rows: int = 0
    kept: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    shortened: int = 0
    first_shortened: str | None = None
    longest: int = 0
    _left: dict[Problem, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def after(cls, report: SamplesReport, bad_rows: Literal["refuse", "skip"], key: str) -> Self:
        """Return what counts on from a report."""
        counter = cls(bad_rows, key, **{each: getattr(report, each) for each in (*_SUMS, "longest", "first_shortened")})
        counter._left = {Problem(left.problem): (left.count, left.first) for left in report.left_out}
        return counter

    def add(self, later: RowCounter) -> None:
        """Count what another one has counted of later rows."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.first_shortened = self.first_shortened or later.first_shortened
        self.longest = max(self.longest, later.longest)
        for problem, (count, first) in later._left.items():
            before, earlier = self._left.get(problem, (0, first))
            self._left[problem] = (before + count, earlier)

    def leave(self, origin: str, bad: BadRow) -> None:
        """Count a row that is left out.

        Raises:
            DataError: Bad rows are refused.
        """
        if self.bad_rows == "refuse" and bad.problem is not Problem.TOO_LONG:
            skip = f"set {self.key}.bad_rows: skip to leave such rows out"
            raise DataError(f"{origin}: {bad.message}", fix=f"{bad.fix}, or {skip}" if bad.fix else skip) from bad
        count, first = self._left.get(bad.problem, (0, f"{origin} ({bad.message})"))
        self._left[bad.problem] = (count + 1, first)

    def shorten(self, origin: str, tokens: int) -> None:
        """Count a sample that was cut at the limit, and had so many tokens."""
        self.shortened += 1
        self.first_shortened = self.first_shortened or f"{origin} ({tokens} tokens)"

    def report(self, name: str) -> SamplesReport:
        """Return what became of the rows so far of a source of this name."""
        left = [(problem, *self._left[problem]) for problem in Problem if problem in self._left]
        return SamplesReport(
            name=name,
            first_shortened=self.first_shortened,
            longest=self.longest,
            left_out=tuple(LeftOut(problem=problem, count=count, first=first) for problem, count, first in left),
            **{each: getattr(self, each) for each in _SUMS},
        )
