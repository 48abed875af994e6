"""What requests to a training service carry, and what losses make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from roll_like.errors import RollLikeError
from roll_like.inference.interface import PromptScores, TopLogprobs
from roll_like.types import FloatArray, IntArray, StopReason

#: What a request says of its loss beside the data.
LossSettings: TypeAlias = Mapping[str, float | str]
#: Values of each token of a datum, shape [T] or [T, K].
TokenArray: TypeAlias = npt.NDArray[Any]


class RequestError(RollLikeError, ValueError):
    """A request asks for what cannot be done; nothing was done, and the service goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence of a request, of T tokens.

    Attributes:
        tokens: Inputs, shape [T].
        inputs: What the loss needs, dense, by the client's names. `target_tokens` says what each position predicts:
            shape [T], or [T, K] for K candidates each.
    """

    tokens: IntArray
    inputs: Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """A batch to compute a loss of, and its gradient.

    Attributes:
        model_id: Whose.
        seq_id: Its place among the model's requests, from 1.
        loss: Name of the loss.
        settings: What is said of the loss beside the data.
        forward_only: Whether no gradient is wanted.
        read: Returns the data; raises `RequestError` where they are not what the protocol has.
    """

    model_id: str
    seq_id: int
    loss: str
    settings: LossSettings
    forward_only: bool
    read: Callable[[], Sequence[Datum]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """One sample.

    Attributes:
        token_ids: With the token that ended it, shape [R].
        logprobs: Of each under the distribution it was drawn from, in nats, shape [R].
        stop_reason: Why it ended.
        top: The likeliest tokens in the place of each; None where they were not asked for.
    """

    token_ids: IntArray
    logprobs: FloatArray
    stop_reason: StopReason
    top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """What is told of a prompt of P tokens; nothing of the first.

    Attributes:
        logprobs: Of each under the model, in nats, NaN where nothing is told, shape [P]; None where not asked for.
        top: The likeliest tokens in their places, all −inf where nothing is told; None where not asked for.
    """

    logprobs: FloatArray | None
    top: TopLogprobs | None

    @classmethod
    def of(cls, scores: PromptScores, *, last: int, top_k: int, told: bool) -> PromptLogprobs:
        """Return what is told of what an engine says.

        Args:
            scores: The engine's, of all tokens but the first.
            last: How many of the last tokens are told of.
            top_k: How many of the likeliest tokens; 0 for none.
            told: Whether log-probabilities of the prompt's own tokens are told.
        """
        length = len(scores.logprobs) + 1
        logprobs = np.full(length, np.nan, np.float32)
        top = TopLogprobs(
            token_ids=np.zeros((length, top_k), np.int32), logprobs=np.full((length, top_k), -np.inf, np.float32)
        )
        first = max(length - last, 1)
        logprobs[first:] = scores.logprobs[first - 1 :]
        if scores.top is not None:
            top.token_ids[first:] = scores.top.token_ids[first - 1 :]
            top.logprobs[first:] = scores.top.logprobs[first - 1 :]
        return cls(logprobs=logprobs if told else None, top=top if top_k else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """The samples of one prompt.

    Attributes:
        samples: As many as were asked for.
        prompt: What is told of the prompt; None where nothing was asked for.
        cached_prompt_tokens: Tokens of the prompt that an earlier request had computed.
    """

    samples: Sequence[SampledTokens]
    prompt: PromptLogprobs | None = None
    cached_prompt_tokens: int = 0
