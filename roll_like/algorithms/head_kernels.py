"""What follows the output projection on GPUs, one pass over a block's logits each: Triton kernels of `logprobs.py`.

PyTorch's own operators read and write a block a dozen times in float32. Here the forward pass reads the products once
and keeps sums only, and the backward pass turns the products into a gradient where they are:

    m = max z,  s = Σ e^{z−m},  t = Σ (z−m)·e^{z−m}        summed online, rescaled when the maximum moves
    logsumexp = m + ln s,  logprob = z_target − m − ln s,  entropy = ln s − t/s
    gradient  g·(p − δ_target) + e·p·(z − logsumexp + entropy)   times the slope of bounded logits

Everything is computed in float32. Only what finds GPUs may import this file: elsewhere there is no Triton.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Logits that a program reads at a time.
FORWARD_COLUMNS, BACKWARD_COLUMNS = 4096, 2048


@triton.jit
def _final_logits(products, bias, at, inside, temperature, cap, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    z = tl.load(products + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    z = z / temperature
    if HAS_CAP:
        z = cap * (1 - 2 / (tl.exp(2 * z / cap) + 1))  # tanh
    return z


@triton.jit
def _forward(
    block,
    bias,
    targets,
    logsumexp,
    logprobs,
    entropy,
    columns,
    stride,
    temperature,
    cap,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    products = block + row * stride
    lane = tl.arange(0, COLUMNS)
    maximum = float("-inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, columns, COLUMNS):
        inside = start + lane < columns
        z = _final_logits(products, bias, start + lane, inside, temperature, cap, HAS_BIAS, HAS_CAP)
        z = tl.where(inside, z, float("-inf"))
        higher = tl.maximum(maximum, tl.max(z, 0))
        # of the sums so far; the first maximum has none, and −∞ less a number times 0 would be NaN
        moved = tl.where(total > 0, maximum - higher, 0.0)
        above = tl.where(inside, z - higher, 0.0)
        power = tl.where(inside, tl.exp(above), 0.0)
        weighted = tl.exp(moved) * (weighted + moved * total) + tl.sum(tl.where(power > 0, above * power, 0.0), 0)
        total = tl.exp(moved) * total + tl.sum(power, 0)
        maximum = higher
    target = tl.load(targets + row)
    there = (target >= 0) & (target < columns)
    chosen = _final_logits(products, bias, tl.where(there, target, 0), there, temperature, cap, HAS_BIAS, HAS_CAP)
    log_total = tl.log(total)
    tl.store(logsumexp + row, maximum + log_total)
    tl.store(logprobs + row, tl.where(there, chosen - maximum - log_total, float("-inf")))
    tl.store(entropy + row, log_total - weighted / total)


@triton.jit
def _backward(
    block,
    bias,
    targets,
    logsumexp,
    logprobs,
    entropy,
    grad_logprobs,
    grad_entropy,
    columns,
    stride,
    temperature,
    cap,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_GRADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    products = block + row * stride
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < columns
    z = _final_logits(products, bias, at, inside, temperature, cap, HAS_BIAS, HAS_CAP)
    log_p = z - tl.load(logsumexp + row)
    p = tl.exp(log_p)
    # exact where the policy is nearly certain, where p − 1 would round to 0
    x = tl.load(logprobs + row)
    series = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6)))))
    minus_rest = tl.where(x > -0.1, series, tl.exp(x) - 1)
    gradient = tl.where(at == tl.load(targets + row), minus_rest, p)
    if HAS_GRADS:
        gradient = gradient * tl.load(grad_logprobs + row)
        gradient += tl.load(grad_entropy + row) * p * (log_p + tl.load(entropy + row))
    if HAS_CAP:
        gradient = gradient * (1 - (z / cap) * (z / cap))
    tl.store(products + at, gradient.to(block.dtype.element_ty), mask=inside)


def token_sums(
    block_CK: Tensor, targets_C: Tensor, bias_K: Tensor | None, temperature: float, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-sum-exp, log-probability (−∞ for a target elsewhere) and entropy of a block's rows, in nats, float32.

    Args:
        block_CK: Products of hidden states and weights.
        targets_C: Column of each row's target; below 0 or from K on: it is in another block.
        bias_K: Added to products.
        temperature: What they are divided by then.
        cap: Bound of what comes out, by tanh; None: none.
    """
    rows, columns = block_CK.shape
    logsumexp_C, logprobs_C, entropy_C = (block_CK.new_empty(rows, dtype=torch.float32) for _ in range(3))
    _forward[(rows,)](
        block_CK,
        block_CK if bias_K is None else bias_K,
        targets_C,
        logsumexp_C,
        logprobs_C,
        entropy_C,
        columns,
        block_CK.stride(0),
        temperature,
        1.0 if cap is None else cap,
        HAS_BIAS=bias_K is not None,
        HAS_CAP=cap is not None,
        COLUMNS=FORWARD_COLUMNS,
        num_warps=8,
    )
    return logsumexp_C, logprobs_C, entropy_C


def products_to_gradient(
    block_CK: Tensor,
    targets_C: Tensor,
    bias_K: Tensor | None,
    temperature: float,
    cap: float | None,
    sums: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor] | None,
) -> None:
    """Overwrite products with the gradient of the final logits, times the slope of bounded ones.

    Args:
        block_CK: The products.
        targets_C: As `token_sums` takes them.
        bias_K: Likewise.
        temperature: Likewise.
        cap: Likewise.
        sums: Log-sum-exp, log-probability and entropy of the rows over the whole vocabulary.
        grads: Upstream gradients of log-probability and entropy; None: 1 and 0, and the sign of p − δ.
    """
    rows, columns = block_CK.shape
    # a gradient of a sum is one number, expanded
    grad_logprobs_C, grad_entropy_C = (each.contiguous() for each in (sums[:2] if grads is None else grads))
    _backward[(rows, -(-columns // BACKWARD_COLUMNS))](
        block_CK,
        block_CK if bias_K is None else bias_K,
        targets_C,
        *sums,
        grad_logprobs_C,
        grad_entropy_C,
        columns,
        block_CK.stride(0),
        temperature,
        1.0 if cap is None else cap,
        HAS_BIAS=bias_K is not None,
        HAS_CAP=cap is not None,
        HAS_GRADS=grads is not None,
        COLUMNS=BACKWARD_COLUMNS,
        num_warps=4,
    )
