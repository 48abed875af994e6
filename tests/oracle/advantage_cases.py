"""Random steps of scored groups, in our form and as the padded tensors that other libraries take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from algorithm_samples import make_group
from hypothesis import strategies as st

from roll_like.registry import ADVANTAGES
from roll_like.types import FloatArray, Group, PolicySample, Scored
from roll_like.values import Metrics

Floats = npt.NDArray[np.float64]
PROMPT = 2  # tokens, as `make_group` writes them


@dataclass(frozen=True)
class Step:
    """A step of `groups`, each a list of (mask, reward of each kind).

    Attributes:
        masks: Of each sample's response: 1 where the policy sampled the token.
        index: Group of each sample.
        parts: Each sample's rewards, by name.
        weights: Of each reward in the sum.
        penalties: Of each response token, 0 where not sampled.
        values: A critic's, of each response token, anything where not sampled.
        baselines: Reward of each group's greedy sample.
        gamma, lam: Discount and λ.
    """

    masks: list[list[int]]
    index: list[int]
    parts: list[dict[str, float]]
    weights: dict[str, float]
    penalties: list[Floats]
    values: list[Floats]
    baselines: list[float]
    gamma: float
    lam: float

    @cached_property
    def rewards(self) -> list[float]:
        return [sum(self.weights[name] * value for name, value in parts.items()) for parts in self.parts]

    @property
    def group_size(self) -> int:
        """Of all groups, where they are equal."""
        return self.index.count(0)

    @cached_property
    def groups(self) -> list[Group[Scored]]:
        groups = []
        for number in sorted(set(self.index)):
            rows = [row for row, group in enumerate(self.index) if group == number]
            group = make_group(
                [self.rewards[row] for row in rows], [self.masks[row] for row in rows], task_id=f"toy/{number}"
            )
            samples = tuple(
                replace(sample, rewards=self.parts[row], weights=self.weights)
                for sample, row in zip(group.samples, rows, strict=True)
            )
            greedy = make_group([self.baselines[number]], task_id=f"toy/{number}").samples
            groups.append(replace(group, samples=samples, baselines=greedy))
        return groups

    # what follows is padded to [B, T], T the longest response

    @cached_property
    def mask_BT(self) -> torch.Tensor:
        return padded(self.masks)

    @cached_property
    def rewards_BT(self) -> torch.Tensor:
        """Reward at the last sampled token, less the penalties."""
        rewards_BT = -padded(self.penalties)
        for row, (mask, reward) in enumerate(zip(self.masks, self.rewards, strict=True)):
            rewards_BT[row, last_action(mask)] += reward
        return rewards_BT

    @cached_property
    def values_BT(self) -> torch.Tensor:
        return padded(self.values)

    @cached_property
    def index_B(self) -> npt.NDArray[np.str_]:
        return np.array([f"toy/{group}" for group in self.index])

    @cached_property
    def actions(self) -> list[tuple[Floats, Floats]]:
        """Reward and value of each sampled token, one pair of arrays a sample."""
        found = []
        for row, mask in enumerate(self.masks):
            at = np.flatnonzero(mask)
            found.append((self.rewards_BT[row].numpy()[at], self.values[row][at]))
        return found

    def spread(self, of_actions: Sequence[Floats]) -> torch.Tensor:
        """Put what belongs to sampled tokens back into [B, T]."""
        spread_BT = torch.zeros_like(self.mask_BT)
        for row, values in enumerate(of_actions):
            spread_BT[row, self.mask_BT[row] > 0] = torch.as_tensor(values, dtype=torch.float64)
        return spread_BT


def step(rewards: list[float], *, index: list[int] | None = None, masks: list[list[int]] | None = None) -> Step:
    """One group, or those that `index` says; two tokens a response, or those of `masks`."""
    masks = [[1, 1] for _ in rewards] if masks is None else masks
    return Step(
        masks=masks,
        index=[0] * len(rewards) if index is None else index,
        parts=[{"toy": reward} for reward in rewards],
        weights={"toy": 1.0},
        penalties=[np.zeros(len(mask)) for mask in masks],
        values=[np.zeros(len(mask)) for mask in masks],
        baselines=[0.0] * len(rewards),
        gamma=1.0,
        lam=1.0,
    )


def last_action(mask: Sequence[int]) -> int:
    """Place of the last sampled token; 0 where there is none."""
    return max((at for at, bit in enumerate(mask) if bit), default=0)


def padded(rows: Sequence[Any]) -> torch.Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor(np.array([[*row, *[0.0] * (longest - len(row))] for row in rows]), dtype=torch.float64)


class Policy:
    """A policy that knows the energies of the step's tokens: its values, squared."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def score_energies(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        return [
            np.where(sample.loss_mask, np.concatenate([np.zeros(PROMPT), values**2]), 0).astype(np.float32)
            for sample, values in zip(samples, self.step.values, strict=True)
        ]


