"""Log-probabilities and entropies of tokens, without ever holding all logits.

A vocabulary of 50,000 and 4,000 tokens make 200 million logits; the model's weights are fewer. Here
the output projection, the softmax and their gradients run in blocks of tokens × vocabulary:

    logits_nv = f(hidden_n · weight_v + bias_v) / temperature
    logprob_n = logits_n[target_n] − logsumexp(logits_n)
    entropy_n = −Σ_v p_nv · log p_nv
    ∂/∂logits_nv = g_n·(δ_v,target − p_nv) − e_n·p_nv·(log p_nv + entropy_n)     for upstream g, e

f is the identity, but for models that scale or bound their logits (`LogitTransform`).

The backward pass computes blocks again from the hidden states. What is kept between the passes is at
most one block, the last: as large as the block that exists during the forward pass anyway, and where
one block holds the whole batch nothing is computed twice. With bounded logits none is kept, because
their slope does not follow from probabilities. On GPUs Triton kernels read a block once (`head_kernels.py`),
and the kept block holds products.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from roll_like.algorithms.blocks import Blocks, Cut
from roll_like.algorithms.divided import DividedVocabulary
from roll_like.errors import ConfigError, EngineError
from roll_like.types import PLAIN_LOGITS, LogitTransform


def token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    chunk_vocab: int,
    bias: Tensor | None = None,
    logits: LogitTransform = PLAIN_LOGITS,
    divided: DividedVocabulary | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target and the entropy at each position, in nats, shape [N].

    Products run in the dtype of `hidden_ND`, also where the weight's is narrower; sums and softmax in
    float32 (float64 for float64). Gradients flow to `hidden_ND`, `weight_VD` and `bias` from both
    results; those of the weight are summed over blocks in float32.

    Args:
        hidden_ND: Last hidden states, after the final norm.
        weight_VD: Output projection. With ZeRO-3 call this inside the module that owns it, so that
            its hooks gather the weight for the backward pass too.
        targets_N: The token that each position predicts, integers.
        temperature: The behaviour policy's; logits are divided by it, so that the results are those
            of the distribution that sampled.
        chunk_tokens: Rows of logits that exist at a time, at most.
        chunk_vocab: Columns of logits that exist at a time, at most.
        bias: Of the output projection, shape [V].
        divided: The ranks that divide the vocabulary; `weight_VD` and `bias` are then this rank's, all else is the same
            on each. Results and gradients of hidden states are those of the whole vocabulary.

    Raises:
        ConfigError: A setting is out of range.
        EngineError: A target is not in the vocabulary, or shapes do not fit.
    """
    cut = checked_cut(temperature, chunk_tokens, chunk_vocab, logits)
    require_fitting(hidden_ND, weight_VD, targets_N, bias, divided)
    if weight_VD.element_size() > hidden_ND.element_size():  # mixed precision: a master weight in float32
        weight_VD = weight_VD.to(hidden_ND.dtype)
    logprobs_N, entropy_N = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, bias, targets_N.long(), cut, divided
    )
    return logprobs_N, entropy_N


class EveryToken:
    """In the place of the tokens that sampling kept: asks a head for `token_certainties`."""

    def select(self, own_N: Tensor) -> EveryToken:
        """Return the same for some targets."""
        del own_N
        return self


@torch.no_grad()
def token_certainties(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    chunk_vocab: int,
    bias: Tensor | None = None,
    logits: LogitTransform = PLAIN_LOGITS,
    divided: DividedVocabulary | None = None,
) -> Tensor:
    """Return KL(U ‖ p) of the uniform distribution U over the vocabulary, in nats, shape [N]: at least 0.

    KL(U ‖ p) = −log V − (1/V) Σ_v log p_v = logsumexp(z) − mean(z) − log V of logits z (self-certainty, Kang et al.
    2025, arXiv:2502.18581). Without gradients; arguments as of `token_logprobs`.
    """
    cut = checked_cut(temperature, chunk_tokens, chunk_vocab, logits)
    if weight_VD.element_size() > hidden_ND.element_size():
        weight_VD = weight_VD.to(hidden_ND.dtype)
    blocks = Blocks(hidden_ND, weight_VD, bias, cut)
    logsumexp_N = hidden_ND.new_full((len(hidden_ND),), -math.inf, dtype=blocks.wide)
    sum_N = torch.zeros_like(logsumexp_N)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        for rows in blocks.tokens:
            logsumexp_C, sum_C = logsumexp_N[rows], sum_N[rows]
            for columns in blocks.vocabulary:
                for tile_rows, tile, _ in blocks.tiles(blocks.compute(rows, columns), columns):
                    logsumexp_C[tile_rows] = torch.logaddexp(logsumexp_C[tile_rows], tile.logsumexp(1))
                    sum_C[tile_rows] += tile.sum(1)
    size = len(weight_VD)
    if divided is not None:
        size = divided.size
        logsumexps, sums = zip(*divided.told(torch.stack([logsumexp_N, sum_N])), strict=True)
        logsumexp_N, sum_N = torch.stack(logsumexps).logsumexp(0), torch.stack(sums).sum(0)
    return logsumexp_N - sum_N / size - math.log(size)


