"""The student's side, from hidden states and output projection, without ever holding all logits.

With a teacher's top-k, a token's loss depends on K + 1 numbers of the student: its logits at those tokens, and the
log-sum-exp of all others. `chosen_logits` computes them, and their gradients, in blocks of tokens × vocabulary. With a
teacher's whole distribution a loss reads whole rows: `full_divergence` works in blocks of as many whole rows as have
the elements of such a block.

Both backward passes compute their blocks again from the hidden states. Each row of ∂/∂logits is made from the
upstream gradients divided by the largest of the row; that factor scales rows of the small [N, D] matrices instead, and
the largest of all rows the sums, so that half precision does not lose weights like 1/N.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from roll_like.algorithms.blocks import Blocks, Cut
from roll_like.algorithms.distillation.base import DistillationLoss, Outcomes
from roll_like.algorithms.distillation.divergences import kl
from roll_like.algorithms.distillation.teacher import TeacherHead
from roll_like.algorithms.divided import DividedVocabulary

#: Tensors of a tile's size that a divergence and its gradient make.
TEMPORARIES = 12


class ChosenLogits(torch.autograd.Function):
    """Logits at chosen tokens and what is needed of all others; gradients for hidden states, weight and bias.

    Returns (chosen_NK, rest_N, logprob_N, best_N): logits/T at `ids_NK`; the log-sum-exp of logits/T of all other
    tokens, −∞ where there are none; the log-probability at temperature 1 of `targets_N`, NaN where None; and the most
    likely token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias: Tensor | None,
        ids_NK: Tensor,
        targets_N: Tensor | None,
        cut: Cut,
        divided: DividedVocabulary | None,
    ) -> tuple[Tensor, ...]:
        """Stream over the vocabulary; `cut` says in what blocks, and T."""
        plain = Cut(1.0, cut.chunk_tokens, cut.chunk_vocab, logits=cut.logits)
        blocks = Blocks(hidden_ND, weight_VD, bias, plain, temporaries=2)
        count, temperature = len(hidden_ND), cut.temperature
        first = 0 if divided is None else divided.own.start
        ids_NK, targets_N = ids_NK - first, None if targets_N is None else targets_N - first
        chosen_NK = hidden_ND.new_zeros(ids_NK.shape, dtype=blocks.wide)
        rest_N, total_N, top_N = (hidden_ND.new_full((count,), -math.inf, dtype=blocks.wide) for _ in range(3))
        target_N = hidden_ND.new_full((count,), math.nan if targets_N is None else 0.0, dtype=blocks.wide)
        best_N = torch.zeros(count, dtype=torch.int64, device=hidden_ND.device)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for rows, columns, tile, scratch in _tiles(blocks):
                chosen = _Place(ids_NK[rows], columns)
                largest, place = tile.max(1)
                best_N[rows] = torch.where(largest > top_N[rows], place + columns.start, best_N[rows])
                top_N[rows] = torch.maximum(largest, top_N[rows])
                if targets_N is not None:
                    total_N[rows] = torch.logaddexp(total_N[rows], tile.logsumexp(1))
                    target_N[rows] += _Place(targets_N[rows, None], columns).read(tile).squeeze(1)
                chosen_NK[rows] += chosen.read(tile) / temperature
                others = chosen.without(torch.div(tile, temperature, out=scratch))
                rest_N[rows] = torch.logaddexp(rest_N[rows], others.logsumexp(1))
        best_N += first
        if divided is not None:
            divided.sum(chosen_NK)
            divided.sum(target_N)
            parts_SFN = torch.stack(divided.told(torch.stack([rest_N, total_N, top_N])))
            rest_N, total_N = parts_SFN[:, :2].logsumexp(0)
            best_SN = torch.stack(divided.told(best_N))
            best_N = best_SN.gather(0, parts_SFN[:, 2].argmax(0, keepdim=True)).squeeze(0)
        ctx.save_for_backward(hidden_ND, weight_VD, bias, ids_NK, targets_N, rest_N, total_N)
        ctx.temperature, ctx.plain, ctx.divided = temperature, plain, divided
        ctx.mark_non_differentiable(best_N)
        ctx.set_materialize_grads(False)
        return chosen_NK, rest_N, target_N - total_N, best_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Stream again: a softmax over the others, one over all, and single entries."""
        hidden_ND, weight_VD, bias, ids_NK, targets_N, rest_N, total_N = ctx.saved_tensors
        present = [grad if grad.ndim == 2 else grad[:, None] for grad in grads[:3] if grad is not None]
        if not present:
            return (None,) * 7
        largest_N = torch.cat(present, 1).abs().amax(1)
        sums = HeadGradients(Blocks(hidden_ND, weight_VD, bias, ctx.plain, temporaries=2), largest_N, ctx)
        # where everything is chosen there is no rest, and its −∞ must not meet the −∞ of a chosen token
        finite_rest_N = torch.where(rest_N == -math.inf, 0.0, rest_N)
        chosen_NK, others_N, hard_N = (None if grad is None else sums.scaled(grad) for grad in grads[:3])
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for rows, columns, block_CK in sums.blocks_again():
                for part, tile, scratch in sums.blocks.tiles(block_CK, columns):
                    at = slice(rows.start + part.start, rows.start + part.stop)
                    gradient, places = scratch.zero_(), _Place(ids_NK[at], columns)
                    slope = sums.blocks.slope(tile)
                    if others_N is not None:
                        logits = places.without(torch.div(tile, ctx.temperature, out=scratch))
                        gradient = logits.sub_(finite_rest_N[at, None]).exp_().mul_(others_N[at, None])
                    if chosen_NK is not None:
                        places.add(gradient, chosen_NK[at])
                    gradient.div_(ctx.temperature)
                    if hard_N is not None:
                        gradient.addcmul_(tile.sub_(total_N[at, None]).exp_(), -hard_N[at, None])
                        _Place(targets_N[at, None], columns).add(gradient, hard_N[at, None])
                    if slope is not None:
                        gradient.mul_(slope)
                    block_CK[part] = gradient
                sums.add(rows, columns, block_CK)
        return *sums.results(ctx.divided), None, None, None, None


class FullDivergence(torch.autograd.Function):
    """Divergence and log-probability of each token from whole rows of both models' logits, some rows at a time.

    Returns (divergence_N, logprob_N, figures_FN, best_2N): the log-probability is that of `targets_N` at temperature 1,
    NaN where None; figures are the forward KL and the teacher's entropy, `best` the most likely token of student and
    teacher, without gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias: Tensor | None,
        targets_N: Tensor | None,
        teacher: TeacherHead,
        loss: DistillationLoss,
        cut: Cut,
        divided: DividedVocabulary | None,
    ) -> tuple[Tensor, ...]:
        """Go through the tokens; `cut` says how many logits exist at a time, and T."""
        count = len(hidden_ND)
        vocabulary = len(weight_VD) if divided is None else divided.size
        rows = max(1, cut.chunk_tokens * min(cut.chunk_vocab, vocabulary) // vocabulary)
        whole = Cut(1.0, rows, vocabulary, logits=cut.logits)
        blocks = Blocks(hidden_ND, weight_VD, bias, whole, temporaries=TEMPORARIES, divided=divided)
        divergence_N, logprob_N = (hidden_ND.new_full((count,), math.nan, dtype=blocks.wide) for _ in range(2))
        figures_FN = hidden_ND.new_zeros(2, count, dtype=blocks.wide)
        best_2N = torch.zeros(2, count, dtype=torch.int64, device=hidden_ND.device)
        theirs = _TeacherRows(teacher, whole, blocks.wide)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for at, _, tile, _ in _tiles(blocks):
                teacher_RV = theirs.logprobs(at, cut.temperature)
                outcomes = Outcomes((tile / cut.temperature).log_softmax(-1), teacher_RV)
                divergence_N[at] = loss.divergence(outcomes)
                if targets_N is not None:
                    logprob_N[at] = tile.gather(1, targets_N[at, None]).squeeze(1) - tile.logsumexp(1)
                figures_FN[0, at] = kl(teacher_RV, outcomes.student_NM)
                figures_FN[1, at] = entropy(teacher_RV)
                best_2N[0, at], best_2N[1, at] = tile.argmax(-1), teacher_RV.argmax(-1)
        ctx.save_for_backward(hidden_ND, weight_VD, bias, targets_N)
        ctx.teacher, ctx.loss, ctx.whole, ctx.temperature = teacher, loss, whole, cut.temperature
        ctx.divided = divided
        ctx.mark_non_differentiable(figures_FN, best_2N)
        ctx.set_materialize_grads(False)
        return divergence_N, logprob_N, figures_FN, best_2N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Go through the tokens again; autograd computes the gradient of the divergence for one tile of logits."""
        present = [grad for grad in grads[:2] if grad is not None]
        if not present:
            return (None,) * 8
        hidden_ND, weight_VD, bias, targets_N = ctx.saved_tensors
        blocks = Blocks(hidden_ND, weight_VD, bias, ctx.whole, temporaries=TEMPORARIES, divided=ctx.divided)
        sums = HeadGradients(blocks, torch.stack(present).abs().amax(0), ctx)
        theirs = _TeacherRows(ctx.teacher, ctx.whole, blocks.wide)
        soft_N, hard_N = (None if grad is None else sums.scaled(grad) for grad in grads[:2])
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for rows, columns, block_CV in sums.blocks_again():
                for part, tile, _ in blocks.tiles(block_CV, columns):
                    at = slice(rows.start + part.start, rows.start + part.stop)
                    gradient_RV = torch.zeros_like(tile)
                    if soft_N is not None:
                        teacher_RV = theirs.logprobs(at, ctx.temperature)
                        gradient_RV += _slope(ctx.loss, tile, teacher_RV, ctx.temperature, soft_N[at])
                    if hard_N is not None:
                        gradient_RV.addcmul_(tile.softmax(-1), -hard_N[at, None])
                        gradient_RV.scatter_add_(1, targets_N[at, None], hard_N[at, None])
                    if (slope := blocks.slope(tile)) is not None:
                        gradient_RV.mul_(slope)
                    block_CV[part] = gradient_RV
                sums.add(rows, columns, block_CV)
        return *sums.results(ctx.divided), None, None, None, None, None


def _slope(
    loss: DistillationLoss, logits_RV: Tensor, teacher_RV: Tensor, temperature: float, upstream_R: Tensor
) -> Tensor:
    """Return the gradient of Σ upstream·divergence for the student's logits, shape [R, V]."""
    with torch.enable_grad():
        logits_RV = logits_RV.detach().requires_grad_()
        divergence_R = loss.divergence(Outcomes((logits_RV / temperature).log_softmax(-1), teacher_RV))
        return torch.autograd.grad(divergence_R, logits_RV, upstream_R)[0]


def entropy(logprobs_NM: Tensor) -> Tensor:
    """Return the entropy of each row in nats, shape [N], from log-probabilities that may be −∞."""
    return -(logprobs_NM.exp() * logprobs_NM.masked_fill(logprobs_NM == -math.inf, 0.0)).sum(-1)


def _tiles(blocks: Blocks) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yield (rows of the batch, columns, their logits, a scratch) for every tile of every block."""
    for rows in blocks.tokens:
        for columns in blocks.vocabulary:
            for part, tile, scratch in blocks.tiles(blocks.compute(rows, columns), columns):
                yield slice(rows.start + part.start, rows.start + part.stop), columns, tile, scratch


class _Place:
    """Where ids [R, K] lie in a part of the vocabulary."""

    def __init__(self, ids_RK: Tensor, columns: slice) -> None:
        local_RK = ids_RK - columns.start
        self.inside_RK = (local_RK >= 0) & (local_RK < columns.stop - columns.start)
        self.local_RK = local_RK.clamp(0, columns.stop - columns.start - 1)

    def read(self, tile: Tensor) -> Tensor:
        """Return the values there, 0 for ids elsewhere, shape [R, K]."""
        return tile.gather(1, self.local_RK).masked_fill(~self.inside_RK, 0.0)

    def without(self, tile: Tensor) -> Tensor:
        """Set the values there to −∞, in place."""
        # ids elsewhere share a column with others: +∞ is no minimum
        bound_RK = torch.where(self.inside_RK, -math.inf, math.inf).to(tile.dtype)
        return tile.scatter_reduce_(1, self.local_RK, bound_RK, "amin")

    def add(self, tile: Tensor, values_RK: Tensor) -> None:
        """Add values there, in place."""
        tile.scatter_add_(1, self.local_RK, values_RK.masked_fill(~self.inside_RK, 0.0))


class _TeacherRows:
    """Log-probabilities of the teacher for some tokens at a time, whole rows.

    Products are computed a block at a time, of the rows that the student's block has, and read tile by tile.
    """

    def __init__(self, teacher: TeacherHead, whole: Cut, wide: torch.dtype) -> None:
        self.teacher, self.wide, self.block = teacher, wide, slice(0, 0)
        weight_VE = teacher.weight_VE.to(teacher.hidden_NE.dtype)
        self.blocks = Blocks(teacher.hidden_NE, weight_VE, None, whole, temporaries=TEMPORARIES)
        self.logits_CV = self.blocks.buffer

    def logprobs(self, rows: slice, temperature: float) -> Tensor:
        """Return log q at the temperature of rows that lie within one of the student's blocks, shape [R, V]."""
        return (self._logits(rows) / temperature).log_softmax(-1)

    def _logits(self, rows: slice) -> Tensor:
        if not self.block.start <= rows.start < self.block.stop:
            self.block = next(block for block in self.blocks.tokens if block.start <= rows.start < block.stop)
            self.logits_CV = self.blocks.compute(self.block, slice(0, len(self.teacher.weight_VE)))
        logits_RV = self.logits_CV[rows.start - self.block.start : rows.stop - self.block.start]
        wide_RV = logits_RV.to(self.wide)
        return self.teacher.logits.of(wide_RV if self.teacher.bias is None else wide_RV + self.teacher.bias.detach())


class HeadGradients:
    """Sums up gradients of hidden states, weight and bias over blocks, in float32."""

    def __init__(self, blocks: Blocks, largest_N: Tensor, ctx: Any) -> None:
        self.blocks = blocks
        scale_N1 = largest_N[:, None].to(blocks.wide)
        self.row_N1 = scale_N1
        self.overall = scale_N1.amax() if len(scale_N1) else scale_N1.new_ones(())
        #: Of each row, relative to the largest.
        self.scale_N1 = torch.where(scale_N1 == 0, 0.0, scale_N1 / self.overall)
        hidden, weight, bias = ctx.needs_input_grad[:3]
        self.hidden_ND = torch.zeros_like(blocks.hidden_ND, dtype=blocks.wide) if hidden else None
        self.weight_VD = torch.zeros_like(blocks.weight_VD, dtype=blocks.wide) if weight else None
        self.bias_V = None
        if bias and blocks.bias is not None:
            self.bias_V = torch.zeros_like(blocks.bias, dtype=blocks.wide)

    def scaled(self, grad: Tensor) -> Tensor:
        """Return an upstream gradient [N] or [N, K] divided by its row's largest, 0 where that is 0."""
        scale = self.row_N1 if grad.ndim == 2 else self.row_N1.squeeze(1)
        return torch.where(scale == 0, 0.0, grad / torch.where(scale == 0, 1.0, scale))

    def blocks_again(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield (rows, columns, products) of every block; the products are to be overwritten."""
        for rows in self.blocks.tokens:
            for columns in self.blocks.vocabulary:
                yield rows, columns, self.blocks.compute(rows, columns)

    def add(self, rows: slice, columns: slice, gradient_CK: Tensor) -> None:
        """Add what a block of ∂/∂logits, up to the rows' scale, says of hidden states, weight and bias."""
        blocks, scale_C1 = self.blocks, self.scale_N1[rows]
        # rows without weight add nothing, not even a NaN
        gradient_CK.masked_fill_(scale_C1 == 0, 0.0)
        if blocks.divided is not None:  # whole rows, and this rank's columns of the weight
            gradient_CK, columns = gradient_CK[:, blocks.divided.own], slice(0, len(blocks.weight_VD))
        if self.hidden_ND is not None:
            self.hidden_ND[rows] += (gradient_CK @ blocks.weight_VD[columns]) * scale_C1
        if self.weight_VD is not None:
            scaled_CD = (blocks.hidden_ND[rows] * scale_C1).to(gradient_CK.dtype)
            blocks.add(self.weight_VD[columns], gradient_CK.t() @ scaled_CD)
        if self.bias_V is not None:
            self.bias_V[columns] += (gradient_CK.t() @ scale_C1.to(gradient_CK.dtype)).flatten()

    def results(self, divided: DividedVocabulary | None = None) -> list[Tensor | None]:
        """Return the three gradients in the dtypes of their tensors, None where not needed.

        That of hidden states is summed over the ranks that divide the vocabulary.

        What was added up is for final logits without their cap; products are divided by the blocks' temperature.
        """
        blocks = self.blocks
        if divided is not None and self.hidden_ND is not None:
            divided.sum(self.hidden_ND)
        totals = (self.hidden_ND, self.weight_VD, self.bias_V)
        likes = (blocks.hidden_ND, blocks.weight_VD, blocks.bias)
        return [
            None if total is None or like is None else total.mul_(self.overall / blocks.temperature).to(like.dtype)
            for total, like in zip(totals, likes, strict=True)
        ]
