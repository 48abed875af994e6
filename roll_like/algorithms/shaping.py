"""Shaping of rewards before advantages are estimated, and of advantages afterwards.

Rewards, in this order: reward of truncated responses, penalty for over-long ones, length penalty, normalisation, clip.
Changes are added as rewards of their own (`Scored.rewards`), so that they are logged, and estimators that compare each
reward separately include them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_like.algorithms.advantages.base import STD_EPSILON, Rewards, describe_sample, flatten, whiten
from roll_like.errors import RewardError
from roll_like.types import Group, Origin, PolicySample, Scored, StopReason
from roll_like.values import Max, Mean, Metric, Min, at_least, has_signal, merge

if TYPE_CHECKING:
    from roll_like.config.algorithm import (
        AdvantageShapingConfig,
        DifficultyConfig,
        MaskConfig,
        RewardShapingConfig,
    )


def overlong_penalties(lengths: Rewards, *, limit: int, buffer: int, penalty: float) -> Rewards:
    """Return the soft penalty for over-long responses, at least 0 (DAPO, arXiv:2503.14476, equation 13).

    0 up to limit − buffer tokens, growing linearly to `penalty` at the limit.

    >>> overlong_penalties(np.array([10.0, 90.0, 100.0]), limit=100, buffer=20, penalty=1.0).tolist()
    [0.0, 0.5, 1.0]
    """
    penalties: Rewards = penalty * np.clip((lengths - (limit - buffer)) / buffer, 0.0, 1.0)
    return penalties


def group_length_rewards(lengths: Rewards, rewards: Rewards) -> Rewards:
    """Return λ_i = ½ − (n_i − min n)/(max n − min n); at most 0 for a reward that is not positive, shape [G].

    Kimi k1.5, arXiv:2501.12599, section 2.3.3. Responses of equal length get 0.

    >>> group_length_rewards(np.array([10.0, 20.0, 30.0]), np.array([0.0, 1.0, 1.0])).tolist()
    [0.0, 0.0, -0.5]
    """
    spread = float(np.ptp(lengths)) if lengths.size else 0.0
    if spread == 0:
        return np.zeros_like(rewards)
    places = 0.5 - (lengths - lengths.min()) / spread
    return np.where(rewards > 0, places, np.minimum(places, 0.0))


@dataclass(slots=True)
class RunningMoments:
    """Mean and variance of every reward of a run so far, merged step by step (Chan, Golub, LeVeque 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: Rewards) -> None:
        """Add a step's rewards."""
        if not values.size:
            return
        count, mean = self.count + values.size, float(values.mean())
        shift = mean - self.mean
        self.squares += float(((values - mean) ** 2).sum()) + shift * shift * self.count * values.size / count
        self.mean += shift * values.size / count
        self.count = count

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two rewards."""
        return float(np.sqrt(self.squares / (self.count - 1))) if self.count > 1 else 0.0


class RewardShaping:
    """Applies `algorithm.reward_shaping` to the groups of each step; keeps the running statistics.

    Args:
        config: `algorithm.reward_shaping`.
        max_response_tokens: Most sampled tokens of a trajectory whose history is not rewritten.
        uses_steps: Whether advantages use rewards of steps, which `normalise` and `clip` know nothing of.
    """

    def __init__(self, config: RewardShapingConfig, *, max_response_tokens: int, uses_steps: bool = False) -> None:
        self._config = config
        self._uses_steps = uses_steps
        self._limit = max_response_tokens
        self._running = RunningMoments()

    def apply(self, groups: Sequence[Group[Scored]]) -> tuple[list[Group[Scored]], dict[str, Metric]]:
        """Return the groups with shaped rewards, and metrics.

        Greedy baselines are shaped like the samples they are compared with; statistics are over the samples only.

        Raises:
            RewardError: Rewards with scores of steps would be standardised or clipped as a whole, and used by step.
        """
        if self._uses_steps and (self._normalises or self._config.clip is not None):
            _refuse_steps(groups)
        penalised = [self._penalised(group) for group in groups]
        shaped = [_with_rewards(group, rewards) for group, rewards in self._normalised(penalised)]
        figures = [
            {
                "reward/shaped": Mean(after.reward),
                **{f"reward/{name}": Mean(value) for name, value in after.rewards.items() if name in PENALTIES},
            }
            for after in flatten(shaped)
        ]
        return shaped, merge(figures) if self._acts() else {}

    def state(self) -> dict[str, Any]:
        """Return the running statistics for a checkpoint."""
        return asdict(self._running)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._running = RunningMoments(int(state["count"]), float(state["mean"]), float(state["squares"]))

    def _acts(self) -> bool:
        config = self._config
        others = (config.truncated, config.overlong, config.length_penalty, config.clip)
        return self._normalises or any(part is not None for part in others)

    @property
    def _normalises(self) -> bool:
        return {self._config.normalise.mean, self._config.normalise.std} != {"none"}

    def _penalised(self, group: Group[Scored]) -> Group[Scored]:
        members = (*group.samples, *group.baselines)
        lengths = np.array([member.trajectory.response_length for member in members], np.float64)
        rewards = np.array([member.reward for member in members], np.float64)
        parts: dict[str, Rewards] = {}
        if (truncated := self._config.truncated) is not None:
            cut = np.array([member.trajectory.stop_reason is StopReason.LENGTH for member in members], np.bool_)
            factor, instead = truncated.factor or 0.0, truncated.reward or 0.0  # one of them is set
            worths = np.where(cut, factor * rewards + instead, rewards)
            parts["truncated"], rewards = worths - rewards, worths
            members = tuple(
                _truncated(member, factor, instead) if out else member for member, out in zip(members, cut, strict=True)
            )
        if (overlong := self._config.overlong) is not None:
            parts["overlong"] = -overlong_penalties(
                lengths, limit=self._limit, buffer=overlong.buffer_tokens, penalty=overlong.penalty
            )
        if (penalty := self._config.length_penalty) is not None:
            change = -lengths / self._limit if penalty.type == "linear" else group_length_rewards(lengths, rewards)
            parts["length"] = penalty.coefficient * change
        changed = [
            replace(
                member,
                reward=member.reward + sum(float(values[index]) for values in parts.values()),
                rewards={**member.rewards, **{name: float(values[index]) for name, values in parts.items()}},
                weights={**member.weights, **dict.fromkeys(parts, 1.0)},
            )
            for index, member in enumerate(members)
        ]
        return _with_members(group, changed)

    def _normalised(self, groups: Sequence[Group[Scored]]) -> list[tuple[Group[Scored], Rewards]]:
        """Return each group with the shaped rewards of its samples and baselines, in this order."""
        rewards = [np.array([sample.reward for sample in group.samples], np.float64) for group in groups]
        step = np.concatenate([*rewards, np.zeros(0)])
        choice, clip = self._config.normalise, self._config.clip
        if "running" in (choice.mean, choice.std):
            self._running.add(step)
        shaped = []
        for group, of_samples in zip(groups, rewards, strict=True):
            values = np.array([*of_samples, *(baseline.reward for baseline in group.baselines)], np.float64)
            if self._normalises:
                _make_equal(values, len(of_samples))
            means = {"none": 0.0, "group": _mean(of_samples), "batch": _mean(step), "running": self._running.mean}
            values = values - means[choice.mean]
            if choice.std != "none":
                stds = {"group": _std(of_samples), "batch": _std(step), "running": self._running.std}
                values = values / (stds[choice.std] + STD_EPSILON) if stds[choice.std] else values
            shaped.append((group, values if clip is None else values.clip(-clip, clip)))
        return shaped


#: Names under which shaping's own changes appear among a sample's rewards.
PENALTIES = ("truncated", "overlong", "length")


def _refuse_steps(groups: Sequence[Group[Scored]]) -> None:
    for sample in flatten(groups):
        if sample.step_rewards:
            raise RewardError(
                "algorithm.reward_shaping: normalise and clip change a reward as a whole, but "
                f"{describe_sample(sample)} has scores of steps, and the advantage estimator uses these",
                fix="remove normalise and clip (algorithm.advantage_shaping can whiten and clip advantages), or use an "
                "estimator of whole rewards, such as algorithm.advantage: grpo",
            )


def _truncated(sample: Scored, factor: float, instead: float) -> Scored:
    """Return a sample whose steps have `factor` of their rewards, or one step at the end with the reward in place."""
    if not sample.step_rewards:
        return sample
    steps = tuple((at, factor * reward) for at, reward in sample.step_rewards)
    if not factor:
        steps = ((sample.trajectory.response_length - 1, instead),)
    return replace(sample, step_rewards=steps, step_value=factor * sample.step_value + instead)


def _with_rewards(group: Group[Scored], rewards: Rewards) -> Group[Scored]:
    members = zip((*group.samples, *group.baselines), rewards, strict=True)
    return _with_members(group, [replace(member, reward=float(reward)) for member, reward in members])


def _with_members(group: Group[Scored], members: Sequence[Scored]) -> Group[Scored]:
    """Return the group with other samples and baselines, in this order."""
    count = len(group.samples)
    return replace(group, samples=tuple(members[:count]), baselines=tuple(members[count:]))


def _mean(values: Rewards) -> float:
    return float(values.mean()) if values.size else 0.0


def _make_equal(values: Rewards, samples: int) -> None:
    """Make one number of rewards that are equal but for noise, which would stand out once their mean is taken off.

    Args:
        values: Rewards of a group's samples and baselines.
    """
    for some in (values, values[:samples]):
        if some.size and not has_signal(some):
            some[:] = some[0]


def _std(values: Rewards) -> float:
    """Unbiased; 0 if values do not differ, and nothing is divided by it."""
    return float(values.std(ddof=1)) if has_signal(values) else 0.0


def in_band(group: Group[Scored], band: DifficultyConfig) -> bool:
    """Return whether the mean (or unbiased standard deviation) of the rewards of a policy lies in the band."""
    own = [sample.reward for sample in group.samples if sample.trajectory.origin is Origin.SAMPLED]
    rewards = np.array(own, np.float64)
    figure = _mean(rewards) if band.of == "mean" else _std(rewards)
    return at_least(figure, band.low) and at_least(band.high, figure)


def trained_on(
    groups: Sequence[Group[Scored]], mask: MaskConfig, domains: Mapping[str, DifficultyConfig] | None = None
) -> tuple[list[bool], dict[str, Metric]]:
    """Return whether each sample is trained on, in the order of `flatten(groups)`, and the shares left out.

    `samples_per_group` counts the policy's samples alone, as the shares do: off-policy answers are no more of these.

    Args:
        groups: A step's groups with their rewards before shaping; off-policy answers behind the policy's samples.
        mask: `algorithm.mask`.
        domains: Difficulty bands of domains that do not use `mask.difficulty`.
    """
    bands = domains or {}
    chosen: list[bool] = []
    figures: list[dict[str, Metric]] = []
    for group in groups:
        band = bands.get(group.task.domain, mask.difficulty)
        fits = band is None or in_band(group, band)
        for place, sample in enumerate(group.samples):
            cut = mask.truncated and sample.trajectory.stop_reason is StopReason.LENGTH
            own = sample.trajectory.origin is Origin.SAMPLED
            extra = own and mask.samples_per_group is not None and place >= mask.samples_per_group
            chosen.append(fits and not cut and not extra)
            if not own:
                continue
            figures.append(
                {
                    "mask/difficulty": Mean(float(not fits)),
                    "mask/truncated": Mean(float(cut)),
                    "mask/samples_per_group": Mean(float(extra)),
                }
            )
    in_use = {
        "mask/difficulty": mask.difficulty is not None or bool(bands),
        "mask/truncated": mask.truncated,
        "mask/samples_per_group": mask.samples_per_group is not None,
    }
    return chosen, {name: metric for name, metric in merge(figures).items() if in_use[name]}


def shape_advantages(
    samples: Sequence[PolicySample], config: AdvantageShapingConfig
) -> tuple[list[PolicySample], dict[str, Metric]]:
    """Return the samples with advantages whitened over their sampled tokens, then clipped, and the figures after it."""
    actions = [sample.advantages[sample.loss_mask].astype(np.float64) for sample in samples]
    if config.whiten:
        actions = whiten(actions)
    if config.clip is not None:
        actions = [values.clip(-config.clip, config.clip) for values in actions]
    if config.whiten or config.clip is not None:
        samples = [_with_advantages(sample, values) for sample, values in zip(samples, actions, strict=True)]
    together = np.concatenate([*actions, np.zeros(0)])
    if not together.size:
        return list(samples), {}
    return list(samples), {
        "advantage/mean": Mean(float(together.mean()), together.size),
        "advantage/std": Mean(float(together.std()), together.size),
        "advantage/max": Max(float(together.max())),
        "advantage/min": Min(float(together.min())),
    }


def _with_advantages(sample: PolicySample, values: Rewards) -> PolicySample:
    advantages_T = np.zeros(len(sample.token_ids), np.float32)
    advantages_T[sample.loss_mask] = values
    return replace(sample, advantages=advantages_T)
