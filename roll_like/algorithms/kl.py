"""KL divergence from a reference model, estimated on sampled tokens (Schulman 2020, joschu.net/blog/kl-approx.html).

With r = log π_ref − log π of a token that π sampled:

    k1  = −r                unbiased, may be negative, high variance
    abs = |r|               biased, positive
    k2  = r²/2              biased, positive; its gradient is that of the reverse KL
    k3  = exp(r) − 1 − r    unbiased, positive, low variance

Only k2 has the gradient of the divergence that all of them estimate; with `straight_through` the value is the
estimator's and the gradient is that of k2.

The penalty is used in one of two ways (`algorithm.kl.use`):

- `loss`: β·k is added to each token's loss, with its gradient (`divergence`).
- `reward`: β·k is subtracted from the reward, as a constant, before advantages are estimated
  (`token_penalties`). The order of a step is then trajectories → reference log-probabilities →
  estimator: `reference.logprobs(policy_samples(groups))`, `token_penalties(...)`,
  `estimator.assign(groups, penalties)`. Estimators that compare one reward a sample subtract the sum
  over its tokens; REINFORCE++ subtracts each from its own token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import neg
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from roll_like.algorithms.lazy import torch
from roll_like.errors import EngineError
from roll_like.types import FloatArray, PolicySample

if TYPE_CHECKING:
    from torch import Tensor

    from roll_like.config.algorithm import KLConfig

KLEstimator: TypeAlias = Literal["k1", "abs", "k2", "k3"]

#: Bound of log-ratios before their exponential is taken, which could overflow; k3 reaches `MAX_K3` well below it.
MAX_LOG_RATIO = 20.0
#: Largest k3 of one token: without a bound, one token that became very unlikely dominates the batch.
MAX_K3 = 10.0
#: Largest relative error that an adaptive coefficient reacts to.
ADAPTION_LIMIT = 0.2


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    # expm1 keeps small divergences exact; the inner clamp keeps the gradient of the outer one finite
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(bounded) - bounded).clamp(max=MAX_K3)


_ESTIMATORS: dict[KLEstimator, Callable[[Tensor], Tensor]] = {"k1": neg, "abs": abs, "k2": _k2, "k3": _k3}


def divergence(
    logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: KLEstimator, *, straight_through: bool = False
) -> Tensor:
    """Return the estimate of KL(π‖π_ref) at each token, shape [N], with gradients for `logprobs_N`.

    k3 is at most 10 a token; beyond that its gradient is 0. With `straight_through` the gradient is
    that of k2.
    """
    log_ratio_N = reference_logprobs_N - logprobs_N
    estimate_N = _ESTIMATORS[estimator](log_ratio_N)
    if not straight_through:
        return estimate_N
    k2_N = _k2(log_ratio_N)
    return estimate_N.detach() + k2_N - k2_N.detach()


class KLController:
    """β of a KL penalty over the steps of a run: fixed, or adapted to a target divergence.

    Ziegler et al. 2019, arXiv:1909.08593, section 2.2: after n samples with divergence k, β is
    multiplied by 1 + clip(k/target − 1, −0.2, 0.2)·n/horizon.

    Args:
        config: `algorithm.kl`.
    """

    def __init__(self, config: KLConfig) -> None:
        self._adaptive = config.adaptive
        self.coefficient = config.coefficient

    def update(self, measured: float, samples: int) -> None:
        """Adapt β to the divergence that a step measured.

        Args:
            measured: Mean estimate over the step's trained tokens, in nats a token.
        """
        if self._adaptive is None:
            return
        error = min(max(measured / self._adaptive.target - 1, -ADAPTION_LIMIT), ADAPTION_LIMIT)
        self.coefficient *= 1 + error * samples / self._adaptive.horizon

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"coefficient": self.coefficient}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.coefficient = float(state["coefficient"])


def token_penalties(
    samples: Sequence[PolicySample],
    reference_logprobs: Sequence[FloatArray],
    *,
    estimator: KLEstimator,
    coefficient: float,
) -> list[FloatArray]:
    """Return β·k of every sampled token, one array [T] a sample, 0 elsewhere.

    The policy's log-probabilities are those that the inference engine reported when it sampled the tokens.

    Args:
        samples: `advantages.policy_samples(groups)`.
        reference_logprobs: The reference model's log-probabilities, one array [T] a sample.
        estimator: `algorithm.kl.estimator`.
        coefficient: `algorithm.kl.coefficient`, β.

    Raises:
        EngineError: The arrays do not fit the samples, or hold infinities or NaN.
    """
    check_logprobs(samples, reference_logprobs, "reference model")
    penalties = []
    for sample, reference_T in zip(samples, reference_logprobs, strict=True):
        log_ratio = (reference_T - sample.behaviour_logprobs)[sample.loss_mask].astype(np.float64)
        penalty_T = np.zeros(sample.token_ids.shape, np.float32)
        penalty_T[sample.loss_mask] = coefficient * _ESTIMATORS[estimator](torch.from_numpy(log_ratio)).numpy()
        penalties.append(penalty_T)
    return penalties


def check_logprobs(
    samples: Sequence[PolicySample], logprobs: Sequence[FloatArray], model: str, fix: str | None = None
) -> None:
    """Check that another model's log-probabilities, one array [T] a sample, fit the samples.

    Raises:
        EngineError: They do not; or they, or the inference engine's, hold infinities or NaN at sampled tokens.
    """
    if len(logprobs) != len(samples):
        raise EngineError(f"{len(logprobs)} arrays of the {model}'s log-probabilities for {len(samples)} samples")
    for index, (sample, logprobs_T) in enumerate(zip(samples, logprobs, strict=True)):
        of_sample = f"log-probabilities of sample {index} (group {sample.group_id!r})"
        if logprobs_T.shape != sample.token_ids.shape:
            raise EngineError(
                f"the {model}'s {of_sample} have shape {logprobs_T.shape}; {sample.token_ids.shape} was expected, "
                "one a token"
            )
        if not all(np.isfinite(array[sample.loss_mask]).all() for array in (logprobs_T, sample.behaviour_logprobs)):
            raise EngineError(
                f"the {of_sample} hold infinities or NaN; the {model} and the inference engine report finite ones "
                "for sampled tokens",
                fix=fix,
            )
