"""Log-probabilities among the tokens that sampling kept: `top_p`, `top_k` and `min_p` leave the others out.

An importance ratio compares two distributions over the same tokens. An engine that truncates samples from the policy
renormalised over the tokens S_n that it kept, and so does the trainer, with the very same S_n (DeepSeek-V3.2,
arXiv:2512.02556, section 3.1):

    logprob_n = z_n[target_n] − log Σ_{v ∈ S_n} exp z_nv        z: final logits over the temperature
    entropy_n = −Σ_{v ∈ S_n} p_nv · log p_nv
    ∂/∂z_nv   = g_n·(δ_v,target − p_nv) − e_n·p_nv·(log p_nv + entropy_n)     v ∈ S_n, for upstream g, e; 0 elsewhere

S_n is usually small. So no block of logits is computed: each kept token is one product of a hidden state and a row of
the output projection, for at most as many tokens at a time as a block of the whole vocabulary has elements. Only where
S_n are large, blocks are computed after all, and single logits taken from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from roll_like.algorithms.blocks import CPU_TILE, DEVICE_TILE, Cut, slices
from roll_like.algorithms.divided import DividedVocabulary
from roll_like.algorithms.logprobs import checked_cut, require_fitting, token_logprobs
from roll_like.errors import EngineError
from roll_like.types import PLAIN_LOGITS, LogitTransform

#: Logits of some hidden states are computed as blocks where more than one in so many of them is wanted: on a CPU a pair
#: takes about as long as this many logits of a block.
BLOCK_PAIRS = 256


@dataclass(frozen=True, eq=False, slots=True)
class KeptIds:
    """`KeptTokens` of a micro-batch's targets, on a device.

    Attributes:
        ids_M: The tokens, those of one target after those of the one before.
        counts_N: How many each target has; 0 for the whole vocabulary.
    """

    ids_M: Tensor
    counts_N: Tensor

    def select(self, own_N: Tensor) -> KeptIds:
        """Return those of some targets."""
        return KeptIds(self.ids_M[own_N.repeat_interleave(self.counts_N)], self.counts_N[own_N])


def kept_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    kept: KeptIds,
    *,
    temperature: float,
    chunk_tokens: int,
    chunk_vocab: int,
    bias: Tensor | None = None,
    logits: LogitTransform = PLAIN_LOGITS,
    divided: DividedVocabulary | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of each target among the tokens kept, as `token_logprobs` does among all.

    Raises:
        ConfigError: A setting is out of range.
        EngineError: A target or a kept token is not in the vocabulary, a target was not kept, or shapes do not fit.
    """
    cut = checked_cut(temperature, chunk_tokens, chunk_vocab, logits)
    require_fitting(hidden_ND, weight_VD, targets_N, bias, divided)
    _require_fitting_kept(kept, targets_N, len(weight_VD) if divided is None else divided.size)
    whole_N = kept.counts_N == 0
    if not bool(whole_N.any()):
        return _among_kept(hidden_ND, weight_VD, bias, targets_N, kept, cut, divided)
    everything = token_logprobs(
        hidden_ND[whole_N],
        weight_VD,
        targets_N[whole_N],
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        chunk_vocab=chunk_vocab,
        bias=bias,
        logits=logits,
        divided=divided,
    )
    if bool(whole_N.all()):
        return everything
    own_N = ~whole_N
    some = _among_kept(hidden_ND[own_N], weight_VD, bias, targets_N[own_N], kept.select(own_N), cut, divided)
    order_N = torch.cat([torch.where(whole_N)[0], torch.where(own_N)[0]]).argsort()
    logprobs_N, entropy_N = (torch.cat(both)[order_N] for both in zip(everything, some, strict=True))
    return logprobs_N, entropy_N


