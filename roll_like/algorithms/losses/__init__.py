"""Policy losses: how advantages move log-probabilities.

A new one is a class in one of these files, or in a module of your own that a configuration names under `import:`;
`algorithm.loss: squared` selects it. `base.py` says what it is given:

    @LOSSES.register("squared")
    class Squared(PolicyLoss):
        class Config(PluginConfig):
            type: Literal["squared"] = "squared"

        def __call__(self, inputs: LossInputs) -> TokenLosses:
            return TokenLosses((inputs.logprobs_N - inputs.advantages_N).square(), {})
"""

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
