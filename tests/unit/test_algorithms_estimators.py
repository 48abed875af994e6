"""Every registered advantage estimator by hand-computed numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from algorithm_samples import make_group, make_scored, make_task

from roll_like.algorithms.advantages import AdvantageEstimator
from roll_like.algorithms.advantages.groups import pkpo_advantages
from roll_like.algorithms.advantages.tokens import token_baseline_advantages
from roll_like.errors import ConfigError, EngineError, RewardError
from roll_like.registry import ADVANTAGES
from roll_like.types import FloatArray, Group, PolicySample, Scored
from roll_like.values import Mean, Metrics


def estimator(name: str, **settings: Any) -> AdvantageEstimator:
    plugin = ADVANTAGES.get(name)
    made: AdvantageEstimator = plugin(plugin.Config(**settings))
    if plugin.needs_policy:
        made.observe(FakePolicy())
    return made


class FakePolicy:
    """The energy of a token is its id, in [0, …)."""

    def score_energies(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        return [np.where(sample.loss_mask, sample.token_ids, 0).astype(np.float32) for sample in samples]


def responses(samples: Sequence[PolicySample]) -> list[list[float]]:
    """Advantages of the tokens after the prompt of two."""
    return [sample.advantages[2:].tolist() for sample in samples]


def test_opo_weighs_the_baseline_by_length() -> None:
    # lengths 1 and 3: baseline (1·1 + 3·0)/4
    samples = estimator("opo").assign([make_group([1.0, 0.0], [[1], [1, 1, 1]])])
    assert responses(samples) == [[0.75], [-0.25, -0.25, -0.25]]
    # a token that was not sampled is no part of the length
    samples = estimator("opo").assign([make_group([1.0, 0.0], [[1, 0, 0], [1, 1, 1]])])
    assert responses(samples)[0] == [0.75, 0, 0]


def test_gpg_hands_the_share_of_silent_groups_to_the_others() -> None:
    groups = [make_group([1.0, 0.0]), make_group([1.0, 1.0], task_id="toy/1"), make_group([0.0, 0.0], task_id="toy/2")]
    samples = estimator("gpg").assign(groups)
    # 6 samples, 2 of which move: times 3
    assert responses(samples)[:2] == [[1.5, 1.5], [-1.5, -1.5]]
    assert responses(samples)[2:] == [[0, 0]] * 4
    assert responses(estimator("gpg").assign(groups[1:])) == [[0, 0]] * 4


def test_pass_at_k_moves_the_best_only() -> None:
    groups = [make_group([0.2, 1.0, 0.5])]
    plain = estimator("grpo_passk", divide_by_std=False).assign(groups)
    assert responses(plain) == [[0, 0], [0.5, 0.5], [0, 0]]
    std = math.sqrt(((0.2 - 17 / 30) ** 2 + (1 - 17 / 30) ** 2 + (0.5 - 17 / 30) ** 2) / 2)
    divided = estimator("grpo_passk").assign(groups)
    assert responses(divided)[1] == pytest.approx([0.5 / std] * 2, rel=1e-5)
    tie = estimator("grpo_passk").assign([make_group([1.0, 1.0, 0.0])])
    assert responses(tie) == [[0, 0]] * 3


def test_the_others_spread_divides_where_they_differ() -> None:
    """The right answer is compared with three equal ones, whose spread is noise (NeMo-RL #1518, #4161)."""
    one_right = estimator("rloo", divide_by_std=True).assign([make_group([1.0, 0.0, 0.0, 0.0])])
    std = math.sqrt(1 / 3)  # of 1, 0, 0
    assert [row[0] for row in responses(one_right)] == pytest.approx([1, *[-1 / 3 / std] * 3], rel=1e-5)
    uneven = estimator("rloo", divide_by_std=True).assign([make_group([0.35] * 7 + [-0.3])])
    assert responses(uneven)[7][0] == pytest.approx(-0.65)
    alone = estimator("rloo", divide_by_std=True).assign([make_group([1.0, 0.0]), make_group([1.0], task_id="toy/1")])
    assert [row[0] for row in responses(alone)] == [1, -1, 0]


def test_pkpo_by_hand() -> None:
    found = estimator("pkpo", k=2).assign([make_group([1.0, 0.0, 0.0, 1.0])])
    # of the three others, the two wrong ones leave room: 2 · 4 / C(4, 2)
    assert [row[0] for row in responses(found)] == pytest.approx([4 / 3, 0, 0, 4 / 3])
    best_of_all = estimator("pkpo", k=3).assign([make_group([0.2, 1.0, 0.5])])
    assert [row[0] for row in responses(best_of_all)] == pytest.approx([0, 1.5, 0])
    lost = estimator("pkpo", k=3).assign([make_group([1.0, 0.0]), make_group([1.0], task_id="toy/1")])
    assert [row[0] for row in responses(lost)] == [2, 0, 0], "fewer than k are left: the best of those"


def test_pkpo_of_large_groups() -> None:
    """One right answer of 2,000 is in half of the sets of 1,000: 2000 · C(1999, 999)/C(2000, 1000) = 1000."""
    advantages = pkpo_advantages(np.array([1.0] + [0.0] * 1999), k=1000)
    assert advantages[0] == pytest.approx(1000, rel=1e-12)
    assert not advantages[1:].any()


@pytest.mark.parametrize("k", [2, 3, 4])
def test_pkpo_is_the_gradient_of_pass_at_k(k: int) -> None:
    """Over all outcomes of G answers, right with probability p, the mean of Σ A·∇log π/G is that of 1 − (1 − p)^k."""
    p, group = 0.3, 4
    slope = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=group):
        chance = math.prod(p if right else 1 - p for right in outcome)
        samples = estimator("pkpo", k=k).assign([make_group(list(outcome))])
        scores = [1 / p if right else -1 / (1 - p) for right in outcome]  # ∂ log π(outcome)/∂p
        slope += chance * sum(row[0] * score for row, score in zip(responses(samples), scores, strict=True)) / group
    assert slope == pytest.approx(k * (1 - p) ** (k - 1), rel=1e-6)


