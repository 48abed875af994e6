"""Every registered preference loss: values by hand, gradients against finite differences, extremes and options."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from algorithm_samples import differences
from preference_samples import kto, loss_of, make_pairs, make_samples
from torch import Tensor

from roll_like.algorithms.preference.base import PairedLoss, UnpairedLoss
from roll_like.algorithms.preference.objective import preference_objective
from roll_like.errors import ConfigError
from roll_like.registry import PREFERENCE_LOSSES

REFERENCE = {"dpo", "ipo", "hinge", "robust", "sppo", "apo_zero", "apo_down"}
FREE = {"cpo", "orpo", "simpo"}
PAIRED = sorted(REFERENCE | FREE)
#: Every form that a paired loss takes.
FORMS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in PAIRED),
    *((name, {"length_normalised": True}) for name in ("dpo", "hinge", "robust", "apo_zero", "apo_down", "cpo")),
    ("ipo", {"length_normalised": False}),
    ("dpo", {"label_smoothing": 0.2}),
    ("cpo", {"label_smoothing": 0.2}),
    ("simpo", {"label_smoothing": 0.2}),
    ("dpo", {"divergence": "forward_kl"}),
    ("dpo", {"divergence": "js"}),
    ("dpo", {"divergence": "alpha", "alpha": 0.3}),
]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def approx(*values: float) -> Any:
    return pytest.approx(list(values), abs=1e-9)


#: Log-ratios 2 and −1 of chosen responses, −3 and 1 of rejected ones; 2 and 4 tokens, 3 and 1.
RATIOS = {"chosen": [-1.0, -5.0], "rejected": [-6.0, -2.0], "reference": ([-3.0, -4.0], [-3.0, -3.0])}
LENGTHS = {"tokens": ([2, 4], [3, 1])}


def values(name: str, **settings: Any) -> list[float]:
    losses: Tensor = loss_of(name, **settings)(make_pairs(**RATIOS, **LENGTHS)).losses_P
    return losses.tolist()


def test_the_table_of_losses() -> None:
    found = {name: PREFERENCE_LOSSES.get(name) for name in PREFERENCE_LOSSES.names()}
    built_in = {name: plugin for name, plugin in found.items() if plugin.__module__.startswith("roll_like.")}
    assert set(built_in) == REFERENCE | FREE | {"kto"}
    assert {name for name, plugin in built_in.items() if plugin.needs_reference} == REFERENCE | {"kto"}
    assert {name for name, plugin in built_in.items() if not plugin.paired} == {"kto"}
    assert {name for name, plugin in built_in.items() if plugin.needs_batch} == {"kto"}
    for name, plugin in built_in.items():
        assert issubclass(plugin, PairedLoss if plugin.paired else UnpairedLoss)
        assert plugin.Config().type == name


# ---- values by hand ----------------------------------------------------------------------------


def test_dpo() -> None:
    assert values("dpo", beta=0.5) == approx(-log_sigmoid(2.5), -log_sigmoid(-1.0))
    smoothed = [-0.9 * log_sigmoid(m) - 0.1 * log_sigmoid(-m) for m in (2.5, -1.0)]
    assert values("dpo", beta=0.5, label_smoothing=0.1) == approx(*smoothed)
    # log-ratios a token: 2/2 − (−3)/3 and −1/4 − 1/1
    normalised = [-log_sigmoid(0.5 * m) for m in (2.0, -1.25)]
    assert values("dpo", beta=0.5, length_normalised=True) == approx(*normalised)


def test_dpo_with_other_divergences() -> None:
    def expected(derivative: Any) -> Any:
        margins = [0.5 * (derivative(math.exp(good)) - derivative(math.exp(bad))) for good, bad in ((2, -3), (-1, 1))]
        return approx(*(-log_sigmoid(margin) for margin in margins))

    assert values("dpo", beta=0.5, divergence="reverse_kl") == expected(lambda t: math.log(t) + 1)
    assert values("dpo", beta=0.5, divergence="forward_kl") == expected(lambda t: -1 / t)
    assert values("dpo", beta=0.5, divergence="js") == expected(lambda t: math.log(2 * t / (1 + t)))
    alpha = values("dpo", beta=0.5, divergence="alpha", alpha=0.3)
    assert alpha == expected(lambda t: (1 - t**-0.3) / 0.3)


def test_the_alpha_divergence_lies_between_both_kls() -> None:
    for alpha, other in ((1e-9, "reverse_kl"), (1 - 1e-9, "forward_kl")):
        found = values("dpo", divergence="alpha", alpha=alpha)
        assert found == pytest.approx(values("dpo", divergence=other), abs=1e-6)


@pytest.mark.parametrize("settings", [{"divergence": "alpha"}, {"alpha": 0.5}, {"divergence": "js", "alpha": 0.5}])
def test_alpha_and_its_divergence_belong_together(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"set (alpha|divergence)"):
        loss_of("dpo", **settings)


def test_a_configuration_with_alpha_is_read_back() -> None:
    config = loss_of("dpo", divergence="alpha", alpha=0.25).config
    assert type(config).model_validate(config.model_dump()) == config


def test_ipo() -> None:
    # the margin should be 1/(2·0.25) = 2; it is 5 and −2, or 2 and −1.25 a token
    assert values("ipo", beta=0.25, length_normalised=False) == approx(9.0, 16.0)
    assert values("ipo", beta=0.25) == approx(0.0, 3.25**2)


def test_hinge() -> None:
    assert values("hinge", beta=0.1) == approx(0.5, 1.2)
    assert values("hinge", beta=0.5) == approx(0.0, 2.0)
    assert values("hinge", beta=0.1, length_normalised=True) == approx(0.8, 1.125)


def test_robust() -> None:
    margins = (2.5, -1.0)
    expected = [(-0.8 * log_sigmoid(m) + 0.2 * log_sigmoid(-m)) / 0.6 for m in margins]
    assert values("robust", beta=0.5, label_smoothing=0.2) == approx(*expected)


def test_sppo() -> None:
    # targets ±1/(2·0.25) = ±2
    assert values("sppo", beta=0.25) == approx(0 + 1, 9 + 9)


def test_apo() -> None:
    zero = [1 - sigmoid(1.0) + sigmoid(-1.5), 1 - sigmoid(-0.5) + sigmoid(0.5)]
    assert values("apo_zero", beta=0.5) == approx(*zero)
    down = [sigmoid(1.0) + 1 - sigmoid(2.5), sigmoid(-0.5) + 1 - sigmoid(-1.0)]
    assert values("apo_down", beta=0.5) == approx(*down)


def test_cpo() -> None:
    # log-probabilities differ by 5 and −3, their means by 1.5 and 0.75
    assert values("cpo", beta=0.5) == approx(-log_sigmoid(2.5), -log_sigmoid(-1.5))
    assert values("cpo", beta=0.5, length_normalised=True) == approx(-log_sigmoid(0.75), -log_sigmoid(0.375))


def test_simpo() -> None:
    assert values("simpo", beta=2.0, gamma=0.5) == approx(-log_sigmoid(2.5), -log_sigmoid(1.0))


def test_orpo() -> None:
    def log_odds(mean: float) -> float:
        return mean - math.log(1 - math.exp(mean))

    pairs = ((-0.5, -2.0), (-1.25, -2.0))
    expected = [-0.3 * log_sigmoid(log_odds(good) - log_odds(bad)) for good, bad in pairs]
    assert values("orpo", beta=0.3) == approx(*expected)


def test_kto() -> None:
    samples = make_samples([-1.0, -2.0, -5.0], [True, False, True], reference=[-3.0, -4.0, -4.0], tokens=[2, 4, 1])
    loss = kto(0.5, beta=0.4, desirable_weight=1.5, undesirable_weight=0.8)
    # log-ratios 2, 2, −1 against 0.5
    expected = [1.5 * (1 - sigmoid(0.4 * 1.5)), 0.8 * (1 - sigmoid(0.4 * -1.5)), 1.5 * (1 - sigmoid(0.4 * -1.5))]
    found = loss(samples)
    assert found.losses_S.tolist() == approx(*expected)
    assert found.rewards_S.tolist() == approx(0.8, 0.8, -0.4)
    assert found.baseline.item() == pytest.approx(0.2)
    normalised = kto(0.5, beta=0.4, length_normalised=True)(samples).losses_S.tolist()
    # 1, 0.5 and −1 a token
    assert normalised == approx(*(1 - sigmoid(0.4 * gain) for gain in (0.5, 0.0, -1.5)))


def test_rewards_are_log_ratios_times_beta() -> None:
    pairs = make_pairs(**RATIOS, **LENGTHS)
    for name in sorted(REFERENCE - {"ipo"}):
        found = loss_of(name, beta=0.5)(pairs)
        assert (found.chosen_rewards_P.tolist(), found.rejected_rewards_P.tolist()) == ([1.0, -0.5], [-1.5, 0.5])
    found = loss_of("ipo", beta=0.5)(pairs)
    assert (found.chosen_rewards_P.tolist(), found.rejected_rewards_P.tolist()) == ([0.5, -0.125], [-0.5, 0.5])
    found = loss_of("cpo", beta=0.5)(pairs)
    assert (found.chosen_rewards_P.tolist(), found.rejected_rewards_P.tolist()) == ([-0.5, -2.5], [-3.0, -1.0])
    for name in ("simpo", "orpo"):
        found = loss_of(name, beta=0.5)(pairs)
        assert (found.chosen_rewards_P.tolist(), found.rejected_rewards_P.tolist()) == ([-0.25, -0.625], [-1.0, -1.0])


# ---- properties --------------------------------------------------------------------------------


def equal_pairs() -> Any:
    return make_pairs([-3.0], [-3.0], reference=([-4.0], [-4.0]), tokens=([3], [3]))


def test_equal_responses_are_worth_a_coin_flip() -> None:
    for name, settings in FORMS:
        if name in {"dpo", "cpo", "robust"}:
            assert loss_of(name, **settings)(equal_pairs()).losses_P.tolist() == approx(math.log(2))
    assert loss_of("simpo", gamma=0.0)(equal_pairs()).losses_P.tolist() == approx(math.log(2))
    assert loss_of("orpo", beta=1.0)(equal_pairs()).losses_P.tolist() == approx(math.log(2))
    assert loss_of("hinge")(equal_pairs()).losses_P.tolist() == [1.0]
    assert loss_of("apo_zero")(equal_pairs()).losses_P.tolist() == approx(1.0)


def test_a_policy_that_equals_its_reference() -> None:
    pairs = make_pairs([-3.0], [-7.0], reference=([-3.0], [-7.0]), tokens=([2], [5]))
    expected = {"dpo": math.log(2), "robust": math.log(2), "hinge": 1.0, "ipo": 25.0, "apo_zero": 1.0, "apo_down": 1.0}
    for name, value in expected.items():
        assert loss_of(name)(pairs).losses_P.tolist() == approx(value)
    assert loss_of("sppo", beta=0.1)(pairs).losses_P.tolist() == approx(50.0)
    samples = make_samples([-3.0, -7.0], [True, False], reference=[-3.0, -7.0])
    assert kto()(samples).losses_S.tolist() == approx(0.5, 0.5)


def swapped(pairs: Any) -> Any:
    """The same pairs with the labels the wrong way round."""
    mirrored = {
        field.name: getattr(
            pairs, field.name.replace("chosen", "·").replace("rejected", "chosen").replace("·", "rejected")
        )
        for field in dataclasses.fields(pairs)
    }
    return type(pairs)(**mirrored)


@pytest.mark.parametrize("name", ["dpo", "cpo", "simpo"])
def test_label_smoothing_mixes_both_labels(name: str) -> None:
    pairs, more = make_pairs(**RATIOS, **LENGTHS), {"gamma": 0.0} if name == "simpo" else {}

    def losses(smoothing: float, given: Any = pairs) -> Tensor:
        found: Tensor = loss_of(name, label_smoothing=smoothing, **more)(given).losses_P
        return found

    assert losses(0.5).tolist() == pytest.approx(losses(0.5, swapped(pairs)).tolist())
    mixed = 0.7 * losses(0.0) + 0.3 * losses(0.0, swapped(pairs))
    assert losses(0.3).tolist() == pytest.approx(mixed.tolist())


def test_robust_is_unbiased_under_flipped_labels() -> None:
    pairs = make_pairs(**RATIOS, **LENGTHS)
    noisy = loss_of("robust", label_smoothing=0.3)
    expected = 0.7 * noisy(pairs).losses_P + 0.3 * noisy(swapped(pairs)).losses_P
    assert expected.tolist() == pytest.approx(loss_of("dpo")(pairs).losses_P.tolist())
    assert loss_of("robust", label_smoothing=0.0)(pairs).losses_P.tolist() == pytest.approx(values("dpo"))


def test_kto_is_symmetric_about_its_baseline() -> None:
    samples = make_samples([1.5, -0.5], [True, False])
    good, bad = kto(0.5)(samples).losses_S.tolist()
    assert good == pytest.approx(bad)


@pytest.mark.parametrize(("name", "settings"), FORMS, ids=str)
def test_pairs_do_not_see_each_other(name: str, settings: dict[str, Any]) -> None:
    whole = loss_of(name, **settings)(make_pairs(**RATIOS, **LENGTHS)).losses_P.tolist()
    for row in (0, 1):
        alone = make_pairs(
            RATIOS["chosen"][row : row + 1],
            RATIOS["rejected"][row : row + 1],
            reference=tuple(side[row : row + 1] for side in RATIOS["reference"]),  # type: ignore[arg-type]
            tokens=tuple(side[row : row + 1] for side in LENGTHS["tokens"]),  # type: ignore[arg-type]
        )
        assert loss_of(name, **settings)(alone).losses_P.tolist() == approx(whole[row])


# ---- options -----------------------------------------------------------------------------------

#: Every option, away from its default.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "dpo": [
        {"beta": 0.3},
        {"label_smoothing": 0.1},
        {"divergence": "forward_kl"},
        {"divergence": "js"},
        {"divergence": "alpha", "alpha": 0.5},
        {"length_normalised": True},
    ],
    "ipo": [{"beta": 0.3}, {"length_normalised": False}],
    "hinge": [{"beta": 0.05}, {"length_normalised": True}],
    "robust": [{"beta": 0.3}, {"label_smoothing": 0.2}, {"length_normalised": True}],
    "sppo": [{"beta": 0.3}],
    "apo_zero": [{"beta": 0.3}, {"length_normalised": True}],
    "apo_down": [{"beta": 0.3}, {"length_normalised": True}],
    "cpo": [{"beta": 0.3}, {"label_smoothing": 0.1}, {"length_normalised": True}, {"nll_coefficient": 0.0}],
    "simpo": [{"beta": 0.3}, {"label_smoothing": 0.1}, {"gamma": 0.3}],
    "orpo": [{"beta": 0.3}, {"nll_coefficient": 0.0}],
}
LIKELIHOOD = [{"nll_coefficient": 0.7, "nll_aggregation": how} for how in ("seq_mean_token_mean", "seq_mean_token_sum")]


def test_the_options_are_all_here() -> None:
    for name in PAIRED:
        given = {key for settings in [*OPTIONS[name], *LIKELIHOOD] for key in settings}
        assert given == set(PREFERENCE_LOSSES.get(name).Config.model_fields) - {"type"}
    assert set(PREFERENCE_LOSSES.get("kto").Config.model_fields) == {"type", *KTO_OPTIONS}


@pytest.mark.parametrize("name", PAIRED)
def test_every_option_changes_the_number(name: str) -> None:
    pairs = make_pairs(**RATIOS, **LENGTHS, token_weights=[0.3, 0.3])
    tried = [{}, *OPTIONS[name], {"nll_coefficient": 0.7}, *LIKELIHOOD]
    found = [preference_objective(pairs, loss_of(name, **settings))[0].item() for settings in tried]
    assert len({round(value, 9) for value in found}) == len(found)


KTO_OPTIONS = {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 1.2, "length_normalised": True}


def test_every_option_of_kto_changes_the_number() -> None:
    samples = make_samples([-1.0, -2.0, -5.0], [True, False, True], reference=[-3.0, -4.5, -4.0], tokens=[2, 4, 1])
    tried = [{}, *({key: value} for key, value in KTO_OPTIONS.items())]
    found = [preference_objective(samples, kto(0.5, **settings))[0].item() for settings in tried]
    assert len({round(value, 9) for value in found}) == len(found)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dpo", {"beta": 0.0}),
        ("dpo", {"label_smoothing": 0.6}),
        ("dpo", {"divergence": "alpha", "alpha": 1.0}),
        ("robust", {"label_smoothing": 0.5}),
        ("simpo", {"gamma": -1.0}),
        ("kto", {"desirable_weight": 0.0}),
        ("hinge", {"nll_coefficient": -0.1}),
        ("hinge", {"label_smoothing": 0.1}),
    ],
)
def test_settings_without_meaning_are_refused(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        loss_of(name, **settings)


# ---- gradients and extremes --------------------------------------------------------------------


def random_pairs(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    tokens = [[draw.randrange(1, 6) for _ in range(3)] for _ in range(2)]
    logprobs = [[-sum(draw.uniform(0.3, 2) for _ in range(count)) for count in side] for side in tokens]
    reference = [[value + draw.uniform(-2, 2) for value in side] for side in logprobs]
    weights = [draw.uniform(0.1, 1) for _ in range(3)]
    return {
        "chosen": logprobs[0],
        "rejected": logprobs[1],
        "reference": reference,
        "tokens": tokens,
        "weights": weights,
        "token_weights": [draw.uniform(0.1, 1)] * 3,
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "settings"), [*FORMS, ("dpo", LIKELIHOOD[0]), ("ipo", LIKELIHOOD[1])], ids=str)
def test_gradients_are_those_of_finite_differences(name: str, settings: dict[str, Any], seed: int) -> None:
    case, loss = random_pairs(seed), loss_of(name, **settings)
    pairs = make_pairs(**case)
    preference_objective(pairs, loss)[0].backward()
    for side, leaf in (("chosen", pairs.chosen_logprobs_P), ("rejected", pairs.rejected_logprobs_P)):

        def objective(values: list[float], side: str = side) -> float:
            return preference_objective(make_pairs(**{**case, side: values}), loss)[0].item()

        assert leaf.grad is not None
        assert leaf.grad.tolist() == pytest.approx(differences(objective, case[side]), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("length_normalised", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_kto(seed: int, length_normalised: bool) -> None:
    draw = random.Random(seed)
    logprobs = [draw.uniform(-6, -1) for _ in range(5)]
    more = {
        "desirable": [True, False, draw.random() < 0.5, True, False],
        "reference": [value + draw.uniform(-2, 2) for value in logprobs],
        "tokens": [draw.randrange(1, 6) for _ in logprobs],
        "weights": [draw.uniform(0.1, 1) for _ in logprobs],
    }
    loss = kto(0.3, desirable_weight=1.3, length_normalised=length_normalised)
    samples = make_samples(logprobs, **more)
    preference_objective(samples, loss)[0].backward()
    numeric = differences(lambda given: preference_objective(make_samples(given, **more), loss)[0].item(), logprobs)
    assert samples.logprobs_S.grad is not None
    assert samples.logprobs_S.grad.tolist() == pytest.approx(numeric, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "settings"), FORMS, ids=str)
def test_responses_that_are_far_apart_stay_finite(name: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    ends = [-1e4, -1e4, 0.0, 0.0, -1e-9]
    other = [0.0, -1e4, -1e4, 0.0, -1e4]
    references = [([0.0] * 5, [-1e4] * 5), ([-1e4] * 5, [0.0] * 5), ([0.0] * 5, [0.0] * 5)]
    for reference in references:
        pairs = make_pairs(ends, other, reference=reference, dtype=dtype)
        objective, metrics = preference_objective(pairs, loss_of(name, **settings))
        objective.backward()
        for array in (objective, pairs.chosen_logprobs_P.grad, pairs.rejected_logprobs_P.grad):
            assert array is not None
            assert array.isfinite().all()
        assert all(math.isfinite(metric.value) for metric in metrics.values())


@pytest.mark.parametrize("divergence", ["forward_kl", "alpha"])
def test_an_abandoned_response_is_still_drawn_back(divergence: str) -> None:
    settings = {"divergence": divergence, "alpha": 0.5 if divergence == "alpha" else None}
    pairs = make_pairs([-900.0], [0.0])
    loss_of("dpo", **settings)(pairs).losses_P.sum().backward()
    assert pairs.chosen_logprobs_P.grad is not None
    assert pairs.chosen_logprobs_P.grad.item() < -1


def test_certain_responses_still_move_under_orpo() -> None:
    pairs = make_pairs([-5.0], [0.0])
    loss_of("orpo", nll_coefficient=0.0)(pairs).losses_P.sum().backward()
    assert pairs.rejected_logprobs_P.grad is not None
    assert pairs.rejected_logprobs_P.grad.item() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "settings"), FORMS, ids=str)
def test_sixteen_bits_are_computed_in_thirty_two(name: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    # multiples of 1/4, which 16 bits hold, whose differences in 8 bits of mantissa would not be
    numbers = {"reference": ([-90.25, -2.0], [-64.25, -1.0]), "tokens": ([30, 2], [20, 1])}
    narrow = make_pairs([-100.5, -1.25], [-64.0, -2.5], **numbers, dtype=dtype)  # type: ignore[arg-type]
    exact = make_pairs([-100.5, -1.25], [-64.0, -2.5], **numbers, dtype=torch.float64)  # type: ignore[arg-type]
    if dtype == torch.bfloat16:
        exact = dataclasses.replace(
            exact,
            **{
                field: getattr(narrow, field).detach().double()
                for field in (
                    "chosen_logprobs_P",
                    "rejected_logprobs_P",
                    "reference_chosen_logprobs_P",
                    "reference_rejected_logprobs_P",
                )
            },
        )
    found, expected = (loss_of(name, **settings)(pairs).losses_P for pairs in (narrow, exact))
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected.tolist(), rel=2e-6)


def test_sixteen_bits_of_kto() -> None:
    wide, narrow = (
        kto(0.3)(make_samples([-100.5, -1.25], [True, False], reference=[-90.25, -2.0], dtype=dtype)).losses_S
        for dtype in (torch.float64, torch.float16)
    )
    assert narrow.tolist() == pytest.approx(wide.tolist(), rel=1e-6)


@pytest.mark.parametrize("baseline", [0.0, 1e4])
def test_samples_that_are_far_away_stay_finite(baseline: float) -> None:
    samples = make_samples([-1e4, -1e4, 0.0, 1e4], [True, False, True, False], dtype=torch.float32)
    objective, _ = preference_objective(samples, kto(baseline))
    objective.backward()
    assert objective.isfinite()
    assert samples.logprobs_S.grad is not None
    assert samples.logprobs_S.grad.isfinite().all()
