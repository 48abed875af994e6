"""Credit for turns by hand-computed numbers, and episodes that were cut into parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from algorithm_samples import make_scored, make_task

from roll_like.algorithms.advantages import AdvantageEstimator
from roll_like.algorithms.advantages.base import by_parts, joined, policy_samples, split
from roll_like.algorithms.kl import KLController
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.policy_gradient.advantages import Advantages
from roll_like.registry import ADVANTAGES
from roll_like.types import FloatArray, Group, Part, PolicySample, Scored


def estimator(name: str, **settings: Any) -> AdvantageEstimator:
    plugin = ADVANTAGES.get(name)
    made: AdvantageEstimator = plugin(plugin.Config(**settings))
    return made


def episode(index: int, turns: Sequence[int], rewards: Sequence[float] = (), **more: Any) -> Scored:
    """An episode after a prompt of two; `turns` says which turn sampled each token, −1 for the environment's."""
    sample = make_scored(make_task(), index, sum(rewards), [turn >= 0 for turn in turns])
    trajectory = replace(sample.trajectory, turns=np.array([-1, -1, *turns], np.int32))
    given = {"reward": sum(rewards), "turn_rewards": tuple(rewards), **more}
    return replace(sample, trajectory=trajectory, **given)


def group_of(*episodes: Scored) -> Group[Scored]:
    return Group(task=episodes[0].trajectory.task, samples=episodes, failures=())


def responses(samples: Sequence[Any]) -> list[list[float]]:
    return [sample.advantages[2:].tolist() for sample in samples]


def test_turns_earn_at_their_last_token() -> None:
    # two turns of two tokens with the environment's between them; 1 after the first, 2 after the second
    group = group_of(episode(0, [0, 0, -1, 1, 1], [1.0, 2.0]))
    (sample,) = estimator("reinforce").assign([group])
    assert sample.advantages[2:].tolist() == [3, 3, 0, 2, 2]
    (sample,) = estimator("reinforce", gamma=0.5).assign([group])
    assert sample.advantages[2:].tolist() == [0.5 + 0.25, 1.0 + 0.5, 0, 1.0, 2.0]


def test_what_no_turn_earned_comes_at_the_end() -> None:
    group = group_of(episode(0, [0, -1, 1], [1.0, 0.0], reward=1.5))
    assert responses(estimator("reinforce").assign([group])) == [[1.5, 0, 0.5]]


def test_turn_returns_discount_turns_not_tokens() -> None:
    group = group_of(episode(0, [0, 0, 0, -1, 1], [0.0, 1.0]), episode(1, [0], [0.0]))
    # returns of the three turns: 0.5, 1 and 0
    scale = math.sqrt(0.25 + 1e-8)
    first, second = estimator("turn_returns", gamma=0.5).assign([group])
    assert first.advantages[2:].tolist() == pytest.approx([0, 0, 0, 0, 0.5 / scale], abs=1e-6)
    assert second.advantages[2:].tolist() == pytest.approx([-0.5 / scale])


def test_a_turn_without_a_token_keeps_its_reward() -> None:
    # the second turn sampled nothing, and earned 2
    group = group_of(episode(0, [0, -1, 2], [1.0, 2.0, 4.0]))
    assert responses(estimator("reinforce").assign([group])) == [[7, 0, 6]]
    # returns of the three turns: 3, 4 and 4; their standard deviation is √⅓
    assert responses(estimator("turn_returns", gamma=0.5).assign([group]))[0] == pytest.approx(
        [-2 / 3 * math.sqrt(3), 0, 1 / 3 * math.sqrt(3)], abs=1e-6
    )


