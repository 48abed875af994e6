"""Questions with one answer each, from a dataset: episodes of one turn, as in GEM (arXiv:2510.01051)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from roll_like.builtin.envs.single_turn import AnswerStyle, SingleTurn
from roll_like.envs import TaskRows, field_of, prompt_messages, read_task_rows
from roll_like.envs.answers import answer_words, contains_words, last_number, only_number, same_number, same_words
from roll_like.errors import DataError, EnvError

#: `exact`: the same words; `number`: the same number, the answer's last; `contains`: the reference's words stand in the
#: answer. Numbers among words count by value.
Match: TypeAlias = Literal["exact", "number", "contains"]
MATCHES: tuple[Match, ...] = ("exact", "number", "contains")


class QA(SingleTurn):
    r"""`roll_like/QA-v0`.

    Seed n asks row n modulo the number of rows, so that seeds that count up walk through the dataset.

    Args:
        path: File, directory or hub dataset with the rows, or the rows themselves; a file is relative to where the run
            is started.
        prompt: Field of the question: a text, or a list of messages. `extra_info.question` is a field of an object.
        answer: Field of the reference answer: one, or a list of which each is right. Also of an object, as
            `reward_model.ground_truth`.
        match: What counts as the same.
        style: Where the answer stands: `<answer>…</answer>`, `\boxed{…}`, or the whole text.
        invalid_penalty: What a text without an answer costs.
        system_prompt: First message of the conversation; default: how to answer.
        held_out: So many rows, the last ones, are asked in evaluations only, and no others are.
        split: Split of a hub dataset.
        subset: Subset of one, such as `main` of `openai/gsm8k`.
    """

    def __init__(
        self,
        path: str | Sequence[Mapping[str, Any]],
        *,
        prompt: str = "prompt",
        answer: str = "answer",
        match: Match = "exact",
        style: AnswerStyle = "tag",
        invalid_penalty: float = 0.0,
        system_prompt: str | None = None,
        held_out: int = 0,
        split: str = "train",
        subset: str | None = None,
    ) -> None:
        super().__init__(style=style, invalid_penalty=invalid_penalty, system_prompt=system_prompt)
        if match not in MATCHES:
            raise EnvError(f"unknown match {match!r}", fix=f"match is one of {', '.join(MATCHES)}")
        rows = read_task_rows(path, (prompt, answer), split=split, subset=subset)
        self.rows = TaskRows(rows, held_out=held_out)
        self._prompt, self._answer, self._match = prompt, answer, match
        for row in rows:
            prompt_messages(row, prompt)
            _check(references(field_of(row, answer)), match, row["origin"])

    def ask(self, seed: int | None) -> tuple[str, dict[str, Any]]:
        """Return the question of a seed's row; of any row without a seed."""
        row = self.rows.row(seed, self.np_random)
        self._right = references(field_of(row, self._answer))
        messages = prompt_messages(row, self._prompt)
        told = {"messages": messages} if len(messages) > 1 else {}  # a single one is the observation
        return messages[-1]["content"], {"state": row["origin"], **told}

    def score(self, answer: str) -> float:
        """Return 1 for a right answer, else 0."""
        return float(any(same(answer, reference, self._match) for reference in self._right))

    def solution(self) -> str:
        """Return the first reference answer."""
        return self._right[0]


def same(answer: str, reference: str, match: Match) -> bool:
    """Return whether an answer says what the reference says.

    >>> same("The cat.", "the cat", "exact"), same("about 1,000", "1000.0", "number"), same("-5.5", "5", "contains")
    (True, True, False)
    """
    if match == "exact":
        return same_words(answer, reference)
    if match == "contains":
        return contains_words(answer, reference)
    found, wanted = last_number(answer), only_number(reference)
    return found is not None and wanted is not None and same_number(found, wanted)


def references(answer: Any) -> list[str]:
    """Return the reference answers of a row's field, which holds one or a list of them."""
    return [str(each) for each in answer] if isinstance(answer, list) else [str(answer)]


def _check(references: list[str], match: Match, origin: str) -> None:
    if not references or not all(answer_words(reference, articles=True) for reference in references):
        raise DataError(f"{origin}: the reference answer is empty", fix="give each row an answer")
    for reference in references:
        if match == "number" and only_number(reference) is None:
            raise DataError(
                f"{origin}: match is 'number', and the reference {reference!r} does not hold one number",
                fix="correct the row, or set match: exact or contains",
            )
