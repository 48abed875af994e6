"""8-bit weights: the same numbers on both sides, and a difference is found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_like.inference.interface import Fingerprints
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.weight_transfer.fingerprint import fingerprint
from roll_like.inference.weight_transfer.int8 import int8_fingerprint, quantise_rows
from roll_like.inference.weight_transfer.interface import send_buckets
from roll_like.inference.weight_transfer.probe import tolerance_of
from roll_like.inference.weight_transfer.sync import compare_fingerprints


def test_rows_have_127_steps_on_both_sides_of_0() -> None:
    weight = torch.tensor([[12.7, -0.1, 0.05, -12.7], [0.0, 0.0, 0.0, 0.0], [-2.54, 1.27, 0.03, 0.0]])
    numbers, scale = quantise_rows(weight)
    # 0.05 is half a step in float32, or a little more: to the nearest, as numpy rounds
    assert numbers.dtype is torch.int8
    assert numbers.tolist()[0][0::3] == [127, -127]
    assert numbers.tolist()[1] == [0, 0, 0, 0]
    assert numbers.tolist()[2] == [-127, 64, 2, 0]  # 63.5 steps round to even
    assert scale[:, 0].tolist() == pytest.approx([0.1, 1.0, 0.02])


@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.float32, torch.bfloat16]))
def test_numbers_are_those_of_numpy_and_half_a_step_away_at_most(seed: int, dtype: torch.dtype) -> None:
    weight = torch.randn(7, 33, generator=torch.Generator().manual_seed(seed)).to(dtype)
    numbers, scale = quantise_rows(weight)
    plain = weight.float().numpy()
    expected = np.abs(plain).max(1, keepdims=True) / np.float32(127)
    np.testing.assert_array_equal(scale.numpy(), expected)
    np.testing.assert_array_equal(numbers.numpy(), np.rint(plain / expected).astype(np.int8))
    assert float(np.abs(numbers.numpy() * expected - plain).max()) <= float(expected.max()) * 0.5001


class Weights:
    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def full_weights(self):
        return iter(self.tensors.items())


def test_what_an_engine_holds_in_8_bits_is_compared_in_8_bits() -> None:
    weight, norm = torch.randn(8, 40), torch.randn(40)
    report = send_buckets(Weights(q=weight, norm=norm), 1 << 20, 0, 3, lambda tensors: None, int8=True)
    assert report.fingerprints == {"q": fingerprint(weight, 3), "norm": fingerprint(norm, 3)}
    assert report.quantized == {"q": int8_fingerprint(weight, 3)}
    right = Fingerprints(
        tensors={"q": int8_fingerprint(weight, 3), "norm": fingerprint(norm, 3)}, tied={}, quantized=frozenset({"q"})
    )
    assert compare_fingerprints(report.fingerprints, right, report.quantized) == ([], [])
    # less than a step in one number, but another scale
    moved = weight.clone()
    moved[5, weight[5].abs().argmax()] *= 1.001
    held = Fingerprints(tensors={**right.tensors, "q": int8_fingerprint(moved, 3)}, tied={}, quantized=frozenset({"q"}))
    assert compare_fingerprints(report.fingerprints, held, report.quantized) == (["q"], [])
    # an engine that quantises what the trainer does not know of
    assert compare_fingerprints(report.fingerprints, right) == (["q"], [])
    assert send_buckets(Weights(q=weight), 1 << 20, 0, 3, lambda tensors: None).quantized == {}


def test_a_probe_of_8_bits_accepts_more_unless_it_is_said() -> None:
    assert tolerance_of(VLLMConfig(), "float32") == 0.01
    assert tolerance_of(VLLMConfig(quantization="int8"), "float32") == 0.3
    assert tolerance_of(VLLMConfig(engine_args={"kv_cache_dtype": "fp8"}), "bfloat16") == 0.3
    assert tolerance_of(VLLMConfig(engine_args={"kv_cache_dtype": None}), "bfloat16") == 0.1
    assert tolerance_of(VLLMConfig(quantization="int8", probe_tolerance=0.05), "float32") == 0.05
