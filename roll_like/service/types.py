"""What requests to a training service carry, and what losses make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy.typing as npt

from roll_like.errors import RollLikeError
from roll_like.types import IntArray

if TYPE_CHECKING:
    from torch import Tensor

#: What a request says of its loss beside the data.
LossSettings: TypeAlias = Mapping[str, float | str]


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
class LossResult:
    """What a loss makes of one datum.

    Attributes:
        loss: A sum over tokens, with its history.
        outputs: What the client is told of each token, shape [T] or [T, K], without history; has `logprobs`.
        metrics: By names that end in how they are put together over data: `:sum`, `:mean`, `:min` or `:max`.
    """

    loss: Tensor
    outputs: Mapping[str, Tensor]
    metrics: Mapping[str, float] = field(default_factory=dict)


#: Takes the log-probabilities of the targets, shaped as these are, the datum's inputs as tensors, and the settings.
DatumLoss: TypeAlias = "Callable[[Tensor, Mapping[str, Tensor], LossSettings], LossResult]"
