"""Log-probabilities among kept tokens: what all logits at once give, with −∞ for the tokens that were left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_samples import same_cases
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from vocabulary_threads import compare_with_ranks

from roll_like.algorithms import kept as module
from roll_like.algorithms.divided import DividedVocabulary
from roll_like.algorithms.kept import KeptIds, kept_logprobs
from roll_like.algorithms.logprobs import token_logprobs
from roll_like.data.kept import KeptOfSamples, joined_kept, kept_tokens, kept_within
from roll_like.errors import EngineError
from roll_like.types import KeptTokens, LogitTransform

VOCABULARY, WIDTH = 11, 5
CUT = {"chunk_tokens": 4, "chunk_vocab": 4}


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, mask: Tensor, logits: LogitTransform, t: float
) -> tuple[Tensor, Tensor]:
    products = torch.nn.functional.linear(hidden, weight, bias) * logits.scale
    if logits.cap is not None:
        products = torch.tanh(products / logits.cap) * logits.cap
    logprobs = (products / t).masked_fill(~mask, -math.inf).log_softmax(-1)
    terms = torch.where(mask, logprobs.exp() * logprobs.masked_fill(~mask, 0.0), 0.0)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -terms.sum(-1)


def drawn(tokens: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    """Hidden states, weight, bias, targets, the mask of what is kept, and the same as `KeptIds`; some keep all."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=dtype)
        for shape in ((tokens, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    )
    targets = torch.randint(VOCABULARY, (tokens,), generator=generator)
    mask = torch.rand(tokens, VOCABULARY, generator=generator) < torch.rand(tokens, 1, generator=generator)
    mask[torch.arange(tokens), targets] = True
    told = torch.rand(tokens, generator=generator) < 0.7
    counts = torch.where(told, mask.sum(1), 0)
    kept = KeptIds(torch.where(mask & told[:, None])[1].to(torch.int32), counts.to(torch.int32))
    return hidden, weight, bias, targets, mask | ~told[:, None], kept


def test_by_hand():
    # logits log 1, log 3, log 4 of which the last two are kept: 3/7, 4/7
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)], [math.log(4)]])
    kept = KeptIds(torch.tensor([1, 2]), torch.tensor([2]))
    for target, share in ((1, 3 / 7), (2, 4 / 7)):
        found = kept_logprobs(hidden, weight, torch.tensor([target]), kept, temperature=1.0, **CUT)
        assert found[0].item() == pytest.approx(math.log(share))
        assert found[1].item() == pytest.approx(-3 / 7 * math.log(3 / 7) - 4 / 7 * math.log(4 / 7))
    # at temperature ½ the logits double: 9/25, 16/25
    found = kept_logprobs(hidden, weight, torch.tensor([1]), kept, temperature=0.5, **CUT)
    assert found[0].item() == pytest.approx(math.log(9 / 25))
    # one token: certain
    alone = KeptIds(torch.tensor([2]), torch.tensor([1]))
    found = kept_logprobs(hidden, weight, torch.tensor([2]), alone, temperature=1.0, **CUT)
    assert (found[0].item(), found[1].item()) == (0.0, 0.0)


@pytest.mark.parametrize("block_pairs", [0, 4, 1 << 30], ids=["pairs", "both", "blocks"])
@pytest.mark.parametrize("entropy", [0.0, 0.6])
@same_cases
@given(
    tokens=st.integers(0, 7),
    chunk=st.sampled_from([(1, 1), (3, 2), (100, 100)]),
    with_bias=st.booleans(),
    cap=st.sampled_from([None, 2.0]),
    ranks=st.sampled_from([1, 2, 3, 4]),
    seed=st.integers(0, 999),
)
def test_values_and_gradients_are_those_of_all_logits_at_once(
    block_pairs, entropy, tokens, chunk, with_bias, cap, ranks, seed
):
    module.BLOCK_PAIRS, usual = block_pairs, module.BLOCK_PAIRS
    try:
        compare(entropy, tokens, chunk, with_bias, cap, ranks, seed)
    finally:
        module.BLOCK_PAIRS = usual


