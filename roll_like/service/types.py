"""What requests to a training service carry, and what losses make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy.typing as npt

from roll_like.errors import RollLikeError
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
    """

    token_ids: IntArray
    logprobs: FloatArray
    stop_reason: StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """The samples of one prompt.

    Attributes:
        samples: As many as were asked for.
        prompt_logprobs: Of each token of the prompt under the model, in nats, NaN for the first, shape [P]; None where
            they were not asked for.
        cached_prompt_tokens: Tokens of the prompt that an earlier request had computed.
    """

    samples: Sequence[SampledTokens]
    prompt_logprobs: FloatArray | None = None
    cached_prompt_tokens: int = 0
