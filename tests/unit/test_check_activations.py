"""Formulas of activations against PyTorch's memory tracker."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from roll_like.algorithms import blocks
from roll_like.algorithms.logprobs import token_logprobs
from roll_like.check.activations import head_bytes, training_bytes
from roll_like.models.shape import load_model_shape

FOLDER = Path(__file__).parents[2] / "benchmarks"
SHAPES = Path(__file__).parents[1] / "data" / "shapes"

pytestmark = pytest.mark.filterwarnings("ignore:Expected a tensor or a traceable wrapper-subclass:UserWarning")


@pytest.fixture
def memory_plan(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("memory_plan")
    for name in ("memory_plan", "common"):
        sys.modules.pop(name)


@pytest.mark.parametrize(
    "model",
    [
        "Qwen2.5-0.5B-Instruct",
        pytest.param("Qwen2.5-7B-Instruct", marks=pytest.mark.slow),
        pytest.param("Llama-3.1-8B-Instruct", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("checkpointing", "error"), [(False, 0.01), (True, 0.06)])
def test_activations_are_those_that_pytorch_tracks(
    memory_plan: ModuleType, model: str, checkpointing: bool, error: float
) -> None:
    """On fake tensors, which take no memory: one layer and two, forward and backward."""
    found = memory_plan.Case(model=model, tokens=2048, checkpointing=checkpointing).compare()
    assert abs(found["error"]) < error, found


def test_ranks_that_divide_matrices_keep_a_part_and_two_gathered_inputs_a_layer() -> None:
    shape = load_model_shape(SHAPES / "Qwen2.5-7B-Instruct")  # 28 layers of width 3584
    options = {"width": 2, "checkpointing": False}
    whole, part = (training_bytes(shape, 1000, ranks=ranks, **options) for ranks in (1, 4))
    # bfloat16 states of all tokens, before attention and before the MLP; and those of the layer that is passing
    assert part == round(whole / 4) + 1000 * 2 * 2 * 3584 * 29


@pytest.mark.parametrize("chunk_tokens", [64, 256])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("float32", [False, True])
def test_logits_are_those_that_pytorch_tracks(
    monkeypatch: pytest.MonkeyPatch, chunk_tokens: int, trained: bool, float32: bool
) -> None:
    """Real tensors, with blocks as on a GPU."""
    monkeypatch.setattr(blocks, "CPU_TILE", blocks.DEVICE_TILE)
    tokens, hidden, vocabulary, chunk_vocab = 512, 64, 5000, 2000
    states = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, dtype=torch.bfloat16, requires_grad=trained)
    targets = torch.randint(vocabulary, (tokens,))
    tracker = MemTracker()
    tracker.track_external(states, weight, targets)
    with tracker:
        logprobs, _ = token_logprobs(
            states.float() if float32 else states,
            weight,
            targets,
            temperature=1.0,
            chunk_tokens=chunk_tokens,
            chunk_vocab=chunk_vocab,
        )
        logprobs.sum().backward()
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    given = sum(each.numel() * each.element_size() for each in (states, weight, targets))
    shape = replace(load_model_shape(SHAPES / "Qwen2.5-0.5B-Instruct"), vocab_size=vocabulary, hidden_size=hidden)
    chunks = {"chunk_tokens": chunk_tokens, "chunk_vocab": chunk_vocab}
    planned = head_bytes(shape, tokens, width=2, **chunks, trained=trained, products=4 if float32 else None)
    assert planned == pytest.approx(snapshot["Total"] - given, rel=0.15)
