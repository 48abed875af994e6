"""Scores groups: every reward that applies, in order to one weighted sum, failures kept apart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roll_like.config.rewards import is_meant_for
from roll_like.content.unicode import whole_text
from roll_like.data.reasoning import split_reasoning
from roll_like.errors import FOREIGN_ERRORS, ConfigError, RewardError, describe_error
from roll_like.registry import REWARDS
from roll_like.rewards.base import Completion, Reward, RewardConfig
from roll_like.rewards.call import ResultOrError, RewardCaller
from roll_like.types import Failure, Group, Scored, StepScore, Task, Trajectory

_log = logging.getLogger(__name__)


def reward_name(config: RewardConfig) -> str:
    """Return the name under which a reward is reported."""
    return config.name or config.type


class Scorer:
    """Scores groups with the configured rewards.

    A reward that raises, times out or returns anything but finite numbers is tried again, and then
    the samples that it left without a score move to the group's failures: never a reward of 0.

    Args:
        configs: The `rewards.use` section.
        timeout_seconds: Limit of one attempt of one reward at a group.
        retries: Further attempts after a failure. A synchronous reward that ran out of time is not
            tried again: its thread still runs.
        domains: Names of the rewards of each domain that names its own; the others are scored by every
            reward whose `sources` and `domains` fit.

    Raises:
        ConfigError: Two rewards have the same name.
        RewardError: A reward cannot be built.
    """

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        *,
        timeout_seconds: float,
        retries: int,
        domains: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._domains = domains or {}
        self._retries = retries
        self._rewards: list[_Entry] = []
        for config in configs:
            name = reward_name(config)
            if any(entry.name == name for entry in self._rewards):
                raise ConfigError(
                    f"two rewards are called {name!r}", fix="give each a `name` of its own in rewards.use"
                )
            reward = _build(name, config)
            self._rewards.append(_Entry(name, config, reward, RewardCaller(reward, timeout_seconds)))

    @property
    def hung(self) -> int:
        """Threads of synchronous rewards that still run past their time-out. They end with the process only."""
        return sum(entry.caller.hung for entry in self._rewards)

    async def score_by(self, names: Sequence[str], completions: Sequence[Completion]) -> dict[str, list[ResultOrError]]:
        """Return the results of the named rewards on a group, whatever its source; an error where one failed."""
        entries = [entry for entry in self._rewards if entry.name in names]
        results = await asyncio.gather(*(self._call_with_retries(entry, completions) for entry in entries))
        return {entry.name: of_reward for entry, of_reward in zip(entries, results, strict=True)}

    async def score_group(self, group: Group[Trajectory]) -> Group[Scored]:
        """Return the group with its results; samples that could not be scored are in its failures.

        Raises:
            ConfigError: No reward is for this group's task.
        """
        rewards = [entry for entry in self._rewards if scores_task(entry.config, group.task, self._domains)]
        if not rewards:
            raise unscored(group.task)
        completions = [to_completion(trajectory) for trajectory in group.samples]
        if not completions:
            return Group(task=group.task, samples=(), failures=group.failures)
        results = await asyncio.gather(*(self._call_with_retries(entry, completions) for entry in rewards))
        samples: list[Scored] = []
        failures = list(group.failures)
        for index, trajectory in enumerate(group.samples):
            reward_results = {entry.name: of_reward[index] for entry, of_reward in zip(rewards, results, strict=True)}
            result = _combine(trajectory, rewards, reward_results)
            if isinstance(result, Scored):
                samples.append(result)
            else:
                failures.append(result)
        return Group(task=group.task, samples=tuple(samples), failures=tuple(failures))

    def close(self) -> None:
        """Free what the rewards hold.

        Raises:
            RewardError: A reward's `close` raised; the others are closed all the same.
        """
        errors = []
        for entry in self._rewards:
            try:
                entry.reward.close()
            except FOREIGN_ERRORS as error:  # raised below
                errors.append(f"closing the reward {entry.name!r} failed: {describe_error(error)}")
        if errors:
            raise RewardError("\n".join(errors))

    async def _call_with_retries(self, entry: _Entry, completions: Sequence[Completion]) -> list[ResultOrError]:
        """Return a result or an error for each completion, after all attempts."""
        results: list[ResultOrError] = []
        pending = list(range(len(completions)))
        for attempt in range(self._retries + 1):
            outcomes, final = await entry.caller.call([completions[index] for index in pending])
            if not results:
                results = list(outcomes)
            for index, reward_result in zip(pending, outcomes, strict=True):
                # a valid result is kept when the whole group has to be scored again
                if isinstance(results[index], RewardError):
                    results[index] = reward_result
            failed = [index for index, reward_result in enumerate(results) if isinstance(reward_result, RewardError)]
            if not failed or final:
                break
            pending = failed if entry.reward.per_sample else pending
            _log.warning(
                "reward %r failed on %d of %d samples (attempt %d of %d): %s",
                *(entry.name, len(failed), len(completions), attempt + 1, self._retries + 1, results[failed[0]]),
            )
        return results


@dataclass(frozen=True)
class _Entry:
    name: str
    config: RewardConfig
    reward: Reward
    caller: RewardCaller


def to_completion(trajectory: Trajectory) -> Completion:
    """Return a trajectory as rewards see it."""
    last = trajectory.record[-1] if trajectory.record else None
    text, tags = (trajectory.text, trajectory.task.reasoning) if last is None else (last.text, last.reasoning)
    reasoning, answer = split_reasoning(text, tags)
    return Completion(
        text=answer,
        messages=trajectory.task.messages,
        answer=trajectory.task.answer,
        metadata=trajectory.task.metadata,
        stop_reason=trajectory.stop_reason,
        response_tokens=trajectory.response_length,
        turns=trajectory.record,
        images=trajectory.pictures,
        reasoning=reasoning,
        full_text=text,
        tags=tags,
    )


def _build(name: str, config: RewardConfig) -> Reward:
    plugin = REWARDS.get(config.type)
    try:
        reward: Reward = plugin(config)
        reward.start()
    except FOREIGN_ERRORS as error:
        raise RewardError(f"the reward {name!r} cannot start: {describe_error(error)}") from error
    return reward


def unscored(task: Task) -> ConfigError:
    """Return the error that no reward scores a task."""
    return ConfigError(
        f"{task.origin}: no reward scores the data source {task.source!r}, domain {task.domain!r}",
        fix="add it to the `sources` or `domains` of one in rewards.use, or leave such rows out by a source's `where`",
    )


def scores_task(config: RewardConfig, task: Task, domains: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a reward scores a task: its domain names it, or names none and `sources` and `domains` fit."""
    if task.domain in domains:
        return reward_name(config) in domains[task.domain]
    return is_meant_for(config, task.source, task.domain)


def _combine(
    trajectory: Trajectory, rewards: Sequence[_Entry], reward_results: Mapping[str, ResultOrError]
) -> Scored | Failure:
    """Return the weighted sum, or the first reward's failure."""
    values: dict[str, float] = {}
    details: dict[str, float] = {}
    steps: dict[str, tuple[StepScore, ...]] = {}
    answer: str | None = None
    total = 0.0
    for entry in rewards:
        reward_result = reward_results[entry.name]
        if isinstance(reward_result, RewardError):
            return Failure(stage="reward", name=entry.name, error=str(reward_result), origin=trajectory.task.origin)
        values[entry.name] = reward_result.value
        details |= {f"{entry.name}/{key}": value for key, value in reward_result.details.items()}
        if answer is None and reward_result.answer is not None:
            answer = whole_text(reward_result.answer)
        if reward_result.steps:
            steps[entry.name] = tuple(reward_result.steps)
        total += entry.config.weight * reward_result.value
    weights = {entry.name: entry.config.weight for entry in rewards}
    return Scored(
        trajectory=trajectory,
        reward=total,
        rewards=values,
        details=details,
        weights=weights,
        answer=answer,
        step_scores=steps,
    )
