"""Policy losses: how advantages move log-probabilities."""

from roll_like.algorithms.losses.base import BatchTokens, LossInputs, PolicyLoss, TokenLosses, policy_ratio
from roll_like.algorithms.losses.clipped import (
    CISPOLoss,
    DPPOKLLoss,
    DPPOTVLoss,
    GMPOLoss,
    GSPOLoss,
    PPOLoss,
    SAPOLoss,
)
from roll_like.algorithms.losses.covariance import ClipCovLoss, KLCovLoss
from roll_like.algorithms.losses.gradient import DROLoss, GPGLoss, KimiLoss, RAFTLoss, ReinforceLoss, TOPRLoss
from roll_like.algorithms.losses.objective import KLTerm, policy_objective

__all__ = [
    "BatchTokens",
    "CISPOLoss",
    "ClipCovLoss",
    "DPPOKLLoss",
    "DPPOTVLoss",
    "DROLoss",
    "GMPOLoss",
    "GPGLoss",
    "GSPOLoss",
    "KLCovLoss",
    "KLTerm",
    "KimiLoss",
    "LossInputs",
    "PPOLoss",
    "PolicyLoss",
    "RAFTLoss",
    "ReinforceLoss",
    "SAPOLoss",
    "TOPRLoss",
    "TokenLosses",
    "policy_objective",
    "policy_ratio",
]
