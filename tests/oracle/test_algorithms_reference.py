"""The algorithms against plain Python loops written from the papers' formulas.

The references share no code with the package: lists and floats, one token at a time, gradients by
central differences. Cases are ragged batches with tokens that the policy did not sample.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_samples import make_group, make_inputs, make_policy_sample

from roll_like.algorithms.aggregation import token_weights
from roll_like.algorithms.kl import token_penalties
from roll_like.algorithms.logprobs import token_logprobs
from roll_like.algorithms.losses import policy_objective
from roll_like.config.algorithm import CorrectionConfig, KLConfig
from roll_like.registry import ADVANTAGES, LOSSES

SEEDS = range(20)
TOLERANCE = 1e-6


def mean(values: list[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def unbiased_variance(values: list[float]) -> float:
    centre = mean(values)
    return sum((value - centre) ** 2 for value in values) / (len(values) - 1)


def grpo_reference(rewards: list[float]) -> list[float]:
    """Shao et al. 2024, section 4.1.2: A_i = (r_i − mean(r)) / std(r)."""
    if len(rewards) == 1 or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    return [(reward - mean(rewards)) / (math.sqrt(unbiased_variance(rewards)) + 1e-6) for reward in rewards]


def dr_grpo_reference(rewards: list[float]) -> list[float]:
    """Liu et al. 2025, section 3.2: A_i = r_i − mean(r)."""
    return [reward - mean(rewards) for reward in rewards]


def rloo_reference(rewards: list[float]) -> list[float]:
    """Ahmadian et al. 2024, equation 8: r_i − 1/(k−1) Σ_{j≠i} r_j."""
    result = []
    for i, reward in enumerate(rewards):
        others = [other for j, other in enumerate(rewards) if j != i]
        result.append(reward - mean(others) if others else 0.0)
    return result


def reinforce_plus_plus_reference(batch: list[tuple[list[int], float, list[float]]], gamma: float) -> list[list[float]]:
    """Hu 2025, equations 8 to 10: return-to-go of r·1[last token] − penalty, normalised over the batch.

    `batch` holds each sample's mask, reward and penalties, per token.
    """
    returns = []
    for mask, reward, penalties in batch:
        actions = [t for t, bit in enumerate(mask) if bit]
        values = [0.0] * len(mask)
        for place, t in enumerate(actions):
            for later_place, later in enumerate(actions[place:]):
                immediate = -penalties[later] + (reward if later == actions[-1] else 0.0)
                values[t] += gamma**later_place * immediate
        returns.append(values)
    flat = [values[t] for (mask, _, _), values in zip(batch, returns, strict=True) for t, bit in enumerate(mask) if bit]
    centre, spread = mean(flat), math.sqrt(unbiased_variance(flat) + 1e-8)
    return [
        [(value - centre) / spread if bit else 0.0 for bit, value in zip(mask, values, strict=True)]
        for (mask, _, _), values in zip(batch, returns, strict=True)
    ]


def random_mask(draw: random.Random) -> list[int]:
    """Response tokens; some are a tool's."""
    return [1] + [int(draw.random() < 0.7) for _ in range(draw.randrange(6))]


def scaled_rloo_reference(rewards: list[float]) -> list[float]:
    """NeMo-RL's `calculate_baseline_and_std_per_prompt` and `GRPOAdvantageEstimator`, with both switches."""
    result = []
    for i, advantage in enumerate(rloo_reference(rewards)):
        others = [other for j, other in enumerate(rewards) if j != i]
        differ = len(others) > 1 and max(others) > min(others)
        result.append(advantage / (math.sqrt(unbiased_variance(others)) + 1e-6) if differ else advantage)
    return result


