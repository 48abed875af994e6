"""Preference losses: how pairs, or samples that are desirable or not, move the log-probabilities of responses."""

from roll_like.algorithms.preference.base import (
    MismatchedResponses,
    PairConfig,
    PairedLoss,
    PairInputs,
    PairLosses,
    PreferenceLoss,
    UnpairedInputs,
    UnpairedLoss,
    UnpairedLosses,
    response_sums,
)
from roll_like.algorithms.preference.objective import preference_objective
from roll_like.algorithms.preference.paired import (
    APODownLoss,
    APOZeroLoss,
    DPOLoss,
    HingeLoss,
    IPOLoss,
    RobustLoss,
    SPPOLoss,
)
from roll_like.algorithms.preference.reference_free import CPOLoss, ORPOLoss, SimPOLoss
from roll_like.algorithms.preference.unpaired import KTOLoss

__all__ = [
    "APODownLoss",
    "APOZeroLoss",
    "CPOLoss",
    "DPOLoss",
    "HingeLoss",
    "IPOLoss",
    "KTOLoss",
    "MismatchedResponses",
    "ORPOLoss",
    "PairConfig",
    "PairInputs",
    "PairLosses",
    "PairedLoss",
    "PreferenceLoss",
    "RobustLoss",
    "SPPOLoss",
    "SimPOLoss",
    "UnpairedInputs",
    "UnpairedLoss",
    "UnpairedLosses",
    "preference_objective",
    "response_sums",
]