def _require_fitting_kept(kept: KeptIds, targets_N: Tensor, vocabulary: int) -> None:
    """Raise an EngineError where numbers do not fit, or a kept token is not in the vocabulary."""
    tokens = int(kept.counts_N.sum())
    if len(kept.counts_N) != len(targets_N) or tokens != len(kept.ids_M):
        raise EngineError(
            f"{len(targets_N)} targets came with what was kept for {len(kept.counts_N)}, {len(kept.ids_M)} tokens in "
            f"all; expected {tokens} tokens"
        )
    if not tokens:
        return
    low, high = (int(each) for each in kept.ids_M.aminmax())
    if low < 0 or high >= vocabulary:
        raise EngineError(
            f"the engine kept tokens from {low} to {high}, and the model has a vocabulary of {vocabulary}",
            fix="use the tokenizer that belongs to model.path",
        )


def _among_kept(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias: Tensor | None,
    targets_N: Tensor,
    kept: KeptIds,
    cut: Cut,
    divided: DividedVocabulary | None,
) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of targets of which each has kept tokens."""
    logprobs_N, entropy_N, times_N = _KeptLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, bias, kept.ids_M.long(), kept.counts_N.long(), targets_N.long(), cut, divided
    )
    if not bool((times_N == 1).all()):
        place = int((times_N != 1).nonzero()[0])
        raise EngineError(
            f"token {int(targets_N[place])} was sampled and is {int(times_N[place])} times among the tokens that the "
            "engine kept; once was expected"
        )
    return logprobs_N, entropy_N


class _KeptLogprobs(torch.autograd.Function):
    """Log-probabilities, entropies, and how often each target is among its kept tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias: Tensor | None,
        ids_M: Tensor,
        counts_N: Tensor,
        targets_N: Tensor,
        cut: Cut,
        divided: DividedVocabulary | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows_M = torch.arange(len(counts_N), device=ids_M.device).repeat_interleave(counts_N)
        target_M = ids_M == targets_N[rows_M]
        if divided is not None:
            own_M = (ids_M >= divided.own.start) & (ids_M < divided.own.stop)
            ids_M, rows_M, target_M = ids_M[own_M] - divided.own.start, rows_M[own_M], target_M[own_M]
        products = _Products(hidden_ND, weight_VD, bias, ids_M, rows_M, cut)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            logits_M = products.logits()
        sums = _sums(logits_M, rows_M, target_M, len(counts_N))
        parts = [sums] if divided is None else divided.told(sums)
        logsumexp_N, logprobs_N, entropy_N, times_N = _joined(torch.stack(list(parts)))
        ctx.save_for_backward(
            hidden_ND, weight_VD, bias, ids_M, rows_M, target_M, logits_M, logsumexp_N, logprobs_N, entropy_N
        )
        ctx.cut, ctx.divided = cut, divided
        ctx.mark_non_differentiable(times_N)
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N, times_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs_N, grad_entropy_N, _ = grads
        if grad_logprobs_N is None and grad_entropy_N is None:
            return (None,) * 8
        hidden_ND, weight_VD, bias, ids_M, rows_M, target_M, logits_M, *sums = ctx.saved_tensors
        logsumexp_N, logprobs_N, entropy_N = sums
        log_p_M = logits_M - logsumexp_N[rows_M]
        p_M = log_p_M.exp()
        gradient_M = torch.zeros_like(logits_M)
        if grad_logprobs_N is not None:
            # exact where the policy is nearly certain, where 1 − p would round to 0
            own_M = torch.where(target_M, -torch.expm1(logprobs_N)[rows_M], -p_M)
            gradient_M += grad_logprobs_N[rows_M] * own_M
        if grad_entropy_N is not None:
            gradient_M -= grad_entropy_N[rows_M] * p_M * (log_p_M + entropy_N[rows_M])
        products = _Products(hidden_ND, weight_VD, bias, ids_M, rows_M, ctx.cut)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            results = products.gradients(logits_M, gradient_M, ctx.needs_input_grad[:3])
        if ctx.divided is not None and results[0] is not None:
            ctx.divided.sum(results[0])
        return *results, None, None, None, None, None


