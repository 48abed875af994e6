"""What advantage estimators have in common: from a step's scored groups to samples that can be trained on.

Formulas are pure functions over NumPy arrays in float64, each beside the estimator that applies it to the groups of a
step. Those over tokens take one array for each sample with the values of its sampled tokens. A user's own estimator
comes in through the same registry:

    @ADVANTAGES.register("best_of_group")
    class BestOfGroup(GroupEstimator):
        class Config(PluginConfig):
            type: Literal["best_of_group"] = "best_of_group"
            bonus: float = 1.0

        def of_group(self, rewards: Rewards) -> Rewards:
            return np.where(rewards == rewards.max(), self.config.bonus, 0.0)

With `import: [my_package.my_estimators]` in YAML, `algorithm.advantage: {type: best_of_group}` uses it.
An estimator that gives every token an advantage of its own derives from `AdvantageEstimator` and
writes `advantages`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from roll_like.algorithms.base import Algorithm
from roll_like.data.images import images_within
from roll_like.data.kept import kept_within
from roll_like.errors import EngineError, RewardError
from roll_like.types import FloatArray, Group, IntArray, PolicySample, Scored
from roll_like.values import Metrics, has_signal

#: Rewards of one group [G], or values of one sample's sampled tokens; float64.
Rewards: TypeAlias = npt.NDArray[np.float64]
#: A step's groups.
Groups: TypeAlias = Sequence[Group[Scored]]
#: One array [T] for each sample, in the order of `flatten(groups)`.
TokenValues: TypeAlias = Sequence[FloatArray]

STD_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


class ValueFunction(Protocol):
    """A critic: estimates the value of the state before each sampled token."""

    def values(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        """Return the value of the state before each token, one array [T] a sample, 0 where not sampled."""

    def learn(
        self, samples: Sequence[PolicySample], values: Sequence[FloatArray], returns: Sequence[FloatArray]
    ) -> Metrics:
        """Train the critic towards the returns; all arrays [T], one a sample, 0 where not sampled.

        Args:
            samples: What `values` was called with.
            values: What it returned, before this update.
            returns: The targets.
        """


class ScoreEnergies(Protocol):
    """A policy that tells how far the gradient of each token's log-probability reaches."""

    def score_energies(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        """Return ‖∇ log π(y)‖² in the logits of each sampled token y, one array [T] a sample, 0 where not sampled."""


def policy_samples(groups: Groups, advantages: TokenValues | None = None) -> list[PolicySample]:
    """Return the groups' samples in order, with their advantages; an episode that was cut gives one for each part.

    `group_id` is the task's id and how often the task came before in the step (`gsm8k/17#0`, `gsm8k/17#1`), so that
    two groups of the same task stay apart. `by_parts` and `joined` convert between samples and parts.

    Args:
        advantages: One array [T] for each sample, in the order of the groups and of their samples; by default all 0,
            for a forward pass that needs no advantages.

    Raises:
        EngineError: An advantage is not finite, or the arrays do not fit the samples.
    """
    samples = flatten(groups)
    advantages = _checked("advantages", advantages, samples)
    seen: Counter[str] = Counter()
    identities = []
    for group in groups:
        identities += [f"{group.task.task_id}#{seen[group.task.task_id]}"] * len(group.samples)
        seen[group.task.task_id] += 1
    return [
        PolicySample(
            group_id=identity,
            token_ids=sample.trajectory.token_ids[part.start : part.end],
            prompt_length=part.prompt_length,
            loss_mask=sample.trajectory.sampled[part.start : part.end],
            images=images_within(sample.trajectory.images, part.start, part.end),
            routes=None if sample.trajectory.routes is None else sample.trajectory.routes[part.start : part.end],
            kept=kept_within(sample.trajectory.kept, part.start, part.end),
            turns=sample.trajectory.turns[part.start : part.end],
            behaviour_logprobs=sample.trajectory.logprobs[part.start : part.end],
            advantages=np.where(sample.trajectory.sampled, advantages_T, 0)[part.start : part.end].astype(np.float32),
            reward=sample.reward,
            policy_version=sample.trajectory.policy_version,
            trajectory=number,
            observed_from=part.observed_from,
            origin=sample.trajectory.origin,
        )
        for number, (identity, sample, advantages_T) in enumerate(zip(identities, samples, advantages, strict=True))
        for part in sample.trajectory.parts
    ]


T = TypeVar("T")


def by_parts(samples: Sequence[Scored], values: Sequence[T]) -> list[T]:
    """Return each sample's value once for each of its parts, in the order of `policy_samples`."""
    return [value for sample, value in zip(samples, values, strict=True) for _ in range(len(sample.trajectory.parts))]


def split(samples: Sequence[Scored], arrays: Sequence[FloatArray]) -> list[FloatArray]:
    """Return one array [T] a sample as arrays of its parts: the inverse of `joined`."""
    return [
        array_T[part.start : part.end]
        for sample, array_T in zip(samples, arrays, strict=True)
        for part in sample.trajectory.parts
    ]


def joined(samples: Sequence[Scored], arrays: Sequence[FloatArray]) -> list[FloatArray]:
    """Return arrays of parts, in the order of `policy_samples`, as one array [T] a sample."""
    parts = iter(arrays)
    return [np.concatenate([next(parts) for _ in sample.trajectory.parts]) for sample in samples]


def flatten(groups: Groups) -> list[Scored]:
    """Return the samples of all groups, in the order of penalties and advantages."""
    return [sample for group in groups for sample in group.samples]


class AdvantageEstimator(Algorithm, ABC):
    """Base of estimators, which give every sampled token of a step an advantage."""

    #: Fewest samples of a prompt that it can compare; fewer are refused before a run starts.
    minimum_samples_per_prompt: ClassVar[int] = 1
    #: What a sample is compared with, for the error message about too few samples.
    compares_with: ClassVar[str] = "the group's other samples"
    #: Whether it needs a critic, which `use` passes in.
    needs_critic: ClassVar[bool] = False
    #: Whether it asks the policy about the sampled tokens, which `observe` passes in: a forward pass before the update.
    needs_policy: ClassVar[bool] = False
    #: Whether rewards below 0 have no meaning; then penalties in the reward are refused before a run starts.
    nonnegative_rewards: ClassVar[bool] = False
    #: Whether each group needs one greedy sample in `Group.baselines`.
    greedy_baseline: ClassVar[bool] = False
    #: Whether it uses rewards of steps (`placed_rewards`), and not the reward as a whole alone.
    uses_steps: ClassVar[bool] = False
    #: Whether a sample may be compared with answers that the policy did not sample: not where the formula takes the
    #: group for draws of one policy.
    takes_off_policy: ClassVar[bool] = False

    @classmethod
    def least_samples(cls, config: Any) -> int:  # noqa: ARG003  (for subclasses)
        """Return the fewest samples of a prompt that it can compare with these settings."""
        return cls.minimum_samples_per_prompt

    def use(self, critic: ValueFunction) -> None:
        """Set the critic, for estimators with `needs_critic`."""
        raise EngineError(
            f"{type(self).__name__} does not use a critic, but was given a {type(critic).__name__}",
            fix="remove the `critic` section, or use advantage: gae",
        )

    def observe(self, policy: ScoreEnergies) -> None:
        """Set the policy, for estimators with `needs_policy`."""
        raise EngineError(f"{type(self).__name__} asks no policy, but was given a {type(policy).__name__}")

    def learn(self) -> Metrics:
        """Train the estimator's own model, if any, on the groups of the last `assign`; return what is to be logged."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the steps so far; plain JSON."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; it is empty in checkpoints of runs with another estimator."""

    def assign(self, groups: Groups, token_penalties: TokenValues | None = None) -> list[PolicySample]:
        """Return the groups' samples in order, with advantages.

        Args:
            groups: All groups of a step; batch statistics are over them.
            token_penalties: Subtracted from the reward of each sampled token, one array [T] a sample in the order of
                `flatten(groups)`; from `kl.token_penalties` if a KL penalty is part of the reward. Default: none.

        Raises:
            RewardError: A reward is not finite; names the task and the sample.
            EngineError: A penalty or advantage is not finite or does not fit its sample.
        """
        samples = flatten(groups)
        for sample in samples:
            if not np.isfinite(sample.reward):
                raise RewardError(
                    f"the reward of {describe_sample(sample)} is {sample.reward}; rewards are finite numbers "
                    f"(its parts: {dict(sample.rewards)})",
                    fix="correct the reward that returned it, or let it raise so that the sample is left out",
                )
        penalties = _checked("token penalties", token_penalties, samples)
        return policy_samples(groups, self.advantages(groups, penalties))

    @abstractmethod
    def advantages(self, groups: Groups, token_penalties: TokenValues) -> TokenValues:
        """Return one array [T] for each sample, in the order of `flatten(groups)`."""


class GroupEstimator(AdvantageEstimator):
    """Base of estimators that compare the rewards of a group; all tokens of a sample get the same advantage.

    The sum of a sample's penalties is subtracted from its reward first.
    """

    minimum_samples_per_prompt = 2

    @abstractmethod
    def of_group(self, rewards: Rewards) -> Rewards:
        """Return the advantage of each sample of one group, shape [G]; after failures G may be 1."""

    def of_samples(self, samples: Sequence[Scored], rewards: Rewards) -> Rewards:  # noqa: ARG002  (for subclasses)
        """Return the advantage of each sample of one group; override it to use more than the rewards.

        Args:
            samples: The group.
            rewards: Their rewards minus the penalties, shape [G].
        """
        return self.of_group(rewards)

    def advantages(self, groups: Groups, token_penalties: TokenValues) -> TokenValues:
        """Return one array [T] for each sample, constant over its tokens."""
        arrays: list[FloatArray] = []
        for group, rewards in penalised_rewards(groups, token_penalties):
            values = self.of_samples(group.samples, rewards)
            if np.shape(values) != rewards.shape:
                raise EngineError(
                    f"{type(self).__name__}.of_group returned shape {np.shape(values)} for a group of {len(rewards)}; "
                    "one advantage a sample was expected"
                )
            for sample, value in zip(group.samples, values, strict=True):
                arrays.append(np.full(len(sample.trajectory.token_ids), value, np.float32))
        return arrays


def penalised_rewards(groups: Groups, token_penalties: TokenValues) -> list[tuple[Group[Scored], Rewards]]:
    """Return each group that has samples, with their rewards minus the sums of their penalties, shape [G]."""
    penalties = iter(token_penalties)
    return [
        (group, np.array([sample.reward - _total(sample, next(penalties)) for sample in group.samples]))
        for group in groups
        if group.samples
    ]


def action_rewards(samples: Sequence[Scored], token_penalties: TokenValues) -> list[Rewards]:
    """Return the reward of each sampled token: minus its penalty, plus what `placed_rewards` places there.

    What these leave of the sample's reward is added at the last token: all of it if there are none.
    """
    rewards = []
    for sample, penalties_T in zip(samples, token_penalties, strict=True):
        sampled = sample.trajectory.sampled
        per_action = -penalties_T[sampled].astype(np.float64)
        if per_action.size:
            placed, rest = placed_rewards(sample)
            for at, reward in placed.items():
                per_action[at] += reward
            per_action[-1] += rest
        rewards.append(per_action)
    return rewards


def placed_rewards(sample: Scored) -> tuple[dict[int, float], float]:
    """Return the rewards that belong to one sampled token, by its index, and what they leave of the sample's reward.

    A turn's reward is at the turn's last token, a step's at the step's. Scores of steps take the place of the value of
    the reward that gave them.
    """
    placed = dict(sample.step_rewards)
    rest = sample.reward - sample.step_value
    trajectory = sample.trajectory
    if sample.turn_rewards:
        for turn, last in turn_ends(trajectory.turns[trajectory.sampled]).items():
            if turn < len(sample.turn_rewards):
                placed[last] = placed.get(last, 0.0) + sample.turn_rewards[turn]
                rest -= sample.turn_rewards[turn]
    return placed, rest


def turn_ends(turns_A: IntArray) -> dict[int, int]:
    """Return the index of each turn's last token.

    Args:
        turns_A: Turn of each sampled token.

    >>> turn_ends(np.array([0, 0, 2]))
    {0: 1, 2: 2}
    """
    ends = np.flatnonzero(np.diff(turns_A, append=-1))
    return {int(turns_A[end]): int(end) for end in ends}


def spread_over_tokens(samples: Sequence[Scored], values: Sequence[Rewards]) -> list[FloatArray]:
    """Return values of sampled tokens as one array [T] a sample, 0 where not sampled."""
    spread = [np.zeros(len(sample.trajectory.token_ids), np.float32) for sample in samples]
    for sample, array_T, value in zip(samples, spread, values, strict=True):
        array_T[sample.trajectory.sampled] = value
    return spread


def whiten(values: Sequence[Rewards]) -> list[Rewards]:
    """Return (x − μ)/√(σ² + 1e-8), with mean and unbiased variance over the values of all sequences.

    If all values are equal they become 0.
    """
    if not values:
        return []
    together = np.concatenate(values)
    if not has_signal(together):
        return [np.zeros_like(row) for row in values]
    mean, scale = together.mean(), 1.0 / np.sqrt(together.var(ddof=1) + WHITEN_EPSILON)
    return [(row - mean) * scale for row in values]


def describe_sample(sample: Scored) -> str:
    """Name a sample in a message: task, row and place in its group."""
    task = sample.trajectory.task
    return f"sample {sample.trajectory.sample_index} of task {task.task_id!r} ({task.origin})"


def _total(sample: Scored, penalties_T: FloatArray) -> float:
    return float(penalties_T[sample.trajectory.sampled].sum(dtype=np.float64))


def _checked(what: str, arrays: TokenValues | None, samples: Sequence[Scored]) -> TokenValues:
    """Return arrays that fit the samples; zeros where there are none."""
    if arrays is None:
        return [np.zeros(len(sample.trajectory.token_ids), np.float32) for sample in samples]
    if len(arrays) != len(samples):
        raise EngineError(f"{len(arrays)} arrays of {what} came for {len(samples)} samples; one a sample was expected")
    for array, sample in zip(arrays, samples, strict=True):
        expected = sample.trajectory.token_ids.shape
        if array.shape != expected:
            raise EngineError(
                f"the {what} of {describe_sample(sample)} have shape {array.shape}; {expected} was expected, one a "
                "token"
            )
        if not np.isfinite(array[sample.trajectory.sampled]).all():
            raise EngineError(
                f"the {what} of {describe_sample(sample)} hold infinities or NaN; finite numbers were expected"
            )
    return arrays
