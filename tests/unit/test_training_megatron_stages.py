"""Which of a pipeline's stages put a weight together when one, or all of them, are asked for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from roll_like.training.megatron_stages import StageWeights
from roll_like.training.megatron_weights import Bundle

PARAMETERS = {name: nn.Parameter(torch.ones(1)) for name in ("first", "second")}


def stage(rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[StageWeights, list[tuple[str, bool]]]:
    """A stage, and for each bundle that it put together its name and whether all were told."""
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: 2)
    place: Any = None
    weights, done = StageWeights(place, group, torch.float32, 0), []
    weights._names = {id(each): name for name, each in PARAMETERS.items()}
    weights._bundle_of = {name: Bundle("whole", (name,), "llama") for name in PARAMETERS}

    def put_together(bundle: Bundle, told: bool) -> dict[str, torch.Tensor]:
        done.append((bundle.names[0], told))
        return {bundle.names[0]: torch.full((1,), float(told))}

    monkeypatch.setattr(weights, "_put_together", put_together)
    return weights, done


@pytest.mark.parametrize("alone", ["first", "second"])
def test_stages_agree_on_what_is_told_though_one_gathered_for_itself(
    alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Telling is a collective of all stages: one that skips it leaves the others waiting."""
    stages = [stage(rank, monkeypatch) for rank in range(2)]
    for asked in ("nothing", "first", "first"):
        with stages[1][0].gathered([PARAMETERS[alone]]):
            pass
        for weights, _ in stages:
            assert asked == "nothing" or float(weights.whole(PARAMETERS[asked])) == 1.0
    told = [[name for name, told in done if told] for _, done in stages]
    assert told == [["first"], ["first"]]


def test_a_bundle_is_put_together_once_until_another_is_asked_for_or_numbers_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, done = stage(0, monkeypatch)
    for name in ("first", "first", "second", "first"):
        weights.whole(PARAMETERS[name])
    assert [name for name, _ in done] == ["first", "second", "first"]
    weights.forget()
    weights.whole(PARAMETERS["first"])
    assert len(done) == 4