def checked_cut(temperature: float, chunk_tokens: int, chunk_vocab: int, logits: LogitTransform) -> Cut:
    """Return how the work is cut into blocks; raise a ConfigError where the temperature is not positive."""
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ConfigError(
            f"log-probabilities at temperature {temperature} are not defined; a positive number was expected",
            fix="set rollout.temperature above 0 for training",
        )
    return Cut(temperature, chunk_tokens, chunk_vocab, keep=torch.is_grad_enabled(), logits=logits)


def require_fitting(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, bias: Tensor | None, divided: DividedVocabulary | None
) -> None:
    """Raise an EngineError where shapes do not fit, or a target is not in the vocabulary."""
    if hidden_ND.shape != (len(targets_N), weight_VD.shape[1]) or (bias is not None and len(bias) != len(weight_VD)):
        raise EngineError(
            f"hidden states of shape {tuple(hidden_ND.shape)}, targets {tuple(targets_N.shape)}, output projection "
            f"{tuple(weight_VD.shape)} and bias {None if bias is None else tuple(bias.shape)} do not fit; "
            "[N, D], [N], [V, D] and [V] were expected"
        )
    if len(targets_N):
        low, high = targets_N.aminmax()
        vocabulary = len(weight_VD) if divided is None else divided.size
        if int(low) < 0 or int(high) >= vocabulary:
            raise EngineError(
                f"token ids from {int(low)} to {int(high)} are to be predicted by a model with a vocabulary of "
                f"{vocabulary}",
                fix="use the tokenizer that belongs to model.path",
            )


class _TokenLogprobs(torch.autograd.Function):
    """`token_logprobs` with a backward pass of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias: Tensor | None,
        targets_N: Tensor,
        cut: Cut,
        divided: DividedVocabulary | None,
    ) -> tuple[Tensor, Tensor]:
        blocks = Blocks(hidden_ND, weight_VD, bias, cut)
        if divided is not None:  # what is kept would be probabilities within this rank's part
            cut, targets_N = replace(cut, keep=False), targets_N - divided.own.start
        keep = cut.keep and any(ctx.needs_input_grad) and len(blocks.vocabulary) == 1 and blocks.cap is None
        logsumexp_N, logprobs_N, entropy_N = (hidden_ND.new_zeros(len(hidden_ND), dtype=blocks.wide) for _ in range(3))
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for rows in blocks.tokens:
                last = rows.stop == len(hidden_ND)
                results = _forward_rows(blocks, rows, targets_N[rows], keep=keep and last)
                logsumexp_N[rows], logprobs_N[rows], entropy_N[rows] = results
        if divided is not None:
            parts = divided.told(torch.stack([logsumexp_N, logprobs_N, entropy_N]))
            logsumexp_N, logprobs_N, entropy_N = reduce(_merge, [(part[0], part[1], part[2]) for part in parts])
        ctx.save_for_backward(hidden_ND, weight_VD, bias, targets_N, logsumexp_N, logprobs_N, entropy_N)
        ctx.cut, ctx.divided = cut, divided
        ctx.kept = blocks.buffer if keep else None
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs_N, grad_entropy_N = grads
        if grad_logprobs_N is None and grad_entropy_N is None:
            return (None,) * 6
        hidden_ND, weight_VD, bias, *saved = ctx.saved_tensors
        # the kept block is overwritten: a second backward pass computes it again
        kept, ctx.kept = ctx.kept, None
        blocks = Blocks(hidden_ND, weight_VD, bias, ctx.cut, kept)
        # probabilities alone do not give log p exactly, which the entropy's gradient needs
        gradients = _Gradients(blocks, saved, grad_logprobs_N, grad_entropy_N)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            results = gradients.run(ctx.needs_input_grad[:3], kept=kept is not None and grad_entropy_N is None)
        if ctx.divided is not None and results[0] is not None:
            ctx.divided.sum(results[0])
        return *results, None, None, None


def _forward_rows(blocks: Blocks, rows: slice, targets_C: Tensor, *, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-sum-exp, log-probability and entropy of some tokens; `keep` leaves probabilities in the buffer."""
    parts = (_forward_block(blocks, rows, columns, targets_C, keep=keep) for columns in blocks.vocabulary)
    return reduce(_merge, parts)


