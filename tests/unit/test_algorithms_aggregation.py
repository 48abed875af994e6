from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from algorithm_samples import make_policy_sample, same_cases
from hypothesis import given
from hypothesis import strategies as st

from roll_like.algorithms.aggregation import Aggregation, token_weights, trajectory_numbers
from roll_like.config.algorithm import AlgorithmConfig

MASKS = [[0, 1, 1, 1], [0, 1], [0, 0, 0], [1, 0, 1]]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token_mean", [1 / 6, 1 / 6, 1 / 6]),
        ("seq_mean_token_sum", [1 / 3, 1 / 3, 1 / 3]),
        ("seq_mean_token_mean", [1 / 9, 1 / 3, 1 / 6]),
        ("token_sum_norm", [1 / 30, 1 / 30, 1 / 30]),
    ],
)
def test_weights_of_ragged_sequences(how, expected):
    weights = token_weights([make_policy_sample(mask) for mask in MASKS], how, max_response_tokens=10)
    # the third sample has no sampled token: no weight, and it is not counted as a sequence
    assert weights[2].tolist() == [0, 0, 0]
    for index, value in zip((0, 1, 3), expected, strict=True):
        assert weights[index] == pytest.approx(np.array(MASKS[index]) * value, rel=1e-6)
        assert weights[index].dtype == np.float32


@pytest.mark.parametrize("how", get_args(Aggregation))
def test_nothing_sampled_means_no_weight(how):
    weights = token_weights([make_policy_sample([0, 0])], how, max_response_tokens=4)
    assert weights[0].tolist() == [0, 0]
    assert token_weights([], how, max_response_tokens=4) == []


@same_cases
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=8), min_size=1, max_size=6))
def test_totals(masks):
    samples = [make_policy_sample(mask) for mask in masks]
    lengths = [sum(mask) for mask in masks if any(mask)]
    if not lengths:
        return
    totals = {
        how: sum(float(weight.sum()) for weight in token_weights(samples, how, max_response_tokens=8))
        for how in get_args(Aggregation)
    }
    mean_length = sum(lengths) / len(lengths)
    assert totals == pytest.approx(
        {
            "token_mean": 1,
            "seq_mean_token_mean": 1,
            "seq_mean_token_sum": mean_length,
            "token_sum_norm": mean_length / 8,
        },
        rel=1e-5,
    )


@pytest.mark.parametrize("how", get_args(Aggregation))
def test_a_rewritten_history_does_not_change_the_weights(how):
    """An episode of five tokens, whole or in three samples, beside one of two tokens and one without any."""
    whole = [make_policy_sample([0, 1, 1, 1, 1, 1]), make_policy_sample([1, 1]), make_policy_sample([0])]
    cut = [
        replace(make_policy_sample(mask), trajectory=number)
        for mask, number in (([0, 1, 1], 0), ([0, 0], 0), ([0, 0, 1, 1, 1], 0), ([1, 1], 1), ([0], 2))
    ]
    expected = [weight[weight > 0] for weight in token_weights(whole, how, max_response_tokens=8)]
    found = [weight[weight > 0] for weight in token_weights(cut, how, max_response_tokens=8)]
    assert np.concatenate(found).tolist() == np.concatenate(expected).tolist()
    assert [len(weights) for weights in found] == [2, 0, 3, 2, 0]
    assert trajectory_numbers([*cut, *whole]) == [0, 0, 0, 1, 2, 3, 4, 5]


def test_the_configuration_knows_the_same_names():
    assert get_args(AlgorithmConfig.model_fields["aggregation"].annotation) == get_args(Aggregation)
