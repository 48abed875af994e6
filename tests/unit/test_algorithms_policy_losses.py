"""Every registered policy loss: values and gradients by hand, and gradients against finite differences in float64."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from algorithm_samples import differences, make_inputs, make_policy_sample
from torch import Tensor

from roll_like.algorithms.kl import KLEstimator
from roll_like.algorithms.losses import BatchTokens, LossInputs, PolicyLoss, policy_objective
from roll_like.config.algorithm import CorrectionConfig, KLConfig
from roll_like.errors import ConfigError, EngineError
from roll_like.registry import LOSSES

PAIR = {"sequence_N": torch.tensor([0, 0, 1]), "sequences": 2}


def loss_of(name: str, **settings: Any) -> PolicyLoss:
    plugin = LOSSES.get(name)
    made: PolicyLoss = plugin(plugin.Config(**settings))
    return made


def bound(loss: PolicyLoss, inputs: LossInputs) -> PolicyLoss:
    """The loss, with the batch's statistics where it wants them; the micro-batch is the whole batch."""
    if not loss.needs_batch:
        return loss
    batch = BatchTokens(
        logprobs_N=inputs.logprobs_N.detach(),
        old_logprobs_N=inputs.old_logprobs_N,
        advantages_N=inputs.advantages_N,
        draws_N=inputs.draws_N,
    )
    return loss.of_batch(batch)


def evaluated(name: str, inputs: LossInputs, **settings: Any) -> tuple[list[float], list[float]]:
    """Losses of the tokens, and the gradient of their sum."""
    losses = bound(loss_of(name, **settings), inputs)(inputs).losses_N
    losses.sum().backward()
    gradient = inputs.logprobs_N.grad
    assert gradient is not None
    return losses.tolist(), gradient.tolist()


def at_ratios(*ratios: float, advantages: list[float], **more: Any) -> LossInputs:
    """Tokens that are these ratios away from an old policy at −1."""
    return make_inputs(
        [math.log(ratio) - 1 for ratio in ratios],
        old_logprobs_N=[-1.0] * len(ratios),
        advantages_N=advantages,
        **more,
    )


def approx(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-9)


@pytest.mark.parametrize("name", ["reinforce", "gpg"])
def test_the_policy_gradient(name: str) -> None:
    losses, gradient = evaluated(name, make_inputs([-1.0, -2.0], advantages_N=[2.0, -1.0]))
    assert (losses, gradient) == ([2.0, -2.0], [-2.0, 1.0])


def test_reinforce_with_importance_weights() -> None:
    losses, gradient = evaluated("reinforce", at_ratios(2.0, advantages=[3.0]), importance_weight=True)
    assert losses == approx([-2 * 3 * (math.log(2) - 1)])
    assert gradient == approx([-6.0])


def test_gspo_clips_sequences() -> None:
    # the first sequence's geometric mean is √(4·1) = 2: above 1.5, clipped; the second's 0.5 is not (A > 0)
    inputs = at_ratios(4.0, 1.0, 0.5, advantages=[1.0, 1.0, 1.0], **PAIR)
    losses, gradient = evaluated("gspo", inputs, clip_low=0.4, clip_high=0.5)
    assert losses == approx([-1.5, -1.5, -0.5])
    assert gradient == approx([0.0, 0.0, -0.5])
    inputs = at_ratios(4.0, 1.0, 0.5, advantages=[-1.0, -1.0, -1.0], **PAIR)
    losses, gradient = evaluated("gspo", inputs, clip_low=0.4, clip_high=0.5)
    assert losses == approx([2.0, 2.0, 0.6])
    assert gradient == approx([2.0, 2.0, 0.0])


#: One episode of two turns: what `PAIR` has as two sequences.
TURNS = {"turn_N": torch.tensor([0, 0, 1]), "turns": 2}


def test_gspo_of_turns_clips_each_on_its_own() -> None:
    # geometric means: √(4·1) = 2 of the first turn, 0.5 of the second; ∛2 = 1.26 of the whole episode
    inputs = at_ratios(4.0, 1.0, 0.5, advantages=[1.0, 1.0, 1.0], **TURNS)
    losses, gradient = evaluated("gspo", inputs, unit="turn", clip_low=0.4, clip_high=0.5)
    assert losses == approx([-1.5, -1.5, -0.5])
    assert gradient == approx([0.0, 0.0, -0.5])
    inputs = at_ratios(4.0, 1.0, 0.5, advantages=[1.0, 1.0, 1.0], **TURNS)
    losses, gradient = evaluated("gspo", inputs, clip_low=0.4, clip_high=0.5)
    assert losses == gradient == approx([-(2 ** (1 / 3))] * 3)
    # turns may differ in advantage: the first was bad and moved up, the second good and moved down
    inputs = at_ratios(4.0, 1.0, 0.5, advantages=[-1.0, -1.0, 2.0], **TURNS)
    losses, gradient = evaluated("gspo", inputs, unit="turn", clip_low=0.4, clip_high=0.5)
    assert losses == approx([2.0, 2.0, -1.0])
    assert gradient == approx([2.0, 2.0, -1.0])


