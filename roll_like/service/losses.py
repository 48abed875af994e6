"""The losses of a training service, by the names of tinker's client and as it defines them.

Each is a sum over the tokens of a sequence, with no mean anywhere: what a token weighs is the client's business. With
p the policy's log-probability of a target, q the client's `logprobs` (those of the policy that sampled), ρ = exp(p − q)
and A the `advantages`, a token's loss is

    cross_entropy         −p                               for [T, K] targets: of each candidate
    importance_sampling   −ρ·A
    ppo                   −min(ρ·A, clip(ρ, low, high)·A)
    cispo                 −sg(clip(ρ, low, high))·A·p
    dro                   −A·p + (β/2)·(p − q)²
    gspo                  as ppo, with s·exp(p − sg(p)) for ρ; s = exp(mean of p − q where the mask is not 0)

times its weight, if the datum has `weights`. `sg` is a stopped gradient. As in `algorithms/losses`, log-ratios are
bounded by ±20 before their exponential is taken (not for dro, which takes none).

A custom loss is computed by the client. It sends its gradient, −∂loss/∂p, as the weights of a cross-entropy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from roll_like.algorithms.kl import MAX_LOG_RATIO
from roll_like.algorithms.losses import clipped_surrogate, policy_ratio
from roll_like.service.types import Datum, LossSettings, RequestError

if TYPE_CHECKING:
    from torch import Tensor

#: From log-probabilities of targets, inputs of the same shape by name, and settings, the loss of each token.
TokenFormula: TypeAlias = "Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]"


def _cross_entropy(logprobs_T: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:  # noqa: ARG001
    return -logprobs_T


def _importance_sampling(logprobs_T: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:  # noqa: ARG001
    return -policy_ratio(logprobs_T, inputs["logprobs"]) * inputs["advantages"]


def _ppo(logprobs_T: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    return -clipped_surrogate(policy_ratio(logprobs_T, inputs["logprobs"]), inputs["advantages"], *_bounds(settings))


def _cispo(logprobs_T: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    ratio_T = policy_ratio(logprobs_T.detach(), inputs["logprobs"])
    return -ratio_T.clamp(*_bounds(settings)) * inputs["advantages"] * logprobs_T


def _dro(logprobs_T: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    penalty_T = 0.5 * settings["beta"] * (logprobs_T - inputs["logprobs"]).square()
    return penalty_T - inputs["advantages"] * logprobs_T


def _gspo(logprobs_T: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    seen_T = logprobs_T.detach()
    mean = (seen_T - inputs["logprobs"])[inputs["sequence_ratio_mask"] != 0].mean()
    ratio_T = (logprobs_T - seen_T + mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()
    return -clipped_surrogate(ratio_T, inputs["advantages"], *_bounds(settings))


def _bounds(settings: Mapping[str, float]) -> tuple[float, float]:
    return settings["clip_low_threshold"], settings["clip_high_threshold"]


@dataclass(frozen=True, slots=True)
class ServiceLoss:
    """A loss of the protocol with its settings.

    Attributes:
        name: The client's.
        formula: Returns the loss of each token before weights.
        inputs: Names in `loss_fn_inputs` that it needs beside `target_tokens`.
        settings: Values of its `loss_fn_config`; by default those of a request without one.
    """

    name: str
    formula: TokenFormula
    inputs: tuple[str, ...] = ()
    settings: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of each token of one datum, with gradient, times its weight.

        Args:
            logprobs: Of the targets, with gradient, shape [T] or [T, K].
            inputs: The datum's, floats of the same shape.
        """
        losses = self.formula(logprobs, inputs, self.settings)
        weights = inputs.get("weights")
        return losses if weights is None else losses * weights

    def refuse(self, data: Sequence[Datum], *, vocabulary: int, max_tokens: int) -> None:
        """Raise where data are not what the loss, or the model, takes.

        Args:
            data: Of one request.
            vocabulary: Tokens are from 0 up to this.
            max_tokens: Longest sequence.

        Raises:
            RequestError: Names the datum and the field.
        """
        if not data:
            raise RequestError("the request has no data; send at least one datum")
        for index, datum in enumerate(data):
            self._refuse_datum(f"datum {index}", datum, vocabulary, max_tokens)

    def _refuse_datum(self, place: str, datum: Datum, vocabulary: int, max_tokens: int) -> None:
        length = len(datum.tokens)
        if not 0 < length <= max_tokens:
            raise RequestError(f"{place} has {length} tokens; this model trains on sequences of 1 to {max_tokens}")
        needed = ("target_tokens", *self.inputs)
        for name in needed:
            if name not in datum.inputs:
                raise RequestError(f"{place} has no loss_fn_inputs[{name!r}]; {self.name} needs {', '.join(needed)}")
        for name in datum.inputs:
            if name not in (*needed, "weights"):
                raise RequestError(
                    f"{place} has loss_fn_inputs[{name!r}]; {self.name} takes {', '.join(needed)} and weights"
                )
        targets = datum.inputs["target_tokens"]
        _refuse_tokens(f"{place}: model_input", datum.tokens, vocabulary)
        _refuse_tokens(f"{place}: target_tokens", targets, vocabulary)
        candidates = targets.ndim == 2 and targets.shape[1] > 0 and self.name == "cross_entropy"
        if not (targets.ndim == 1 or candidates) or len(targets) != length:
            wanted = f"[{length}] or [{length}, K]" if self.name == "cross_entropy" else f"[{length}]"
            raise RequestError(
                f"{place}: target_tokens has shape {list(targets.shape)}; {self.name} takes {wanted}, as many as "
                "model_input has tokens: target i is what follows token i"
            )
        for name, values in datum.inputs.items():
            if name != "target_tokens":
                _refuse_values(f"{place}: {name}", values, targets.shape)
        mask = datum.inputs.get("sequence_ratio_mask")
        if mask is not None and not mask.any():
            raise RequestError(f"{place}: sequence_ratio_mask is 0 everywhere; set it to 1 at the sampled tokens")


