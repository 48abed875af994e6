"""Dense attention equals torch's, values and gradients, and leaves to torch what it is not for."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention

from roll_like.training.attention import MAX_DENSE_TOKENS, attention_forward
from roll_like.training.segments import segment_mask

MASK = segment_mask(torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, -1, -1]]))
SHAPES = [(6, 2), (4, 4), (3, 1)]


def leaves(heads: int, groups: int, dtype: torch.dtype, length: int = 7) -> list[torch.Tensor]:
    """Queries, keys and values as models make them: [B, L, heads, D], seen as [B, heads, L, D]."""
    torch.manual_seed(0)
    widths = (heads, 8), (groups, 8), (groups, 5)
    return [
        torch.randn(2, length, count, width, dtype=dtype).transpose(1, 2).requires_grad_() for count, width in widths
    ]


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """The definition, head by head."""
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~MASK, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize(("heads", "groups"), SHAPES)
def test_values_and_gradients_equal_the_definition(heads: int, groups: int) -> None:
    tensors = leaves(heads, groups, torch.float32)
    ours, weights = attention_forward(Module(), *tensors, MASK, scaling=0.3)
    theirs = plain(*tensors, 0.3)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    assert weights is None
    upstream = torch.randn_like(ours)
    for mine, expected in zip(
        torch.autograd.grad(ours, tensors, upstream), torch.autograd.grad(theirs, tensors, upstream), strict=True
    ):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-4)


def test_the_scale_is_that_of_the_head_width_where_none_is_given() -> None:
    tensors = leaves(6, 2, torch.float32)
    torch.testing.assert_close(attention_forward(Module(), *tensors, MASK)[0], plain(*tensors, 8**-0.5))


def test_scores_are_not_rounded_to_low_precision() -> None:
    query, key, value = (tensor.detach() for tensor in leaves(6, 6, torch.bfloat16))
    # a part that all keys share changes no weight, but makes scores so large that bfloat16 would lose the rest
    key = key + 16
    truth = plain(query.double(), key.double(), value.double(), 1.0)
    ours = attention_forward(Module(), query, key, value, MASK, scaling=1.0)[0]
    assert (ours - truth).abs().max() < 0.02


def test_what_dense_attention_is_not_for_goes_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> torch.Tensor:
        raise AssertionError("dense attention was called")

    monkeypatch.setattr("roll_like.training.attention.dense_attention", refuse)
    tensors = leaves(4, 4, torch.float32)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    expected = scaled_dot_product_attention(*tensors, attn_mask=causal).transpose(1, 2)
    without_mask, _ = attention_forward(Module(), *tensors, None, is_causal=True)
    torch.testing.assert_close(without_mask, expected)
    additive = torch.zeros(causal.shape).masked_fill(~causal, float("-inf"))
    torch.testing.assert_close(attention_forward(Module(), *tensors, additive)[0], expected)
    long = [tensor.detach() for tensor in leaves(1, 1, torch.float32, MAX_DENSE_TOKENS + 1)]
    mask = torch.ones(1, 1, MAX_DENSE_TOKENS + 1, MAX_DENSE_TOKENS + 1, dtype=torch.bool).tril()
    attention_forward(Module(), *long, mask)
