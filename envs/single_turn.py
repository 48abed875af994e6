"""Environments of one turn: a question, an answer, a score."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal, TypeAlias

import gymnasium
from gymnasium.error import ResetNeeded

from roll_like.data.boxed import last_boxed
from roll_like.envs import FreeText, answer_of, read_tag
from roll_like.errors import EnvError

#: Where the answer stands: `<answer>4</answer>`, `\\boxed{4}`, or the whole text.
AnswerStyle: TypeAlias = Literal["tag", "boxed", "text"]
_HOW: dict[AnswerStyle, str] = {
    "tag": "Give the final answer as <answer>…</answer>.",
    "boxed": "Give the final answer as \\boxed{…}.",
    "text": "",
}


class SingleTurn(gymnasium.Env[str, str]):
    """Base: asks once, scores the answer, ends.

    Args:
        style: Where the answer stands.
        invalid_penalty: What a text without an answer costs; ≥ 0.
        system_prompt: First message of the conversation; default: how to answer, where `style` asks for it.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(self, *, style: AnswerStyle, invalid_penalty: float, system_prompt: str | None) -> None:
        if style not in _HOW:
            raise EnvError(f"unknown answer style {style!r}", fix=f"style is one of {', '.join(_HOW)}")
        if invalid_penalty < 0:
            raise EnvError(f"invalid_penalty is what a text without answer costs: ≥ 0, found {invalid_penalty}")
        self.observation_space = FreeText()
        self.action_space = FreeText()
        self.system_prompt = (_HOW[style] or None) if system_prompt is None else system_prompt
        self._style = style
        self._penalty = invalid_penalty
        self._open = False

    @abstractmethod
    def ask(self, seed: int | None) -> tuple[str, dict[str, Any]]:
        """Return the question of a seed, and what to say about it in `info`."""

    @abstractmethod
    def score(self, answer: str) -> float:
        """Return what an answer to the last question is worth: 1 is right."""

    @abstractmethod
    def solution(self) -> str | None:
        """Return the right answer to the last question; None where several are right and none is known."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Ask."""
        super().reset(seed=seed, options=options)
        question, info = self.ask(seed)
        self._open = True
        return question, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score the answer, which follows the reasoning if there is any, and end the episode.

        Raises:
            ResetNeeded: There was an answer already.
        """
        if not self._open:
            raise ResetNeeded("the question was answered; call reset() first")
        self._open = False
        answer = read_answer(answer_of(action), self._style)
        reward = -self._penalty if answer is None else self.score(answer)
        info = {"success": answer is not None and reward >= 1.0, "invalid_action": answer is None}
        return "", float(reward), True, False, info

    def scripted_action(self) -> str | None:
        """Return the right answer, written as it should be."""
        answer = self.solution()
        if answer is None or not self._open:
            return None
        return {"tag": f"<answer>{answer}</answer>", "boxed": f"\\boxed{{{answer}}}", "text": answer}[self._style]


def read_answer(text: str, style: AnswerStyle) -> str | None:
    r"""Return the last answer in `text`, or None where there is none.

    >>> read_answer(r"so it is \boxed{\frac{1}{2}}", "boxed")
    '\\frac{1}{2}'
    """
    if style == "tag":
        return read_tag(text, "answer") or None
    if style == "boxed":
        return (last_boxed(text) or "").strip() or None
    return text.strip() or None
