"""Short answers to questions: equal to a reference answer (`exact_match`), or sharing its words (`f1`).

Case, English articles, spacing and punctuation between words do not count; numbers count by their value. Of several
reference answers the best fitting one counts.
"""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from roll_like import Completion, Outcome, Reward, RewardCase, RewardConfig, RewardResult, register_reward
from roll_like.builtin.rewards.patterns import check_pattern, find_match, without_matches
from roll_like.data.answers import answer_words, drop_unit_signs
from roll_like.data.boxed import last_boxed
from roll_like.errors import RewardError
from roll_like.rewards.base import refusing_row
from roll_like.types import Task

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


class AnswerConfig(RewardConfig):
    """Settings of rewards that compare with reference answers."""

    answers_field: str | None = Field(
        default=None, description="Row field with a list of reference answers; default: the row's answer alone."
    )
    take: Literal["response", "boxed", "last_line"] = Field(
        default="response",
        description="What is compared. response: all of it. boxed: the last `\\boxed{…}`. last_line: the last line "
        "that is not blank.",
    )
    pattern: Annotated[str | None, AfterValidator(check_pattern)] = Field(
        default=None,
        description="Regular expression that finds the answer in what is taken: its first group (or all of it).",
    )
    match: Literal["first", "last"] = Field(default="last", description="Which match of `pattern` counts.")
    ignore: tuple[Annotated[str, AfterValidator(check_pattern)], ...] = Field(
        default=(),
        description="Regular expressions whose matches are removed from the answer and from the references, in this "
        "order, before they are compared: `,` and `\\$` of `$1,000`.",
    )
    normalize: Literal["words", "squad", "none"] = Field(
        default="words",
        description="What does not count. words: case, English articles, punctuation between words, how a number is "
        "written, and a currency or percent sign that the reference lacks. squad: case, articles and all punctuation, "
        "as in SQuAD's evaluation, so `3.14` is `314`. none: spacing only; for versions and codes.",
    )


class ExactMatchConfig(AnswerConfig):
    """Settings of the `exact_match` reward."""

    type: Literal["exact_match"] = "exact_match"


class F1Config(AnswerConfig):
    """Settings of the `f1` reward."""

    type: Literal["f1"] = "f1"


class _Compared(Reward, ABC):
    """Takes an answer out of a response and compares it with the row's reference answers."""

    per_sample: ClassVar[bool] = True

    config: AnswerConfig

    def check_row(self, task: Task) -> None:
        """Check that the row has reference answers.

        Raises:
            DataError: It has none, or one of which normalisation leaves nothing.
        """
        with refusing_row(task, "correct the row, `answer_field` of its source or `answers_field`"):
            self._gold(task.answer, task.metadata)

    def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
        """Return a value from 0 to 1 for each completion; a `RewardError` where a pattern took too long."""
        return [self._score_one(completion) for completion in completions]

    def cases(self) -> Sequence[RewardCase]:
        """Return a question with one answer, in the form that `take` wants; none where a pattern or case decides."""
        if self.config.pattern is not None or self.config.normalize == "none":
            return ()
        form = {"response": "{}", "boxed": "It is \\boxed{{{}}}.", "last_line": "Let me think.\n{}\n"}[self.config.take]
        field = self.config.answers_field
        return (
            RewardCase(
                prompt="Where is the Eiffel Tower?",
                answer="Paris, France",
                metadata={} if field is None else {field: ["Paris, France", "In Paris, France"]},
                gold=(form.format("Paris, France"), form.format("the paris france")),
                wrong=(form.format("Berlin"), form.format("London")),
                hostile=(form.format("the"), form.format("..."), form.format(" ".join(["word"] * 1000))),
            ),
        )

    @abstractmethod
    def compare(self, found: list[str], gold: list[str]) -> float:
        """Return how well the normalised words of an answer fit those of a reference answer."""

    def _score_one(self, completion: Completion) -> Outcome:
        try:
            gold = self._gold(completion.answer, completion.metadata)
            found = self._words(self._taken(completion.text))
        except ValueError as error:
            return RewardError(str(error), fix="correct the row")
        except RewardError as error:
            return error
        by_value = self.config.normalize == "words"
        value = max(
            self.compare(drop_unit_signs(found, reference) if by_value else found, reference) for reference in gold
        )
        return RewardResult(value, {"parsed": float(bool(found))}, " ".join(found))

    def _taken(self, text: str) -> str:
        if self.config.take == "boxed":
            text = last_boxed(text) or ""
        elif self.config.take == "last_line":
            text = ([line for line in text.splitlines() if line.strip()] or [""])[-1]
        if self.config.pattern is not None:
            text = find_match(self.config.pattern, text, self.config.match) or ""
        return text

    def _gold(self, answer: str | None, metadata: Mapping[str, Any]) -> list[list[str]]:
        field = self.config.answers_field
        found = answer if field is None else metadata.get(field)
        answers = [found] if isinstance(found, str) else found
        if not isinstance(answers, Sequence) or not answers or not all(isinstance(one, str) for one in answers):
            where = "the row's answer" if field is None else f"the field {field!r}"
            raise ValueError(f"{where} should be a text or a list of texts, found {found!r}")
        gold = [self._words(one) for one in answers]
        if not all(gold):
            raise ValueError(f"nothing is left of a reference answer in {found!r} (normalize: {self.config.normalize})")
        return gold

    def _words(self, text: str) -> list[str]:
        return _NORMALISERS[self.config.normalize](without_matches(self.config.ignore, text))


@register_reward("exact_match")
class ExactMatch(_Compared):
    """1 where the answer equals a reference answer, else 0; `parsed` tells whether there was one."""

    Config: ClassVar[type[RewardConfig]] = ExactMatchConfig

    def answers(self, completions: Sequence[Completion]) -> Sequence[str | RewardError]:
        """Return the normalised words of each answer; a `RewardError` where a pattern took too long."""
        return [self._answer(completion) for completion in completions]

    def _answer(self, completion: Completion) -> str | RewardError:
        try:
            return " ".join(self._words(self._taken(completion.text)))
        except RewardError as error:
            return error

    def compare(self, found: list[str], gold: list[str]) -> float:
        """Return 1 for equal words in equal order, else 0."""
        return float(found == gold)


@register_reward("f1")
class F1(_Compared):
    """Harmonic mean of precision and recall of the answer's words against the best fitting reference answer's."""

    Config: ClassVar[type[RewardConfig]] = F1Config

    def compare(self, found: list[str], gold: list[str]) -> float:
        """Return 2·shared / (words found + words of the reference), repeated words counted as often as both have."""
        shared = sum((Counter(found) & Counter(gold)).values())
        return 2 * shared / (len(found) + len(gold))


def normalise(text: str) -> list[str]:
    """Return the words of `text` without case, punctuation (of any script) and English articles.

    SQuAD's evaluation does so (Rajpurkar et al. 2016, arXiv:1606.05250).

    >>> normalise("The U.S.A.,  and a dog!")
    ['usa', 'and', 'dog']
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    letters = "".join(char for char in folded if not unicodedata.category(char).startswith("P"))
    return _ARTICLES.sub(" ", letters).split()


def _as_written(text: str) -> list[str]:
    return unicodedata.normalize("NFC", text).split()


_NORMALISERS = {"words": answer_words, "squad": normalise, "none": _as_written}