def _forward_block(
    blocks: Blocks, rows: slice, columns: slice, targets_C: Tensor, *, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-sum-exp, log-probability (−∞ for a target elsewhere) and entropy within a part of the vocabulary."""
    block_CK = blocks.compute(rows, columns)
    if blocks.fused:
        from roll_like.algorithms.head_kernels import token_sums

        local_C = targets_C - columns.start
        return token_sums(block_CK, local_C, blocks.bias_of(columns), blocks.temperature, blocks.cap)
    logsumexp_C, logprobs_C, entropy_C = (block_CK.new_empty(len(block_CK), dtype=blocks.wide) for _ in range(3))
    local_C = (targets_C - columns.start).clamp(0, block_CK.shape[1] - 1)
    for tile_rows, tile, scratch in blocks.tiles(block_CK, columns):
        torch.log_softmax(tile, 1, out=scratch)
        maximum = tile.amax(1)
        logsumexp_C[tile_rows] = maximum - scratch.amax(1)
        logprobs_C[tile_rows] = scratch.gather(1, local_C[tile_rows, None]).squeeze(1)
        torch.softmax(scratch, 1, out=tile)  # of log p: faster than exp on CPU
        entropy_C[tile_rows] = -scratch.mul_(tile).sum(1)
        if keep:
            block_CK[tile_rows] = tile
    inside = (targets_C >= columns.start) & (targets_C < columns.stop)
    return logsumexp_C, torch.where(inside, logprobs_C, -math.inf), entropy_C


def _merge(left: tuple[Tensor, Tensor, Tensor], right: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Merge two parts of the vocabulary; the entropy is the mean of the parts' plus that of the choice between them."""
    logsumexp_C = torch.logaddexp(left[0], right[0])
    logprobs_C, entropy_C = torch.full_like(logsumexp_C, -math.inf), torch.zeros_like(logsumexp_C)
    for part_logsumexp_C, part_logprobs_C, part_entropy_C in (left, right):
        log_share_C = part_logsumexp_C - logsumexp_C
        logprobs_C = torch.maximum(logprobs_C, part_logprobs_C + log_share_C)  # one of the two holds the target
        entropy_C += log_share_C.exp() * (part_entropy_C - log_share_C)
    return logsumexp_C, logprobs_C, entropy_C


class _Gradients:
    """The backward pass.

    Without an entropy gradient a row of ∂/∂logits is (−g_n/temperature)·(p_nv − δ_v,target): the block
    holds p − δ, and the factor scales rows of the small [N, D] matrices on either side of the product.
    """

    def __init__(
        self, blocks: Blocks, saved: list[Tensor], grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> None:
        self.blocks = blocks
        self.targets_N, self.logsumexp_N, self.logprobs_N, self.entropy_N = saved
        self.grad_logprobs_N = torch.zeros_like(self.logprobs_N) if grad_logprobs_N is None else grad_logprobs_N
        self.grad_entropy_N = grad_entropy_N
        factor_N = self.grad_logprobs_N if grad_entropy_N is None else torch.ones_like(self.logprobs_N)
        self.scale_N1 = -factor_N[:, None] / blocks.temperature

    def run(self, needed: tuple[bool, bool, bool], *, kept: bool) -> list[Tensor | None]:
        """Return gradients of hidden states, weight and bias, or None where not needed."""
        blocks, (needs_hidden, needs_weight, needs_bias) = self.blocks, needed
        hidden_ND, weight_VD, bias = blocks.hidden_ND, blocks.weight_VD, blocks.bias
        once = len(blocks.tokens) == 1
        grad_hidden_ND = torch.zeros_like(hidden_ND) if needs_hidden else None
        grad_weight_VD = None
        if needs_weight:  # written once, or summed up in float32
            grad_weight_VD = torch.empty_like(weight_VD) if once else torch.zeros_like(weight_VD, dtype=blocks.wide)
        grad_bias_V = bias.new_zeros(bias.shape, dtype=blocks.wide) if needs_bias and bias is not None else None
        # the last tokens first: their block may be in the buffer
        for rows in reversed(blocks.tokens):
            scale_C1 = self.scale_N1[rows]
            scaled_CD = (hidden_ND[rows] * scale_C1).to(hidden_ND.dtype)
            sum_CD = hidden_ND.new_zeros(scaled_CD.shape, dtype=blocks.wide)
            for columns in blocks.vocabulary:
                block_CK = self._kept(rows, columns) if kept else self._recomputed(rows, columns)
                if needs_hidden:
                    sum_CD += block_CK @ blocks.weight(columns)
                if grad_weight_VD is not None and once and weight_VD.dtype == block_CK.dtype:
                    torch.mm(block_CK.t(), scaled_CD, out=grad_weight_VD[columns])
                elif grad_weight_VD is not None and once:
                    grad_weight_VD[columns] = block_CK.t() @ scaled_CD
                elif grad_weight_VD is not None:
                    blocks.add(grad_weight_VD[columns], block_CK.t() @ scaled_CD)
                if grad_bias_V is not None:
                    grad_bias_V[columns] += (block_CK.t() @ scale_C1.to(block_CK.dtype)).flatten()
            kept = False
            if grad_hidden_ND is not None:
                grad_hidden_ND[rows] = (sum_CD * scale_C1).to(hidden_ND.dtype)
        return [
            grad_hidden_ND,
            None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype),
            None if grad_bias_V is None or bias is None else grad_bias_V.to(bias.dtype),
        ]

    def _kept(self, rows: slice, columns: slice) -> Tensor:
        """Turn what the forward pass left in the buffer, probabilities or products, into p − δ, shape [C, K]."""
        block_CK = self.blocks.view(rows, columns)
        if self.blocks.fused:
            return self._fused(block_CK, rows, columns)
        minus_rest_C = torch.expm1(self.logprobs_N[rows])
        # not scatter_, which copies the whole block on CPU
        at_C = torch.arange(len(block_CK), device=block_CK.device)
        block_CK[at_C, self.targets_N[rows]] = minus_rest_C.to(block_CK.dtype)
        return block_CK

    def _recomputed(self, rows: slice, columns: slice) -> Tensor:
        """Compute the block again and turn it into the gradient's rows, shape [C, K]."""
        block_CK = self.blocks.compute(rows, columns)
        if self.blocks.fused:
            return self._fused(block_CK, rows, columns)
        local_C1 = self.targets_N[rows, None] - columns.start
        inside_C1 = (local_C1 >= 0) & (local_C1 < block_CK.shape[1])
        local_C1 = local_C1.clamp(0, block_CK.shape[1] - 1)
        # exact where the policy is nearly certain, where p − 1 would round to 0
        minus_rest_C1 = torch.expm1(self.logprobs_N[rows, None])
        for tile_rows, tile, scratch in self.blocks.tiles(block_CK, columns):
            slope = self.blocks.slope(tile)
            tile.sub_(self.logsumexp_N[rows][tile_rows, None])
            if self.grad_entropy_N is not None:
                scratch.copy_(tile).add_(self.entropy_N[rows][tile_rows, None])
            tile.exp_()
            if self.grad_entropy_N is not None:
                scratch.mul_(tile).mul_(self.grad_entropy_N[rows][tile_rows, None])
            at = local_C1[tile_rows]
            present = tile.gather(1, at)
            tile.scatter_(1, at, torch.where(inside_C1[tile_rows], minus_rest_C1[tile_rows], present))
            if self.grad_entropy_N is not None:
                tile.mul_(self.grad_logprobs_N[rows][tile_rows, None]).add_(scratch)
            if slope is not None:
                tile.mul_(slope)
            block_CK[tile_rows] = tile
        return block_CK

    def _fused(self, products_CK: Tensor, rows: slice, columns: slice) -> Tensor:
        """Turn products into the gradient's rows where they are, shape [C, K]."""
        from roll_like.algorithms.head_kernels import products_to_gradient

        sums = (self.logsumexp_N[rows], self.logprobs_N[rows], self.entropy_N[rows])
        grads = None if self.grad_entropy_N is None else (self.grad_logprobs_N[rows], self.grad_entropy_N[rows])
        local_C = self.targets_N[rows] - columns.start
        blocks = self.blocks
        products_to_gradient(products_CK, local_C, blocks.bias_of(columns), blocks.temperature, blocks.cap, sums, grads)
        return products_CK