def test_maxrl_divides_by_the_mean() -> None:
    groups = [make_group([1.0, 0.0, 0.0, 0.0]), make_group([1.0, 1.0, 0.5, 0.0], task_id="toy/1")]
    samples = estimator("maxrl").assign(groups)
    # means 1/4 and 5/8
    assert [row[0] for row in responses(samples)] == pytest.approx([3, -1, -1, -1, 0.6, 0.6, -0.2, -1])
    # no right answer: nothing to make likelier
    silent = estimator("maxrl").assign([make_group([0.0, 0.0])])
    assert responses(silent) == [[0, 0]] * 2


def test_maxrl_is_the_gradient_of_the_truncated_likelihood() -> None:
    """Over all outcomes of G answers, right with probability p, the mean of Σ A·∇log π/G is the slope of
    −Σ_{k<G} (1 − p)^k/k, the expansion of log p to order G − 1 (a group without a right answer has no advantage)."""
    p, group = 0.3, 4
    slope = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=group):
        chance = math.prod(p if right else 1 - p for right in outcome)
        samples = estimator("maxrl").assign([make_group(list(outcome))])
        scores = [1 / p if right else -1 / (1 - p) for right in outcome]  # ∂ log π(outcome)/∂p
        slope += chance * sum(row[0] * score for row, score in zip(responses(samples), scores, strict=True)) / group
    assert slope == pytest.approx(sum((1 - p) ** (k - 1) for k in range(1, group)), rel=1e-6)


def test_maxrl_refuses_rewards_below_0() -> None:
    with pytest.raises(RewardError, match=r"sample 1 .*toy\.jsonl:1.* is -0.5; maxrl divides by the group's mean"):
        estimator("maxrl").assign([make_group([1.0, -0.5])])


def test_reinforce_is_the_return_to_go() -> None:
    samples = estimator("reinforce", gamma=0.5).assign([make_group([2.0], [[1, 0, 1, 1]])])
    # the token in the middle is no action: the discount does not see it
    assert responses(samples) == [[0.5, 0, 1.0, 2.0]]
    penalties = [np.array([0, 0, 0.1, 9.0, 0.2, 0.0], np.float32)]
    samples = estimator("reinforce").assign([make_group([2.0], [[1, 0, 1, 1]])], penalties)
    assert responses(samples)[0] == pytest.approx([1.7, 0, 1.8, 2.0])


