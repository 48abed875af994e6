"""The Triton kernels behind the output projection, in Triton's interpreter on CPU; `tests/gpu` has them on a GPU.

Triton comes with torch's builds for GPUs: `tests/integration/test_older_versions.py` runs these tests beside one.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from roll_like.algorithms.blocks import Blocks
from roll_like.algorithms.logprobs import token_logprobs
from roll_like.types import PLAIN_LOGITS, LogitTransform

if find_spec("triton") is None:
    pytest.skip("needs Triton, which comes with torch's builds for GPUs", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
# of the interpreter, which is NumPy: tanh by exp overflows to where it should
pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}") for text in ("Conversion of", "overflow", "All-NaN")]

TOKENS, WIDTH, VOCABULARY = 11, 6, 150


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from roll_like.algorithms import head_kernels

    monkeypatch.setattr(head_kernels, "FORWARD_COLUMNS", 32)
    monkeypatch.setattr(head_kernels, "BACKWARD_COLUMNS", 16)


def inputs_of(*, certain: bool) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    hidden_ND, weight_VD, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    targets_N = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    if certain:  # one token takes nearly all
        hidden_ND[0], targets_N[0] = 40 * weight_VD[7], 7
    return [hidden_ND, weight_VD, bias], targets_N


def results(
    inputs: list[Tensor], targets_N: Tensor, logits: LogitTransform, *, chunks: int, bias: bool, entropy: bool
) -> list[Tensor]:
    """Return log-probabilities, entropies, and gradients of all inputs."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    logprobs_N, entropy_N = token_logprobs(
        *leaves[:2],
        targets_N,
        temperature=0.7,
        chunk_tokens=-(-TOKENS // chunks),
        chunk_vocab=-(-VOCABULARY // chunks),
        bias=leaves[2] if bias else None,
        logits=logits,
    )
    loss = (torch.linspace(-1, 2, TOKENS) * logprobs_N).sum()
    if entropy:
        loss = loss + entropy_N.sum()  # whose gradient is one number, expanded
    loss.backward()
    return [logprobs_N.detach(), entropy_N.detach(), *(each.grad for each in leaves if each.grad is not None)]


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("logits", [PLAIN_LOGITS, LogitTransform(scale=0.5, cap=3.0)])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_they_compute_what_torch_does(
    chunks: int, logits: LogitTransform, bias: bool, entropy: bool, certain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, targets_N = inputs_of(certain=certain)
    doubles = [each.double() for each in inputs]
    exact = results(doubles, targets_N, logits, chunks=1, bias=bias, entropy=entropy)
    monkeypatch.setattr(Blocks, "fused", True)
    found = results(inputs, targets_N, logits, chunks=chunks, bias=bias, entropy=entropy)
    assert len(found) == len(exact) == 4 + bias
    for one, two in zip(found, exact, strict=True):
        bound = 2e-4 if certain else 2e-5  # its logits are in the hundreds
        torch.testing.assert_close(one.double(), two, atol=bound, rtol=bound)


def test_what_is_not_a_number_stays_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, targets_N = inputs_of(certain=False)
    inputs[0][3, 0] = float("nan")
    monkeypatch.setattr(Blocks, "fused", True)
    logprobs_N, entropy_N, *_ = results(inputs, targets_N, PLAIN_LOGITS, chunks=2, bias=False, entropy=True)
    assert logprobs_N.isnan().tolist() == entropy_N.isnan().tolist() == [index == 3 for index in range(TOKENS)]
