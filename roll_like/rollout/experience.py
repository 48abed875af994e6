"""Experience replay: right answers of earlier steps join groups again, with the log-probabilities of who sampled them.

RLEP (arXiv:2507.07451) and its relatives mix verified answers of a pool into groups. Here an answer is kept as it was
sampled, so that the importance ratio of the policy being trained to the policy that sampled it stays exact, however old
it is. What joins a group is chosen when the group ends. The pool changes between two steps only, so that the order in
which groups end changes nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from roll_like.config.demonstrations import ExperienceReplayConfig
from roll_like.errors import ConfigError
from roll_like.rollout.replay import recorded_stems
from roll_like.rollout.storage import read_groups, write_groups
from roll_like.types import Group, Origin, Scored, Task, Trajectory
from roll_like.values import at_least

#: Where a checkpoint has the answers of the pool.
POOL = "experience"


@dataclass(frozen=True, slots=True)
class _Kept:
    """A right answer, and the step that sampled it, counted from 0."""

    step: int
    answer: Scored


class ExperiencePool:
    """Right answers of earlier steps, by task.

    Args:
        config: The section `experience_replay`.
        seed: Seed of the run.
    """

    def __init__(self, config: ExperienceReplayConfig, *, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._step = 0
        self._start: Callable[[], object] | None = None
        self._kept: Mapping[str, tuple[_Kept, ...]] = {}
        self._stated: Mapping[str, tuple[_Kept, ...]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def to_score(self, task: Task) -> Sequence[Trajectory]:  # noqa: ARG002 - of the protocol
        """Return nothing: what is kept has its rewards."""
        return ()

    def join(self, group: Group[Scored], scored: Sequence[Scored]) -> Group[Scored]:  # noqa: ARG002
        """Return a scored group with answers of its task, where it is to have some."""
        config = self._config
        if config.only_unsolved and solves(group.samples, config.solved_reward):
            return group
        task = group.task
        # data that has changed since may give another task the same id
        known = [one for one in self._kept.get(task.task_id, ()) if self._fits(one, task)]
        if not known:
            return group
        draw = np.random.default_rng([self._seed, self._step, zlib.crc32(task.task_id.encode())])
        places = draw.choice(len(known), min(config.samples_per_prompt, len(known)), replace=False)
        members = (*group.samples, *group.baselines, *group.off_policy)
        first = 1 + max(member.trajectory.sample_index for member in members)
        joined = tuple(
            _replayed(known[place].answer, task, first + index) for index, place in enumerate(sorted(places.tolist()))
        )
        return replace(group, off_policy=(*group.off_policy, *joined))

    def begin_step(self, step: int) -> None:
        """Forget what is too old for a step, counted from 0."""
        self._step = step
        if self._start is not None:
            start, self._start = self._start, None
            start()
        self._keep(self._kept)

    def add(self, groups: Iterable[Group[Scored]], step: int) -> None:
        """Keep the right answers of groups that a step has sampled."""
        kept: dict[str, tuple[_Kept, ...]] = dict(self._kept)
        for group in groups:
            right = [one for one in group.samples if at_least(one.reward, self._config.solved_reward)]
            for answer in right:
                of_task = kept.get(group.task.task_id, ())
                same = answer.trajectory.token_ids
                older = [one for one in of_task if not np.array_equal(one.answer.trajectory.token_ids, same)]
                kept[group.task.task_id] = (_Kept(step, answer), *older)
        self._keep(kept)

    def start_with(self, fill: Callable[[], object]) -> None:
        """Call `fill` before the first step, unless a checkpoint brings answers."""
        self._start = fill

    def fill(
        self, path: Path, tasks: Callable[[str], Task | None], vocabulary: int | None, *, routes: bool = False
    ) -> str:
        """Take the right answers that another run recorded, as if they were of this step; return what was taken.

        Args:
            path: Folder of the run.
            tasks: Finds a task by its id.
            vocabulary: Tokens that the model knows; None where that is not known.
            routes: Whether training needs the experts of their tokens.

        Raises:
            ConfigError: It has none to the tasks of this run, or lacks the experts.
        """
        recorded = list(_recorded(path))
        if not recorded:
            raise ConfigError(
                f"experience_replay.initial: {path} has no rollouts with tokens",
                fix="repeat that run with rollout.save_tokens: true",
            )
        mine = [
            group
            for group in recorded
            if (task := tasks(group.task.task_id)) is not None
            and np.array_equal(task.prompt_ids, group.task.prompt_ids)
            and all(vocabulary is None or sample.trajectory.token_ids.max() < vocabulary for sample in group.samples)
        ]
        if routes and any(sample.trajectory.routes is None for group in mine for sample in group.samples):
            raise ConfigError(
                f"experience_replay.initial: {path} was recorded without the experts of its tokens, which "
                "algorithm.router_replay replays",
                fix="record it with algorithm.router_replay: true, set that to false here, or remove "
                "experience_replay.initial",
            )
        self.add([self._of_this_step(group) for group in mine], self._step)
        if not len(self):
            found = f"{len(mine)} of its {len(recorded)} groups are of prompts of this run"
            raise ConfigError(
                f"experience_replay.initial: {path} has no answer with a reward of {self._config.solved_reward:g} or "
                f"more to a prompt of this run; {found}",
                fix="name a run on the same data with the same model and chat template, or lower "
                "experience_replay.solved_reward",
            )
        return f"{len(self)} right answers of {len(self._kept)} prompts are replayed from {path}"

    def _of_this_step(self, group: Group[Scored]) -> Group[Scored]:
        """Return a group of another run with the version that samples this step: versions of runs do not compare."""
        version, samples = self._step + 1, []
        for sample in group.samples:
            segments = tuple(replace(segment, policy_version=version) for segment in sample.trajectory.segments)
            samples.append(replace(sample, trajectory=replace(sample.trajectory, segments=segments)))
        return replace(group, samples=tuple(samples))

    def state(self) -> dict[str, Any]:
        """Return the steps of the answers; plain JSON. `save` writes these."""
        self._stated = self._kept
        return {task_id: [one.step for one in kept] for task_id, kept in self._kept.items()}

    def save(self, directory: Path) -> None:
        """Write the answers that `state` was last told of."""
        groups = [
            Group(task=kept[0].answer.trajectory.task, samples=tuple(one.answer for one in kept), failures=())
            for kept in self._stated.values()
        ]
        write_groups(directory / POOL, groups)

    def load(self, directory: Path, steps: Mapping[str, Sequence[int]]) -> None:
        """Read what `save` wrote, with the steps that `state` returned."""
        self._start = None
        self._kept = {
            group.task.task_id: tuple(map(_Kept, steps[group.task.task_id], group.samples))
            for group in read_groups(directory / POOL)
        }

    def _keep(self, kept: Mapping[str, tuple[_Kept, ...]]) -> None:
        """Take in other answers: the newest of each task, and none that is too old."""
        oldest, most = self._step - self._config.max_age, self._config.kept_per_prompt
        young = {
            task_id: tuple(one for one in of_task if one.step >= oldest)[:most] for task_id, of_task in kept.items()
        }
        # replaced as a whole: groups of an asynchronous run end meanwhile
        self._kept = {task_id: of_task for task_id, of_task in young.items() if of_task}

    def _fits(self, one: _Kept, task: Task) -> bool:
        return np.array_equal(one.answer.trajectory.task.prompt_ids, task.prompt_ids)


def solves(samples: Iterable[Scored], reward: float) -> bool:
    """Return whether a sample has at least this reward."""
    return any(at_least(sample.reward, reward) for sample in samples)


def _replayed(answer: Scored, task: Task, sample_index: int) -> Scored:
    trajectory = replace(answer.trajectory, task=task, sample_index=sample_index, origin=Origin.REPLAYED)
    return replace(answer, trajectory=trajectory)


def _recorded(path: Path) -> Iterator[Group[Scored]]:
    """Yield the groups that a run recorded, step after step; steps may be missing."""
    for stem in recorded_stems(path):
        yield from read_groups(stem)
