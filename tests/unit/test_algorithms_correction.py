from __future__ import annotations

import math

import pytest
from algorithm_samples import make_inputs, same_cases
from hypothesis import given
from hypothesis import strategies as st

from roll_like.algorithms.correction import (
    ImportanceWeight,
    correction_from,
    mismatch,
    no_correction,
)
from roll_like.algorithms.losses import policy_objective
from roll_like.config.algorithm import CorrectionConfig
from roll_like.registry import LOSSES
from roll_like.values import Max


def test_truncated_weights_by_hand():
    old = [-1.0, -1.0, -1.0, -0.1]
    behaviour = [-1.0 - math.log(1.5), -1.0 + math.log(4), -1.0 - math.log(8), -400.0]
    inputs = make_inputs(old, behaviour_logprobs_N=behaviour)
    corrected = ImportanceWeight(cap=2.0)(inputs)
    assert corrected.weights_N.tolist() == pytest.approx([1.5, 0.25, 2.0, 2.0])
    assert corrected.capped_N.tolist() == [False, False, True, True]
    assert not corrected.weights_N.requires_grad
    assert ImportanceWeight(cap=5.0)(inputs).weights_N.tolist() == pytest.approx([1.5, 0.25, 5.0, 5.0])


def test_no_gradient_flows_through_the_weights():
    inputs = make_inputs([-1.0], behaviour_logprobs_N=[-1.2])
    # on-policy, the old policy is the current one; were it not detached, its gradient would be added
    live = inputs.logprobs_N
    on_policy = make_inputs([-1.0], logprobs_N=live, old_logprobs_N=live, behaviour_logprobs_N=[-1.2])
    corrected = ImportanceWeight(cap=2.0)(on_policy)
    assert not corrected.weights_N.requires_grad


def test_without_mismatch_nothing_is_corrected():
    inputs = make_inputs([-1.0, -2.0])
    for correction in (ImportanceWeight(cap=2.0), no_correction):
        assert correction(inputs).weights_N.tolist() == [1.0, 1.0]
        assert correction(inputs).capped_N.tolist() == [False, False]


def test_the_configuration_chooses():
    inputs = make_inputs([-1.0], behaviour_logprobs_N=[-9.0])
    assert correction_from(CorrectionConfig())(inputs).weights_N.tolist() == [2.0]
    assert correction_from(CorrectionConfig(cap=3.0))(inputs).weights_N.tolist() == [3.0]
    assert correction_from(CorrectionConfig(type="none"))(inputs).weights_N.tolist() == [1.0]


def test_mismatch_by_hand():
    inputs = make_inputs([-1.0, -2.0], old_logprobs_N=[-1.5, -2.0], behaviour_logprobs_N=[-1.2, -2.1])
    figures = mismatch(inputs)
    # log μ − log π: 0.3 and −0.1
    assert figures["mismatch/kl_k1"].tolist() == pytest.approx([0.3, -0.1])
    assert figures["mismatch/kl"].tolist() == pytest.approx([math.exp(-0.3) - 1 + 0.3, math.exp(0.1) - 1 - 0.1])
    assert figures["mismatch/logprob_difference"].tolist() == pytest.approx([0.3, 0.1])


def test_mismatch_is_seen_where_the_old_policy_is_the_behaviour_policy():
    inputs = make_inputs([-1.0, -2.0], old_logprobs_N=[-1.5, -2.0], behaviour_logprobs_N=[-1.5, -2.0])
    assert mismatch(inputs)["mismatch/logprob_difference"].tolist() == pytest.approx([0.5, 0.0])


def test_mismatch_is_logged_with_every_objective():
    loss = LOSSES.get("ppo")
    inputs = make_inputs([-1.0, -2.0], behaviour_logprobs_N=[-1.3, -2.1])
    _, metrics = policy_objective(inputs, loss(loss.Config()), None, 0.0, ImportanceWeight(cap=1.2))
    assert metrics["mismatch/logprob_difference"].value == pytest.approx(0.2)
    assert metrics["mismatch/logprob_difference_max"] == Max(pytest.approx(0.3))
    assert metrics["mismatch/kl_k1"].value == pytest.approx(-0.2)
    weights = [1.2, math.exp(0.1)]
    assert metrics["correction/capped_fraction"].value == 0.5
    assert metrics["correction/ess"].value == pytest.approx(sum(weights) ** 2 / (2 * sum(w * w for w in weights)))


@same_cases
@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=9), st.floats(0.1, 10))
def test_weights_never_exceed_the_cap(pairs, cap):
    old, behaviour = zip(*pairs, strict=True)
    weights = ImportanceWeight(cap=cap)(make_inputs(old, behaviour_logprobs_N=behaviour)).weights_N
    for weight, pi, mu in zip(weights.tolist(), old, behaviour, strict=True):
        assert weight == pytest.approx(min(math.exp(max(pi - mu, -20)), cap))