def test_remax_compares_with_the_greedy_answer() -> None:
    groups = [make_group([1.0, 0.0], baseline=0.25), make_group([0.5], baseline=1.0, task_id="toy/1")]
    samples = estimator("remax").assign(groups)
    assert responses(samples) == [[0.75, 0.75], [-0.25, -0.25], [-0.5, -0.5]]
    discounted = estimator("remax", gamma=0.5).assign(groups[:1])
    assert responses(discounted)[0] == [0.25, 0.75]


def test_remax_needs_the_greedy_answer() -> None:
    with pytest.raises(EngineError, match="no greedy sample"):
        estimator("remax").assign([make_group([1.0, 0.0])])
    with pytest.raises(EngineError, match=r"greedy sample 2 .*nan"):
        estimator("remax").assign([make_group([1.0, 0.0], baseline=math.nan)])


def test_reinforce_plus_plus_baseline_whitens_over_tokens() -> None:
    groups = [make_group([1.0, 0.0], [[1, 1, 1], [1]]), make_group([0.2, 0.4], [[1], [1]], task_id="toy/1")]
    centred = [0.5, 0.5, 0.5, -0.5, -0.1, 0.1]
    mean = sum(centred) / 6
    scale = math.sqrt(sum((value - mean) ** 2 for value in centred) / 5 + 1e-8)
    samples = estimator("reinforce_plus_plus_baseline").assign(groups)
    flat = [value for row in responses(samples) for value in row]
    assert flat == pytest.approx([(value - mean) / scale for value in centred], rel=1e-5)


def with_rewards(group: Group[Scored], weights: dict[str, float], *rewards: dict[str, float]) -> Group[Scored]:
    """The group with several rewards a sample; the sum is their weighted one."""
    samples = [
        replace(sample, rewards=parts, weights=weights, reward=sum(weights[name] * parts[name] for name in parts))
        for sample, parts in zip(group.samples, rewards, strict=True)
    ]
    return replace(group, samples=tuple(samples))


def test_gdpo_standardises_each_reward() -> None:
    # by the sum, the reward of range 100 decides alone; standardised, both count alike
    group = with_rewards(
        make_group([0.0, 0.0], [[1], [1]]), {"a": 1.0, "b": 2.0}, {"a": 100.0, "b": 0.0}, {"a": 0.0, "b": 1.0}
    )
    samples = estimator("gdpo").assign([group])
    # each standardised to ±1/√2; weighted 1·x − 2·x = −x, whitened over two tokens: ∓1/√2
    assert [row[0] for row in responses(samples)] == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-4)


def test_gdpo_refuses_groups_whose_samples_have_different_rewards() -> None:
    group = with_rewards(make_group([0.0, 0.0]), {"a": 1.0, "b": 1.0}, {"a": 1.0}, {"b": 1.0})
    with pytest.raises(RewardError, match="different rewards"):
        estimator("gdpo").assign([group])


