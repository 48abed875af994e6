"""Attention of joined rows on a GPU against dense masks in float32: values, gradients, windows, shared prompts."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from roll_like.training import varlen
from roll_like.training.attention import explicit_attention
from roll_like.training.joined import KERNELS, JoinedAttention
from roll_like.training.segments import RowSegments, Scores

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
Record = Callable[[str, object], None]
#: Largest error, as a share of the largest number, of results and of gradients.
TOLERANCES = {torch.bfloat16: 0.02, torch.float32: 1e-3}
#: A prompt with three responses, whose lengths are no multiples of a kernel's tiles; two samples without a prompt in
#: common; one token.
ROWS = (((150, 0), (70, 1), (33, 2), (131, 3)), ((200, 0),), ((64, 0), (1, 1)), ((1, 0),))

needs_flash = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0),
    reason="flash attention needs compute capability 8.0 (A100) or newer",
)


def segments_of(rows: Any, length: int) -> RowSegments:
    """Rows of (tokens, segment) pieces, padded."""
    segments = torch.full((len(rows), length), -1)
    positions = torch.zeros(len(rows), length, dtype=torch.long)
    for row, pieces in enumerate(rows):
        prompt = pieces[0][0]
        for (begin, end), (tokens, segment) in zip(
            pairwise(accumulate((tokens for tokens, _ in pieces), initial=0)), pieces, strict=True
        ):
            segments[row, begin:end] = segment
            positions[row, begin:end] = torch.arange(tokens) + (prompt if segment else 0)
    return RowSegments(segments.to(DEVICE), positions.to(DEVICE))


def leaves(shape: tuple[int, int], heads: int, groups: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values [B, L, heads, D], rounded to a precision, in float32."""
    torch.manual_seed(0)
    return [torch.randn(*shape, count, width, device=DEVICE).to(dtype).float() for count in (heads, groups, groups)]


def dense(tensors: list[Tensor], segments: RowSegments, scores: Scores) -> Tensor:
    """The definition, in float32, of all tokens that are no padding, shape [T, H, D]."""
    query, key, value = (each.transpose(1, 2) for each in tensors)
    mask = segments.mask(scores.window)
    output = explicit_attention(query, key, value, mask, scores.scale, softcap=scores.softcap, sinks_H=scores.sinks_H)
    return output.transpose(1, 2).flatten(0, 1)[segments.sequences.kept_T]


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().float(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max())


def largest_error(
    kernel: JoinedAttention, dtype: torch.dtype, heads: int, groups: int, width: int, **more: Any
) -> float:
    """Return the largest error of results and of gradients."""
    segments, scores = segments_of(ROWS, 384), Scores(scale=width**-0.5, **more)
    tensors = [each.requires_grad_() for each in leaves((len(ROWS), 384), heads, groups, width, dtype)]
    expected = dense(tensors, segments, scores)
    upstream = torch.randn_like(expected).to(dtype).float()
    gradients = torch.autograd.grad(expected, tensors, upstream)
    joined = [each.detach().flatten(0, 1)[segments.sequences.kept_T].to(dtype).requires_grad_() for each in tensors]
    found = KERNELS[kernel](*joined, segments, scores)
    errors = [error(found, expected)]
    for mine, theirs in zip(torch.autograd.grad(found, joined, upstream.to(dtype)), gradients, strict=True):
        errors.append(error(mine, theirs.flatten(0, 1)[segments.sequences.kept_T]))
    return max(errors)