class _Products:
    """Logits of single pairs of a hidden state and a token, and their gradients, some pairs at a time.

    Pairs come in the order of their hidden states. Where some states have many each, whole blocks are computed instead.
    """

    def __init__(
        self, hidden_ND: Tensor, weight_VD: Tensor, bias: Tensor | None, ids_M: Tensor, rows_M: Tensor, cut: Cut
    ) -> None:
        self.hidden_ND, self.weight_VD, self.bias, self.ids_M, self.rows_M = hidden_ND, weight_VD, bias, ids_M, rows_M
        self.wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        self.temperature = cut.temperature / cut.logits.scale
        self.cap = None if cut.logits.cap is None else cut.logits.cap / cut.temperature
        self._cut = cut
        tile = DEVICE_TILE if hidden_ND.is_cuda else CPU_TILE
        self._pairs = max(1, min(cut.chunk_tokens * cut.chunk_vocab, tile) // max(hidden_ND.shape[1], 1))

    def _parts(self) -> Iterator[tuple[slice, slice, bool]]:
        """Yield some hidden states, their pairs, and whether these are so many that blocks take less time."""
        parts = self._cut.tokens(len(self.hidden_ND))
        ends = torch.searchsorted(self.rows_M, self.rows_M.new_tensor([part.stop for part in parts])).tolist()
        for rows, first, end in zip(parts, [0, *ends], ends, strict=False):
            blocks = (end - first) * BLOCK_PAIRS > (rows.stop - rows.start) * len(self.weight_VD)
            yield rows, slice(first, end), blocks

    def _pieces(self, part: slice) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield some pairs: which, their hidden states and their rows of the output projection, wide, shape [P, D]."""
        for piece in slices(part.stop - part.start, self._pairs):
            pairs = slice(part.start + piece.start, part.start + piece.stop)
            weight_PD = self.weight_VD[self.ids_M[pairs]].to(self.hidden_ND.dtype)
            yield pairs, self.hidden_ND[self.rows_M[pairs]].to(self.wide), weight_PD.to(self.wide)

    def _blocks(self, rows: slice, part: slice) -> Iterator[tuple[slice, Tensor, tuple[Tensor, Tensor]]]:
        """Yield parts of the vocabulary: the pairs that are there, as indices, and their places in the block."""
        ids, places = self.ids_M[part], self.rows_M[part] - rows.start
        for columns in self._cut.vocabulary(len(self.weight_VD)):
            inside = torch.where((ids >= columns.start) & (ids < columns.stop))[0]
            yield columns, inside + part.start, (places[inside], ids[inside] - columns.start)

    def logits(self) -> Tensor:
        """Return final logits over the temperature, shape [M]; products are rounded as a matrix product's are."""
        logits_M = self.hidden_ND.new_empty(len(self.ids_M), dtype=self.wide)
        for rows, part, blocks in self._parts():
            if not blocks:
                for pairs, hidden_PD, weight_PD in self._pieces(part):
                    logits_M[pairs] = (hidden_PD.mul_(weight_PD)).sum(1).to(self.hidden_ND.dtype).to(self.wide)
                continue
            for columns, at, places in self._blocks(rows, part):
                weight_KD = self.weight_VD[columns].to(self.hidden_ND.dtype)
                logits_M[at] = (self.hidden_ND[rows] @ weight_KD.t())[places].to(self.wide)
        if self.bias is not None:
            logits_M += self.bias[self.ids_M]
        logits_M /= self.temperature
        return logits_M if self.cap is None else logits_M.div_(self.cap).tanh_().mul_(self.cap)

    def gradients(
        self, logits_M: Tensor, gradient_M: Tensor, needed: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return gradients of hidden states, weight and bias out of that of final logits; None where not needed."""
        if self.cap is not None:
            gradient_M = gradient_M * (1 - (logits_M / self.cap) ** 2)
        gradient_M = gradient_M / self.temperature
        inputs = (self.hidden_ND, self.weight_VD, self.bias)
        totals = [
            torch.zeros_like(each, dtype=self.wide) if need and each is not None else None
            for each, need in zip(inputs, needed, strict=True)
        ]
        grad_hidden_ND, grad_weight_VD, grad_bias_V = totals
        for rows, part, blocks in self._parts():
            if blocks:
                self._add_blocks(rows, part, gradient_M, grad_hidden_ND, grad_weight_VD)
                continue
            for pairs, hidden_PD, weight_PD in self._pieces(part):
                if grad_hidden_ND is not None:
                    _add_rows(grad_hidden_ND, self.rows_M[pairs], weight_PD.mul_(gradient_M[pairs, None]))
                if grad_weight_VD is not None:
                    _add_rows(grad_weight_VD, self.ids_M[pairs], hidden_PD.mul_(gradient_M[pairs, None]))
        if grad_bias_V is not None:
            grad_bias_V.index_add_(0, self.ids_M, gradient_M)
        found = [
            None if total is None or each is None else total.to(each.dtype)
            for total, each in zip(totals, inputs, strict=True)
        ]
        return found[0], found[1], found[2]

    def _add_blocks(
        self,
        rows: slice,
        part: slice,
        gradient_M: Tensor,
        grad_hidden_ND: Tensor | None,
        grad_weight_VD: Tensor | None,
    ) -> None:
        """Add the gradients of some hidden states' pairs; each row of a block is over its largest gradient."""
        hidden_CD, dtype = self.hidden_ND[rows], self.hidden_ND.dtype
        largest_C = gradient_M.new_zeros(len(hidden_CD))
        largest_C.scatter_reduce_(0, self.rows_M[part] - rows.start, gradient_M[part].abs(), "amax")
        scale_C1 = torch.where(largest_C > 0, largest_C, 1.0)[:, None]
        scaled_CD = (hidden_CD * scale_C1).to(dtype)
        for columns, at, places in self._blocks(rows, part):
            block_CK = hidden_CD.new_zeros(len(hidden_CD), columns.stop - columns.start)
            block_CK[places] = (gradient_M[at] / scale_C1[places[0], 0]).to(dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[rows] += (block_CK @ self.weight_VD[columns].to(dtype)) * scale_C1
            if grad_weight_VD is not None:
                grad_weight_VD[columns] += block_CK.t() @ scaled_CD


def _add_rows(total: Tensor, places_P: Tensor, rows_PD: Tensor) -> None:
    """Add rows at their places; on CPU twice as fast as `index_add_`."""
    total.scatter_add_(0, places_P[:, None].expand(-1, rows_PD.shape[1]), rows_PD)


def _sums(logits_M: Tensor, rows_M: Tensor, target_M: Tensor, rows: int) -> Tensor:
    """Return, of each row's logits: the maximum m, Σ e^{z−m}, Σ (z−m)·e^{z−m}, the target's z, and targets, [5, N]."""
    zeros_N = logits_M.new_zeros(rows)
    maximum_N = torch.full_like(zeros_N, -math.inf).scatter_reduce_(0, rows_M, logits_M, "amax")
    above_M = logits_M - maximum_N[rows_M]
    power_M = above_M.exp()
    target_rows = rows_M[target_M]
    return torch.stack(
        [
            maximum_N,
            zeros_N.index_add(0, rows_M, power_M),
            zeros_N.index_add(0, rows_M, above_M * power_M),
            zeros_N.index_add(0, target_rows, logits_M[target_M]),
            zeros_N.index_add(0, target_rows, torch.ones_like(logits_M[target_M])),
        ]
    )


def _joined(sums_S5N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-sum-exp, log-probability, entropy and how often the target is there, from ranks' sums."""
    maxima_SN, totals_SN, weighted_SN, targets_SN, times_SN = sums_S5N.unbind(1)
    maximum_N = maxima_SN.amax(0)
    # a rank without a row's tokens has −∞ there, and −∞ times 0 is no number
    moved_SN = torch.where(totals_SN > 0, maxima_SN - maximum_N, 0.0)
    total_N = (moved_SN.exp() * totals_SN).sum(0)
    weighted_N = (moved_SN.exp() * (weighted_SN + moved_SN * totals_SN)).sum(0)
    log_total_N = total_N.log()
    logprobs_N = targets_SN.sum(0) - maximum_N - log_total_N
    return maximum_N + log_total_N, logprobs_N, log_total_N - weighted_N / total_N, times_SN.sum(0)