def test_gspo_of_turns_in_any_order_of_tokens() -> None:
    inputs = at_ratios(4.0, 0.5, 1.0, advantages=[1.0, 1.0, 1.0], turn_N=torch.tensor([1, 0, 1]), turns=2)
    losses, _ = evaluated("gspo", inputs, unit="turn", clip_low=0.4, clip_high=9.0)
    assert losses == approx([-2.0, -0.5, -2.0])


def test_gspo_of_single_turns_is_that_of_sequences() -> None:
    for advantages in ([1.0, 1.0, 1.0], [-1.0, -1.0, 1.0]):
        found = [
            evaluated("gspo", at_ratios(4.0, 1.0, 0.5, advantages=advantages, **PAIR), unit=unit, clip_high=0.5)
            for unit in ("sequence", "turn")
        ]
        assert found[0] == found[1]


def test_cispo_keeps_every_gradient() -> None:
    inputs = at_ratios(0.1, 1.0, 3.0, advantages=[1.0, 1.0, -1.0])
    losses, gradient = evaluated("cispo", inputs, clip_low=0.3, clip_high=0.5)
    weights = [0.7, 1.0, 1.5]
    logprobs = [math.log(0.1) - 1, -1.0, math.log(3) - 1]
    signs = [1, 1, -1]
    assert losses == approx([-w * s * logprob for w, s, logprob in zip(weights, signs, logprobs, strict=True)])
    assert gradient == approx([-0.7, -1.0, 1.5])


def test_sapo_has_weight_one_on_policy_and_fades() -> None:
    _, gradient = evaluated("sapo", at_ratios(1.0, 1.0, 3.0, advantages=[2.0, -2.0, 1.0]))
    gate = 1 / (1 + math.exp(-2.0))
    assert gradient == approx([-2.0, 2.0, -3 * 4 * gate * (1 - gate)])
    losses, _ = evaluated("sapo", at_ratios(1.0, 1.0, advantages=[1.0, -1.0]), tau_positive=4.0, tau_negative=2.0)
    assert losses == approx([-0.5, 1.0])


def test_gmpo_is_the_geometric_mean_of_clipped_ratios() -> None:
    # log-ratios 1 and −0.2, clipped above at 0.4 where A > 0: mean 0.1
    inputs = at_ratios(math.e, math.exp(-0.2), math.exp(-1.0), advantages=[2.0, 2.0, -1.0], **PAIR)
    losses, gradient = evaluated("gmpo", inputs)
    first, second = 2 * math.exp(0.1), math.exp(-0.4)
    assert losses == approx([-first, -first, second])
    # two tokens carry the loss and each has half of the mean's gradient; the clipped ones have none
    assert gradient == approx([0.0, -first, 0.0])


def test_dppo_tv_masks_what_moved_too_far() -> None:
    # from π_old = e⁻¹ = 0.368: to 0.735 (+0.368) and to 0.037 (−0.331)
    inputs = at_ratios(2.0, 2.0, 0.1, 0.1, advantages=[1.0, -1.0, 1.0, -1.0])
    losses, gradient = evaluated("dppo_tv", inputs, clip_low=0.3, clip_high=0.3)
    assert gradient == approx([0.0, 2.0, -0.1, 0.0])
    assert losses == approx([0.0, 2 * (math.log(2) - 1), -0.1 * (math.log(0.1) - 1), 0.0])
    _, gradient = evaluated("dppo_tv", at_ratios(2.0, 0.1, advantages=[1.0, -1.0]), clip_low=0.34, clip_high=0.37)
    assert gradient == approx([-2.0, 0.1])
    _, gradient = evaluated("dppo_tv", at_ratios(2.0, advantages=[-1.0]), ratio_cap=1.5)
    assert gradient == approx([1.5])


