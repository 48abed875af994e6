from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from algorithm_samples import NO_CORRECTION, make_inputs, same_cases
from hypothesis import given
from hypothesis import strategies as st

from roll_like.algorithms.correction import correct, mismatch
from roll_like.algorithms.losses import policy_objective
from roll_like.config.algorithm import CorrectionConfig
from roll_like.errors import ConfigError
from roll_like.registry import LOSSES
from roll_like.values import Max, merge, reduce


def test_truncated_weights_by_hand():
    old = [-1.0, -1.0, -1.0, -0.1]
    behaviour = [-1.0 - math.log(1.5), -1.0 + math.log(4), -1.0 - math.log(8), -400.0]
    inputs = make_inputs(old, behaviour_logprobs_N=behaviour)
    corrected = correct(inputs, CorrectionConfig(cap=2.0))
    assert corrected.weights_N.tolist() == pytest.approx([1.5, 0.25, 2.0, 2.0])
    assert corrected.capped_N.tolist() == [False, False, True, True]
    assert not corrected.weights_N.requires_grad
    assert correct(inputs, CorrectionConfig(cap=5.0)).weights_N.tolist() == pytest.approx([1.5, 0.25, 5.0, 5.0])


def test_no_gradient_flows_through_the_weights():
    inputs = make_inputs([-1.0], behaviour_logprobs_N=[-1.2])
    # on-policy, the old policy is the current one; were it not detached, its gradient would be added
    live = inputs.logprobs_N
    on_policy = make_inputs([-1.0], logprobs_N=live, old_logprobs_N=live, behaviour_logprobs_N=[-1.2])
    corrected = correct(on_policy, CorrectionConfig(cap=2.0))
    assert not corrected.weights_N.requires_grad


def test_without_mismatch_nothing_is_corrected():
    inputs = make_inputs([-1.0, -2.0])
    for correction in (CorrectionConfig(cap=2.0), NO_CORRECTION):
        assert correct(inputs, correction).weights_N.tolist() == [1.0, 1.0]
        assert correct(inputs, correction).capped_N.tolist() == [False, False]


def test_the_configuration_chooses():
    inputs = make_inputs([-1.0], behaviour_logprobs_N=[-9.0])
    assert correct(inputs, CorrectionConfig()).weights_N.tolist() == [2.0]
    assert correct(inputs, CorrectionConfig(cap=3.0)).weights_N.tolist() == [3.0]
    assert correct(inputs, CorrectionConfig(type="none")).weights_N.tolist() == [1.0]


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
    _, metrics = policy_objective(inputs, loss(loss.Config()), None, 0.0, CorrectionConfig(cap=1.2))
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
    weights = correct(make_inputs(old, behaviour_logprobs_N=behaviour), CorrectionConfig(cap=cap)).weights_N
    for weight, pi, mu in zip(weights.tolist(), old, behaviour, strict=True):
        assert weight == pytest.approx(min(math.exp(max(pi - mu, -20)), cap))


SEQUENCES = {"sequence_N": torch.tensor([0, 1, 0]), "sequences": 2}


#: One sequence of two turns: what `SEQUENCES` has as two sequences.
TURNS = {"turn_N": torch.tensor([0, 1, 0]), "turns": 2}


def with_ratios(*ratios: float, **more):
    """Tokens whose old policy is these ratios away from the behaviour policy."""
    behaviour = [-1 - math.log(ratio) for ratio in ratios]
    return make_inputs([-1.0] * len(ratios), behaviour_logprobs_N=behaviour, **more)


def corrected_by(inputs, **config):
    return correct(inputs, CorrectionConfig(**config))


def test_sequence_weights_are_products():
    inputs = with_ratios(1.5, 0.5, 3.0, **SEQUENCES)
    assert corrected_by(inputs, level="sequence", cap=10.0).weights_N.tolist() == pytest.approx([4.5, 0.5, 4.5])
    corrected = corrected_by(inputs, level="sequence", cap=2.0)
    assert corrected.weights_N.tolist() == pytest.approx([2.0, 0.5, 2.0])
    assert corrected.capped_N.tolist() == [True, False, True]


def test_geometric_weights_are_means():
    inputs = with_ratios(1.0, 0.5, 4.0, **SEQUENCES)
    assert corrected_by(inputs, level="geometric", cap=10.0).weights_N.tolist() == pytest.approx([2.0, 0.5, 2.0])


