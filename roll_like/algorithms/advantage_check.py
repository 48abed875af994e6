"""Tries an advantage estimator on random groups, and reports what would train something else than meant.

    report = check_advantage("my_estimator", settings={"decay": 0.9})
    print(report)

A sample has the rewards `one` and `two`, and a task no metadata.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from roll_like.algorithms.advantages.base import AdvantageEstimator, GroupEstimator, Groups, TokenValues, flatten
from roll_like.algorithms.loss_check import AlgorithmReport, algorithm_settings
from roll_like.errors import FOREIGN_ERRORS, describe_error
from roll_like.registry import ADVANTAGES
from roll_like.types import FloatArray, Group, Part, PolicySample, Scored, Segment, StopReason, Task, Trajectory
from roll_like.values import Metrics

_GROUPS, _SAMPLES, _PROMPT = 4, 4, 2
_SEEDS = range(4)


class _Critic:
    """One value everywhere: advantages then follow from the rewards alone."""

    def values(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        """Return the values of the states before sampled tokens."""
        return [np.where(one.loss_mask, 0.5, 0).astype(np.float32) for one in samples]

    def learn(
        self, samples: Sequence[PolicySample], values: Sequence[FloatArray], returns: Sequence[FloatArray]
    ) -> Metrics:
        """Learn nothing from arrays that a critic can learn from.

        Raises:
            ValueError: They are of other samples, or not finite.
        """
        for name, arrays in (("values", values), ("returns", returns)):
            if [np.shape(array) for array in arrays] != [one.token_ids.shape for one in samples]:
                raise ValueError(f"the critic was given {name} that do not fit the samples' tokens")
            if not all(np.isfinite(array).all() for array in arrays):
                raise ValueError(f"the critic was given {name} that are not finite")
        return {}


class _Policy:
    """Energies that differ from token to token."""

    def score_energies(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        """Return the energy of each sampled token."""
        return [np.where(one.loss_mask, 0.5 + 0.4 * np.cos(one.token_ids), 0).astype(np.float32) for one in samples]


def check_advantage(
    estimator: str | type[AdvantageEstimator], *, settings: Mapping[str, Any] | None = None
) -> AlgorithmReport:
    """Try an estimator on groups of answers and episodes: in another order, after failures, resumed, with penalties.

    Args:
        estimator: A registered name, or a class.
        settings: Its settings.

    Raises:
        ConfigError: The settings are wrong.
        PluginError: There is no such estimator.
    """
    plugin: type[AdvantageEstimator] = ADVANTAGES.get(estimator) if isinstance(estimator, str) else estimator
    config = algorithm_settings(plugin, estimator, settings, "advantage estimator")
    problems: dict[str, None] = {}
    notes: dict[str, None] = {}

    def fresh() -> AdvantageEstimator:
        made = plugin(config)
        if made.needs_critic:
            made.use(_Critic())
        if made.needs_policy:
            made.observe(_Policy())
        return made

    try:
        for seed in _SEEDS:
            groups = _groups(seed, greedy=plugin.greedy_baseline)
            form = list(_form(fresh, groups))
            problems |= dict.fromkeys(form)
            if form:
                continue  # what is compared below has no meaning then
            later = _groups(seed + len(_SEEDS), greedy=plugin.greedy_baseline)
            problems |= dict.fromkeys(_compared(fresh, groups, later))
            notes |= dict.fromkeys(_noted(fresh, groups))
    except FOREIGN_ERRORS as error:
        problems[f"it raises {describe_error(error)}"] = None
    return AlgorithmReport(name=str(getattr(config, "type", plugin.__name__)), problems=(*problems,), notes=(*notes,))


_Fresh: TypeAlias = Callable[[], AdvantageEstimator]


def _groups(seed: int, *, greedy: bool) -> list[Group[Scored]]:
    """Return groups with two rewards a sample: half of them answers, half episodes of two turns with rewards."""
    draw = np.random.default_rng(seed)
    groups = []
    for number in range(_GROUPS):
        task = Task(
            task_id=f"check/{number}",
            source="check",
            domain="check",
            messages=(),
            prompt_ids=np.arange(_PROMPT, dtype=np.int32),
            answer=None,
            metadata={},
            origin=f"check:{number + 1}",
        )
        samples = [_sample(task, index, draw, turns=1 + number % 2) for index in range(_SAMPLES + greedy)]
        groups.append(Group(task=task, samples=(*samples[:_SAMPLES],), failures=(), baselines=(*samples[_SAMPLES:],)))
    return groups


def _sample(task: Task, index: int, draw: np.random.Generator, *, turns: int) -> Scored:
    lengths = draw.integers(1, 5, turns)
    turn_T = np.full(_PROMPT, -1)
    for turn, length in enumerate(lengths):
        turn_T = np.concatenate([turn_T, np.full(length, turn), [-1]])
    turn_T = turn_T[:-1].astype(np.int32)
    sampled = turn_T >= 0
    trajectory = Trajectory(
        task=task,
        sample_index=index,
        token_ids=draw.integers(0, 100, len(turn_T)).astype(np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, -draw.uniform(0.1, 2.0, len(turn_T)), 0).astype(np.float32),
        turns=turn_T,
        parts=(Part(start=0, end=len(turn_T), prompt_length=_PROMPT),),
        segments=(Segment(start=_PROMPT, end=len(turn_T), policy_version=0),),
        text="",
        stop_reason=StopReason.STOP,
    )
    rewards = {"one": float(draw.uniform()), "two": float(draw.uniform())}
    total = sum(rewards.values())
    return Scored(
        trajectory=trajectory,
        reward=total,
        rewards=rewards,
        details={},
        weights=dict.fromkeys(rewards, 1.0),
        turn_rewards=(0.25 * total, 0.75 * total) if turns == 2 else (),
        turn_states=("a", f"b{index % 2}") if turns == 2 else (),
    )


def _values(estimator: AdvantageEstimator, groups: Groups, penalty: float = 0.0) -> list[FloatArray]:
    """Return the advantages of sampled tokens, one array a sample."""
    samples = flatten(groups)
    penalties = [
        np.where(one.trajectory.sampled, penalty * np.arange(len(one.trajectory.sampled)), 0).astype(np.float32)
        for one in samples
    ]
    kept = [each.copy() for each in penalties]
    found = estimator.advantages(groups, penalties)
    if not all(np.array_equal(one, other) for one, other in zip(penalties, kept, strict=True)):
        raise ValueError("token_penalties were changed in place; compute new arrays")
    return [np.asarray(values)[one.trajectory.sampled] for values, one in zip(found, samples, strict=True)]


def _penalised(fresh: _Fresh, groups: Groups, penalty: float = 0.2) -> float:
    """Return the mean advantage of the first sample of every group, each of whose tokens has a penalty."""
    penalties = [
        np.where(one.trajectory.sampled, penalty * (one.trajectory.sample_index == 0), 0).astype(np.float32)
        for one in flatten(groups)
    ]
    found = fresh().advantages(groups, penalties)[::_SAMPLES]
    first = [group.samples[0].trajectory.sampled for group in groups]
    return float(np.mean([np.asarray(values)[sampled].mean() for values, sampled in zip(found, first, strict=True)]))


def _differ(one: Sequence[FloatArray], other: Sequence[FloatArray]) -> bool:
    return not all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(one, other, strict=True))


def _form(fresh: _Fresh, groups: Groups) -> Iterator[str]:
    """Yield what is wrong with what it returns, also where samples of a group were lost."""
    *others, last = groups
    lost = {"": groups, " where three of a group's four samples were lost": [_with_samples(last, last.samples[:1])]}
    lost[" where a group lost all its samples"] = [*others, _with_samples(last, ())]
    for where, tried in lost.items():
        samples = flatten(tried)
        nothing = [np.zeros(len(one.trajectory.sampled), np.float32) for one in samples]
        found: TokenValues = fresh().advantages(tried, nothing)
        if len(found) != len(samples):
            yield f"it returned {len(found)} arrays for {len(samples)} samples{where}; one a sample was expected"
            return
        for values, one in zip(found, samples, strict=True):
            if np.shape(values) != one.trajectory.sampled.shape:
                yield (
                    f"it returned shape {np.shape(values)} for {len(one.trajectory.sampled)} tokens{where}; "
                    "one advantage for each token of prompt and response was expected"
                )
                return
            if not np.isfinite(np.asarray(values)[one.trajectory.sampled]).all():
                yield f"it returned advantages that are not finite{where}"
                return


def _compared(fresh: _Fresh, groups: Groups, later: Groups) -> Iterator[str]:
    """Yield what its advantages depend on and should not, or do not and should.

    Args:
        later: Other samples of the same tasks: those of the next step.
    """
    before = [one.reward for one in flatten(groups)]
    values = _values(fresh(), groups)
    if [one.reward for one in flatten(groups)] != before or _differ(_values(fresh(), groups), values):
        yield "two estimators that were given the same groups differ, or the groups were changed"
    one, other = fresh(), fresh()
    _values(one, groups)
    one.learn()
    stateful = bool(one.state())  # what was seen before matters then
    other.load_state(json.loads(json.dumps(one.state())))
    if _differ(_values(one, later), _values(other, later)):
        yield "after a resume the advantages differ; return in state() all that it remembers, as plain JSON"
    turned = _values(fresh(), [_with_samples(group, _numbered(group.samples[::-1])) for group in groups])
    back = [turned[at + _SAMPLES - 1 - place] for at in range(0, len(turned), _SAMPLES) for place in range(_SAMPLES)]
    if not stateful and _differ(back, values):
        yield "the advantages depend on the order of a group's samples"
    if not stateful and _differ(_values(fresh(), groups[::-1]), _by_group(values)):
        yield "the advantages depend on the order of the groups"
    best = [max(range(_SAMPLES), key=lambda index: group.samples[index].reward) for group in groups]
    worst = [min(range(_SAMPLES), key=lambda index: group.samples[index].reward) for group in groups]
    gains = [
        values[number * _SAMPLES + high].mean() - values[number * _SAMPLES + low].mean()
        for number, (high, low) in enumerate(zip(best, worst, strict=True))
    ]
    if float(np.mean(gains)) < 0:
        yield "the best sample of a group gets less than the worst; turn its sign"
    if not fresh().nonnegative_rewards and _penalised(fresh, groups) > _penalised(fresh, groups, 0.0):
        yield "a penalty raises the advantage of its own sample; subtract token_penalties"
    steps = [_with_samples(group, [_with_step(sample) for sample in group.samples]) for group in groups]
    if not fresh().uses_steps and _differ(_values(fresh(), steps), values):
        yield "it reads step_rewards, so set uses_steps = True: groups whose steps differ are kept then"


def _noted(fresh: _Fresh, groups: Groups) -> Iterator[str]:
    """Yield what is meant in some estimators."""
    if not fresh().nonnegative_rewards and not _differ(_values(fresh(), groups), _values(fresh(), groups, 0.1)):
        yield "it leaves out token_penalties, so a KL penalty in the reward (kl.use: reward) has no effect"
    if isinstance(fresh(), GroupEstimator):
        equal = [_with_samples(group, [_with_reward(one, 1.0) for one in group.samples]) for group in groups]
        if any(array.any() for array in _values(fresh(), equal)):
            yield "groups whose rewards are all equal train the policy"


def _numbered(samples: Sequence[Scored]) -> list[Scored]:
    """Return samples in the places in which they stand."""
    return [
        replace(sample, trajectory=replace(sample.trajectory, sample_index=index))
        for index, sample in enumerate(samples)
    ]


def _by_group(values: Sequence[FloatArray]) -> list[FloatArray]:
    """Return the values of groups in the opposite order."""
    starts = range(len(values) - _SAMPLES, -1, -_SAMPLES)
    return [array for start in starts for array in values[start : start + _SAMPLES]]


def _with_samples(group: Group[Scored], samples: Sequence[Scored]) -> Group[Scored]:
    return replace(group, samples=tuple(samples))


def _with_reward(sample: Scored, reward: float) -> Scored:
    return replace(sample, reward=reward, rewards={"one": reward, "two": 0.0}, turn_rewards=())


def _with_step(sample: Scored) -> Scored:
    return replace(sample, step_rewards=((0, sample.rewards["one"]),), step_value=sample.rewards["one"])
