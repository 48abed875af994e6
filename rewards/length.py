"""Length: a soft penalty for responses near the longest that is wanted.

DAPO's soft over-long punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13): 0 up to `max_tokens −
buffer_tokens`, then in a straight line down to −`penalty` at `max_tokens`, and −`penalty` beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from roll_like import Completion, Reward, RewardCase, RewardConfig, RewardResult, register_reward


class LengthConfig(RewardConfig):
    """Settings of the `length` reward."""

    type: Literal["length"] = "length"
    max_tokens: int = Field(default=512, ge=1, description="From this length on, the whole penalty. Tokens.")
    buffer_tokens: int = Field(
        default=128, ge=0, description="The penalty grows over the last so many tokens before `max_tokens`. Tokens."
    )
    min_tokens: int = Field(
        default=1, ge=0, description="Shorter responses get the whole penalty, so that silence does not pay. Tokens."
    )
    penalty: float = Field(default=1.0, gt=0, description="Taken from a response that is too long or too short.")

    @model_validator(mode="after")
    def _something_is_left(self) -> Self:
        if self.min_tokens > self.max_tokens - self.buffer_tokens:
            raise ValueError(
                f"no length is without penalty: min_tokens is {self.min_tokens}, and the penalty begins above "
                f"max_tokens − buffer_tokens = {self.max_tokens - self.buffer_tokens}; lower one of "
                "the two"
            )
        return self


@register_reward("length")
class Length(Reward):
    """0 for a response of a wanted length, down to −`penalty` for one that is too long or too short."""

    Config: ClassVar[type[RewardConfig]] = LengthConfig
    per_sample: ClassVar[bool] = True

    config: LengthConfig

    def score(self, completions: Sequence[Completion]) -> Sequence[RewardResult]:
        """Return a value from −`penalty` to 0 for each completion."""
        return [
            RewardResult(self._value(completion.response_tokens), {"tokens": completion.response_tokens})
            for completion in completions
        ]

    def cases(self) -> Sequence[RewardCase]:
        """Return responses that are as long as wanted, and one that is too long; a word stands for a token."""
        longest = self.config.max_tokens - self.config.buffer_tokens
        return (
            RewardCase(
                prompt="Say something.",
                gold=(_words(max(self.config.min_tokens, 1)), _words(longest)) if longest > 0 else (),
                wrong=(_words(self.config.max_tokens + 1),),
                hostile=(_words(10 * self.config.max_tokens),),
                gold_value=0.0,
                empty_value=0.0 if self.config.min_tokens == 0 else -self.config.penalty,
            ),
        )

    def _value(self, tokens: int) -> float:
        config = self.config
        if tokens < config.min_tokens or tokens > config.max_tokens:
            return -config.penalty
        over = tokens - (config.max_tokens - config.buffer_tokens)
        return -config.penalty * over / config.buffer_tokens if over > 0 else 0.0


def _words(count: int) -> str:
    return " ".join(["word"] * count)
