"""liger-kernel 0.8.5: the preference losses of `chunked_loss`, from hidden states and output projections.

Their arithmetic is PyTorch's, in float32; nothing of it needs a GPU or triton. `compiled=False` runs them as they are
written. Chunks of one pair, as by default, so that they also show that parts add up.
"""

from __future__ import annotations

from typing import Any

from oracle_imports import references
from torch import Tensor

with references():
    from liger_kernel.chunked_loss import (
        LigerFusedLinearCPOLoss,
        LigerFusedLinearDPOLoss,
        LigerFusedLinearKTOLoss,
        LigerFusedLinearORPOLoss,
        LigerFusedLinearSimPOLoss,
    )

FREE = {"cpo": LigerFusedLinearCPOLoss, "orpo": LigerFusedLinearORPOLoss, "simpo": LigerFusedLinearSimPOLoss}


def dpo_loss(case: Any, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and its gradients for hidden states [B, T, D] and the projection [V, D]."""
    hidden_BTD, weight_VD = _leaves(case)
    loss, _ = LigerFusedLinearDPOLoss(compiled=False, **settings)(
        weight_VD, hidden_BTD, case.ids_BT, ref_input=case.reference_hidden_BTD, ref_weight=case.reference_weight_VD
    )
    loss.backward()
    return loss, hidden_BTD.grad, weight_VD.grad


def free_loss(case: Any, name: str, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same of the losses without a reference."""
    hidden_BTD, weight_VD = _leaves(case)
    loss, _ = FREE[name](compiled=False, **settings)(weight_VD, hidden_BTD, case.ids_BT)
    loss.backward()
    return loss, hidden_BTD.grad, weight_VD.grad


def kto_loss(case: Any, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same of KTO, of samples."""
    hidden_BTD, weight_VD = _leaves(case)
    loss, _ = LigerFusedLinearKTOLoss(compiled=False, use_ref_model=True, **settings)(
        hidden_BTD,
        weight_VD,
        case.ids_BT,
        preference_labels=case.responses.desirable_B,
        ref_input=case.reference_hidden_BTD,
        ref_weight=case.reference_weight_VD,
        kl=weight_VD.new_tensor(case.baseline).detach(),
    )
    loss.backward()
    return loss, hidden_BTD.grad, weight_VD.grad


def _leaves(case: Any) -> tuple[Tensor, Tensor]:
    return case.hidden_BTD.clone().requires_grad_(), case.weight_VD.clone().requires_grad_()
