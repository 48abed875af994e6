"""The objective of preference training: weights, likelihood, metrics, cuts into micro-batches, bad input."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import pytest
import torch
from preference_samples import kto, loss_of, make_pairs, make_samples

from roll_like.algorithms.preference.base import (
    MismatchedResponses,
    PairConfig,
    PairedLoss,
    PairInputs,
    PairLosses,
    UnpairedInputs,
    UnpairedLoss,
    UnpairedLosses,
    sequence_logprobs,
)
from roll_like.algorithms.preference.objective import preference_objective
from roll_like.config.base import PluginConfig
from roll_like.errors import EngineError
from roll_like.registry import PREFERENCE_LOSSES
from roll_like.values import Mean, Sum, merge, reduce

RATIOS = {"chosen": [-1.0, -5.0], "rejected": [-6.0, -2.0], "reference": ([-3.0, -4.0], [-3.0, -3.0])}
LENGTHS = {"tokens": ([2, 4], [3, 1])}


def test_sums_of_responses() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -4.0, -0.5], dtype=torch.bfloat16, requires_grad=True)
    sums, tokens = sequence_logprobs(logprobs, torch.tensor([2, 0, 2, 2]), 4)
    assert (sums.tolist(), tokens.tolist()) == ([-2.0, 0.0, -5.5, 0.0], [1, 0, 3, 0])
    assert sums.dtype == torch.float32
    (sums * torch.tensor([1.0, 2, 3, 4])).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [3.0, 1.0, 3.0, 3.0]


def test_a_weighted_sum_of_pairs() -> None:
    pairs = make_pairs(**RATIOS, **LENGTHS, weights=[0.25, 0.5])
    objective, metrics = preference_objective(pairs, loss_of("hinge", beta=0.1))
    assert objective.item() == pytest.approx(0.25 * 0.5 + 0.5 * 1.2)
    assert metrics["train/loss"] == metrics["train/preference_loss"] == Sum(objective.item())
    assert "train/nll_loss" not in metrics


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", (1 + 5) * 0.1),
        ("seq_mean_token_mean", 0.25 * 1 / 2 + 0.5 * 5 / 4),
        ("seq_mean_token_sum", 0.25 * 1 + 0.5 * 5),
    ],
)
def test_the_likelihood_of_chosen_responses(aggregation: str, expected: float) -> None:
    pairs = make_pairs(**RATIOS, **LENGTHS, weights=[0.25, 0.5], token_weights=[0.1, 0.1])
    plain, _ = preference_objective(pairs, loss_of("hinge", beta=0.1))
    loss = loss_of("hinge", beta=0.1, nll_coefficient=0.3, nll_aggregation=aggregation)
    objective, metrics = preference_objective(pairs, loss)
    assert objective.item() - plain.item() == pytest.approx(0.3 * expected)
    assert metrics["train/nll_loss"].value == pytest.approx(0.3 * expected)
    assert metrics["train/loss"].value == pytest.approx(objective.item())
    assert metrics["train/preference_loss"].value == pytest.approx(plain.item())


def test_figures_of_pairs() -> None:
    _, metrics = preference_objective(make_pairs(**RATIOS, **LENGTHS), loss_of("dpo", beta=0.5))
    # rewards 1 and −0.5 of chosen responses, −1.5 and 0.5 of rejected ones
    assert {name: metrics[name] for name in metrics if name.startswith("preference/")} == {
        "preference/pairs": Sum(2.0),
        "preference/reward_chosen": Mean(0.25, 2.0),
        "preference/reward_rejected": Mean(-0.5, 2.0),
        "preference/reward_margin": Mean(0.75, 2.0),
        "preference/accuracy": Mean(0.5, 2.0),
        "preference/logprob_chosen": Mean(-3.0, 2.0),
        "preference/logprob_rejected": Mean(-4.0, 2.0),
        "preference/length_chosen": Mean(3.0, 2.0),
        "preference/length_rejected": Mean(2.0, 2.0),
    }


def test_a_policy_that_equals_its_reference_is_at_chance() -> None:
    pairs = make_pairs([-1.0, -2.0], [-3.0, -4.0], reference=([-1.0, -2.0], [-3.0, -4.0]))
    assert preference_objective(pairs, loss_of("dpo"))[1]["preference/accuracy"] == Mean(0.5, 2.0)


def test_figures_of_samples() -> None:
    samples = make_samples(
        [-1.0, -2.0, -5.0, -9.0], [True, False, True, True], reference=[-3.0, -4.0, -5.25, -9.0], tokens=[2, 4, 1, 7]
    )
    samples = dataclasses.replace(samples, weights_S=torch.tensor([0.5, 0.25, 0.25, 0.0]))
    objective, metrics = preference_objective(samples, kto(0.5, beta=0.4))
    # log-ratios 2 and 0.25 of desirable samples, and 2 of the one that should be below the baseline of 0.5
    above, wrong, below = (1 / (1 + math.exp(0.4 * gain)) for gain in (1.5, -1.5, -0.25))
    assert objective.item() == pytest.approx(0.5 * above + 0.25 * wrong + 0.25 * below)
    assert reduce(metrics) == pytest.approx(
        {
            "train/loss": objective.item(),
            "train/preference_loss": objective.item(),
            "preference/samples": 3.0,
            "preference/reward_chosen": 0.45,
            "preference/reward_rejected": 0.8,
            "preference/accuracy": 1 / 3,
            "preference/logprob_chosen": -3.0,
            "preference/logprob_rejected": -2.0,
            "preference/length_chosen": 1.5,
            "preference/length_rejected": 4.0,
            "preference/baseline": 0.2,
        }
    )
    weights = {name.partition("/")[2]: metric.weight for name, metric in metrics.items() if isinstance(metric, Mean)}
    of_chosen, of_rejected = (
        {name: weight for name, weight in weights.items() if name.endswith(side)} for side in ("_chosen", "_rejected")
    )
    assert (set(of_chosen.values()), set(of_rejected.values())) == ({2.0}, {1.0})
    assert weights["accuracy"] == weights["baseline"] == 3.0


def test_samples_of_one_kind_only() -> None:
    samples = make_samples([-1.0, -2.0], [True, True])
    _, metrics = preference_objective(samples, kto())
    assert "preference/reward_rejected" not in metrics
    assert "preference/reward_rejected" not in reduce(metrics)
    assert metrics["preference/reward_chosen"].weight == 2.0  # type: ignore[union-attr]


def test_pairs_that_only_fill_up_change_nothing() -> None:
    plain = make_pairs([-1.0], [-6.0], reference=([-3.0], [-3.0]), tokens=([2], [3]))
    filled = make_pairs(**RATIOS, **LENGTHS, weights=[1.0, 0.0], token_weights=[1.0, 0.0])
    for loss in (loss_of("dpo", nll_coefficient=0.5), loss_of("orpo")):
        expected, figures = preference_objective(plain, loss)
        objective, found = preference_objective(filled, loss)
        assert objective.item() == pytest.approx(expected.item())
        assert found == pytest.approx(figures)
    objective.backward()
    assert filled.chosen_logprobs_P.grad is not None
    assert filled.chosen_logprobs_P.grad[1].item() == 0
    only = make_pairs(**RATIOS, **LENGTHS, weights=[0.0, 0.0], token_weights=[0.0, 0.0])
    objective, found = preference_objective(only, loss_of("dpo", nll_coefficient=0.5))
    assert objective.item() == 0
    assert reduce(found) == {
        "train/loss": 0.0,
        "train/preference_loss": 0.0,
        "train/nll_loss": 0.0,
        "preference/pairs": 0.0,
    }


def rows_of(inputs: Any, rows: slice) -> Any:
    arrays = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    return type(inputs)(**{name: None if array is None else array[rows] for name, array in arrays.items()})


CHOSEN, REJECTED = [-1.0, -5.0, -2.0, -7.0, -0.5], [-6.0, -2.0, -2.5, -1.0, -3.0]
CHOSEN_TOKENS = [2, 4, 3, 9, 1]


def whole_batch(name: str) -> PairInputs | UnpairedInputs:
    """Five items with the weights of a global mean."""
    if name == "kto":
        return make_samples(
            CHOSEN, [True, False, True, True, False], reference=REJECTED, tokens=CHOSEN_TOKENS, weights=[0.2] * 5
        )
    reference = [value - 0.5 * row for row, value in enumerate(CHOSEN)], [value + 0.5 for value in REJECTED]
    return make_pairs(
        CHOSEN,
        REJECTED,
        reference=reference,
        tokens=(CHOSEN_TOKENS, [3, 1, 8, 2, 2]),
        weights=[0.2] * 5,
        token_weights=[1 / sum(CHOSEN_TOKENS)] * 5,
    )


@pytest.mark.parametrize("name", PREFERENCE_LOSSES.names())
def test_micro_batches_add_up(name: str) -> None:
    loss = kto(0.3) if name == "kto" else loss_of(name, nll_coefficient=0.4)
    whole = whole_batch(name)
    expected, figures = preference_objective(whole, loss)
    items, merged = [slice(0, 1), slice(1, 4), slice(4, 5)], []
    total = torch.zeros(())
    for rows in items:
        part, metrics = preference_objective(rows_of(whole, rows), loss)
        total = total + part
        merged.append(metrics)
    assert total.item() == pytest.approx(expected.item())
    assert reduce(merge(merged)) == pytest.approx(reduce(figures))
    if isinstance(whole, PairInputs):
        losses = loss(whole).losses_P.mean() - 0.4 * whole.chosen_logprobs_P.sum() / sum(CHOSEN_TOKENS)
    else:
        losses = loss(whole).losses_S.mean()
    assert expected.item() == pytest.approx(losses.item())


# ---- the baseline of kto -----------------------------------------------------------------------


def mismatched(logprobs: list[float], reference: list[float], tokens: list[int]) -> MismatchedResponses:
    return MismatchedResponses(
        logprobs_M=torch.tensor(logprobs, requires_grad=True),
        reference_logprobs_M=torch.tensor(reference),
        tokens_M=torch.tensor(tokens),
    )


@pytest.mark.parametrize(
    ("settings", "reference", "expected"),
    [
        ({}, [-3.0, -4.0], 1.0),
        ({"length_normalised": True}, [-3.0, -4.0], (2 / 2 - 0 / 4) / 2),
        ({}, [-0.5, -1.0], 0.0),  # a negative estimate of a divergence
    ],
)
def test_the_baseline(settings: dict[str, Any], reference: list[float], expected: float) -> None:
    batch = mismatched([-1.0, -4.0], reference, [2, 4])
    bound = loss_of("kto", beta=1.0, **settings).of_batch(batch)
    found = bound(make_samples([-1.0], [True]))
    assert found.baseline.item() == expected
    found.losses_S.sum().backward()
    assert batch.logprobs_M.grad is None


def test_kto_needs_its_batch() -> None:
    with pytest.raises(EngineError, match="of_batch"):
        loss_of("kto")(make_samples([-1.0], [True]))


@pytest.mark.parametrize(
    "batch",
    [mismatched([], [], []), mismatched([-math.inf], [0.0], [1]), mismatched([math.nan], [0.0], [1])],
    ids=["none", "-inf", "nan"],
)
def test_a_baseline_of_nothing_is_refused(batch: MismatchedResponses) -> None:
    with pytest.raises(EngineError, match=r"KL baseline of \d mismatched responses"):
        loss_of("kto").of_batch(batch)


def test_a_loss_without_of_batch_says_so() -> None:
    class Wrong(UnpairedLoss):
        needs_batch = True

        def __call__(self, inputs: UnpairedInputs) -> UnpairedLosses:
            return UnpairedLosses(inputs.logprobs_S, inputs.logprobs_S, torch.zeros(()))

    with pytest.raises(EngineError, match="Wrong has needs_batch, but no of_batch"):
        Wrong(PluginConfig(type="wrong")).of_batch(mismatched([-1.0], [-1.0], [1]))


# ---- bad input ---------------------------------------------------------------------------------

ARRAYS = (
    "chosen_logprobs_P",
    "rejected_logprobs_P",
    "reference_chosen_logprobs_P",
    "reference_rejected_logprobs_P",
    "weights_P",
    "token_weights_P",
)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("field", ARRAYS)
@pytest.mark.parametrize("name", sorted(set(PREFERENCE_LOSSES.names()) - {"kto"}))
def test_infinities_in_pairs_are_refused(name: str, field: str, bad: float) -> None:
    pairs = make_pairs(**RATIOS, **LENGTHS, requires_grad=False)
    array = getattr(pairs, field).clone()
    array[1] = bad
    with pytest.raises(EngineError, match=r"at pair 1 \(of 2 in this micro-batch; 1 such pairs .* finite numbers"):
        preference_objective(dataclasses.replace(pairs, **{field: array}), loss_of(name))


@pytest.mark.parametrize("field", ["logprobs_S", "reference_logprobs_S", "weights_S"])
def test_infinities_in_samples_are_refused(field: str) -> None:
    samples = make_samples([-1.0, -2.0], [True, False])
    broken = dataclasses.replace(samples, **{field: torch.tensor([math.nan, 0.0])})
    with pytest.raises(EngineError, match="nan at sample 0"):
        preference_objective(broken, kto())


@pytest.mark.parametrize(("field", "which"), [("chosen_tokens_P", "chosen"), ("rejected_tokens_P", "rejected")])
def test_empty_responses_are_refused(field: str, which: str) -> None:
    pairs = dataclasses.replace(make_pairs(**RATIOS, **LENGTHS), **{field: torch.tensor([3, 0])})
    with pytest.raises(EngineError, match=f"the {which} response of pair 1 has 0 tokens"):
        preference_objective(pairs, loss_of("dpo"))


@pytest.mark.parametrize("name", [name for name in PREFERENCE_LOSSES.names() if name != "kto"])
def test_a_missing_reference(name: str) -> None:
    alone = dataclasses.replace(
        make_pairs(**RATIOS, **LENGTHS), reference_chosen_logprobs_P=None, reference_rejected_logprobs_P=None
    )
    loss = loss_of(name)
    if loss.needs_reference:
        with pytest.raises(EngineError, match="compares with a reference model"):
            preference_objective(alone, loss)
    else:
        found, _ = preference_objective(alone, loss)
        expected, _ = preference_objective(make_pairs(**RATIOS, **LENGTHS), loss)
        assert found.item() == expected.item()


def test_a_missing_reference_of_samples() -> None:
    samples = dataclasses.replace(make_samples([-1.0], [True]), reference_logprobs_S=None)
    with pytest.raises(EngineError, match="these samples have none"):
        preference_objective(samples, kto())


def test_pairs_and_samples_are_told_apart() -> None:
    with pytest.raises(EngineError, match="KTOLoss takes single samples, found pairs"):
        preference_objective(make_pairs(**RATIOS), kto())
    with pytest.raises(EngineError, match="DPOLoss takes pairs, found single samples"):
        preference_objective(make_samples([-1.0], [True]), loss_of("dpo"))


# ---- a loss of one's own -----------------------------------------------------------------------


def test_a_users_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PREFERENCE_LOSSES, "_plugins", dict(PREFERENCE_LOSSES._plugins))

    @PREFERENCE_LOSSES.register("difference_test")
    class Difference(PairedLoss):
        class Config(PairConfig):
            type: Literal["difference_test"] = "difference_test"

        def __call__(self, inputs: PairInputs) -> PairLosses:
            chosen_P, rejected_P = inputs.log_ratios()
            return PairLosses(rejected_P - chosen_P, chosen_P, rejected_P)

    pairs = make_pairs(**RATIOS, **LENGTHS)
    objective, _ = preference_objective(pairs, loss_of("difference_test", nll_coefficient=1.0))
    # margins 5 and −2; log-probabilities −1 and −5
    assert objective.item() == pytest.approx(-5 + 2 + 1 + 5)
    objective.backward()
    assert pairs.chosen_logprobs_P.grad is not None
    assert pairs.chosen_logprobs_P.grad.tolist() == [-2.0, -2.0]