@needs_flash
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("dtype", "heads", "groups", "width"),
    [
        (torch.bfloat16, 4, 4, 64),
        (torch.bfloat16, 6, 2, 128),
        (torch.bfloat16, 4, 1, 256),
        (torch.float32, 6, 2, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_values_and_gradients_equal_those_of_dense_masks(
    kernel: JoinedAttention,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    width: int,
    window: int | None,
    record_property: Record,
) -> None:
    found = largest_error(kernel, dtype, heads, groups, width, window=window)
    record_property(f"{kernel}_{str(dtype).removeprefix('torch.')}_{width}_{window}_error", round(found, 6))
    assert found < TOLERANCES[dtype]


@needs_flash
@pytest.mark.parametrize("groups", [1, 4])
def test_long_sequences_are_those_of_the_flash_kernel(groups: int, record_property: Record) -> None:
    """On an H100 cuDNN computes them, one after the other."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN's kernel is used from compute capability 9.0 (H100) on")
    segments = segments_of((((5000, 0),), ((4000, 0),)), 5000)
    results, seconds = [], []
    kernels: tuple[JoinedAttention, ...] = ("cudnn", "varlen")
    for kernel in kernels:
        tensors = [
            each.flatten(0, 1)[segments.sequences.kept_T] for each in leaves((2, 5000), 4, groups, 128, torch.bfloat16)
        ]
        joined = [each.to(torch.bfloat16).requires_grad_() for each in tensors]
        for _ in range(2):
            began = time.perf_counter()
            output = KERNELS[kernel](*joined, segments, Scores(scale=128**-0.5))
            gradients = torch.autograd.grad(output.float().square().sum(), joined)
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        results.append([output.detach().float(), *(each.float() for each in gradients)])
    errors = [float((one - two).abs().max() / two.abs().max()) for one, two in zip(*results, strict=True)]
    record_property(f"long_sequences_{groups}_error", round(max(errors), 6))
    record_property(f"long_sequences_{groups}_time_of_flash", round(seconds[0] / seconds[1], 3))
    assert max(errors) < TOLERANCES[torch.bfloat16]


@needs_flash
@pytest.mark.parametrize("length", [4096 + 64, 4096 + 1, 8192])
def test_gradients_of_scores_far_below_zero_are_numbers(length: int) -> None:
    """Where public reports have NaN from cuDNN: all scores near −120, and half a tile of keys left over."""
    segments = segments_of((((length, 0),),), length)
    joined = [each[0].mul(0.1).to(torch.bfloat16) for each in leaves((1, length), 1, 1, 64, torch.bfloat16)]
    joined[0][..., 0], joined[1][..., 0] = 1.0, -120 * 8.0
    joined = [each.requires_grad_() for each in joined]
    KERNELS["cudnn"](*joined, segments, Scores(scale=64**-0.5)).float().square().sum().backward()
    assert all(each.grad is not None and bool(each.grad.isfinite().all()) for each in joined)


@needs_flash
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_flex_bounds_scores_and_has_sinks(softcap: float | None, sinks: bool, record_property: Record) -> None:
    more = {"sinks_H": torch.linspace(-1, 2, 4, device=DEVICE)} if sinks else {}
    found = largest_error("flex", torch.bfloat16, 4, 2, 64, softcap=softcap, **more)
    record_property(f"flex_softcap_{softcap}_sinks_{sinks}_error", round(found, 6))
    assert found < TOLERANCES[torch.bfloat16]


@needs_flash
def test_queries_of_a_flash_kernel_stand_at_the_last_keys() -> None:
    """Two queries and five keys: the first sees four of them, the second all; with a window of two, the last two."""
    from torch.nn.attention.varlen import varlen_attn

    query = torch.zeros(2, 1, 64, device=DEVICE, dtype=torch.bfloat16)  # all keys weigh the same
    value = torch.zeros(5, 1, 64, device=DEVICE, dtype=torch.bfloat16)
    value[range(5), 0, range(5)] = 1.0
    ends = [torch.tensor([0, count], device=DEVICE, dtype=torch.int32) for count in (2, 5)]
    for window, expected in (
        ((-1, 0), [[0.25, 0.25, 0.25, 0.25, 0.0], [0.2] * 5]),
        ((1, 0), [[0.0, 0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 0.5, 0.5]]),
    ):
        seen: Any = varlen_attn(query, torch.ones_like(value), value, *ends, 2, 5, window_size=window)
        torch.testing.assert_close(seen[:, 0, :5].float().cpu(), torch.tensor(expected), atol=2e-3, rtol=0)


@needs_flash
@pytest.mark.parametrize("kernel", KERNELS)
def test_memory_grows_with_the_length_of_16_bit_rows(
    kernel: JoinedAttention, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    def refuse(*arguments: object) -> Tensor:
        raise AssertionError("sequences were computed one after the other")

    monkeypatch.setattr(varlen, "_one_by_one", refuse)
    peaks = []
    for length in (8192, 32768):
        rows = (((length // 2, 0), *((length // 8, response) for response in (1, 2, 3, 4))),)
        segments = segments_of(rows, length)
        joined = [each[0].to(torch.bfloat16).requires_grad_() for each in leaves((1, length), 8, 2, 64, torch.bfloat16)]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        KERNELS[kernel](*joined, segments, Scores(scale=64**-0.5)).float().square().sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    record_property(f"{kernel}_gib_of_a_layer_at_32768_tokens", round(peaks[1] / 2**30, 3))
    assert peaks[1] < 6 * peaks[0]  # a mask would take 16 times as much
