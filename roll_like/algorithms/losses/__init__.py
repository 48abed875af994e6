"""Policy losses: how advantages move log-probabilities."""

from roll_like.algorithms.losses import clipped, covariance, gradient
from roll_like.algorithms.losses.base import BatchTokens, LossInputs, PolicyLoss, TokenLosses, policy_ratio
from roll_like.algorithms.losses.clipped import clipped_surrogate
from roll_like.algorithms.losses.objective import policy_objective

__all__ = [
    "BatchTokens",
    "LossInputs",
    "PolicyLoss",
    "TokenLosses",
    "clipped",
    "clipped_surrogate",
    "covariance",
    "gradient",
    "policy_objective",
    "policy_ratio",
]