def _refuse_tokens(place: str, tokens: npt.NDArray[Any], vocabulary: int) -> None:
    if not np.issubdtype(tokens.dtype, np.integer):
        raise RequestError(f"{place} is of {tokens.dtype}; send token ids as int64")
    wrong = (tokens < 0) | (tokens >= vocabulary)
    if wrong.any():
        raise RequestError(f"{place} has token {int(tokens[wrong][0])}; the vocabulary is 0 to {vocabulary - 1}")


def _refuse_values(place: str, values: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise RequestError(f"{place} has shape {list(values.shape)}, target_tokens {list(shape)}; send one value each")
    wrong = ~np.isfinite(values)
    if wrong.any():
        position = ", ".join(str(each) for each in np.argwhere(wrong)[0])
        raise RequestError(f"{place}[{position}] is {float(values[wrong][0])}; send finite numbers")


_SAMPLED = ("logprobs", "advantages")
_LOSSES = {
    each.name: each
    for each in (
        ServiceLoss("cross_entropy", _cross_entropy),
        ServiceLoss("importance_sampling", _importance_sampling, _SAMPLED),
        ServiceLoss("ppo", _ppo, _SAMPLED, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        ServiceLoss("cispo", _cispo, _SAMPLED, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
        ServiceLoss("dro", _dro, _SAMPLED, {"beta": 0.05}),
        ServiceLoss(
            "gspo",
            _gspo,
            (*_SAMPLED, "sequence_ratio_mask"),
            {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
        ),
    )
}
#: Names that the client knows and that are not served, and why.
_NOT_SERVED = {
    "stable_reinforce": "its definition is not published",
    "custom": "pass the function itself to forward_backward_custom, which computes it in the client",
}


def service_loss(name: str, settings: LossSettings) -> ServiceLoss:
    """Return a loss with its settings.

    Args:
        name: The client's `loss_fn`.
        settings: The client's `loss_fn_config`.

    Raises:
        RequestError: It is not served, or a setting is wrong.
    """
    known = _LOSSES.get(name)
    if known is None:
        reason = f" ({_NOT_SERVED[name]})" if name in _NOT_SERVED else ""
        raise RequestError(f"the loss {name!r} is not served{reason}; use one of {', '.join(_LOSSES)}")
    for key, value in settings.items():
        if key not in known.settings:
            takes = ", ".join(known.settings) or "no settings"
            raise RequestError(f"loss_fn_config has {key!r}; {name} takes {takes}")
        if isinstance(value, str) or not math.isfinite(value) or value < 0:
            raise RequestError(f"loss_fn_config[{key!r}] is {value!r}; {name} takes a number, 0 or more")
    chosen = {**known.settings, **{key: float(value) for key, value in settings.items()}}
    if "clip_low_threshold" in chosen and chosen["clip_low_threshold"] > chosen["clip_high_threshold"]:
        low, high = _bounds(chosen)
        raise RequestError(
            f"clip_low_threshold is {low:g}, above clip_high_threshold {high:g}; both are bounds of the ratio, such as "
            "0.8 and 1.2"
        )
    return ServiceLoss(name, known.formula, known.inputs, chosen)
