"""The module that is trained: a causal language model that returns log-probabilities of chosen tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from roll_like.algorithms.logprobs import token_logprobs
from roll_like.training.backbone import run_backbone
from roll_like.training.layout import MicroBatch
from roll_like.training.segments import RowSegments


class TokenLogprobHead(nn.Module):
    """The language-model head, without ever holding all logits.

    It registers the head's own (perhaps tied) weight, so that ZeRO-3 gathers it around this module.
    """

    def __init__(self, head: nn.Linear, *, chunk_tokens: int, chunk_vocab: int) -> None:
        super().__init__()
        self.weight = head.weight
        self.bias = head.bias
        self.chunk_tokens = chunk_tokens
        self.chunk_vocab = chunk_vocab

    def forward(self, hidden_ND: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of each target, in nats, float32, shape [N]."""
        return token_logprobs(
            hidden_ND,
            self.weight,
            targets_N,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            chunk_vocab=self.chunk_vocab,
            bias=self.bias,
        )


class PolicyModule(nn.Module):
    """A Hugging Face causal model whose forward pass takes one micro-batch.

    Args:
        causal_lm: The model, with a `lm_head` and a backbone (`base_model`).
        chunk_tokens: Rows of logits that exist at a time.
        chunk_vocab: Columns of logits that exist at a time.
        head: What becomes of the hidden states before targets.
    """

    def __init__(
        self, causal_lm: Any, *, chunk_tokens: int, chunk_vocab: int, head: type[TokenLogprobHead] = TokenLogprobHead
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.head = head(causal_lm.get_output_embeddings(), chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab)

    def forward(
        self,
        token_ids_BL: Tensor,
        positions_BL: Tensor,
        segment_ids_BL: Tensor,
        sources_N: Tensor,
        targets_N: Tensor,
        temperature: float,
        *more: Any,
    ) -> Any:
        """Return what the head makes of the targets: (log-probabilities, entropies), shape [N], float32.

        Each target is predicted by the output at flat index `sources_N` of [B·L]. `more` goes to the head.
        """
        hidden_ND = self.hidden_states(token_ids_BL, positions_BL, segment_ids_BL, sources_N)
        return self.head(hidden_ND, targets_N, temperature, *more)

    def hidden_states(
        self, token_ids_BL: Tensor, positions_BL: Tensor, segment_ids_BL: Tensor, sources_N: Tensor
    ) -> Tensor:
        """Return the last hidden states before each target, after the final norm, shape [N, D]."""
        return hidden_states(self.causal_lm.base_model, token_ids_BL, positions_BL, segment_ids_BL, sources_N)


def hidden_states(
    backbone: Any, token_ids_BL: Tensor, positions_BL: Tensor, segment_ids_BL: Tensor, sources_N: Tensor
) -> Tensor:
    """Return a backbone's last hidden states, after the final norm, at flat indices `sources_N` of [B·L], [N, D]."""
    return run_backbone(backbone, token_ids_BL, RowSegments(segment_ids_BL, positions_BL), sources_N)


def tensors_of(batch: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the forward pass's index tensors on a device."""
    arrays = (batch.token_ids_BL, batch.positions_BL, batch.segment_ids_BL, batch.sources, batch.targets)
    tokens, positions, segments, sources, targets = (
        torch.from_numpy(array).long().to(device, non_blocking=True) for array in arrays
    )
    return tokens, positions, segments, sources, targets
