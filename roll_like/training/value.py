"""The module of a critic: a language model's backbone that returns the value of the state before each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from roll_like.training.policy import branch_mask


class ValueHead(nn.Module):
    """A linear map from a hidden state to its value, computed in float32; every value is 0 to begin with.

    Args:
        width: Size of a hidden state, D.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """Return values, shape [N], float32."""
        values_N1 = nn.functional.linear(hidden_ND.float(), self.weight.float(), self.bias.float())
        return values_N1.squeeze(1)


class ValueModule(nn.Module):
    """A Hugging Face causal model without its language-model head, and a value head instead.

    Args:
        causal_lm: The model. Only its backbone is kept: what nothing computes with must not be in the
            optimizer. A tied embedding stays, as the backbone's own.
    """

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.backbone = causal_lm.base_model
        self.head = ValueHead(causal_lm.get_output_embeddings().in_features)

    def forward(self, token_ids_BL: Tensor, positions_BL: Tensor, branches_BL: Tensor, sources_N: Tensor) -> Tensor:
        """Return the value of the state at each flat index `sources_N` of [B·L], shape [N], float32."""
        hidden_BLD = self.backbone(
            input_ids=token_ids_BL,
            position_ids=positions_BL,
            attention_mask=branch_mask(branches_BL),
            use_cache=False,
        ).last_hidden_state
        values_N: Tensor = self.head(hidden_BLD.reshape(-1, hidden_BLD.shape[-1])[sources_N])
        return values_N