def pkpo_reference(rewards: list[float], k: int) -> list[float]:
    """Walder and Karkhanis 2025, s^(loo−1), by enumeration of all sets of k samples, times the group's size."""
    size = len(rewards)
    result = [0.0] * size
    sets = list(itertools.combinations(range(size), min(k, size)))
    for chosen in sets:
        for i in chosen:
            others = [rewards[j] for j in chosen if j != i]
            if others:
                result[i] += (max(rewards[j] for j in chosen) - max(others)) * size / len(sets)
    return result


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "settings", "reference"),
    [
        ("grpo", {}, grpo_reference),
        ("dr_grpo", {}, dr_grpo_reference),
        ("rloo", {}, rloo_reference),
        ("rloo", {"divide_by_std": True}, scaled_rloo_reference),
        ("pkpo", {"k": 2}, partial(pkpo_reference, k=2)),
        ("pkpo", {"k": 3}, partial(pkpo_reference, k=3)),
        ("pkpo", {"k": 5}, partial(pkpo_reference, k=5)),
    ],
)
def test_group_estimators(
    name: str, settings: dict[str, Any], reference: Callable[[list[float]], list[float]], seed: int
) -> None:
    draw = random.Random(seed)
    groups, expected = [], []
    for index in range(4):
        size = draw.randrange(1, 6)
        rewards = [draw.choice([0.0, 1.0, draw.uniform(-3, 3)]) for _ in range(size)]
        masks = [random_mask(draw) for _ in range(size)]
        groups.append(make_group(rewards, masks, task_id=f"toy/{index}"))
        for mask, advantage in zip(masks, reference(rewards), strict=True):
            expected.append([0.0, 0.0] + [advantage * bit for bit in mask])
    plugin = ADVANTAGES.get(name)
    samples = plugin(plugin.Config(**settings)).assign(groups)
    for sample, advantages in zip(samples, expected, strict=True):
        assert sample.advantages.tolist() == pytest.approx(advantages, rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_plus_plus(gamma: float, seed: int) -> None:
    draw = random.Random(seed)
    rewards = [draw.uniform(-1, 1) for _ in range(5)]
    masks = [random_mask(draw) for _ in rewards]
    penalties = [[float(np.float32(draw.uniform(0, 0.1))) for _ in [0, 0, *mask]] for mask in masks]
    batch = [([0, 0, *mask], reward, row) for mask, reward, row in zip(masks, rewards, penalties, strict=True)]
    plugin = ADVANTAGES.get("reinforce_plus_plus")
    groups = [make_group(rewards[:2], masks[:2]), make_group(rewards[2:], masks[2:])]
    samples = plugin(plugin.Config(gamma=gamma)).assign(groups, [np.array(row, np.float32) for row in penalties])
    for sample, advantages in zip(samples, reinforce_plus_plus_reference(batch, gamma), strict=True):
        assert sample.advantages.tolist() == pytest.approx(advantages, abs=TOLERANCE)


def kl_reference(policy: float, reference: float, estimator: str) -> float:
    """Schulman 2020, with r = π_ref/π."""
    ratio = math.exp(reference) / math.exp(policy)
    return {
        "k1": -math.log(ratio),
        "k2": 0.5 * math.log(ratio) ** 2,
        "k3": min((ratio - 1) - math.log(ratio), 10.0),
    }[estimator]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_penalties(estimator: Any, seed: int) -> None:
    draw = random.Random(seed)
    mask = [0, *random_mask(draw)]
    policy, reference = ([draw.uniform(-4, 0) for _ in mask] for _ in range(2))
    (penalties,) = token_penalties(
        [make_policy_sample(mask, policy)], [np.array(reference, np.float32)], estimator=estimator, coefficient=0.05
    )
    expected = [
        0.05 * kl_reference(p, q, estimator) if bit else 0.0 for bit, p, q in zip(mask, policy, reference, strict=True)
    ]
    assert penalties.tolist() == pytest.approx(expected, abs=TOLERANCE)


def clipped_surrogate(ratio: float, advantage: float) -> float:
    """Schulman et al. 2017, equation 7, with DAPO's two bounds; Ye et al. 2020, equation 5, where A < 0."""
    clipped = max(0.8, min(1.28, ratio))
    objective = min(ratio * advantage, clipped * advantage)
    if advantage < 0:
        objective = max(objective, 3.0 * advantage)
    return -objective


def objective_reference(batch: list[list[dict[str, float]]], how: str, limit: int, estimator: str) -> float:
    """Sum each sequence's token losses, then join sequences as the aggregation says."""
    sums, lengths = [], []
    for sequence in batch:
        total = 0.0
        for token in sequence:
            surrogate = clipped_surrogate(math.exp(token["policy"]) / math.exp(token["old"]), token["advantage"])
            weight = min(math.exp(token["old"]) / math.exp(token["behaviour"]), 2.0)
            kl = kl_reference(token["policy"], token["reference"], estimator)
            total += surrogate * weight + 0.1 * kl - 0.01 * token["entropy"]
        sums.append(total)
        lengths.append(len(sequence))
    if how == "token_mean":
        return sum(sums) / sum(lengths)
    if how == "seq_mean_token_sum":
        return mean(sums)
    if how == "seq_mean_token_mean":
        return mean([total / length for total, length in zip(sums, lengths, strict=True)])
    return sum(sums) / (len(sums) * limit)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "token_sum_norm"])