def test_gigpo_compares_turns_in_the_same_state() -> None:
    # both start in "a"; only the first comes through "b"
    group = group_of(
        episode(0, [0, -1, 1], [0.0, 1.0], turn_states=("a", "b")),
        episode(1, [0, -1, 1], [0.0, 0.0], turn_states=("a", "c")),
    )
    plain = estimator("gigpo", gamma=0.5, turn_weight=2.0, divide_by_std=False).assign([group])
    # episodes: ±0.5; in "a" the returns are 0.5 and 0: ±0.25, twice; "b" and "c" were met once
    assert responses(plain) == [[1.0, 0, 0.5], [-1.0, 0, -0.5]]
    without = estimator("gigpo", turn_weight=0.0, divide_by_std=False).assign([group])
    assert responses(without) == [[0.5, 0, 0.5], [-0.5, 0, -0.5]]
    divided = estimator("gigpo", gamma=0.5).assign([group])
    half = math.sqrt(0.5)
    assert divided[0].advantages[2:].tolist() == pytest.approx([2 * half, 0, half], rel=1e-4)


def test_gigpo_without_states_is_grpo() -> None:
    group = group_of(episode(0, [0, 1], [0.0, 1.0]), episode(1, [0, 1], [0.0, 0.0]))
    assert responses(estimator("gigpo").assign([group])) == responses(estimator("grpo").assign([group]))


def cut_episode() -> Scored:
    """Two parts: prompt of two and one sampled token; prompt of three and two sampled tokens."""
    sample = make_scored(make_task(), 0, 1.0, [1, 0, 0, 0, 1, 1])
    parts = (Part(start=0, end=3, prompt_length=2), Part(start=3, end=8, prompt_length=3, observed_from=2))
    trajectory = replace(sample.trajectory, parts=parts, turns=np.array([-1, -1, 0, -1, -1, -1, 1, 1], np.int32))
    return replace(sample, trajectory=trajectory, turn_rewards=(0.25, 0.75), turn_states=("a", "b"))


def test_the_parts_of_a_cut_episode_share_its_return() -> None:
    group = group_of(cut_episode(), episode(1, [0], [0.0]))
    samples = estimator("reinforce").assign([group])
    assert [sample.token_ids.tolist() for sample in samples[:2]] == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert [sample.prompt_length for sample in samples] == [2, 3, 2]
    # one trajectory for the aggregation of losses, too
    assert [sample.trajectory for sample in samples] == [0, 0, 1]
    assert [sample.observed_from for sample in samples] == [None, 2, None]
    assert [sample.advantages.tolist() for sample in samples[:2]] == [[0, 0, 1], [0, 0, 0, 0.75, 0.75]]
    # a group compares two episodes, not three sequences
    assert [sample.advantages.max() for sample in estimator("dr_grpo").assign([group])] == [0.5, 0.5, 0]
    # trajectory-level credit of agents is this: GRPO over whole episodes, the same for all of an episode's parts
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    whole = [sample.advantages[sample.loss_mask].tolist() for sample in estimator("grpo").assign([group])]
    assert whole == [pytest.approx(values) for values in ([half], [half, half], [-half])]


def test_turns_of_a_cut_episode_are_those_of_a_whole_one() -> None:
    group = group_of(cut_episode(), episode(1, [0], [0.0], turn_states=("a",)))
    # returns by turns: 0.25 + 0.75/2 and 0.75, and 0
    samples = estimator("turn_returns", gamma=0.5).assign([group])
    scale = 1 / math.sqrt(np.var([0.625, 0.75, 0.0], ddof=1) + 1e-8)
    mean = (0.625 + 0.75) / 3
    assert samples[0].advantages.tolist() == pytest.approx([0, 0, (0.625 - mean) * scale])
    assert samples[1].advantages.tolist() == pytest.approx([0, 0, 0, *[(0.75 - mean) * scale] * 2])
    assert samples[2].advantages.tolist() == pytest.approx([0, 0, -mean * scale])
    # ±0.5 of the episodes; 0.625 and 0 in state "a"; "b" was met once
    samples = estimator("gigpo", gamma=0.5, divide_by_std=False).assign([group])
    assert [sample.advantages.tolist() for sample in samples] == [
        [0, 0, 0.8125],
        [0, 0, 0, 0.5, 0.5],
        [0, 0, -0.8125],
    ]


