r"""Choice questions: whether the option that a response settles on is the right one.

The response has to say that it answers: `\boxed{B}`, "the answer is (B)", "Answer: B", or nothing but
the letter. A capital letter somewhere in prose is none: "A dog barks" does not choose A.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from roll_like import Completion, Reward, RewardCase, RewardConfig, RewardResult, register_reward
from roll_like.builtin.rewards.choice import choice
from roll_like.data.answers import answer_words
from roll_like.errors import RewardError
from roll_like.rewards.base import refusing_row
from roll_like.types import Task


class MultipleChoiceConfig(RewardConfig):
    """Settings of the `multiple_choice` reward."""

    type: Literal["multiple_choice"] = "multiple_choice"
    letters: str = Field(
        default="ABCDEFGHIJ", pattern=r"^[A-Z]{2,26}$", description="Letters of the options, in their order."
    )
    options_field: str | None = Field(
        default=None,
        description="Row field with the options' texts, in order; then the answer may be a text or its number from 0.",
    )
    boxed: bool = Field(default=False, description="Take the answer from `\\boxed{…}` only.")


@register_reward("multiple_choice")
class MultipleChoice(Reward):
    """1 where the response settles on the right option, else 0; `parsed` tells whether it settled on one."""

    Config: ClassVar[type[RewardConfig]] = MultipleChoiceConfig
    required_fields: ClassVar[tuple[str, ...]] = ("answer",)
    per_sample: ClassVar[bool] = True

    config: MultipleChoiceConfig

    def check_row(self, task: Task) -> None:
        """Check that the reference answer is one of the options.

        Raises:
            DataError: It is not, or the options are no list of texts.
        """
        with refusing_row(task, "correct the row, or `letters` or `options_field` of the reward"):
            self._gold(task.answer, task.metadata)

    def score(self, completions: Sequence[Completion]) -> Sequence[RewardResult]:
        """Return 1 or 0 for each completion."""
        return [self._score_one(completion) for completion in completions]

    def answers(self, completions: Sequence[Completion]) -> Sequence[str | RewardError]:
        """Return the letter that each completion settles on."""
        try:
            return [self._chosen(one, self._options(one.metadata)) or "" for one in completions]
        except ValueError as error:
            raise RewardError(str(error), fix="correct the row") from error

    def cases(self) -> Sequence[RewardCase]:
        """Return a question about capitals."""
        options = {} if self.config.options_field is None else {self.config.options_field: ["Rome", "Paris"]}
        boxed, plain = ("so \\boxed{B}", "\\boxed{\\text{B}}."), ("The answer is (B).", "**Answer: B**")
        return (
            RewardCase(
                prompt="Which is the capital of France? (A) Rome (B) Paris",
                answer="B",
                metadata=options,
                gold=boxed if self.config.boxed else (*boxed, *plain),
                wrong=("\\boxed{A}", "The answer is (A)."),
                hostile=(
                    "Both are cities in Europe.",
                    "By the way, (A) Rome (B) Paris.",
                    "The answer is A or B.",
                    "The answer is not B.",
                    "\\boxed{A, B}",
                    "The answer is B. The answer is A.",
                    "A B C D",
                ),
            ),
        )

    def _score_one(self, completion: Completion) -> RewardResult:
        try:
            gold, options = self._gold(completion.answer, completion.metadata)
        except ValueError as error:
            raise RewardError(str(error), fix="correct the row") from error
        chosen = self._chosen(completion, options)
        return RewardResult(float(chosen == gold), {"parsed": float(chosen is not None)}, chosen or "")

    def _chosen(self, completion: Completion, options: Sequence[str]) -> str | None:
        question = str(completion.messages[-1]["content"]) if completion.messages else ""
        return choice(completion.text, self.config.letters, options, question=question, boxed=self.config.boxed)

    def _options(self, metadata: Mapping[str, Any]) -> list[str]:
        """Return the options' texts, none where only letters are known; ValueError if the row has no list of them."""
        field = self.config.options_field
        if field is None:
            return []
        found = metadata.get(field)
        if isinstance(found, str) or not isinstance(found, Sequence) or len(found) < 2:
            raise ValueError(f"the field {field!r} should hold a list of options, found {found!r}")
        return [str(option) for option in found]

    def _gold(self, answer: str | None, metadata: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Return the right letter and the options' texts; ValueError if the row has none."""
        options = self._options(metadata)
        letters = self.config.letters[: len(options) or None]
        text = (answer or "").strip()
        bare = text.strip("().").upper()
        if len(bare) == 1 and bare in letters:
            return bare, options
        folded = [answer_words(option, articles=True) for option in options]
        words = answer_words(text, articles=True)
        if folded.count(words) == 1:
            return letters[folded.index(words)], options
        if options and text.isdecimal() and int(text) < len(options):
            return letters[int(text)], options
        raise ValueError(f"the answer {answer!r} is not one of the options {', '.join(letters)}")