class FakeCritic:
    """Values as given; remembers what it was to learn."""

    def __init__(self, values: list[list[float]]) -> None:
        self._values = [np.array(row, np.float32) for row in values]
        self.trained_on: tuple[list[list[float]], list[list[float]]] | None = None

    def values(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        assert len(samples) == len(self._values)
        return self._values

    def learn(
        self, samples: Sequence[PolicySample], values: Sequence[FloatArray], returns: Sequence[FloatArray]
    ) -> Metrics:
        self.trained_on = [row.tolist() for row in values], [row.tolist() for row in returns]
        return {"critic/loss": Mean(float(len(samples)))}


def test_the_optimal_token_baseline_weighs_by_energy_so_far() -> None:
    # ids of responses begin at 2: energies 2, 3, 4, summed up 2, 5, 9; the tool's token in the second has none: 2, 6
    groups = [make_group([1.0, 0.0], [[1, 1, 1], [1, 0, 1]])]
    samples = estimator("optimal_token_baseline").assign(groups)
    # B = ½, then 5/(5 + 6); the first's last token has nothing to compare with
    assert responses(samples)[0] == pytest.approx([0.5, 1 - 5 / 11, 0])
    assert responses(samples)[1] == pytest.approx([-0.5, 0, -5 / 11])
    tail = estimator("optimal_token_baseline", tail_returns=True).assign(groups)
    assert responses(tail)[0] == pytest.approx([0.5, 1 - 5 / 11, 1])
    discounted = estimator("optimal_token_baseline", gamma=0.5).assign([make_group([1.0, 0.0], [[1, 1], [1]])])
    assert responses(discounted) == [pytest.approx([0.25, 0]), pytest.approx([-0.25])]


def test_the_optimal_token_baseline_has_the_least_variance() -> None:
    """Against every other number at each step, over two answers: Σ W·(G − b)² is least at b = B."""
    returns = [np.array([1.0, 0.5]), np.array([0.0, 0.25]), np.array([0.4, 0.1])]
    energies = [np.array([0.2, 1.0]), np.array([0.9, 0.1]), np.array([0.5, 0.3])]
    found = token_baseline_advantages(returns, energies)
    for step in range(2):
        weights = [energy[: step + 1].sum() for energy in energies]
        variance = sum(weight * row[step] ** 2 for weight, row in zip(weights, found, strict=True))
        for shift in (-0.01, 0.01):
            other = sum(weight * (row[step] + shift) ** 2 for weight, row in zip(weights, found, strict=True))
            assert other > variance


def test_the_optimal_token_baseline_without_any_gradient_is_the_mean() -> None:
    found = token_baseline_advantages([np.ones(1), np.zeros(1)], [np.zeros(1), np.zeros(1)])
    assert [row.tolist() for row in found] == [[0.5], [-0.5]]
    assert token_baseline_advantages([np.zeros(0), np.zeros(0)], [np.zeros(0), np.zeros(0)])[0].size == 0
    plugin = ADVANTAGES.get("optimal_token_baseline")
    with pytest.raises(EngineError, match="no policy to ask"):
        plugin(plugin.Config()).assign([make_group([1.0, 0.0])])
    with pytest.raises(EngineError, match="asks no policy"):
        estimator("grpo").observe(FakePolicy())


def test_gae_by_hand_passes_through_tool_tokens() -> None:
    # prompt of two, actions at 2 and 4; the tool's token at 3 has a value that nobody may read
    critic = FakeCritic([[0, 0, 0.5, 77.0, 0.25]])
    gae = estimator("gae", gamma=0.9, lam=0.5)
    gae.use(critic)
    (sample,) = gae.assign([make_group([1.0], [[1, 0, 1]])])
    last = 1.0 - 0.25
    first = 0.9 * 0.25 - 0.5 + 0.9 * 0.5 * last
    assert sample.advantages.tolist() == pytest.approx([0, 0, first, 0, last])
    assert gae.learn() == {"critic/loss": Mean(1.0)}
    assert critic.trained_on is not None
    values, returns = critic.trained_on
    assert values == [[0, 0, 0.5, 77.0, 0.25]]
    assert returns[0] == pytest.approx([0, 0, first + 0.5, 0, last + 0.25])


def test_gae_with_lambda_one_is_return_minus_value() -> None:
    gae = estimator("gae")
    gae.use(FakeCritic([[0, 0, 0.5, 0.25], [0, 0, 1.0, 2.0]]))
    samples = gae.assign([make_group([1.0, 3.0])])
    assert responses(samples) == [[0.5, 0.75], [2.0, 1.0]]


def test_gae_has_a_lambda_of_its_own_for_the_critic() -> None:
    critic = FakeCritic([[0, 0, 0.5, 0.25]])
    gae = estimator("gae", lam=0.5, critic_lam=1.0)
    gae.use(critic)
    (sample,) = gae.assign([make_group([1.0])])
    last = 1.0 - 0.25
    assert responses([sample])[0] == pytest.approx([0.25 - 0.5 + 0.5 * last, last])
    gae.learn()
    assert critic.trained_on is not None
    # λ = 1: the returns themselves
    assert critic.trained_on[1][0][2:] == pytest.approx([1.0, 1.0])


def test_gae_with_a_lambda_that_follows_the_length() -> None:
    """1 − 1/(α·n), n the sampled tokens: with α = 0.4 and n = 4, 5 (one more is a tool's) and 2: 0.375, 0.5 and 0."""
    critic = FakeCritic([[0, 0, *[0.5] * 4], [0, 0, *[0.5] * 6], [0, 0, 0.5, 0.5]])
    gae = estimator("gae", length_adaptive=0.4)
    gae.use(critic)
    samples = gae.assign([make_group([1.0, 1.0, 1.0], [[1] * 4, [1, 1, 0, 1, 1, 1], [1, 1]])])
    found = [[value for value in row if value] for row in responses(samples)]
    # equal values: every difference is 0 but the last, 1 − 0.5
    assert found[0] == pytest.approx([0.5 * 0.375**power for power in (3, 2, 1, 0)])
    assert found[1] == pytest.approx([0.5 * 0.5**power for power in (4, 3, 2, 1, 0)])
    assert found[2] == pytest.approx([0.5])
    gae.learn()
    assert critic.trained_on is not None
    # the critic's λ is lam, 1
    assert [row[2] for row in critic.trained_on[1]] == pytest.approx([1.0] * 3)


def test_gae_refuses_a_lambda_that_nothing_reads() -> None:
    with pytest.raises(ConfigError, match=r"lam \(0\.9\) has no effect"):
        estimator("gae", lam=0.9, length_adaptive=0.05)


def test_gae_needs_a_critic_and_something_to_learn() -> None:
    with pytest.raises(EngineError, match="no critic"):
        estimator("gae").assign([make_group([1.0])])
    gae = estimator("gae")
    gae.use(FakeCritic([]))
    with pytest.raises(EngineError, match="nothing to learn"):
        gae.learn()
    with pytest.raises(EngineError, match="does not use a critic"):
        estimator("grpo").use(FakeCritic([]))
    assert estimator("grpo").learn() == {}


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES.names()) - {"gae"}))
def test_infinite_rewards_are_refused(name: str) -> None:
    with pytest.raises(RewardError, match=r"inf.*toy\.jsonl:1|toy\.jsonl:1.*inf"):
        estimator(name).assign([make_group([1.0, math.inf], baseline=0.0)])


