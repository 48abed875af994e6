"""The cross-entropy on observations (ECHO): its weights, and its gradient beside the policy's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_samples import make_policy_sample
from bigram_engine import LR, fixed_groups, start_table, train_two_steps

from roll_like.algorithms.advantages.base import policy_samples
from roll_like.algorithms.aggregation import observation_weights
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.policy_gradient.objective import policy_batches
from roll_like.types import PolicySample


def test_weights_are_shared_by_all_observed_tokens() -> None:
    # prompts of 2 and 1; what follows a prompt and is not sampled is read: 2 and 1 tokens
    samples = [
        replace(make_policy_sample([0, 0, 1, 0, 0, 1]), prompt_length=2),
        replace(make_policy_sample([0, 1, 1, 0]), prompt_length=1),
        replace(make_policy_sample([0, 1]), prompt_length=1),
    ]
    found = observation_weights(samples, 0.3)
    assert [array.tolist() for array in found] == [
        pytest.approx([0, 0, 0, 0.1, 0.1, 0]),
        pytest.approx([0, 0, 0, 0.1]),
        [0, 0],
    ]
    assert [array.tolist() for array in observation_weights(samples[2:], 0.3)] == [[0, 0]]
    # an episode whose history was rendered again: of a prompt of four tokens the last one was not there before
    again = replace(make_policy_sample([0, 0, 0, 0, 1, 0, 1]), prompt_length=4, observed_from=3)
    assert observation_weights([again], 0.3)[0].tolist() == pytest.approx([0, 0, 0, 0.15, 0, 0.15, 0])


def test_observations_in_prompts_are_targets_of_their_sample() -> None:
    again = replace(make_policy_sample([0, 0, 0, 0, 1, 0, 1]), prompt_length=4, observed_from=3)
    weights = [np.array([0, 0, 0, 0, 1, 0, 1], np.float32)]
    ((batch,),) = policy_batches(
        [again], weights, observation_weights([again], 0.5), ranks=1, max_tokens=16, share_prompts=True
    )
    assert (batch.targets.tolist(), batch.sources.tolist()) == ([3, 4, 5, 6], [2, 3, 4, 5])
    assert batch.likelihood_weights.tolist() == [0.25, 0, 0.25, 0]


def observed(samples: list[PolicySample]) -> list[tuple[int, int]]:
    """Each token that was read and not written, with the one before it."""
    return [
        (int(sample.token_ids[at - 1]), int(sample.token_ids[at]))
        for sample in samples
        for at in range(sample.prompt_length, len(sample.token_ids))
        if not sample.loss_mask[at]
    ]


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_the_gradient_is_the_policys_and_that_of_the_cross_entropy(loss: str) -> None:
    algorithms = [
        AlgorithmConfig.model_validate({"loss": loss, "observation_coefficient": coefficient})
        for coefficient in (0.0, 0.4)
    ]
    plain, echoing = (train_two_steps(algorithm) for algorithm in algorithms)
    pairs = observed(policy_samples(fixed_groups(0.2, 0)))
    # groups of equal rewards, whose advantages are 0, have some of them
    assert len(pairs) > len(observed(policy_samples(fixed_groups(0.2, 0)[:3]))) > 0
    table = torch.from_numpy(start_table()).requires_grad_()
    before, after = torch.tensor(pairs).T
    cross_entropy = torch.nn.functional.cross_entropy(table[before], after)
    (gradient,) = torch.autograd.grad(cross_entropy, table)
    difference = echoing.tables[0] - plain.tables[0]
    assert difference == pytest.approx(-LR * 0.4 * gradient.numpy(), abs=1e-6)
    figures, others = echoing.metrics[0], plain.metrics[0]
    assert figures["train/observation_cross_entropy"] == pytest.approx(cross_entropy.item(), rel=1e-5)
    assert figures["train/observation_loss"] == pytest.approx(0.4 * cross_entropy.item(), rel=1e-5)
    assert figures["train/loss"] == pytest.approx(others["train/loss"] + 0.4 * cross_entropy.item(), rel=1e-5)
    # it is no part of the policy's figures
    assert figures["train/policy_loss"] == pytest.approx(others["train/policy_loss"], abs=1e-6)
    assert "train/observation_loss" not in others


def test_a_batch_that_fills_up_a_ranks_work_has_no_observation() -> None:
    sample = replace(make_policy_sample([0, 1, 0, 1]), prompt_length=1)
    weights = [np.array([0, 1, 0, 1], np.float32)]
    shards = policy_batches(
        [sample], weights, observation_weights([sample], 0.5), ranks=2, max_tokens=16, share_prompts=True
    )
    assert [batch.likelihood_weights.tolist() for (batch,) in shards] == [[0, 0.5, 0], [0, 0, 0]]
    assert [batch.weights.tolist() for (batch,) in shards] == [[1, 0, 1], [0, 0, 0]]
    own, kept = shards[0][0].of_turns()
    assert kept.tolist() == [0, 2]
    assert (own.weights.tolist(), own.target_ids.tolist(), own.sources.tolist()) == ([1, 1], [1, 3], [0, 2])
