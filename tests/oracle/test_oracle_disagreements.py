"""Where references differ from each other or from us: what each does, and that ours does what the page says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import rl_libraries_reference as libraries
import torch
import trl_reference as trl
import verl_reference as verl
from advantage_cases import advantages, step
from loss_cases import figures, loss_and_gradient, tokens
from torch import Tensor

from roll_like.algorithms.advantages.returns import GAE
from roll_like.algorithms.correction import correct
from roll_like.algorithms.kl import divergence
from roll_like.config.algorithm import CorrectionConfig, RejectConfig


def rewards_BK(*rewards: float) -> Tensor:
    return torch.tensor(rewards, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_a_group_of_one_has_nothing_to_compare_with(name: str) -> None:
    alone = step([3.0, 1.0, 2.0], index=[0, 1, 1])
    theirs, ours = verl.advantages(name, alone), advantages(name, alone)
    assert theirs[0, 0] > 0.5  # the raw reward, before whitening
    # centred rewards are 0, −½ and ½; whitened over the tokens, ours stays 0
    assert ours[0].tolist() == [0.0, 0.0]


def test_a_group_of_one_is_zero_in_trl_and_refused_by_pass_at_k_in_verl() -> None:
    assert trl.grpo_advantages(
        rewards_BK(3.0), torch.ones(1), 1, scale="group", order="sum_then_normalize"
    ).tolist() == [0.0]
    with pytest.raises(ValueError, match="at least 2 samples"):
        verl.advantages("grpo_passk", step([3.0]))
    assert advantages("grpo_passk", step([3.0])).tolist() == [[0.0, 0.0]]


def test_rewards_that_differ_by_rounding_are_equal() -> None:
    # one reward summed in two orders, in float32, in which trainers keep rewards
    one, other = float(np.float32(0.1) + np.float32(0.7)), 0.8
    assert 0 < abs(one - other) < 1e-6
    equal = step([one, other, other])
    assert verl.advantages("grpo", equal).abs().max() > 0.005
    assert advantages("grpo", equal).abs().max() == 0


def test_epsilon_of_the_standard_deviation() -> None:
    near = step([0.0, 0.0, 0.01])
    std = np.std([0.0, 0.0, 0.01], ddof=1)
    best = 0.01 - 0.01 / 3
    assert advantages("grpo", near)[2, 0] == pytest.approx(best / (std + 1e-6), rel=1e-6)
    assert verl.advantages("grpo", near)[2, 0] == pytest.approx(best / (std + 1e-6), rel=1e-6)
    theirs = trl.grpo_advantages(
        rewards_BK(0.0, 0.0, 0.01), torch.ones(1), 3, scale="group", order="sum_then_normalize"
    )
    assert theirs[2] == pytest.approx(best / (std + 1e-4), rel=1e-6)


def test_whitening_of_equal_returns() -> None:
    equal = step([4.0, 4.0, 4.0], masks=[[1], [1], [1]])
    theirs = verl.advantages("reinforce_plus_plus", equal)
    assert theirs.abs().max() == pytest.approx(4e-8 / 3 / 1e-4, rel=0.01)  # its mean divides by N + 1e-8
    assert advantages("reinforce_plus_plus", equal).abs().max() == 0


def test_gae_is_whitened_by_an_option_of_its_own() -> None:
    two = step([1.0, 0.0])
    assert verl.advantages("gae", two)[0, 0] == pytest.approx(np.sqrt(3) / 2, rel=1e-6)
    assert advantages("gae", two).tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert "whiten" not in GAE.Config.model_fields


def test_gpg_scales_by_groups_that_have_a_signal() -> None:
    # the second group of three has none, although its rewards are not 0; in the first, two rewards are 0
    groups = step([1.0, 0.0, 0.0, 1.0, 1.0, 1.0], index=[0, 0, 0, 1, 1, 1])
    assert advantages("gpg", groups)[0, 0] == pytest.approx(6 / 3 * (1 - 1 / 3))
    assert verl.advantages("gpg", groups)[0, 0] == pytest.approx(6 / 4 * (1 - 1 / 3))


def test_gdpo_whitens_over_tokens() -> None:
    # a response of three tokens and one of one: over tokens the mean is not 0
    uneven = step([1.0, 0.0], masks=[[1, 1, 1], [1]])
    spread = np.array([1, 1, 1, -1]) * np.sqrt(0.5)
    expected = (spread - spread.mean()) / spread.std(ddof=1)
    for found in (advantages("gdpo", uneven), verl.advantages("gdpo", uneven)):
        assert [found[0, 0], found[1, 0]] == pytest.approx([expected[0], expected[3]], abs=1e-5)
    theirs = trl.grpo_advantages(rewards_BK(1.0, 0.0), torch.ones(1), 2, scale="group", order="normalize_then_sum")
    assert theirs.tolist() == pytest.approx([np.sqrt(0.5), -np.sqrt(0.5)], abs=1e-3)


def test_cispo_clips_on_both_sides_relative_to_one() -> None:
    ratios = [0.1, 0.5, 1.0, 1.5, 9.0]
    batch = tokens([[-1.0 + np.log(ratio) for ratio in ratios]], old_BT=[[-1.0] * 5])
    clip = {"clip_low": 0.2, "clip_high": 0.28}

    def weights(gradient_BT: Tensor) -> list[float]:
        return (-5 * gradient_BT[0]).tolist()

    two_sided = pytest.approx([0.8, 0.8, 1.0, 1.28, 1.28])
    assert weights(loss_and_gradient("cispo", batch, **clip)[1]) == two_sided
    config = verl.actor_config(clip_ratio_low=0.2, clip_ratio_high=0.28)
    assert weights(verl.policy_loss("cispo", batch, config, how="token-mean")[1]) == two_sided
    # TRL, and liger-kernel like it: epsilon_high is the bound itself, and there is none below
    assert weights(trl.grpo_loss(batch, "cispo", clip_high=0.28)[1]) == pytest.approx([0.1, 0.28, 0.28, 0.28, 0.28])
    # torchrl differentiates the clipped ratio, so that tokens beyond the bounds lose their gradient
    assert weights(libraries.torchrl_cispo_loss(batch, clip=(0.2, 0.28))[1]) == pytest.approx([0, 0, 1.0, 0, 0])


def test_k3_is_bounded() -> None:
    batch = tokens([[-8.0]], reference_BT=[[-1.0]])
    unbounded = np.exp(7.0) - 7 - 1
    assert divergence(batch.logprobs_BT, batch.reference_BT, "k3").item() == 10
    assert verl.core_algos.kl_penalty(batch.logprobs_BT, batch.reference_BT, "k3").item() == 10
    with_kl, without = (trl.grpo_loss(batch, "dapo", beta=beta)[0].item() for beta in (1.0, 0.0))
    assert with_kl - without == pytest.approx(unbounded)


def test_dro_has_no_bound_on_the_log_ratio_that_it_squares() -> None:
    batch = tokens([[-1.0]], old_BT=[[-22.0]])
    config = verl.actor_config(policy_loss={"dro_beta": 0.05})
    for loss, gradient in (
        loss_and_gradient("dro", batch, beta=0.05),
        verl.policy_loss("dro", batch, config, how="token-mean"),
    ):
        assert (loss.item(), gradient.item()) == pytest.approx((1 + 0.025 * 21**2, -1 + 0.05 * 21))


def test_sequences_without_a_trained_token_are_not_counted() -> None:
    batch = tokens([[-1.0, -2.0], [-1.0, -1.0]], mask_BT=[[1, 1], [0, 0]])
    one = loss_and_gradient("ppo", batch, how="seq_mean_token_mean")[0].item()
    config = verl.actor_config()
    assert one == -1.0
    assert verl.policy_loss("vanilla", batch, config, how="seq-mean-token-mean")[0].item() == pytest.approx(-1.0)
    assert trl.grpo_loss(batch, "grpo")[0].item() == -0.5
    assert verl.policy_loss("geo_mean", batch, config, how="")[0].item() == pytest.approx(-0.5)
    assert loss_and_gradient("gmpo", batch, how="seq_mean_token_mean")[0].item() == pytest.approx(-1.0)


def test_denominators_are_of_the_whole_batch() -> None:
    whole = tokens(
        [[-1.0, -2.0, -1.0], [-1.0, -1.0, -1.0]], mask_BT=[[1, 1, 1], [1, 0, 0]], advantages_BT=[[1.0] * 3, [3.0] * 3]
    )
    expected = -(3 * 1.0 + 3.0) / 4
    assert loss_and_gradient("ppo", whole)[0].item() == expected
    assert trl.grpo_loss(whole, "dapo")[0].item() == expected
    # TRL's bnpo, one sequence a micro-batch: a mean of means
    names = ("mask_BT", "logprobs_BT", "old_BT", "behaviour_BT", "reference_BT", "advantages_BT", "entropy_BT")
    halves = [
        replace(whole, lengths=[3], **{name: getattr(whole, name)[row : row + 1] for name in names}) for row in (0, 1)
    ]
    assert np.mean([trl.grpo_loss(half, "bnpo")[0].item() for half in halves]) == -2.0 != expected


def test_the_entropy_bonus_is_aggregated_like_the_loss() -> None:
    batch = tokens(
        [[-1.0, -2.0, -1.0], [-1.0, -1.0, -1.0]], mask_BT=[[1, 1, 1], [1, 0, 0]], entropy_BT=[[1.0] * 3, [3.0] * 3]
    )
    ours, theirs = (
        loss_and_gradient("ppo", batch, how="seq_mean_token_mean", entropy_coefficient=coefficient)[0].item()
        for coefficient in (0.0, 1.0)
    )
    assert ours - theirs == pytest.approx((1 + 3) / 2)  # a mean over sequences
    bonus = trl.grpo_loss(batch, "grpo")[0] - trl.grpo_loss(batch, "grpo", entropy_coefficient=1.0)[0]
    assert bonus.item() == pytest.approx((3 * 1 + 3) / 4)  # over tokens, whatever the loss does


def test_k1_bounds_the_ratio_of_trainer_to_engine() -> None:
    # the trainer's policy is 1.5 times as sure of the first token, and half as sure of the second
    batch = tokens([[-1.0, -1.0]], behaviour_BT=[[-1.0 - np.log(1.5), -1.0 + np.log(2.0)]])
    reject = RejectConfig(estimator="k1", level="token", low=0.6, high=1.8)
    ours = correct(batch.inputs(batch.logprobs_BT, "token_mean"), CorrectionConfig(type="none", reject=reject))
    assert ours.weights_N.tolist() == [1.0, 0.0]
    log_ratio_BT = batch.old_BT - batch.behaviour_BT
    theirs, _ = verl.rollout_corr_helper.compute_rollout_rejection_mask(
        log_ratio_BT, batch.mask_BT, "token_k1", "0.6_1.8"
    )
    # verl bounds engine/trainer: 1/1.5 and 2
    assert theirs.tolist() == [[1.0, 0.0]]
    theirs, _ = verl.rollout_corr_helper.compute_rollout_rejection_mask(
        log_ratio_BT, batch.mask_BT, "token_k1", "0.4_1.2"
    )
    assert theirs.tolist() == [[1.0, 0.0]]
    narrow = RejectConfig(estimator="k1", level="token", low=0.4, high=1.2)
    ours = correct(batch.inputs(batch.logprobs_BT, "token_mean"), CorrectionConfig(type="none", reject=narrow))
    assert ours.weights_N.tolist() == [0.0, 1.0]


def test_effective_sample_size_of_nothing() -> None:
    batch = tokens([[-1.0, -1.0]], behaviour_BT=[[-3.0, -3.0]])
    masked = CorrectionConfig(type="masked", cap=2.0, floor=0.5)
    assert figures("ppo", batch, correction=masked)["correction/ess"] == 0
    with pytest.raises(ZeroDivisionError):
        verl.rollout_corr_helper.compute_rollout_correction_weights(
            batch.old_BT - batch.behaviour_BT, batch.mask_BT, rollout_is="token", rollout_is_threshold="0.5_2.0"
        )


def test_a_correction_weighs_the_tokens_of_gmpo() -> None:
    # weights of 1/2 and 2: ours are averaged, verl's geometric mean is 1
    batch = tokens([[-1.0, -1.0]], behaviour_BT=[[-1.0 + np.log(2), -1.0 - np.log(2)]])
    ours = loss_and_gradient("gmpo", batch, how="seq_mean_token_mean", correction=CorrectionConfig(cap=10.0))
    assert ours[0].item() == pytest.approx(-(0.5 + 2) / 2)
    weights_BT = (batch.old_BT - batch.behaviour_BT).exp()
    theirs = verl.policy_loss("geo_mean", batch, verl.actor_config(), how="", weights_BT=weights_BT)
    assert theirs[0].item() == pytest.approx(-1.0)


def test_of_tokens_that_tie_for_the_last_place_none_is_held_back() -> None:
    # two tokens always have the same covariance
    batch = tokens([[-1.0, -2.0]], old_BT=[[-1.5, -1.5]], advantages_BT=[[1.0, -1.0]])
    plain, ours = (
        loss_and_gradient("kl_cov", batch, fraction=0.5, coefficient=coefficient)[0].item()
        for coefficient in (1e-9, 1.0)
    )
    assert ours == pytest.approx(plain)
    config = verl.actor_config(policy_loss={"kl_cov_ratio": 0.5, "ppo_kl_coef": 1.0})
    theirs = verl.policy_loss("kl_cov", batch, config, how="token-mean")[0].item()
    assert theirs - plain == pytest.approx(0.25)  # one of them, |log ρ| = ½, in a mean over two


def test_dppo_truncates_at_its_own_bound() -> None:
    batch = tokens([[-1.0]], old_BT=[[-1.0 - np.log(10.0)]], advantages_BT=[[-1.0]])
    ours = loss_and_gradient("dppo_tv", batch)[1].item()
    assert ours == pytest.approx(10.0)  # below the paper's 20
    theirs = verl.policy_loss("dppo_tv", batch, verl.actor_config(), how="token-mean")[1].item()
    assert theirs == pytest.approx(3.0)  # it shares its default with dual clip
