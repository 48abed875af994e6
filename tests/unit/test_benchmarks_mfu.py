"""Model FLOPs are those of a hand count and of PyTorch's own counter."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from roll_like.models.shape import ModelShape, load_model_shape
from roll_like.types import TrainingSample

FOLDER = Path(__file__).parents[2] / "benchmarks"
#: 100 parameters without the embeddings, 40 in the output layer, 24 multiplications a pair of query and key.
SHAPE = ModelShape(
    parameters=140,
    layers=2,
    hidden_size=4,
    intermediate_size=5,
    vocab_size=10,
    heads=2,
    kv_heads=1,
    head_dim=3,
    max_positions=None,
    tied_embeddings=True,
)


@pytest.fixture
def mfu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("mfu")
    for name in ("mfu", "common"):
        sys.modules.pop(name)


def sample(*token_ids: int, prompt: int) -> TrainingSample:
    return TrainingSample(
        group_id="g",
        token_ids=np.array(token_ids, np.int32),
        prompt_length=prompt,
        sampled=np.arange(len(token_ids)) >= prompt,
    )


def test_training_computes_a_common_prefix_once_and_no_last_token(mfu: ModuleType) -> None:
    """1 2 3 of both and 4 of the first: 4 tokens that see 1, 2, 3 and 4; targets 4, 5 and 6."""
    needed = mfu.training_pass([sample(1, 2, 3, 4, 5, prompt=3), sample(1, 2, 3, 6, prompt=3)])
    assert (needed.tokens, needed.pairs, needed.targets) == (4, 10, 3)
    assert needed.flops(SHAPE) == 2 * (4 * 100 + 3 * 40 + 10 * 24)


def test_sequences_without_a_common_prefix_are_counted_one_by_one(mfu: ModuleType) -> None:
    needed = mfu.training_pass([sample(1, 2, 3, prompt=1), sample(2, 2, 3, prompt=1), sample(1, 3, 3, prompt=1)])
    assert (needed.tokens, needed.pairs, needed.targets) == (5, 3 + 3 + 2, 6)


def test_generation_computes_a_prompt_once_and_never_feeds_the_last_token(mfu: ModuleType) -> None:
    """The prompt's 3 tokens see 1, 2 and 3; of 2 and 1 sampled tokens one is fed, and sees 4."""
    needed = mfu.generation_pass([([1, 2, 3], 2), ([1, 2, 3], 1)])
    assert (needed.tokens, needed.pairs, needed.targets) == (4, 10, 3)


def test_an_output_layer_of_its_own_changes_nothing(mfu: ModuleType) -> None:
    needed = mfu.ForwardPass(tokens=7, pairs=28, targets=7)
    assert needed.flops(replace(SHAPE, parameters=180, tied_embeddings=False)) == needed.flops(SHAPE)


def test_forward_and_backward_cost_what_pytorch_counts(mfu: ModuleType, tiny_model: Path) -> None:
    """Up to the weights of norms; PyTorch also counts pairs that the causal mask leaves out."""
    length = 24
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    ids = torch.arange(100, 100 + length)[None]
    with FlopCounterMode(display=False) as forward:
        loss = model(ids).logits.logsumexp(-1).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    needed = mfu.ForwardPass(tokens=length, pairs=length * length, targets=length)
    expected = needed.flops(load_model_shape(tiny_model))
    assert forward.get_total_flops() == pytest.approx(expected, rel=0.005)
    assert forward.get_total_flops() + backward.get_total_flops() == pytest.approx(3 * expected, rel=0.005)


@pytest.mark.parametrize("backward", [False, True])
def test_timed_products_are_those_of_the_models_layers(mfu: ModuleType, tiny_model: Path, backward: bool) -> None:
    products = mfu.Products(
        model=str(tiny_model), dtype="float32", device="cpu", rows=6, targets=5, backward=backward, seconds=1e-9
    )
    with FlopCounterMode(display=False) as counter:
        assert mfu.ProductTimer(products).seconds_per_flop() > 0
    a_layer = 64 * (128 + 64 + 64) + 128 * 64 + 3 * 64 * 128
    assert counter.get_total_flops() == (3 if backward else 1) * 2 * (6 * 2 * a_layer + 5 * 512 * 64)


def test_layers_that_are_not_timed_weigh_as_much_as_those_that_are(
    mfu: ModuleType, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers at 2 seconds a FLOP and an output layer at 1: of 2 layers the one that is timed counts twice."""
    monkeypatch.setattr(mfu, "_LAYERS", 1)
    timer = mfu.ProductTimer(
        mfu.Products(model=str(tiny_model), dtype="float32", device="cpu", rows=1, targets=1, backward=False)
    )
    layer, head = 2 * (64 * 256 + 128 * 64 + 3 * 64 * 128), 2 * 512 * 64
    monkeypatch.setattr(timer, "_multiply", lambda operands: 2.0 * layer if len(operands) > 1 else 1.0 * head)
    assert timer.seconds_per_flop() == pytest.approx((2 * 2 * layer + head) / (2 * layer + head))


def test_utilisation_is_a_share_of_the_measured_rate(mfu: ModuleType) -> None:
    assert mfu.utilisation({"engine": 4.0e10, "bare": 2.0e10}, 8.0e10) == {
        "matmul_gflops_per_second": 80.0,
        "engine_gflops_per_second": 40.0,
        "engine_mfu": 0.5,
        "bare_gflops_per_second": 20.0,
        "bare_mfu": 0.25,
    }
