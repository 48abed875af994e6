"""Two custom rewards: a function that scores one answer, and a class that scores a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from roll_like import (
    Completion,
    DataError,
    Reward,
    RewardConfig,
    RewardResult,
    StopReason,
    Task,
    register_reward,
)


@register_reward("brief")
def brief(completion: Completion) -> float:
    """1 for a finished answer of 5 to 25 words, else 0."""
    finished = completion.stop_reason is StopReason.STOP
    return float(finished and 5 <= len(completion.text.split()) <= 25)


class UsesWordConfig(RewardConfig):
    """Settings of `uses_word`: the YAML keys that are allowed with `type: uses_word`."""

    type: Literal["uses_word"] = "uses_word"
    copies: float = Field(default=0.0, ge=0, le=1, description="Score of an answer that repeats another one.")


@register_reward("uses_word")
class UsesWord(Reward):
    """1 for an answer that uses the row's `word`; less for one that repeats another answer of its group."""

    Config: ClassVar[type[RewardConfig]] = UsesWordConfig
    required_fields: ClassVar[tuple[str, ...]] = ("word",)

    config: UsesWordConfig

    def check_row(self, task: Task) -> None:
        """Raise for an invalid row before the run starts, with its file and line."""
        word = task.metadata["word"]
        if not isinstance(word, str) or not word.strip():
            raise DataError(f"{task.origin}: 'word' should be a word, found {word!r}", fix="correct the row")

    def score(self, completions: Sequence[Completion]) -> Sequence[RewardResult]:
        """Return one result for each answer of a group, in order; `details` become metrics."""
        results, seen = [], set[str]()
        for completion in completions:
            said = " ".join(completion.text.lower().split())
            used, copied = completion.metadata["word"].lower() in said, said in seen
            seen.add(said)
            value = float(used) * (self.config.copies if copied else 1.0)
            results.append(RewardResult(value, {"used": float(used), "copied": float(copied)}))
        return results