def test_weights_of_turns():
    inputs = with_ratios(1.5, 0.5, 3.0, **TURNS)
    assert corrected_by(inputs, level="turn", cap=10.0).weights_N.tolist() == pytest.approx([4.5, 0.5, 4.5])
    assert corrected_by(inputs, level="sequence", cap=10.0).weights_N.tolist() == pytest.approx([2.25] * 3)
    corrected = corrected_by(inputs, type="masked", level="turn", cap=4.0, floor=0.4)
    assert corrected.weights_N.tolist() == pytest.approx([0.0, 0.5, 0.0])
    inputs = with_ratios(1.0, 0.5, 4.0, **TURNS)
    assert corrected_by(inputs, level="turn_geometric", cap=10.0).weights_N.tolist() == pytest.approx([2.0, 0.5, 2.0])
    assert corrected_by(inputs, level="turn_geometric", cap=1.5).weights_N.tolist() == pytest.approx([1.5, 0.5, 1.5])


@pytest.mark.parametrize(("turn", "sequence"), [("turn", "sequence"), ("turn_geometric", "geometric")])
def test_weights_of_single_turns_are_those_of_sequences(turn, sequence):
    inputs = with_ratios(1.5, 0.5, 3.0, **SEQUENCES)
    found, expected = (corrected_by(inputs, level=level, cap=2.0) for level in (turn, sequence))
    assert found.weights_N.tolist() == expected.weights_N.tolist()


def test_masked_weights_are_zero_outside_of_the_band():
    inputs = with_ratios(0.4, 1.0, 3.0)
    corrected = corrected_by(inputs, type="masked", floor=0.5, cap=2.0)
    assert corrected.weights_N.tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert corrected.capped_N.tolist() == [True, False, True]
    assert corrected_by(inputs, type="masked").weights_N.tolist() == pytest.approx([0.4, 1.0, 0.0])


@pytest.mark.parametrize(
    ("reject", "expected"),
    [
        ({"estimator": "k1", "level": "token", "high": 2.0}, [False, False, True]),
        ({"estimator": "k1", "level": "token", "high": 2.0, "low": 0.6}, [False, True, True]),
        # geometric means √3 and 0.5
        ({"estimator": "k1", "level": "sequence_mean", "high": 1.7}, [True, False, True]),
        ({"estimator": "k1", "level": "sequence_mean", "high": 1.8, "low": 0.6}, [False, True, False]),
        ({"estimator": "k1", "level": "sequence_max", "high": 2.9}, [True, False, True]),
        ({"estimator": "k1", "level": "sequence_max", "high": 3.1}, [False, False, False]),
        ({"estimator": "k1", "level": "sequence_max", "high": 3.1, "low": 0.6}, [False, True, False]),
        # (log 3)²/2 = 0.6035, (log ½)²/2 = 0.2402
        ({"estimator": "k2", "level": "token", "high": 0.6}, [False, False, True]),
        ({"estimator": "k2", "level": "token", "high": 0.24}, [False, True, True]),
        ({"estimator": "k2", "level": "sequence_mean", "high": 0.3}, [True, False, True]),
        ({"estimator": "k2", "level": "sequence_max", "high": 0.6}, [True, False, True]),
        # 3 − 1 − log 3 = 0.9014, ½ − 1 + log 2 = 0.1931
        ({"estimator": "k3", "level": "token", "high": 0.9}, [False, False, True]),
        ({"estimator": "k3", "level": "token", "high": 0.19}, [False, True, True]),
        ({"estimator": "k3", "level": "sequence_mean", "high": 0.45}, [True, False, True]),
        ({"estimator": "k3", "level": "sequence_max", "high": 0.91}, [False, False, False]),
    ],
)
@pytest.mark.parametrize("unit", ["sequence", "turn"])
def test_rejection_by_hand(unit, reject, expected):
    parts = SEQUENCES if unit == "sequence" else TURNS
    reject = {**reject, "level": reject["level"].replace("sequence", unit)}
    corrected = corrected_by(with_ratios(1.0, 0.5, 3.0, **parts), cap=100.0, reject=reject)
    assert corrected.rejected_N.tolist() == expected
    plain = [1.0, 0.5, 3.0]
    kept = [0.0 if out else weight for out, weight in zip(expected, plain, strict=True)]
    assert corrected.weights_N.tolist() == pytest.approx(kept)


