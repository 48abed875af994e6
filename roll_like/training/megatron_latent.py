"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) on a rank's heads, over joined rows.

Megatron-Core has it, too. Without Transformer Engine its tensor ranks would divide the projection that makes the part
of keys which all heads share, and no rank would get the gradient that the heads of other ranks have of that part
(github.com/NVIDIA/Megatron-LM/issues/1699). Here every tensor rank has the two narrow projections, and computes them
for its own tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn


class LatentAttention(MegatronModule):  # type: ignore[misc]
    """The attention of one layer, as Megatron-Core's layers call it.

    Args:
        core: Makes what computes attention out of queries, keys and values.
        norm: Makes a norm of narrow states.
    """

    def __init__(
        self, model: Any, core: Any, norm: Any, *, config: Any, layer_number: int, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__(config=config)
        self._group = pg_collection.tp
        self._widths = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
        self._latent = model.kv_lora_rank
        self._in_turn = getattr(model, "rope_interleave", True)
        self.rotary_factor = 1.0
        hidden, heads = model.hidden_size, model.num_attention_heads
        plain, rotated, value = self._widths
        common = {"config": config, "bias": False, "init_method": config.init_method, "tp_group": self._group}
        divided = partial(ColumnParallelLinear, **common, gather_output=False)
        whole = partial(_whole, config)
        if model.q_lora_rank is None:
            self.linear_q_proj = divided(hidden, heads * (plain + rotated))
        else:
            self.linear_q_down_proj = whole(hidden, model.q_lora_rank)
            self.q_layernorm = norm(config, model.q_lora_rank)
            self.linear_q_up_proj = divided(model.q_lora_rank, heads * (plain + rotated))
        self.linear_kv_down_proj = whole(hidden, model.kv_lora_rank + rotated)
        self.kv_layernorm = norm(config, model.kv_lora_rank)
        self.linear_kv_up_proj = divided(model.kv_lora_rank, heads * (plain + value))
        self.core_attention = core(config=config, layer_number=layer_number)
        self.linear_proj = RowParallelLinear(
            heads * value, hidden, **common, input_is_parallel=True, skip_bias_add=True
        )

    def forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor, attention_bias: Any, **_: Any
    ) -> tuple[Tensor, None]:
        """Return what is added to the states of this rank's tokens, shape [T, 1, D].

        Args:
            hidden_states: Shape [T, 1, D], of some of the row's tokens where tensor ranks divide them.
            rotary_pos_emb: Angles of all tokens of the row, shape [T, 1, 1, R].
            attention_bias: What tokens may see (`LayerRows`).
        """
        if hasattr(self, "linear_q_proj"):
            query_T1X = self.linear_q_proj(hidden_states)[0]
        else:
            query_T1X = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))[0]
        latent_T1X, shared_T1R = self.linear_kv_down_proj(hidden_states).split([self._latent, self._widths[1]], -1)
        key_value_T1X = self.linear_kv_up_proj(self.kv_layernorm(latent_T1X))[0]
        if self.config.sequence_parallel:  # its gradient is the sum over the heads of all ranks
            shared_T1R = gather_from_sequence_parallel_region(shared_T1R, group=self._group)
        plain, rotated, value = self._widths
        query_T1HX, query_T1HR = query_T1X.unflatten(-1, (-1, plain + rotated)).split([plain, rotated], -1)
        key_T1HX, value_T1HE = key_value_T1X.unflatten(-1, (-1, plain + value)).split([plain, value], -1)
        key_T1HR = self._turned(shared_T1R[:, :, None], rotary_pos_emb).expand(-1, -1, key_T1HX.shape[2], -1)
        output_T1X: Tensor = self.core_attention(
            torch.cat([query_T1HX, self._turned(query_T1HR, rotary_pos_emb)], -1),
            torch.cat([key_T1HX, key_T1HR], -1),
            value_T1HE,
            attention_bias=attention_bias,
        )
        return self.linear_proj(output_T1X)[0], None

    def _turned(self, states_T1HR: Tensor, angles_T11R: Tensor) -> Tensor:
        """Return states turned by their positions' angles; a pair is two neighbours, or one of each half."""
        half_T11R = angles_T11R.chunk(2, -1)[0]
        cosine, sine = (
            (each * self.rotary_factor).to(states_T1HR.dtype) for each in (half_T11R.cos(), half_T11R.sin())
        )
        first, second = (states_T1HR[..., 0::2], states_T1HR[..., 1::2]) if self._in_turn else states_T1HR.chunk(2, -1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def _whole(config: Any, inputs: int, outputs: int) -> nn.Linear:
    """Return a projection that every tensor rank has; each computes some tokens, so their gradients are added up."""
    made = nn.Linear(inputs, outputs, bias=False, device=torch.cuda.current_device(), dtype=config.params_dtype)
    made.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return made
