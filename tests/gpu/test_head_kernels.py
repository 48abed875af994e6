"""The Triton kernels behind the output projection against float64, and against PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from roll_like.algorithms.blocks import Blocks, Cut
from roll_like.algorithms.logprobs import token_logprobs
from roll_like.types import LogitTransform

pytestmark = pytest.mark.gpu
#: Largest error over the largest value: rounding of products to 16 bit, or of float32.
BOUNDS = {torch.bfloat16: 0.02, torch.float16: 0.004, torch.float32: 2e-4}
TOKENS, WIDTH, VOCABULARY = 700, 256, 9001


def results(inputs: list[Tensor], targets_N: Tensor, logits: LogitTransform, *, chunks: int) -> list[Tensor]:
    """Return log-probabilities, entropies, and gradients of all inputs."""
    inputs = [each.detach().clone().requires_grad_() for each in inputs]
    hidden_ND, weight_VD, bias = inputs
    found = token_logprobs(
        hidden_ND,
        weight_VD,
        targets_N,
        temperature=0.7,
        chunk_tokens=TOKENS // chunks + 1,
        chunk_vocab=VOCABULARY // chunks + 1,
        bias=bias,
        logits=logits,
    )
    weights = torch.linspace(-1, 1, TOKENS, device=hidden_ND.device, dtype=found[0].dtype)
    ((weights * found[0]).sum() + 0.3 * (weights.flip(0) * found[1]).sum()).backward()
    gradients = [each.grad for each in inputs]
    assert all(each is not None for each in gradients)
    return [*(each.detach().double() for each in found), *(each.double() for each in gradients if each is not None)]


@pytest.mark.parametrize("cap", [None, 4.0])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_and_gradients_equal_float64(
    dtype: torch.dtype, chunks: int, cap: float | None, record_property: Callable[[str, object], None]
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    inputs = [torch.randn(shape, generator=generator, device="cuda").mul(0.3).to(dtype) for shape in shapes]
    targets_N = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator, device="cuda")
    logits = LogitTransform(cap=cap)
    assert Blocks(*inputs, Cut(1.0, 64, 64, logits=logits)).fused
    fused = results(inputs, targets_N, logits, chunks=chunks)
    exact = results([each.double() for each in inputs], targets_N, logits, chunks=1)
    errors = [float((one - two).abs().max() / two.abs().max()) for one, two in zip(fused, exact, strict=True)]
    record_property(f"head_error_{str(dtype)[6:]}_{chunks}_{cap}", round(max(errors), 5))
    assert max(errors) < BOUNDS[dtype], errors
