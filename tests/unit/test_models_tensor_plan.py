"""Which models ranks can divide the matrices of."""

from __future__ import annotations

from typing import Any

import pytest
from model_families import ATTENDING, make_family

from roll_like.errors import ConfigError
from roll_like.models.tensor_plan import FAMILIES, refuse_undivided_matrices


@pytest.mark.parametrize("family", ATTENDING)
def test_families_without_a_plan_are_refused_by_name(family: str) -> None:
    config = make_family(family).config
    refuse_undivided_matrices(config, 1)
    if family in FAMILIES:
        refuse_undivided_matrices(config, 2)
        return
    with pytest.raises(ConfigError, match=f"of llama, qwen2, qwen3 models, and this one is {family}") as caught:
        refuse_undivided_matrices(config, 2)
    assert "remove the key" in caught.value.fix


@pytest.mark.parametrize(
    ("changes", "ranks", "message", "fix"),
    [
        ({}, 4, "tensor_parallel: 4 divides a model among 4 ranks, and this one has 2 key heads", "one of 1, 2"),
        ({"num_attention_heads": 6}, 4, "this one has 6 query heads", "one of 1, 2"),
        ({"num_key_value_heads": 4, "intermediate_size": 50}, 4, "has 50 inner units of a feed-forward", "one of 1, 2"),
        ({"num_key_value_heads": 4, "vocab_size": 63}, 4, "this one has 63 tokens in the vocabulary", "one of 1"),
    ],
)
def test_sizes_that_ranks_do_not_divide(changes: dict[str, Any], ranks: int, message: str, fix: str) -> None:
    config = make_family("llama").config
    for key, value in changes.items():
        setattr(config, key, value)
    with pytest.raises(ConfigError, match=message) as caught:
        refuse_undivided_matrices(config, ranks)
    assert caught.value.fix is not None
    assert caught.value.fix.endswith(fix)
