"""Which models ranks can divide the matrices of."""

from __future__ import annotations

from typing import Any

import pytest
from model_families import ATTENDING, RECURRENT, make_family

from roll_like.errors import ConfigError
from roll_like.models.tensor_plan import FAMILIES, refuse_undivided_matrices


@pytest.mark.parametrize("family", ATTENDING)
def test_families_whose_layers_attend_are_divided(family: str) -> None:
    assert family in FAMILIES
    refuse_undivided_matrices(make_family(family).config, 2)


@pytest.mark.parametrize("family", RECURRENT)
def test_families_without_a_plan_are_refused_by_name(family: str) -> None:
    config = make_family(family).config
    refuse_undivided_matrices(config, 1)
    with pytest.raises(ConfigError, match=f"llama, .* models, and this one is {family}") as caught:
        refuse_undivided_matrices(config, 2)
    assert "remove the key" in caught.value.fix


@pytest.mark.parametrize(
    ("family", "changes", "ranks", "message", "fix"),
    [
        ("llama", {}, 4, "tensor_parallel: 4 divides a model among 4 ranks, and this one has 2 key heads", "of 1, 2"),
        ("llama", {"num_attention_heads": 6}, 4, "this one has 6 query heads", "one of 1, 2"),
        (
            "llama",
            {"num_key_value_heads": 4, "intermediate_size": 50},
            4,
            "has 50 inner units",
            "of 1, 2",
        ),
        ("deepseek_v3", {"intermediate_size": 49}, 2, "has 49 inner units of a feed-forward", "one of 1"),
        ("deepseek_v3", {"moe_intermediate_size": 21}, 2, "has 21 inner units of shared experts", "one of 1"),
        ("qwen3_moe", {"intermediate_size": 49, "mlp_only_layers": [0]}, 2, "has 49 inner units", "one of 1"),
    ],
)
def test_sizes_that_ranks_do_not_divide(
    family: str, changes: dict[str, Any], ranks: int, message: str, fix: str
) -> None:
    config = make_family(family).config
    for key, value in changes.items():
        setattr(config, key, value)
    with pytest.raises(ConfigError, match=message) as caught:
        refuse_undivided_matrices(config, ranks)
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {"vocab_size": 63}), ("qwen3_moe", {"intermediate_size": 49}), ("mixtral", {"intermediate_size": 49})],
)
def test_neither_the_vocabulary_nor_experts_need_be_divided_evenly(family: str, changes: dict[str, Any]) -> None:
    config = make_family(family).config
    for key, value in changes.items():
        setattr(config, key, value)
    refuse_undivided_matrices(config, 2)
