"""KL divergence from a reference model, estimated on sampled tokens (Schulman 2020, joschu.net/blog/kl-approx.html).

With r = log π_ref − log π of a token that π sampled:

    k1 = −r                unbiased, may be negative, high variance
    k2 = r²/2              biased, positive; its gradient is that of the reverse KL
    k3 = exp(r) − 1 − r    unbiased, positive, low variance

A penalty goes to one of two places (`algorithm.kl.use`):

- `loss`: β·k is added to each token's loss and its gradient flows (`divergence`).
- `reward`: β·k is taken from the reward, as a constant, before advantages are estimated
  (`token_penalties`). The order of a step is then trajectories → reference log-probabilities →
  estimator: `reference.logprobs(policy_samples(groups))`, `token_penalties(...)`,
  `estimator.assign(groups, penalties)`. Estimators that compare one reward a sample subtract the sum
  over its tokens; REINFORCE++ subtracts each from its own token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from roll_like.errors import EngineError
from roll_like.types import FloatArray, PolicySample

KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]

#: exp of a larger log-ratio would overflow; far beyond `MAX_K3`.
MAX_LOG_RATIO = 20.0
#: Largest k3 of one token: without a bound, one token that the policy abandoned rules the batch.
MAX_K3 = 10.0


def _k1(log_ratio: Tensor) -> Tensor:
    return -log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    # expm1 keeps small divergences exact; the inner clamp keeps the gradient of the outer one finite
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(bounded) - bounded).clamp(max=MAX_K3)


_ESTIMATORS: dict[KLEstimator, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}


def divergence(logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: KLEstimator) -> Tensor:
    """Return the estimate of KL(π‖π_ref) at each token, shape [N], with gradients for `logprobs_N`.

    k3 is at most 10 a token; beyond that its gradient is 0.
    """
    return _ESTIMATORS[estimator](reference_logprobs_N - logprobs_N)


def token_penalties(
    samples: Sequence[PolicySample],
    reference_logprobs: Sequence[FloatArray],
    *,
    estimator: KLEstimator,
    coefficient: float,
) -> list[FloatArray]:
    """Return β·k of every sampled token, one array [T] a sample, 0 elsewhere.

    The policy's side is what the inference engine reported, the policy that sampled the tokens.

    Args:
        samples: `advantages.policy_samples(groups)`.
        reference_logprobs: The reference model's log-probabilities, one array [T] a sample.
        estimator: `algorithm.kl.estimator`.
        coefficient: `algorithm.kl.coefficient`, β.

    Raises:
        EngineError: The arrays do not fit the samples, or hold infinities or NaN.
    """
    if len(reference_logprobs) != len(samples):
        raise EngineError(f"{len(reference_logprobs)} arrays of reference log-probabilities for {len(samples)} samples")
    penalties = []
    for index, (sample, reference_T) in enumerate(zip(samples, reference_logprobs, strict=True)):
        if reference_T.shape != sample.token_ids.shape:
            raise EngineError(
                f"the reference log-probabilities of sample {index} (group {sample.group_id!r}) have shape "
                f"{reference_T.shape}; {sample.token_ids.shape} was expected, one a token"
            )
        log_ratio = (reference_T - sample.behaviour_logprobs)[sample.sampled].astype(np.float64)
        if not np.isfinite(log_ratio).all():
            raise EngineError(
                f"the log-probabilities of sample {index} (group {sample.group_id!r}) hold infinities or NaN; "
                "the reference model and the inference engine report finite ones for sampled tokens"
            )
        penalty_T = np.zeros(sample.token_ids.shape, np.float32)
        penalty_T[sample.sampled] = coefficient * _ESTIMATORS[estimator](torch.from_numpy(log_ratio)).numpy()
        penalties.append(penalty_T)
    return penalties