def compare(entropy, tokens, chunk, with_bias, cap, ranks, seed) -> None:
    hidden, weight, bias, targets, mask, kept = drawn(tokens, seed)
    logits = LogitTransform(scale=1.5, cap=cap)
    inputs = [each.clone().requires_grad_() for each in ((hidden, weight, bias) if with_bias else (hidden, weight))]
    wanted = plain(inputs[0], inputs[1], inputs[2] if with_bias else None, targets, mask, logits, 0.7)
    upstream = torch.randn(2, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def compute(own: Sequence[Tensor], divided: DividedVocabulary) -> tuple[Tensor, Tensor]:
        return kept_logprobs(
            own[0],
            own[1],
            targets,
            kept,
            temperature=0.7,
            chunk_tokens=chunk[0],
            chunk_vocab=chunk[1],
            bias=own[2] if with_bias else None,
            logits=logits,
            divided=None if ranks == 1 else divided,
        )

    compare_with_ranks(compute, inputs, wanted, upstream * torch.tensor([[1.0], [entropy]]), ranks=ranks)


def test_the_gradient_of_a_nearly_certain_token_is_exact():
    """1 − p of the likelier of two tokens is e⁻³⁰, and would be 0 in float32."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [30.0]], requires_grad=True)
    kept = KeptIds(torch.tensor([0, 1]), torch.tensor([2]))
    logprob, _ = kept_logprobs(hidden, weight, torch.tensor([1]), kept, temperature=1.0, **CUT)
    logprob.sum().backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == pytest.approx([-math.exp(-30), math.exp(-30)], rel=1e-5)


@pytest.mark.parametrize("block_pairs", [0, 1 << 30])
@pytest.mark.parametrize("whole", [False, True])
def test_half_precision_is_rounded_as_products_are(whole, block_pairs, monkeypatch):
    """With every token kept it is the distribution over the vocabulary, as near as bfloat16's products are."""
    monkeypatch.setattr(module, "BLOCK_PAIRS", block_pairs)
    hidden, weight, _, targets, _, _ = drawn(40, 3)
    hidden, weight = ((each * 3).bfloat16().requires_grad_() for each in (hidden, weight))
    counts = torch.full((40,), 0 if whole else VOCABULARY)
    kept = KeptIds(torch.arange(VOCABULARY).repeat(0 if whole else 40), counts)
    found = kept_logprobs(hidden, weight, targets, kept, temperature=1.0, **CUT)
    wanted = token_logprobs(hidden, weight, targets, temperature=1.0, **CUT)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    grads, expected = (torch.autograd.grad(each[0].sum(), (hidden, weight)) for each in (found, wanted))
    for one, other in zip(grads, expected, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.float(), other.float(), rtol=0.03, atol=0.03)


def test_at_most_a_block_of_rows_exists_at_a_time(monkeypatch):
    hidden, weight, _, targets, _, kept = drawn(7, 1)
    sizes: list[int] = []
    pieces = module._Products._pieces

    def counted(self: Any, part: slice) -> Any:
        for piece in pieces(self, part):
            sizes.append(piece[1].numel())
            yield piece

    monkeypatch.setattr(module._Products, "_pieces", counted)
    monkeypatch.setattr(module, "BLOCK_PAIRS", 0)
    kept_logprobs(hidden, weight, targets, kept, temperature=1.0, chunk_tokens=3, chunk_vocab=5)
    assert 0 < max(sizes) <= 3 * 5


@pytest.mark.parametrize(
    ("ids", "counts", "targets", "message"),
    [
        ([1, 2], [2], [3], "token 3 was sampled and is 0 times among"),
        ([1, 1], [2], [1], "token 1 was sampled and is 2 times among"),
        ([1, VOCABULARY], [2], [1], f"kept tokens from 1 to {VOCABULARY}, and the model has a vocabulary of"),
        ([1, -1], [2], [1], "kept tokens from -1 to 1"),
        ([1, 2], [1], [1], "came with what was kept for 1, 2 tokens in all; expected 1 tokens"),
        ([1, 2], [1, 1], [1], "1 targets came with what was kept for 2"),
    ],
)
def test_what_does_not_fit_is_refused(ids, counts, targets, message):
    hidden, weight, *_ = drawn(1, 0)
    kept = KeptIds(torch.tensor(ids), torch.tensor(counts))
    with pytest.raises(EngineError, match=message):
        kept_logprobs(hidden, weight, torch.tensor(targets), kept, temperature=1.0, **CUT)


def test_selected_targets_have_their_own_tokens():
    kept = KeptIds(torch.tensor([1, 3, 0, 2, 3]), torch.tensor([2, 0, 3]))
    one = kept.select(torch.tensor([False, True, True]))
    assert (one.ids_M.tolist(), one.counts_N.tolist()) == ([0, 2, 3], [0, 3])


# ---- the same as arrays ------------------------------------------------------------------------------


def same(kept: KeptTokens | None, ids: list[int], counts: list[int]) -> bool:
    return kept is not None and (kept.ids.tolist(), kept.counts.tolist()) == (ids, counts)


def test_arrays_of_pieces_parts_and_targets():
    kept = kept_tokens([[1, 3], [], [0, 2, 3], [5]], [3, 9, 0, 5])
    assert same(kept, [1, 3, 0, 2, 3, 5], [2, 0, 3, 1])
    assert same(kept_within(kept, 1, 3), [0, 2, 3], [0, 3])
    assert kept_within(None, 1, 3) is None
    assert same(joined_kept([(None, 2), (kept_within(kept, 3, 4), 1)]), [5], [0, 0, 1])
    assert joined_kept([(None, 2), (None, 1)]) is None
    many = KeptOfSamples([(None, 3), (kept, 4), (kept_within(kept, 2, 4), 2)])
    found = many.at(np.array([2, 1, 0, 1], np.int32), np.array([0, 0, 2, 3], np.int32))
    assert same(found, [0, 2, 3, 1, 3, 5], [3, 2, 0, 1])


@pytest.mark.parametrize(
    ("found", "sampled", "message"),
    [
        ([[1, 3]], [3, 4], "for 1 tokens, and sampled 2"),
        ([[1, 3], [4]], [3, 5], "token 1 of the response is 5, which it kept 0 times among 1 tokens"),
        ([[3, 3]], [3], "kept 2 times"),
    ],
)
def test_an_engine_that_contradicts_itself_is_refused(found, sampled, message):
    with pytest.raises(ValueError, match=message):
        kept_tokens(found, sampled)
