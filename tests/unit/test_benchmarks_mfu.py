"""The benchmarks' matrix products are those of the model, and utilisation is a share of their rate."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from torch.utils.flop_counter import FlopCounterMode

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def mfu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("mfu")
    for name in ("mfu", "common"):
        sys.modules.pop(name)


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
