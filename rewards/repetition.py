"""Repetition: a penalty for responses that say the same over and over.

The share of n-grams that occurred before in the response, as in "Demystifying Long Chain-of-Thought"
(Yeo et al. 2025, arXiv:2502.03373); a share up to `free` costs nothing, because prose repeats itself a little.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from roll_like import Completion, Reward, RewardCase, RewardConfig, RewardResult, register_reward

_WORD = re.compile(r"\w+")


class RepetitionConfig(RewardConfig):
    """Settings of the `repetition` reward."""

    type: Literal["repetition"] = "repetition"
    n: int = Field(default=4, ge=1, description="Length of the sequences that are compared. Words or characters.")
    by: Literal["words", "characters"] = Field(
        default="words", description="What sequences are made of; characters for scripts without spaces."
    )
    free: float = Field(default=0.1, ge=0, lt=1, description="Share of repeated sequences that costs nothing.")
    penalty: float = Field(default=1.0, gt=0, description="Taken from a response in which everything is repeated.")


@register_reward("repetition")
class Repetition(Reward):
    """0 for a response that does not repeat itself, down to −`penalty`; `repeated` is the share of repeated n-grams."""

    Config: ClassVar[type[RewardConfig]] = RepetitionConfig
    per_sample: ClassVar[bool] = True

    config: RepetitionConfig

    def score(self, completions: Sequence[Completion]) -> Sequence[RewardResult]:
        """Return a value from −`penalty` to 0 for each completion."""
        return [self._score_one(completion.full_text) for completion in completions]

    def cases(self) -> Sequence[RewardCase]:
        """Return prose, and loops of words and of sentences."""
        sentence = "the lamp turned slowly above grey water while ships passed on towards their harbour"
        return (
            RewardCase(
                prompt="Write about a lighthouse.",
                gold=(sentence,),
                wrong=(" ".join(["ships"] * 60), " ".join([sentence] * 5)),
                hostile=(" ".join(["Ships, ships!"] * 2000),),
                gold_value=0.0,
            ),
        )

    def _score_one(self, text: str) -> RewardResult:
        folded = text.casefold()
        units = _WORD.findall(folded) if self.config.by == "words" else [char for char in folded if not char.isspace()]
        repeated = repeated_share(units, self.config.n)
        over = max(repeated - self.config.free, 0.0) / (1 - self.config.free)
        return RewardResult(0.0 - self.config.penalty * over, {"repeated": repeated})


def repeated_share(units: Sequence[str], n: int) -> float:
    """Return the share of n-grams that occurred before, 0 to 1; 0 for a text shorter than `n`."""
    grams = [tuple(units[start : start + n]) for start in range(len(units) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