#: What they compare with is not the group alone: the reward, a greedy answer's, or a running mean.
ELSEWHERE = {"reinforce", "remax", "rae"}
#: What compares scores of steps, which these samples have not.
OF_STEPS = {"grpo_process"}


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES.names()) - {"gae", *ELSEWHERE, *OF_STEPS}))
def test_equal_rewards_carry_no_signal(name: str) -> None:
    samples = estimator(name).assign([make_group([0.1 + 0.2, 0.3]), make_group([0.3, 0.3], task_id="toy/1")])
    if name == "reinforce_plus_plus":
        assert np.abs([sample.advantages for sample in samples]).max() == 0
    assert all(not sample.advantages.any() for sample in samples)


@pytest.mark.parametrize(
    "name", sorted(set(ADVANTAGES.names()) - {"gae", "reinforce_plus_plus", *ELSEWHERE, *OF_STEPS})
)
def test_a_group_of_one_has_nothing_to_compare_with(name: str) -> None:
    assert not estimator(name).assign([make_group([1.0])])[0].advantages.any()


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES.names()) - {"gae", "rae", *OF_STEPS}))
def test_the_order_of_samples_changes_nothing(name: str) -> None:
    task = make_task()
    members = [make_scored(task, i, r, m) for i, (r, m) in enumerate([(1.0, [1]), (0.0, [1, 0, 1]), (0.3, [1, 1])])]
    greedy = (make_scored(task, 3, 0.5, [1]),)
    group = Group(task=task, samples=tuple(members), failures=(), baselines=greedy)
    other = replace(make_group([0.5, 2.0, 0.1], baseline=0.0), task=make_task("toy/1"))
    forwards = estimator(name).assign([group, other])
    backwards = estimator(name).assign([other, replace(group, samples=tuple(reversed(members)))])
    for before, after in zip(forwards[:3], reversed(backwards[3:]), strict=True):
        assert before.advantages == pytest.approx(after.advantages, abs=1e-6)
