from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from algorithm_samples import same_cases
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll_like.algorithms import blocks as module
from roll_like.algorithms.logprobs import token_logprobs
from roll_like.errors import ConfigError, EngineError
from roll_like.types import LogitTransform

VOCABULARY, WIDTH = 37, 5


def plain(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The plain way: all logits at once, gradients by autograd."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    logits = logits / temperature
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def case(tokens: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype).requires_grad_()  # noqa: E731
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    return draw(tokens, WIDTH), draw(VOCABULARY, WIDTH), draw(VOCABULARY), targets


def gradients(outputs: tuple[Tensor, Tensor], inputs: tuple[Tensor, ...], entropy: float) -> tuple[Tensor, ...]:
    """Gradients of a sum in which every token has another coefficient."""
    logprobs, entropies = outputs
    coefficients = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)
    total = (coefficients * logprobs).sum()
    if entropy:
        total = total + entropy * (coefficients.flip(0) * entropies).sum()
    return torch.autograd.grad(total, inputs, retain_graph=True)


def test_by_hand():
    # logits log 1, log 3 over temperature 1: probabilities 1/4, 3/4
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    logprobs, entropy = token_logprobs(
        hidden, weight, torch.tensor([1]), temperature=1.0, chunk_tokens=4, chunk_vocab=4
    )
    assert logprobs.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    # at temperature ½ the logits double: 1/10, 9/10
    logprobs, _ = token_logprobs(hidden, weight, torch.tensor([0]), temperature=0.5, chunk_tokens=4, chunk_vocab=4)
    assert logprobs.item() == pytest.approx(math.log(0.1))
    # doubled by the model, and bounded by 1: 0 and tanh(2 log 3) = (81 − 1)/(81 + 1)
    bounded, _ = token_logprobs(
        hidden,
        weight,
        torch.tensor([0]),
        temperature=1.0,
        chunk_tokens=4,
        chunk_vocab=4,
        logits=LogitTransform(scale=2.0, cap=1.0),
    )
    assert bounded.item() == pytest.approx(-math.log(1 + math.exp(80 / 82)))


@pytest.mark.parametrize("tile", [1, 80, 1 << 20])
@pytest.mark.parametrize("entropy", [0.0, 0.7])
@same_cases
@given(
    tokens=st.integers(0, 9),
    chunk_tokens=st.integers(1, 10),
    chunk_vocab=st.sampled_from([1, 7, VOCABULARY - 1, VOCABULARY, 100]),
    temperature=st.sampled_from([1.0, 0.6, 2.0]),
    with_bias=st.booleans(),
    scale=st.sampled_from([1.0, 0.25, 3.0]),
    cap=st.sampled_from([None, 0.5, 4.0]),
)
def test_values_and_gradients_equal_the_plain_way(
    tile, entropy, tokens, chunk_tokens, chunk_vocab, temperature, with_bias, scale, cap
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CPU_TILE", tile)
        hidden, weight, bias, targets = case(tokens)
        inputs = (hidden, weight, bias) if with_bias else (hidden, weight)
        expected = plain(hidden, weight, targets, temperature, bias if with_bias else None, scale=scale, cap=cap)
        found = token_logprobs(
            hidden,
            weight,
            targets,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            chunk_vocab=chunk_vocab,
            bias=bias if with_bias else None,
            logits=LogitTransform(scale=scale, cap=cap),
        )
        torch.testing.assert_close(found, expected)
        wanted = gradients(expected, inputs, entropy)
        torch.testing.assert_close(gradients(found, inputs, entropy), wanted)
        # again, when the block that the forward pass kept is gone
        torch.testing.assert_close(gradients(found, inputs, entropy), wanted)


@pytest.mark.parametrize(("chunk_tokens", "chunk_vocab"), [(2, 10), (3, 100), (100, 100)])
def test_finite_differences(chunk_tokens, chunk_vocab):
    hidden, weight, bias, targets = case(4)

    def outputs(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            hidden, weight, targets, temperature=0.8, chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab, bias=bias
        )

    # the block that is kept serves once; afterwards the same numbers come from other operations
    assert torch.autograd.gradcheck(outputs, (hidden, weight, bias), nondet_tol=1e-12)


def test_float32():
    hidden, weight, bias, targets = case(8, torch.float32)
    found = token_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=3, chunk_vocab=10, bias=bias)
    expected = plain(hidden, weight, targets, 1.0, bias)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        gradients(found, (hidden, weight, bias), 0.5),
        gradients(expected, (hidden, weight, bias), 0.5),
        atol=1e-5,
        rtol=1e-5,
    )


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("chunk_tokens", [40, 100])
@pytest.mark.parametrize("entropy", [0.0, 0.5])
def test_bfloat16_is_as_exact_as_the_plain_way(chunk_tokens, entropy):
    hidden, weight, _, targets = case(100, torch.bfloat16)
    exact_inputs = tuple(tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    exact = gradients(plain(*exact_inputs, targets, 1.0), exact_inputs, entropy)

    logprobs = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
    usual = (logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1))
    ours = token_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=chunk_tokens, chunk_vocab=100)
    assert [output.dtype for output in ours] == [torch.float32, torch.float32]
    torch.testing.assert_close(ours, usual, atol=1e-5, rtol=1e-5)

    for ours_grad, usual_grad, exact_grad in zip(
        gradients(ours, (hidden, weight), entropy), gradients(usual, (hidden, weight), entropy), exact, strict=True
    ):
        assert ours_grad.dtype == torch.bfloat16
        # a row's factor is applied outside the product: one more rounding to 8 bits, √2 of the error
        assert relative_error(ours_grad, exact_grad) < 1.6 * relative_error(usual_grad, exact_grad)