def test_dppo_kl_masks_by_binary_divergence() -> None:
    old = math.exp(-1)
    new = 2 * old
    divergence = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
    for bound_at, expected in ((divergence * 0.99, 0.0), (divergence * 1.01, -2.0)):
        _, gradient = evaluated("dppo_kl", at_ratios(2.0, advantages=[1.0]), clip_high=bound_at)
        assert gradient == approx([expected])
    _, gradient = evaluated("dppo_kl", at_ratios(0.1, advantages=[-1.0]), clip_low=0.01)
    assert gradient == approx([0.0])


def test_clip_cov_leaves_out_drawn_tokens_of_the_band() -> None:
    # means: A 0, log π −2; covariances 1·1, 1·(−1), (−1)·1, (−1)·(−1): two lie in (0.5, 2)
    given = {"advantages_N": [1.0, 1.0, -1.0, -1.0], "draws_N": [0.9, 0.0, 0.0, 0.1]}
    _, gradient = evaluated("clip_cov", make_inputs([-1.0, -3.0, -1.0, -3.0], **given), low=0.5, high=2.0)
    # of the two the one with the smallest draw
    assert gradient == approx([-1.0, -1.0, 1.0, 0.0])
    inputs = make_inputs([-1.0, -3.0, -1.0, -3.0], **given)
    _, gradient = evaluated("clip_cov", inputs, low=0.5, high=2.0, fraction=0.5)
    assert gradient == approx([0.0, -1.0, 1.0, 0.0])
    _, gradient = evaluated("clip_cov", make_inputs([-1.0, -3.0, -1.0, -3.0], **given), low=1.5, high=2.0)
    assert gradient == approx([-1.0, -1.0, 1.0, 1.0])
    with pytest.raises(ConfigError, match="band is empty"):
        loss_of("clip_cov", low=2.0, high=1.0)


def test_clip_cov_clips_like_ppo_and_draws_no_clipped_token() -> None:
    given = {"old_logprobs_N": [-2.0, -3.0, -1.0, -3.0], "draws_N": [0.0, 0.5, 0.5, 0.5]}
    inputs = make_inputs([-1.0, -3.0, -1.0, -3.0], advantages_N=[1.0, 1.0, -1.0, -1.0], **given)
    losses, gradient = evaluated("clip_cov", inputs, low=0.5, high=2.0)
    # the first is beyond 1 + 0.2 anyway, so the last is drawn although its draw is larger
    assert losses[0] == pytest.approx(-1.2)
    assert gradient == approx([0.0, -1.0, 1.0, 0.0])


def test_kl_cov_holds_back_the_largest_covariance() -> None:
    given = {"old_logprobs_N": [-1.5, -3.0, -1.0, -3.0], "advantages_N": [2.0, 0.0, -1.0, -1.0]}
    inputs = make_inputs([-1.0, -3.0, -1.0, -3.0], **given)
    losses, gradient = evaluated("kl_cov", inputs, coefficient=3.0)
    ratio = math.exp(0.5)
    assert losses == approx([-2 * ratio + 1.5, 0.0, 1.0, 1.0])
    assert gradient == approx([-2 * ratio + 3, 0.0, 1.0, 1.0])
    inputs = make_inputs([-1.0, -3.0, -1.0, -3.0], **{**given, "old_logprobs_N": [-1.5, -3.0, -1.0, -2.5]})
    losses, _ = evaluated("kl_cov", inputs, fraction=0.5)
    assert losses == approx([-2 * ratio + 0.5, 0.0, 1.0, math.exp(-0.5) + 0.5])


def test_kl_cov_holds_back_nothing_where_all_tokens_tie() -> None:
    losses, _ = evaluated("kl_cov", make_inputs([-1.0, -3.0], old_logprobs_N=[-2.0, -2.0]))
    assert losses == approx([-math.e, -math.exp(-1)])


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_covariance_losses_need_their_batch(name: str) -> None:
    with pytest.raises(EngineError, match="of_batch"):
        loss_of(name)(make_inputs([-1.0]))


def test_dro_holds_every_token() -> None:
    losses, gradient = evaluated("dro", at_ratios(math.e, advantages=[2.0]), beta=0.5)
    assert losses == approx([0.0 + 0.25])
    assert gradient == approx([-2.0 + 0.5])


def test_kimi_holds_the_sequence() -> None:
    # log-ratios 1 and 2 of one sequence: (1 + 2)²; the other's −1
    inputs = at_ratios(math.e, math.e**2, math.exp(-1), advantages=[1.0, 1.0, 0.0], **PAIR)
    losses, gradient = evaluated("kimi", inputs, tau=0.1)
    assert losses == approx([0.0 + 0.05 * 9 / 2, -1.0 + 0.05 * 9 / 2, 0.05])
    assert gradient == approx([-1 + 0.1 * 3, -1 + 0.1 * 3, -0.1])