def test_objective_values_and_gradients(how: Any, estimator: Any, seed: int) -> None:
    draw = random.Random(seed)
    batch = []
    for _ in range(4):
        tokens = []
        for _ in range(draw.randrange(1, 6)):
            old = draw.uniform(-3, -0.1)
            tokens.append(
                {
                    "old": old,
                    "policy": old + draw.gauss(0, 0.5),
                    "behaviour": old + draw.gauss(0, 0.5),
                    "reference": old + draw.gauss(0, 0.5),
                    "advantage": draw.gauss(0, 1),
                    "entropy": draw.uniform(0, 3),
                }
            )
        batch.append(tokens)
    flat = [token for sequence in batch for token in sequence]
    weights = token_weights([make_policy_sample([1] * len(tokens)) for tokens in batch], how, max_response_tokens=7)

    def column(name: str) -> list[float]:
        return [token[name] for token in flat]

    inputs = make_inputs(
        column("policy"),
        old_logprobs_N=column("old"),
        behaviour_logprobs_N=column("behaviour"),
        reference_logprobs_N=column("reference"),
        advantages_N=column("advantage"),
        entropy_N=column("entropy"),
        weights_N=torch.from_numpy(np.concatenate(weights)).double(),
        sequence_N=torch.tensor([index for index, tokens in enumerate(batch) for _ in tokens]),
        sequences=len(batch),
    )
    plugin = LOSSES.get("ppo")
    loss, _ = policy_objective(
        inputs, plugin(plugin.Config()), KLConfig(estimator=estimator, coefficient=0.1), 0.01, CorrectionConfig(cap=2.0)
    )
    assert loss.item() == pytest.approx(objective_reference(batch, how, 7, estimator), abs=TOLERANCE)

    loss.backward()
    assert inputs.logprobs_N.grad is not None
    step = 1e-6
    for token, gradient in zip(flat, inputs.logprobs_N.grad.tolist(), strict=True):
        policy, ends = token["policy"], []
        for end in (policy + step, policy - step):
            token["policy"] = end
            ends.append(objective_reference(batch, how, 7, estimator))
        token["policy"] = policy
        assert gradient == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=TOLERANCE)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("chunks", [(2, 3), (100, 100)])
def test_log_probabilities_and_entropies(chunks: tuple[int, int], seed: int) -> None:
    draw = random.Random(seed)
    width, vocabulary, temperature = 3, 11, 0.7
    hidden, weight = ([[draw.gauss(0, 1) for _ in range(width)] for _ in range(rows)] for rows in (5, vocabulary))
    targets = [draw.randrange(vocabulary) for _ in hidden]
    logprobs, entropies = token_logprobs(
        torch.tensor(hidden, dtype=torch.float64),
        torch.tensor(weight, dtype=torch.float64),
        torch.tensor(targets),
        temperature=temperature,
        chunk_tokens=chunks[0],
        chunk_vocab=chunks[1],
    )
    for state, target, logprob, entropy in zip(hidden, targets, logprobs.tolist(), entropies.tolist(), strict=True):
        logits = [sum(a * b for a, b in zip(state, row, strict=True)) / temperature for row in weight]
        total = sum(math.exp(logit) for logit in logits)
        probabilities = [math.exp(logit) / total for logit in logits]
        assert logprob == pytest.approx(math.log(probabilities[target]), abs=TOLERANCE)
        assert entropy == pytest.approx(-sum(p * math.log(p) for p in probabilities), abs=TOLERANCE)