def test_rejection_alone_and_in_bypass_mode():
    # bypass: the old policy is the behaviour policy, so the current one is compared
    inputs = make_inputs([-1.0, -3.0], old_logprobs_N=[-1.0, -1.0], behaviour_logprobs_N=[-1.0, -1.0])
    corrected = corrected_by(inputs, type="none", reject={"estimator": "k2", "level": "token", "high": 1.0})
    assert corrected.weights_N.tolist() == [1.0, 0.0]
    assert corrected.rejected_N.tolist() == [False, True]
    assert not corrected.weights_N.requires_grad


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"floor": 0.5}, "type: masked only"),
        ({"type": "masked", "floor": 3.0}, "set floor below cap"),
        ({"reject": {"estimator": "k1", "high": 0.9}}, "high bounds the ratio"),
        ({"reject": {"estimator": "k3", "high": 0.9, "low": 0.1}}, "no lower bound"),
        ({"reject": {"estimator": "k1", "high": 2.0, "low": 1.5}}, "set it below 1"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        CorrectionConfig(**config)


def test_statistics_merge_to_those_of_the_whole_batch():
    old = [-1.0, -2.0, -0.5, -3.0]
    behaviour = [-1.2, -1.5, -0.6, -3.5]
    ppo = LOSSES.get("ppo")(LOSSES.get("ppo").Config())
    correction = CorrectionConfig(cap=1.2)

    def metrics(start, end):
        inputs = make_inputs(old[start:end], behaviour_logprobs_N=behaviour[start:end])
        return policy_objective(inputs, ppo, None, 0.0, correction)[1]

    whole, parts = reduce(metrics(0, 4)), reduce(merge([metrics(0, 1), metrics(1, 4)]))
    assert parts == pytest.approx(whole)
    weights = [min(math.exp(o - b), 1.2) for o, b in zip(old, behaviour, strict=True)]
    assert whole["correction/ess"] == pytest.approx(sum(weights) ** 2 / (4 * sum(w * w for w in weights)))
    assert whole["mismatch/logprob_pearson"] == pytest.approx(np.corrcoef(old, behaviour)[0, 1])
    # log-ratios 0.2, −0.5, 0.1, 0.5
    assert whole["mismatch/ratio_p01"] == pytest.approx(math.exp(-0.5), rel=0.006)
    assert whole["mismatch/ratio_p50"] == pytest.approx(math.exp(0.1), rel=0.006)
    assert whole["mismatch/ratio_p99"] == pytest.approx(math.exp(0.5), rel=0.006)
    assert whole["correction/capped_fraction"] == 0.5


def test_only_bad_sequences_are_masked():
    """DeepSeek-V3.2's mask: A < 0 and mean log(μ/π) > δ, by hand."""
    pairs = {"sequence_N": torch.tensor([0, 0, 1, 1, 2, 2, 3]), "sequences": 4}
    # mean log(μ/π) of the sequences: 0.6, 0.6, 0.4, −2 (which the policy likes better than the engine did)
    inputs = make_inputs(
        [-1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0],
        behaviour_logprobs_N=[0.0, -0.8, -0.8, 0.0, -0.2, -1.0, -3.0],
        advantages_N=[-1.0, -1.0, 1.0, 1.0, -1.0, -1.0, -1.0],
        **pairs,
    )

    def rejected(**reject):
        return correct(inputs, CorrectionConfig(type="none", reject=reject)).rejected_N.tolist()

    assert rejected(low=math.exp(-0.5), advantages="negative") == [True, True] + [False] * 5
    assert rejected(low=math.exp(-0.5)) == [True] * 4 + [False] * 3
    assert rejected(low=math.exp(-0.3), advantages="negative") == [True, True, False, False, True, True, False]
    # zero is not negative
    zero = dataclasses.replace(inputs, advantages_N=torch.zeros(7, dtype=torch.float64))
    config = CorrectionConfig(type="none", reject={"low": 0.9, "advantages": "negative"})
    assert not correct(zero, config).rejected_N.any()


def test_a_sequence_of_both_signs_is_masked_as_a_whole_by_its_mean_advantage():
    """Mean advantages are −1/6 and 0.4/3 of sequences, −1/6, −0.1 and 0.6 of turns; log(μ/π) is 1 everywhere."""
    inputs = make_inputs(
        [0.0] * 6,
        behaviour_logprobs_N=[1.0] * 6,
        advantages_N=[-0.5, 0.25, -0.25, -0.3, 0.1, 0.6],
        sequence_N=torch.tensor([0, 0, 0, 1, 1, 1]),
        sequences=2,
        turn_N=torch.tensor([0, 0, 0, 1, 1, 2]),
        turns=3,
    )

    def rejected(level):
        reject = {"level": level, "low": 0.9, "advantages": "negative"}
        return correct(inputs, CorrectionConfig(type="none", reject=reject)).rejected_N.tolist()

    assert rejected("token") == [True, False, True, True, False, False]
    for kind in ("mean", "max"):
        assert rejected(f"sequence_{kind}") == [True] * 3 + [False] * 3
        assert rejected(f"turn_{kind}") == [True] * 5 + [False]


@pytest.mark.parametrize("reject", [{}, {"estimator": "k2"}, {"estimator": "k3"}])
def test_a_rejection_without_a_bound_is_refused(reject):
    with pytest.raises(ConfigError, match="there is no bound"):
        CorrectionConfig(reject=reject)
