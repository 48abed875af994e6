"""liger-kernel 0.8.5: `chunked_loss.LigerFusedLinearGRPOLoss`, from hidden states and the output projection.

Its arithmetic is PyTorch's, in float32; nothing of it needs a GPU or triton. `compiled=False` runs it
as it is written.
"""

from __future__ import annotations

from typing import Any

from oracle_imports import references
from torch import Tensor

with references():
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss


def grpo_loss(case: Any, loss_type: str, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and its gradients for hidden states [B, T, D] and the projection [V, D]."""
    hidden_BTD, weight_VD = case.hidden_BTD.clone().requires_grad_(), case.weight_VD.clone().requires_grad_()
    batch = case.batch
    loss = LigerFusedLinearGRPOLoss(
        loss_type=loss_type,
        compiled=False,
        use_ref_model=settings.get("beta", 0.0) != 0,
        temperature=case.temperature,
        **{"beta": 0.0, **settings},
    )(
        hidden_BTD,
        weight_VD,
        case.ids_BT,
        batch.mask_BT.float(),
        batch.advantages_B.float(),
        ref_per_token_logps=batch.reference_BT.float(),
        old_per_token_logps=batch.old_BT.float(),
    )[0]
    loss.backward()
    return loss, hidden_BTD.grad, weight_VD.grad