class Critic:
    """A value function that knows the step's values."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.returns: list[FloatArray] = []

    def values(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        return [
            np.where(sample.loss_mask, np.concatenate([np.zeros(PROMPT), values]), 0).astype(np.float32)
            for sample, values in zip(samples, self.step.values, strict=True)
        ]

    def learn(
        self, samples: Sequence[PolicySample], values: Sequence[FloatArray], returns: Sequence[FloatArray]
    ) -> Metrics:
        self.returns = list(returns)
        return {}


def advantages(name: str, step: Step, **settings: Any) -> torch.Tensor:
    """Ours, padded to [B, T]; 0 where not sampled."""
    plugin = ADVANTAGES.get(name)
    estimator = plugin(plugin.Config(**settings))
    if estimator.needs_critic:
        estimator.use(Critic(step))
    if estimator.needs_policy:
        estimator.observe(Policy(step))
    penalties = [np.concatenate([np.zeros(PROMPT), row]).astype(np.float32) for row in step.penalties]
    samples = estimator.assign(step.groups, penalties)
    return padded([sample.advantages[PROMPT:] for sample in samples])


def rounded(draw: np.random.Generator, low: float, high: float, count: int) -> list[float]:
    """Numbers that float32 holds exactly, and never closer to each other than 1/256 unless equal."""
    return (np.round(draw.uniform(low, high, count) * 256) / 256).tolist()


@st.composite
def steps(
    draw: st.DrawFn,
    *,
    smallest_group: int = 2,
    equal_groups: bool = False,
    smallest_response: int = 0,
    rewards: tuple[str, ...] = ("toy",),
    penalised: bool = True,
) -> Step:
    """One to four groups: ragged responses, tokens that were not sampled, responses without a sampled token,
    groups of equal rewards.

    Args:
        smallest_group: Fewest samples of a group.
        equal_groups: Whether all groups have the same number of samples.
        smallest_response: Leading tokens of a response that are sampled in any case.
        rewards: Names of the rewards of a sample.
        penalised: Whether tokens have penalties.
    """
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, 4))
    sizes = [draw(st.integers(smallest_group, 5))] * count
    if not equal_groups:
        sizes = [draw(st.integers(smallest_group, 5)) for _ in range(count)]
    kinds = [draw(st.sampled_from(["real", "binary", "equal", "negative"])) for _ in sizes]
    masks, index, parts = [], [], []
    for group, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        masks += [_mask(random, smallest_response) for _ in range(size)]
        index += [group] * size
        columns = [_rewards(random, kind, size) for _ in rewards]
        parts += [dict(zip(rewards, row, strict=True)) for row in zip(*columns, strict=True)]
    if sum(map(sum, masks)) < 2:  # verl refuses to whiten fewer
        masks[0] = [1, 1, *masks[0]]
    return Step(
        masks=masks,
        index=index,
        parts=parts,
        weights=dict(zip(rewards, [1.0, 0.5, 2.0], strict=False)),
        penalties=[
            np.array(rounded(random, -0.2, 0.2, len(mask))) * mask * (penalised and kinds[group] != "equal")
            for mask, group in zip(masks, index, strict=True)
        ],
        values=[np.array(rounded(random, -2, 2, len(mask))) for mask in masks],
        baselines=rounded(random, -1, 1, count),
        gamma=draw(st.sampled_from([1.0, 0.9, 0.5])),
        lam=draw(st.sampled_from([1.0, 0.95, 0.0])),
    )


def _mask(random: np.random.Generator, smallest: int) -> list[int]:
    """A response of up to 8 tokens; some are a tool's."""
    length = int(random.integers(1, 9))
    mask = (random.random(length) < random.choice([1.0, 0.7, 0.3, 0.0])).astype(int)
    mask[:smallest] = 1
    return mask.tolist()


def _rewards(random: np.random.Generator, kind: str, size: int) -> list[float]:
    if kind == "equal":
        return rounded(random, -2, 2, 1) * size
    if kind == "binary":
        return random.integers(0, 2, size).astype(float).tolist()
    return rounded(random, -5, -1 if kind == "negative" else 3, size)