@pytest.mark.parametrize("chunk_tokens", [1, 2])
def test_the_gradient_of_a_nearly_certain_token_survives_bfloat16(chunk_tokens):
    # p = 1 − 1/4001 rounds to 1 in bfloat16; its gradient 1 − p must not round to 0
    hidden = torch.tensor([[1.0], [1.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[8.3125], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = token_logprobs(
        hidden, weight, torch.tensor([0, 0]), temperature=1.0, chunk_tokens=chunk_tokens, chunk_vocab=2
    )
    (grad,) = torch.autograd.grad(logprobs.sum(), weight)
    rest = 1 / (1 + math.exp(8.3125))
    assert grad[0].item() == pytest.approx(2 * rest, rel=1e-2)


def test_weight_gradients_are_summed_in_float32():
    # 1 + 2⁻⁹ + 2⁻⁹ + … is 1 in bfloat16 when summed block by block
    tokens = 257
    hidden = torch.full((tokens, 1), 2.0**-8, dtype=torch.bfloat16)
    hidden[0] = 1.0
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = token_logprobs(
        hidden, weight, torch.zeros(tokens, dtype=torch.int64), temperature=1.0, chunk_tokens=1, chunk_vocab=2
    )
    (grad,) = torch.autograd.grad(logprobs.sum(), weight)
    assert grad.flatten().tolist() == [1.0, -1.0]


def test_a_master_weight_in_float32_keeps_its_dtype():
    hidden, weight, _, targets = case(6, torch.bfloat16)
    master = weight.detach().float().requires_grad_()
    settings: dict[str, Any] = {"temperature": 1.0, "chunk_tokens": 4, "chunk_vocab": 100}
    (grad,) = torch.autograd.grad(token_logprobs(hidden, master, targets, **settings)[0].sum(), master)
    (same,) = torch.autograd.grad(token_logprobs(hidden, weight, targets, **settings)[0].sum(), weight)
    assert grad.dtype == torch.float32
    assert torch.equal(grad, same.float())


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_what_needs_a_gradient_gets_one(frozen):
    hidden, weight, _, targets = case(5)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    for chunk_tokens in (2, 5):
        hidden.grad = weight.grad = None
        logprobs, _ = token_logprobs(
            hidden, weight, targets, temperature=1.0, chunk_tokens=chunk_tokens, chunk_vocab=10
        )
        logprobs.sum().backward()
        learned, other = (weight, hidden) if frozen == "hidden" else (hidden, weight)
        assert other.grad is None
        (expected,) = torch.autograd.grad(plain(hidden, weight, targets, 1.0)[0].sum(), learned)
        torch.testing.assert_close(learned.grad, expected)


def test_the_entropy_alone_has_a_gradient():
    hidden, weight, _, targets = case(5)
    found = token_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=5, chunk_vocab=100)[1]
    expected = plain(hidden, weight, targets, 1.0)[1]
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), (hidden, weight)), torch.autograd.grad(expected.sum(), (hidden, weight))
    )


def test_works_under_autocast_and_without_gradients():
    hidden, weight, _, targets = case(5, torch.float32)
    settings: dict[str, Any] = {"temperature": 1.0, "chunk_tokens": 2, "chunk_vocab": 10}
    expected = token_logprobs(hidden, weight, targets, **settings)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = token_logprobs(hidden, weight, targets, **settings)
        grads = torch.autograd.grad(cast[0].sum(), (hidden, weight))
    torch.testing.assert_close(cast, expected)
    torch.testing.assert_close(grads, torch.autograd.grad(expected[0].sum(), (hidden, weight)))
    with torch.no_grad():
        assert not token_logprobs(hidden, weight, targets, **settings)[0].requires_grad


class LargestMatrix(torch.utils._python_dispatch.TorchDispatchMode):
    """Records how many elements the largest tensor has that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if torch.is_tensor(value):
                self.largest = max(self.largest, value.numel())
        return result


def test_never_holds_more_logits_than_it_may():
    tokens = 64
    hidden, weight, _, targets = case(tokens)
    with LargestMatrix() as seen:
        logprobs, entropy = token_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=8, chunk_vocab=16)
        (logprobs + entropy).sum().backward()
    # hidden states and their gradient are the largest; all logits would be 64 × 37
    assert seen.largest == tokens * WIDTH


def test_bad_input_is_refused():
    hidden, weight, bias, targets = case(3)
    settings: dict[str, Any] = {"temperature": 1.0, "chunk_tokens": 2, "chunk_vocab": 10}
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"rollout\.temperature"):
            token_logprobs(hidden, weight, targets, **settings | {"temperature": temperature})
    for wrong in (torch.tensor([0, 1, VOCABULARY]), torch.tensor([0, -1, 1])):
        with pytest.raises(EngineError, match=f"a vocabulary of {VOCABULARY}"):
            token_logprobs(hidden, weight, wrong, **settings)
    with pytest.raises(EngineError, match="do not fit"):
        token_logprobs(hidden[:2], weight, targets, **settings)
    with pytest.raises(EngineError, match="do not fit"):
        token_logprobs(hidden, weight, targets, bias=bias[1:], **settings)
    with pytest.raises(EngineError, match="a vocabulary of 0"):
        token_logprobs(hidden, weight[:0], targets, **settings)