@pytest.mark.parametrize(("name", "weight"), [("dro", "beta"), ("kimi", "tau")])
def test_a_quadratic_penalty_pulls_back_from_any_distance(name: str, weight: str) -> None:
    # one token: −A·log π + (w/2)·(log ρ)², gradient −A + w·log ρ
    far = make_inputs([0.0], old_logprobs_N=[-21.0], advantages_N=[1.0])
    losses, gradient = evaluated(name, far, **{weight: 0.05})
    assert losses == approx([0.025 * 21**2])
    assert gradient == approx([-1 + 0.05 * 21])  # +0.05; a penalty without gradient would leave −1
    abandoned = make_inputs([-30.0], old_logprobs_N=[0.0], advantages_N=[-1.0])
    losses, gradient = evaluated(name, abandoned, **{weight: 0.05})
    assert losses == approx([-30 + 0.025 * 30**2])
    assert gradient == approx([1 - 0.05 * 30])


def test_kimi_adds_up_log_ratios_before_it_squares() -> None:
    # log-ratios 25 and −24 of one sequence: 1 in all
    inputs = make_inputs([0.0, -24.0], old_logprobs_N=[-25.0, 0.0], advantages_N=[0.0, 0.0])
    losses, gradient = evaluated("kimi", inputs, tau=0.1)
    assert losses == approx([0.025, 0.025])
    assert gradient == approx([0.1, 0.1])


def test_topr_tapers_bad_sequences_only() -> None:
    # sequence ratios 0.5·0.5 and 3
    inputs = at_ratios(0.5, 0.5, 3.0, advantages=[-1.0, -1.0, -1.0], **PAIR)
    _, gradient = evaluated("topr", inputs)
    assert gradient == approx([0.25, 0.25, 1.0])
    _, gradient = evaluated("topr", at_ratios(0.5, 0.5, 3.0, advantages=[1.0, 1.0, 2.0], **PAIR))
    assert gradient == approx([-1.0, -1.0, -2.0])
    _, gradient = evaluated("topr", at_ratios(3.0, advantages=[-1.0]), negative_cap=2.0)
    assert gradient == approx([2.0])


def test_vespo_by_hand() -> None:
    # the first sequence's ratio is 4·0.5 = 2, the second's 0.5; W^k·exp(λ·(1 − W))
    inputs = at_ratios(4.0, 0.5, 0.5, advantages=[2.0, 2.0, -1.0], **PAIR)
    losses, gradient = evaluated("vespo", inputs)
    first, second = 2**2 * math.exp(3 * (1 - 2)), 0.5**3 * math.exp(2 * (1 - 0.5))
    assert gradient == approx([-2 * first, -2 * first, second])
    assert losses == approx(
        [-2 * first * (math.log(4) - 1), -2 * first * (math.log(0.5) - 1), second * (math.log(0.5) - 1)]
    )
    _, gradient = evaluated("vespo", at_ratios(0.5, advantages=[1.0]), k_positive=1.0, lam_positive=0.5)
    assert gradient == approx([-0.5 * math.exp(0.5 * 0.5)])


def test_vespo_is_the_policy_gradient_on_policy_and_lets_go_of_what_is_far_away() -> None:
    _, gradient = evaluated("vespo", at_ratios(1.0, 1.0, 1.0, advantages=[1.0, -2.0, 0.0]))
    assert gradient == approx([-1.0, 2.0, 0.0])
    # 60 tokens, each a hundred times as likely: beyond what exp can hold; and the other way round
    for ratio, advantage in ((100.0, 1.0), (100.0, -1.0), (0.01, 1.0), (0.01, -1.0)):
        _, gradient = evaluated("vespo", at_ratios(*[ratio] * 60, advantages=[advantage] * 60))
        assert gradient == approx([0.0] * 60)


def test_vespo_weighs_most_at_k_over_lambda() -> None:
    def weight(ratio: float) -> float:
        return -evaluated("vespo", at_ratios(ratio, advantages=[1.0]), k_positive=3.0, lam_positive=2.0)[1][0]

    assert weight(1.5) == pytest.approx(1.5**3 * math.exp(-1))
    assert weight(1.5) > max(weight(1.45), weight(1.55))


