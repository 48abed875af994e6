"""The tokens of a whole optimizer batch on every rank, for losses that need statistics of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from roll_like.algorithms.losses import BatchTokens
from roll_like.training.layout import PolicyBatch


def tokens_of_all_ranks(
    batches: Sequence[PolicyBatch], logprobs: Sequence[Tensor], old_logprobs: Sequence[Tensor]
) -> BatchTokens:
    """Return every token with a weight of one optimizer step: this rank's micro-batches and all other ranks'.

    Every rank must call it at the same time; all get the same tokens in the same order.

    Args:
        batches: This rank's micro-batches.
        logprobs: Of the policy being trained, shape [N] for each micro-batch.
        old_logprobs: Of the policy that ratios compare with, likewise.
    """
    columns = [
        torch.stack([current, old, *(torch.from_numpy(array).to(current) for array in (batch.advantages, batch.draws))])
        for batch, current, old in zip(batches, logprobs, old_logprobs, strict=True)
    ]
    counted = torch.cat([torch.from_numpy(batch.weights != 0) for batch in batches])
    mine_4N = torch.cat(columns, dim=1)
    logprobs_N, old_N, advantages_N, draws_N = gather_columns(mine_4N[:, counted.to(mine_4N.device)])
    return BatchTokens(logprobs_N=logprobs_N, old_logprobs_N=old_N, advantages_N=advantages_N, draws_N=draws_N)


def gather_columns(mine_KN: Tensor) -> Tensor:
    """Return the columns of all ranks side by side, by rank; each rank may have another number of them."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return mine_KN
    ranks = torch.distributed.get_world_size()
    count = torch.tensor([mine_KN.shape[1]], device=mine_KN.device)
    counts = [torch.zeros_like(count) for _ in range(ranks)]
    torch.distributed.all_gather(counts, count)
    widths = [int(each) for each in counts]
    # collectives move equal shapes: fill up to the widest and cut again
    padded = mine_KN.new_zeros(len(mine_KN), max(widths))
    padded[:, : mine_KN.shape[1]] = mine_KN
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    torch.distributed.all_gather(parts, padded)
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