class Reference:
    """A model that is these distances away from what sampled the tokens, part by part."""

    distances = ([0, 0, 0.1], [0, 0, 0, 0.2, 0.3], [0, 0, 0])

    def logprobs(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        return [
            np.where(sample.loss_mask, sample.behaviour_logprobs - np.array(distance), 0).astype(np.float32)
            for sample, distance in zip(samples, self.distances, strict=True)
        ]


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        # each token pays its own, its turn's reward comes at the turn's last token: 0.15 − 0.2 + 0.45, …
        ({"type": "reinforce"}, [[0.4], [0.25, 0.45], [0.0]]),
        # an episode pays the sum: 0.4 and 0
        ({"type": "dr_grpo"}, [[0.2], [0.2, 0.2], [-0.2]]),
        # a turn pays its own tokens': 0.15 and 0.25, so returns of 0.275 and 0.25 in states "a" and "b"
        ({"type": "gigpo", "gamma": 0.5, "divide_by_std": False}, [[0.2 + 0.1375], [0.2, 0.2], [-0.2 - 0.1375]]),
    ],
)
def test_a_penalty_in_the_reward_is_paid_where_it_arose(advantage: dict[str, Any], expected: list[list[float]]) -> None:
    group = group_of(cut_episode(), episode(1, [0], [0.0], turn_states=("a",)))
    kl = {"use": "reward", "estimator": "k1", "coefficient": 1.0}
    algorithm = AlgorithmConfig.model_validate({"advantage": advantage, "kl": kl})
    reference: Any = Reference()
    made = estimator(**{"name" if key == "type" else key: value for key, value in advantage.items()})
    samples = (
        Advantages(made, algorithm, KLController(algorithm.kl), reference, max_response_tokens=8)
        .assign([group])
        .samples
    )
    found = [sample.advantages[sample.loss_mask].tolist() for sample in samples]
    assert found == [pytest.approx(values, abs=1e-6) for values in expected]


def test_a_cut_episode_adapts_the_penalty_once() -> None:
    """Two episodes, one in two parts, of a mean divergence of 0.15 over four tokens: n is 2, and not 3."""
    group = group_of(cut_episode(), episode(1, [0], [0.0]))
    kl = {"use": "reward", "estimator": "k1", "coefficient": 1.0, "adaptive": {"target": 0.125, "horizon": 10}}
    algorithm = AlgorithmConfig.model_validate({"advantage": "dr_grpo", "kl": kl})
    reference: Any = Reference()
    advantages = Advantages(
        estimator("dr_grpo"), algorithm, controller := KLController(algorithm.kl), reference, max_response_tokens=8
    )
    advantages.assign([group])
    assert controller.coefficient == pytest.approx(1 + 0.2 * 2 / 10)


def test_returns_of_turns_pay_their_own_penalties() -> None:
    group = group_of(cut_episode(), episode(1, [0], [0.0]))
    penalties = [np.array([0, 0, 0.1, 0, 0, 0, 0.2, 0.3], np.float32), np.zeros(3, np.float32)]
    returns = [0.275, 0.25, 0.0]
    samples = estimator("turn_returns", gamma=0.5).assign([group], penalties)
    scale = 1 / math.sqrt(np.var(returns, ddof=1) + 1e-8)
    found = [float(sample.advantages[-1]) for sample in samples]
    assert found == pytest.approx([(value - np.mean(returns)) * scale for value in returns], abs=1e-5)


def test_samples_and_parts_lead_into_each_other() -> None:
    samples = [cut_episode(), episode(1, [0])]
    assert [part.turns.tolist() for part in policy_samples([group_of(*samples)])] == [
        [-1, -1, 0],
        [-1, -1, -1, 1, 1],
        [-1, -1, 0],
    ]
    arrays = [part.advantages for part in policy_samples([group_of(*samples)])]
    whole = joined(samples, arrays)
    assert [len(array) for array in whole] == [8, 3]
    assert [array.tolist() for array in split(samples, whole)] == [array.tolist() for array in arrays]
    assert by_parts(samples, ["cut", "whole"]) == ["cut", "cut", "whole"]