def test_vespo_refuses_weights_without_a_bound() -> None:
    with pytest.raises(ConfigError, match=r"lam_negative: 0 the weight W\^3 grows without a bound"):
        loss_of("vespo", lam_negative=0.0)
    _, gradient = evaluated("vespo", at_ratios(3.0, advantages=[1.0]), k_positive=0.0, lam_positive=0.0)
    assert gradient == approx([-1.0])


def test_luspo_is_gspo_that_adds_up_tokens() -> None:
    # sequences of 2 and 1 tokens, ratios √(4·1) = 2 and 0.5; LUSPO's loss is −|y|·min(s·A, clip(s)·A), its gradient
    # −|y|·s·A·(1/|y|) for each token's log-probability, 0 where clipped
    inputs = at_ratios(4.0, 1.0, 0.5, advantages=[1.0, 1.0, 1.0], weights_N=[0.5, 0.5, 0.5], **PAIR)
    loss = (inputs.weights_N * loss_of("gspo", clip_low=0.4, clip_high=1.5)(inputs).losses_N).sum()
    assert loss.item() == pytest.approx(-(2 * 2 + 1 * 0.5) / 2)
    loss.backward()
    assert inputs.logprobs_N.grad is not None
    assert inputs.logprobs_N.grad.tolist() == approx([-2 / 2, -2 / 2, -0.5 / 2])


def test_raft_is_the_likelihood_of_good_samples() -> None:
    losses, gradient = evaluated("raft", make_inputs([-1.0, -2.0], advantages_N=[5.0, 0.1]))
    assert (losses, gradient) == ([1.0, 2.0], [-1.0, -1.0])
    good, bad = (
        dataclasses.replace(sample, advantages=sample.advantages + shift)
        for sample, shift in ((make_policy_sample([0, 1, 1]), 0.4), (make_policy_sample([0, 1, 1]), -0.4))
    )
    assert [loss_of("raft").selects(sample) for sample in (good, bad)] == [True, False]
    assert [loss_of("raft", min_advantage=0.5).selects(sample) for sample in (good, bad)] == [False, False]
    assert not loss_of("raft", min_advantage=-1.0).selects(make_policy_sample([0, 0]))
    assert all(loss_of(name).selects(bad) for name in LOSSES.names() if name != "raft")


# ---- finite differences ------------------------------------------------------------------------


def random_inputs(seed: int) -> dict[str, Any]:
    """Three ragged sequences in random order of tokens; ratios away from every bound's kink."""
    draw = random.Random(seed)
    lengths = [draw.randrange(1, 5) for _ in range(3)]
    sequences = [index for index, length in enumerate(lengths) for _ in range(length)]
    draw.shuffle(sequences)
    count = len(sequences)
    advantages = [draw.choice([-1.0, 1.0]) * draw.uniform(0.2, 2) for _ in lengths]
    turns = [2 * index + draw.randrange(2) for index in sequences]
    return {
        "logprobs": [draw.uniform(-4, -0.1) for _ in range(count)],
        "old_logprobs_N": [draw.uniform(-4, -0.1) for _ in range(count)],
        "behaviour_logprobs_N": [draw.uniform(-4, -0.1) for _ in range(count)],
        "reference_logprobs_N": [draw.uniform(-4, -0.1) for _ in range(count)],
        "advantages_N": [advantages[index] for index in sequences],
        "weights_N": [draw.uniform(0.1, 1) for _ in range(count)],
        "draws_N": [draw.random() for _ in range(count)],
        "entropy_N": torch.zeros(count, dtype=torch.float64),
        "sequence_N": torch.tensor(sequences),
        "sequences": 3,
        "turn_N": torch.tensor(turns),
        "turns": 6,
    }


#: Settings under which the losses' parts show in a few tokens.
DIFFERENTIATED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in LOSSES.names() if not name.endswith("_cov")),
    ("clip_cov", {"low": 0.1, "fraction": 0.5}),
    ("kl_cov", {"fraction": 0.3}),
    ("gspo", {"unit": "turn", "clip_low": 0.3, "clip_high": 0.5}),
]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("name", "settings"), DIFFERENTIATED, ids=str)
def test_gradients_are_those_of_finite_differences(name: str, settings: dict[str, Any], seed: int) -> None:
    case = random_inputs(seed)
    logprobs = case.pop("logprobs")
    inputs = make_inputs(logprobs, **case)
    loss = bound(loss_of(name, **settings), inputs)

    def objective(values: Tensor, frozen: LossInputs | None) -> Tensor:
        given = make_inputs(logprobs, **case, logprobs_N=values)
        if frozen is None:
            return (given.weights_N * loss(given).losses_N).sum()
        return surrogate(name, loss, given, frozen)

    objective(inputs.logprobs_N, None).backward()
    assert inputs.logprobs_N.grad is not None
    numeric = differences(lambda values: objective(torch.tensor(values, dtype=torch.float64), inputs).item(), logprobs)
    assert inputs.logprobs_N.grad.tolist() == pytest.approx(numeric, abs=1e-6)


