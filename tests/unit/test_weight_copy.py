"""A rank's copy of what it trains: blends by hand, to the bit where a policy has to be what it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from roll_like.training.weight_copy import WeightCopy


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"matrix": torch.full((3, 5), 1.0, dtype=dtype), "norm": torch.full((7,), -2.0, dtype=dtype)}


def held(copy: WeightCopy, shares: dict[str, Tensor]) -> dict[str, Tensor]:
    with copy.in_place():
        return {name: share.clone() for name, share in shares.items()}


def test_blends_are_those_computed_by_hand() -> None:
    shares = weights()
    copy = WeightCopy(lambda: shares, precise=True)
    shares["matrix"].fill_(3.0)
    # 0.6 · 3 + 0.4 · 1 = 2.2; fifteen differences of 2, seven of 0
    squared, count = copy.follow(0.6)
    assert (round(squared, 3), count) == (60.0, 22)
    assert torch.allclose(held(copy, shares)["matrix"], torch.tensor(2.2))
    assert torch.equal(held(copy, shares)["norm"], shares["norm"])  # what is equal stays equal
    shares["matrix"].fill_(0.0)
    copy.follow(0.6)  # 0.4 · 2.2
    assert torch.allclose(held(copy, shares)["matrix"], torch.tensor(0.88))
    shares["matrix"].normal_()
    copy.follow(1.0)
    assert torch.equal(held(copy, shares)["matrix"], shares["matrix"])


def test_the_policy_is_what_it_was_after_a_copy_was_in_its_place() -> None:
    shares = {"matrix": torch.randn(64, 64, dtype=torch.bfloat16), "empty": torch.empty(0)}
    copy = WeightCopy(lambda: shares, precise=True)
    start = shares["matrix"].clone()
    shares["matrix"].mul_(1.01)
    moved = shares["matrix"].clone()

    def failing_pass() -> None:
        with copy.in_place():
            assert torch.equal(shares["matrix"], start)
            raise RuntimeError("a pass")

    with pytest.raises(RuntimeError, match="a pass"):
        failing_pass()
    assert torch.equal(shares["matrix"], moved)


def test_an_average_moves_by_less_than_sixteen_bits_tell_apart() -> None:
    shares = weights(torch.bfloat16)
    average, rounded = WeightCopy(lambda: shares, precise=True), WeightCopy(lambda: shares, precise=False)
    shares["matrix"].fill_(2.0)
    for _ in range(500):
        average.follow(0.001)
        rounded.follow(0.001)
    expected = 2.0 - 0.999**500  # from 1 towards 2
    assert torch.allclose(held(average, shares)["matrix"].float(), torch.tensor(expected), atol=0.005)
    assert torch.equal(held(rounded, shares)["matrix"].float(), torch.ones(3, 5))  # why averages are kept in float32


def test_it_is_read_as_it_was_written_and_no_other(tmp_path: Path) -> None:
    shares, path = weights(), tmp_path / "copy_reference_0.pt"
    copy = WeightCopy(lambda: shares, precise=True)
    shares["matrix"].fill_(0.3)
    copy.follow(0.123)
    copy.save(path)
    expected = held(copy, shares)
    again = WeightCopy(lambda: shares, precise=True)
    assert not torch.equal(held(again, shares)["matrix"], expected["matrix"])
    again.load(path)
    for name, tensor in held(again, shares).items():
        assert torch.equal(tensor, expected[name])
    others = {"matrix": torch.zeros(3, 4), "norm": torch.zeros(7)}
    with pytest.raises(RuntimeError, match=r"of matrix it has \(3, 5\), and this rank \(3, 4\)"):
        WeightCopy(lambda: others, precise=True).load(path)


def test_room_in_host_memory_is_counted_and_tensors_do_not_overlap() -> None:
    shares = {f"{index}": torch.full((index + 1,), float(index), dtype=torch.bfloat16) for index in range(20)}
    copy = WeightCopy(lambda: shares, precise=True)
    assert copy.bytes == sum(range(1, 21)) * (4 + 2)
    for name, tensor in held(copy, shares).items():
        assert torch.equal(tensor, shares[name])
