"""Tasks of reasoning-gym: more than 100 families, each seed another question, scored by the family's own verifier."""

from __future__ import annotations

from typing import Any

from roll_like.builtin.envs.extras import need
from roll_like.builtin.envs.single_turn import AnswerStyle, SingleTurn
from roll_like.errors import EnvError
from roll_like.registry import did_you_mean

ENV_ID = "roll_like/ReasoningGym-v0"
PACKAGE = "reasoning-gym==0.1.25"


class ReasoningGym(SingleTurn):
    r"""`roll_like/ReasoningGym-v0`.

    Args:
        task: Family, such as `chain_sum`, `gcd` or `countdown`.
        config: Settings of the family, such as `{"min_terms": 2}`.
        style: Where the answer stands: `<answer>…</answer>`, `\boxed{…}`, or the whole text.
        invalid_penalty: What a text without an answer costs.
        system_prompt: First message of the conversation; default: how to answer.

    Raises:
        EnvError: reasoning-gym is not installed, knows no such family, or refuses the settings.
    """

    def __init__(
        self,
        task: str = "chain_sum",
        *,
        config: dict[str, Any] | None = None,
        style: AnswerStyle = "tag",
        invalid_penalty: float = 0.0,
        system_prompt: str | None = None,
    ) -> None:
        super().__init__(style=style, invalid_penalty=invalid_penalty, system_prompt=system_prompt)
        self._make = need("reasoning_gym", PACKAGE, ENV_ID).create_dataset
        known = need("reasoning_gym.factory", PACKAGE, ENV_ID).DATASETS
        if task not in known:
            hint = did_you_mean(task, known, f"it has {len(known)}", count=3)
            raise EnvError(f"reasoning-gym has no task {task!r}; {hint}", fix="correct `task` of the kwargs")
        self._task, self._config = task, dict(config or {})
        self._data, self._entry = self._item(0)

    def ask(self, seed: int | None) -> tuple[str, dict[str, Any]]:
        """Return the first question of the family's data set of this seed."""
        number = int(self.np_random.integers(2**31)) if seed is None else seed % 2**31
        self._data, self._entry = self._item(number)
        return str(self._entry["question"]), {"state": f"{self._task}:{number}"}

    def score(self, answer: str) -> float:
        """Return the verifier's score, between 0 and 1.

        Raises:
            EnvError: The verifier itself failed; that says nothing about the answer.
        """
        try:
            return float(self._data.score_answer(answer, entry=self._entry))
        except Exception as error:
            raise EnvError(
                f"the verifier of reasoning-gym's task {self._task!r} raised {type(error).__name__}: {error}"
            ) from error

    def solution(self) -> str | None:
        """Return the answer that the family itself gives."""
        return None if self._entry["answer"] is None else str(self._entry["answer"])

    def _item(self, seed: int) -> tuple[Any, Any]:
        try:
            data = self._make(self._task, **{**self._config, "seed": seed, "size": 1})
            return data, data[0]
        except (AssertionError, TypeError, ValueError) as error:
            raise EnvError(
                f"reasoning-gym's task {self._task!r} refuses the settings {self._config}: {error}",
                fix="correct `config` of the kwargs",
            ) from error