def surrogate(name: str, loss: PolicyLoss, given: LossInputs, frozen: LossInputs) -> Tensor:
    """The loss with what it holds without gradient taken at the frozen point.

    A loss whose weight is detached is no function whose slope is its gradient: there the loss at the
    frozen point, divided by its log-probability, is the coefficient of log π (or, for GSPO, the
    ratio of the sequence or turn is held).
    """
    detached = {"cispo", "dppo_tv", "dppo_kl", "topr", "reinforce", "vespo"}
    if name in detached:
        coefficients = (loss(frozen).losses_N / frozen.logprobs_N).detach()
        return (given.weights_N * coefficients * given.logprobs_N).sum()
    if name == "gspo":
        shift = given.logprobs_N - frozen.logprobs_N.detach()
        mean_of = {"sequence": frozen.sequence_mean, "turn": frozen.turn_mean}[loss.config.unit]
        mean = mean_of(frozen.logprobs_N - frozen.old_logprobs_N).detach()
        advantages, ratio = given.advantages_N, (mean + shift).exp()
        clipped = ratio.clamp(1 - loss.config.clip_low, 1 + loss.config.clip_high)
        return -(given.weights_N * torch.minimum(ratio * advantages, clipped * advantages)).sum()
    return (given.weights_N * loss(given).losses_N).sum()


#: Other values of the settings that act through the ratio.
OTHER_VALUES: dict[str, Any] = {
    "clip_low": 0.1,
    "clip_high": 0.1,
    "dual_clip": 5.0,
    "ratio_cap": 3.0,
    "tau_positive": 2.0,
    "tau_negative": 2.0,
    "unit": "turn",
    "importance_weight": True,
    "beta": 3.0,
    "tau": 3.0,
    "fraction": 0.5,
    "coefficient": 3.0,
}


@pytest.mark.parametrize(
    ("name", "setting"), [(name, setting) for name in LOSSES.names() for setting in LOSSES.get(name).ratio_settings]
)
def test_settings_that_act_through_the_ratio_change_no_gradient_where_it_is_1(name: str, setting: str) -> None:
    def gradient(ratios: list[float], **settings: Any) -> list[float]:
        more = {"turn_N": torch.tensor([0, 0, 1, 2]), "turns": 3, "sequence_N": torch.tensor([0, 0, 0, 1])}
        given = at_ratios(*ratios, advantages=[2.0, -1.0, 0.5, -3.0], sequences=2, **more)
        return evaluated(name, given, **settings)[1]

    other = {setting: OTHER_VALUES[setting]}
    assert gradient([1.0] * 4) == approx(gradient([1.0] * 4, **other))
    far = [1.02 * 1.08**power for power in range(-45, 45)]
    assert any(gradient([r, 1 / r, 1 / r, r]) != approx(gradient([r, 1 / r, 1 / r, r], **other)) for r in far)


@pytest.mark.parametrize(
    ("estimator", "weighted"),
    [("k1", False), ("abs", False), ("k2", False), ("k3", False), ("k1", True), ("k3", True)],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_whole_objective_has_the_gradient_of_finite_differences(
    estimator: KLEstimator, weighted: bool, seed: int
) -> None:
    case = random_inputs(seed)
    logprobs = case.pop("logprobs")
    inputs = make_inputs(logprobs, **case)

    def objective(values: Tensor) -> Tensor:
        given = make_inputs(logprobs, **case, logprobs_N=values)
        kl = KLConfig(estimator=estimator, coefficient=0.3, importance_weight=weighted)
        return policy_objective(given, loss_of("ppo"), kl, 0.0, CorrectionConfig(level="geometric"))[0]

    objective(inputs.logprobs_N).backward()
    assert inputs.logprobs_N.grad is not None
    numeric = differences(lambda values: objective(torch.tensor(values, dtype=torch.float64)).item(), logprobs)
    assert inputs.logprobs_N.grad.tolist() == pytest.approx(numeric, abs=1e-6)
