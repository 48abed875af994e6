"""Tensors without memory, and what brings it back."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from roll_like.training import host_copies
from roll_like.training.host_copies import HostCopies, tensors_within


def test_all_views_of_a_storage_are_emptied_and_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "CHUNK_BYTES", 100)  # 240 bytes are three pieces
    flat = torch.arange(60, dtype=torch.float32)
    part, transposed = flat[10:20], flat.view(6, 10).T
    expected = [tensor.clone() for tensor in (flat, part, transposed)]
    copies = HostCopies("cpu")
    copies.offload([part, flat])
    assert flat.untyped_storage().nbytes() == part.untyped_storage().nbytes() == 0
    assert copies.bytes == 240
    copies.offload([flat])  # nothing is left to move
    assert copies.bytes == 240
    copies.reload()
    assert copies.bytes == 0
    assert all(torch.equal(*pair) for pair in zip((flat, part, transposed), expected, strict=True))
    flat += 1  # still one storage
    assert torch.equal(part, expected[1] + 1)


def test_what_is_added_later_comes_back_with_the_rest() -> None:
    first, second = torch.ones(5), torch.ones(7, dtype=torch.bfloat16)
    copies = HostCopies("cpu")
    copies.offload([first])
    copies.offload([first, second])
    assert copies.bytes == 34
    copies.reload()
    assert torch.equal(first, torch.ones(5))
    assert torch.equal(second, torch.ones(7, dtype=torch.bfloat16))


def test_what_others_need_is_kept() -> None:
    flat, other = torch.ones(6), torch.ones(2)
    copies = HostCopies("cpu")
    copies.offload([flat[:3], other], keep=[flat[3:]])
    assert (flat.untyped_storage().nbytes(), other.untyped_storage().nbytes()) == (24, 0)


def test_other_devices_and_empty_tensors_are_left_alone() -> None:
    here = torch.ones(3)
    assert HostCopies("cuda")._storages([here, torch.empty(4, device="meta")]) == []
    assert HostCopies("cpu")._storages([torch.empty(0)]) == []


def test_training_goes_on_as_if_nothing_had_been_moved() -> None:
    def trained(*, move: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        copies = HostCopies("cpu")
        for step in range(4):
            module(torch.full((3, 4), float(step))).square().sum().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step > 2)
            if move:
                tensors = list(tensors_within(optimizer, of=("torch",)))
                copies.offload(tensors)
                assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
                assert {id(parameter) for parameter in module.parameters()} <= {id(tensor) for tensor in tensors}
                copies.reload()
        return [parameter.detach() for parameter in module.parameters()]

    assert all(torch.equal(*pair) for pair in zip(trained(move=True), trained(move=False), strict=True))


def test_tensors_are_found_in_what_is_nested_and_each_once() -> None:
    a, b, c, d, e = (torch.full((1,), float(value)) for value in range(5))
    a.requires_grad_().grad = b
    c.partition = d  # type: ignore[attr-defined]
    own = SimpleNamespace(inside=[e])
    root = SimpleNamespace(state=defaultdict(dict, {a: {"moment": c}}), more=({"again": c}, [a]), own=own)
    root.itself = root
    assert sorted(float(tensor.detach()) for tensor in tensors_within(root)) == [0, 1, 2, 3]
    assert sorted(float(tensor.detach()) for tensor in tensors_within(root, of=("types",))) == [0, 1, 2, 3, 4]
