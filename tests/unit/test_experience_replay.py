"""Right answers of earlier steps: what is kept, what joins a group again, and that a resumed run goes on alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests_support import scored, task

from roll_like.config.demonstrations import ExperienceReplayConfig
from roll_like.errors import ConfigError
from roll_like.metrics import files
from roll_like.rollout.collection import Collected
from roll_like.rollout.experience import ExperiencePool
from roll_like.rollout.metrics import off_policy_metrics
from roll_like.rollout.replaying import ReplayingRollouts
from roll_like.rollout.storage import write_groups
from roll_like.types import Group, Origin, Scored
from roll_like.values import reduce


def group(index: int, rewards: Sequence[float], *, version: int = 1, first: int = 50) -> Group[Scored]:
    """A group whose samples have different tokens."""
    samples = []
    for place, reward in enumerate(rewards):
        sample = scored(task(index), reward, sample=place, version=version)
        token_ids = sample.trajectory.token_ids.copy()
        token_ids[2:] = first + place
        samples.append(replace(sample, trajectory=replace(sample.trajectory, token_ids=token_ids)))
    return Group(task=task(index), samples=tuple(samples), failures=())


def pool(seed: int = 0, **section: Any) -> ExperiencePool:
    return ExperiencePool(ExperienceReplayConfig.model_validate(section), seed=seed)


def tokens(joined: Group[Scored]) -> list[int]:
    """What tells the answers apart that have joined a group."""
    return [int(one.trajectory.token_ids[-1]) for one in joined.off_policy]


def test_right_answers_join_groups_that_have_none() -> None:
    answers = pool()
    answers.add([group(0, [0, 1, 0]), group(1, [0, 0, 0])], 0)
    answers.begin_step(1)
    joined = answers.join(group(0, [0, 0]), ())
    (again,) = joined.off_policy
    assert again.reward == 1
    trajectory = again.trajectory
    # as it was sampled: the ratio to that policy stays exact
    assert (trajectory.origin, trajectory.policy_version, trajectory.sample_index) == (Origin.REPLAYED, 1, 2)
    assert trajectory.logprobs.tolist() == group(0, [0, 1, 0]).samples[1].trajectory.logprobs.tolist()
    assert tokens(joined) == [51]
    assert answers.join(group(0, [0, 1]), ()).off_policy == ()  # it has one of its own
    assert answers.join(group(1, [0, 0]), ()).off_policy == ()  # nobody has solved it
    assert len(pool(only_unsolved=False)) == 0
    always = pool(only_unsolved=False)
    always.add([group(0, [1])], 0)
    assert tokens(always.join(group(0, [0, 1]), ())) == [50]


def test_what_counts_as_right() -> None:
    answers = pool(solved_reward=0.5, samples_per_prompt=3)
    answers.add([group(0, [0.4, 0.5, 0.9])], 0)
    assert sorted(tokens(answers.join(group(0, [0.4, 0.4]), ()))) == [51, 52]
    assert answers.join(group(0, [0.5, 0.4]), ()).off_policy == ()


def test_old_answers_are_forgotten_and_the_newest_are_kept() -> None:
    answers = pool(max_age=2, kept_per_prompt=2, samples_per_prompt=2)
    answers.add([group(0, [1, 1, 1], first=10)], 0)
    assert len(answers) == 2
    answers.begin_step(1)
    answers.add([group(0, [1], first=20)], 1)
    assert 20 in tokens(answers.join(group(0, [0]), ()))
    answers.begin_step(3)  # those of step 0 are three steps old
    assert tokens(answers.join(group(0, [0]), ())) == [20]
    answers.begin_step(4)
    assert len(answers) == 0


def test_equal_answers_are_kept_once() -> None:
    answers = pool(samples_per_prompt=4)
    answers.add([group(0, [1, 1]), group(0, [1, 1])], 0)
    assert len(answers) == 2
    answers.add([group(0, [1], version=7)], 5)
    joined = answers.join(group(0, [0]), ())
    # the newer one has taken the place of the older
    assert sorted(one.trajectory.policy_version for one in joined.off_policy) == [1, 7]


def test_an_answer_to_another_prompt_of_the_same_id_is_none() -> None:
    answers = pool()
    answers.add([group(0, [1])], 0)
    other = group(0, [0])
    changed = replace(other, task=replace(other.task, prompt_ids=np.array([9, 9], np.int32)))
    assert answers.join(changed, ()).off_policy == ()


def test_what_joins_depends_on_seed_step_and_task_alone() -> None:
    def joined(seed: int, order: int) -> list[list[int]]:
        answers = pool(seed)
        answers.add([group(index, [1] * 8) for index in range(6)], 0)
        answers.begin_step(1)
        return [tokens(answers.join(group(index, [0]), ())) for index in range(6)[::order]][::order]

    assert joined(0, 1) == joined(0, -1)  # in whatever order groups end
    assert joined(0, 1) != joined(1, 1)
    assert len({tuple(each) for each in joined(0, 1)}) > 1


class Script:
    """A source whose step t has the groups of a list, joined by the pool as a runner does it."""

    def __init__(self, steps: Sequence[Sequence[Group[Scored]]], answers: ExperiencePool) -> None:
        self.steps = steps
        self.answers = answers
        self.loaded: Mapping[str, Any] = {}

    def collect(self, step: int) -> Collected:
        groups = tuple(self.answers.join(each, ()) for each in self.steps[step])
        return Collected(groups=groups[:-1], rejected=groups[-1:], failures=(), started=len(groups), tokens=0)

    def state(self) -> dict[str, Any]:
        return {"order": 3}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.loaded = state

    def save(self, directory: Path) -> None:
        (directory / "own").touch()

    def load(self, directory: Path) -> None:
        assert (directory / "own").exists()


STEPS = [
    [group(0, [1, 0], first=10), group(1, [1, 1], first=20)],
    [group(0, [1, 0], first=30), group(1, [0, 0])],
    [group(0, [0, 0]), group(1, [0, 0])],
    [group(0, [0, 0]), group(1, [0, 0])],
]


def seen(source: ReplayingRollouts, steps: range) -> list[list[list[int]]]:
    found = []
    for step in steps:
        collected = source.collect(step)
        found.append([tokens(each) for each in (*collected.groups, *collected.rejected)])
    return found


def test_a_resumed_run_replays_what_the_first_would_have(tmp_path: Path) -> None:
    whole = pool(max_age=2)
    uninterrupted = seen(ReplayingRollouts(Script(STEPS, whole), whole), range(4))
    # of this step's answers none joins; those of rejected groups are kept too
    assert uninterrupted[0] == [[], []]
    assert uninterrupted[1][0] == []
    assert uninterrupted[1][1] in ([20], [21])
    assert uninterrupted[2][0] in ([10], [30])
    assert uninterrupted[3] == [[30], []]  # those of step 0 are forgotten

    first = pool(max_age=2)
    source = ReplayingRollouts(Script(STEPS, first), first)
    assert seen(source, range(2)) == uninterrupted[:2]
    state = source.state()
    seen(source, range(2, 3))  # what comes after the checkpoint's state is not in it
    source.save(tmp_path)
    second = pool(max_age=2)
    script = Script(STEPS, second)
    resumed = ReplayingRollouts(script, second)
    resumed.load_state(state)
    resumed.load(tmp_path)
    assert script.loaded["order"] == 3
    assert seen(resumed, range(2, 4)) == uninterrupted[2:]
    # a checkpoint of a run that replayed nothing
    resumed.load_state({"order": 3})
    resumed.load(tmp_path)


def test_figures() -> None:
    answers = pool()
    source = ReplayingRollouts(Script(STEPS, answers), answers)
    assert reduce(source.collect(0).metrics)["replay/kept"] == 3
    groups = [answers.join(group(0, [0]), ()), group(1, [0])]
    figures = reduce(off_policy_metrics(groups, 5, {Origin.REPLAYED}))
    assert figures == {"replay/groups": 0.5, "replay/age": 4}


def test_answers_of_an_earlier_run(tmp_path: Path) -> None:
    tasks = {task(index).task_id: task(index) for index in range(2)}
    answers = pool(initial="runs/x")
    with pytest.raises(ConfigError, match="has no rollouts with tokens"):
        answers.fill(tmp_path, tasks.get, 512)
    (tmp_path / "rollouts").mkdir()
    for step, groups in enumerate(STEPS[:2], 1):
        write_groups(files.rollouts_path(tmp_path, step).with_suffix(""), groups)
    assert "4 right answers of 2 prompts" in answers.fill(tmp_path, tasks.get, 512)
    assert tokens(answers.join(group(1, [0]), ())) in ([20], [21])
    with pytest.raises(ConfigError, match="0 of its 4 groups are of prompts of this run"):
        pool(initial="runs/x").fill(tmp_path, lambda _: None, 512)
    with pytest.raises(ConfigError, match="no answer with a reward of 2 or more"):
        pool(initial="runs/x", solved_reward=2).fill(tmp_path, tasks.get, 512)
    with pytest.raises(ConfigError, match="0 of its 4 groups"):  # of another model's vocabulary
        pool(initial="runs/x").fill(tmp_path, tasks.get, 5)


def test_an_earlier_run_counts_from_the_step_that_reads_it(tmp_path: Path) -> None:
    """Its versions are other weights', steps may be missing in it, and a checkpoint's answers come before it."""
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    for step in (2, 150):
        stem = files.rollouts_path(tmp_path / "run", step).with_suffix("")
        write_groups(stem, [group(0, [1, 0], version=step + 40, first=step)])
    tasks = {task(0).task_id: task(0)}

    def started(step: int) -> ExperiencePool:
        answers = pool(samples_per_prompt=2)
        answers.start_with(lambda: answers.fill(tmp_path / "run", tasks.get, None))
        answers.begin_step(step)
        return answers

    for step in (0, 500):
        answers = started(step)
        joined = answers.join(group(0, [0]), ())
        assert sorted(tokens(joined)) == [2, 150]
        answers.begin_step(step + 3)
        # the weights of a step, counted from 0, are those of version step + 1
        figures = reduce(off_policy_metrics([answers.join(group(0, [0]), ())], step + 4, {Origin.REPLAYED}))
        assert figures["replay/age"] == 3
    earlier = pool()
    earlier.add([group(0, [1], first=77)], 0)
    steps = earlier.state()
    earlier.save(tmp_path)
    resumed = pool()
    resumed.start_with(lambda: pytest.fail("it is not read"))
    resumed.load(tmp_path, steps)
    resumed.begin_step(1)
    assert tokens(resumed.join(group(0, [0]), ())) == [77]
    with pytest.raises(ConfigError, match=r"without the experts.*router_replay"):
        pool().fill(tmp_path / "run", tasks.get, None, routes=True)
