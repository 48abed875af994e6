"""A step's groups: resumable, filtered, bounded in failures; and the figures that come of them."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from config_files import MINIMAL
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_support import group, scored, task

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.cluster import WorkerDied
from roll_like.cluster.driver_loop import DriverLoop
from roll_like.config.rollout import RolloutConfig
from roll_like.data.bad_rows import RowsReport
from roll_like.data.tasks import TaskOrder, TaskSet, TaskSource
from roll_like.errors import GenerationError
from roll_like.inference.interface import Guesses
from roll_like.policy_gradient import reward_workers
from roll_like.rollout.collection import Collected, SampleCounter, SampleProgress, no_progress
from roll_like.rollout.evaluate import Evaluator
from roll_like.rollout.metrics import evaluation_metrics, pass_at_k, rollout_metrics, rollout_rows
from roll_like.rollout.scheduler import GroupPlan
from roll_like.rollout.source import GroupFilter, GroupSource, SynchronousRollouts
from roll_like.types import Failure, Group, Scored, StopReason, Task
from roll_like.values import reduce


def taskset(count: int = 10) -> TaskSet:
    report = RowsReport(name="fake", rows=count, kept=count, left_out=(), longest=2)
    tasks = tuple(task(index) for index in range(count))
    return TaskSet(
        sources=(
            TaskSource(name="fake", key="data.sources.0", weight=1.0, items=tasks, answer_field=None, report=report),
        )
    )


def collected(groups: list[Group[Scored]], **changes) -> Collected:  # type: ignore[no-untyped-def]
    settings = {
        "rejected": (),
        "unfinished": (),
        "failures": (),
        "started": len(groups),
        "wait_reward_seconds": 0.5,
        "tokens": 10,
    }
    return Collected(groups=tuple(groups), **(settings | changes))


class FakeRunner:
    """Runs each group for as many turns of the event loop as a script says, and by it gives it equal rewards or not."""

    replicas = 2

    def __init__(self, script: Callable[[int], tuple[int, bool]] = lambda index: (index, True)) -> None:
        self.script = script
        self.counter = SampleCounter(2, no_progress)
        self.seeds: list[int | None] = []
        self.begun: list[list[str]] = []
        self.waited_for: list[int] = []
        self.fails: dict[str, Exception] = {}
        self.failures = 0
        self.busy = 0.0
        self._stops: dict[int, asyncio.Event] = {}

    def make(self, seed: int | None, progress: SampleProgress) -> FakeRunner:
        self.counter = SampleCounter(2, progress)
        self.seeds.append(seed)
        self.begun.append([])
        self.waited_for.append(0)
        self.busy += 3.0
        return self

    def busy_seconds(self) -> float:
        return self.busy

    def take_guesses(self) -> Guesses:
        return Guesses()

    async def run(self, number: int, owner: Task) -> Group[Scored]:
        self.begun[-1].append(owner.task_id)
        self._stops[number] = asyncio.Event()
        turns, different = self.script(int(owner.task_id.removeprefix("fake/")))
        for _ in range(turns):
            await asyncio.sleep(0)
            if self._stops[number].is_set():
                break
        if owner.task_id in self.fails:
            raise self.fails.pop(owner.task_id)
        lost = Failure(stage="reward", name="judge", error="broke", origin="fake.jsonl:1")
        scored = group(owner, [0.0, 1.0] if different else [1.0, 1.0])
        return replace(scored, failures=(lost,) * (self.failures if number == 0 else 0))

    async def stop(self, groups: Collection[int]) -> None:
        for number in groups:
            self._stops[number].set()

    def prioritize(self, groups: Collection[int]) -> None:
        self.waited_for[-1] = max(self.waited_for[-1], len(groups))

    def describe(self, group: int) -> str:
        return ""


def source(
    runner: FakeRunner,
    loop: DriverLoop,
    *,
    filters: Mapping[str, bool] | None = None,
    tasks: int = 100,
    begin_step: Callable[[int], object] = lambda step: None,
    **changes: Any,
) -> SynchronousRollouts:
    config = RolloutConfig(prompts_per_step=3, samples_per_prompt=2, **changes)
    groups = GroupSource(
        make_runner=runner.make,
        engines=runner,
        order=TaskOrder(taskset(tasks), seed=0, shuffle=False),
        accept=GroupFilter(config, domains=filters),
        begin_step=begin_step,
    )
    return SynchronousRollouts(groups, config, seed=7, runner=loop)


#: Of four groups that start at once after a step that rejected some, the slowest is given back.
OVERSAMPLED: dict[str, Any] = {"drop_zero_variance_groups": True, "max_oversampling": 2.0}


def one_is_given_back(index: int) -> tuple[int, bool]:
    """Reject task 0, so that the second step starts one group more than it needs; its last is too slow."""
    return (1000 if index == 7 else 0, index != 0)


def test_a_resumed_source_goes_on_with_the_same_tasks_and_seeds() -> None:
    with DriverLoop() as loop:
        first, second = FakeRunner(one_is_given_back), FakeRunner()
        told: list[int] = []
        rollouts = source(first, loop, begin_step=told.append, **OVERSAMPLED)
        assert [names(rollouts.collect(step).groups) for step in (0, 1)] == [
            ["fake/1", "fake/2", "fake/3"],
            ["fake/4", "fake/5", "fake/6"],
        ]
        state = rollouts.state()
        rollouts.collect(2)
        assert told == [0, 1, 2]
        resumed = source(second, loop, **OVERSAMPLED)
        resumed.load_state(state)
        resumed.collect(2)
    assert state["returned"] == ["fake/7"]
    assert second.begun[0] == first.begun[2]
    assert first.begun[2][0] == first.begun[1][-1] == "fake/7"  # what was aborted comes first, and is waited for
    assert first.waited_for == [0, 0, 1]
    assert second.waited_for == [1]
    assert second.seeds[0] == first.seeds[2] != first.seeds[1]


def names(groups: Sequence[Group[Scored]]) -> list[str]:
    return [one.task.task_id for one in groups]


def test_a_step_that_was_interrupted_collects_the_same_tasks_again() -> None:
    with DriverLoop() as loop:
        undisturbed, disturbed = FakeRunner(one_is_given_back), FakeRunner(one_is_given_back)
        disturbed.fails["fake/8"] = WorkerDied("training worker 0 is gone")
        expected, rollouts = source(undisturbed, loop, **OVERSAMPLED), source(disturbed, loop, **OVERSAMPLED)
        for step in (0, 1):
            expected.collect(step)
            rollouts.collect(step)
        with pytest.raises(WorkerDied):
            rollouts.collect(2)
        rollouts.collect(2)
        expected.collect(2)
    assert disturbed.begun[2] == disturbed.begun[3] == undisturbed.begun[2]
    assert rollouts.state() == expected.state()
    assert disturbed.waited_for == [0, 0, 1, 1]


@settings(max_examples=2 * settings().max_examples)
@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=30), st.integers(1, 6))
def test_no_task_is_given_back_twice_and_none_is_lost(script: list[tuple[int, bool]], steps: int) -> None:
    turns, ended, given_back = itertools.cycle(script), [], []
    with DriverLoop() as loop:
        # more tasks than are drawn, so that each is drawn once
        rollouts = source(
            FakeRunner(lambda index: next(turns)),
            loop,
            tasks=1000,
            drop_zero_variance_groups=True,
            max_oversampling=3.0,
        )
        for step in range(steps):
            got = rollouts.collect(step)
            assert len(got.groups) <= 3
            assert got.started <= 9
            given_back += [owner.task_id for owner in got.unfinished]
            ended += names([*got.groups, *got.rejected])
    assert len(set(given_back)) == len(given_back)
    assert sorted([*ended, *rollouts.state()["returned"]]) == sorted({*ended, *given_back})


def test_engines_report_for_how_long_they_had_requests() -> None:
    with DriverLoop() as loop:
        rollouts = source(FakeRunner(), loop)
        first, second = rollouts.collect(0), rollouts.collect(1)
    assert reduce(rollout_metrics(first, 0))["time/engines"] == 1.5  # 3 s of two engines
    assert reduce(rollout_metrics(second, 0))["time/engines"] == 1.5


def test_oversampling_follows_the_share_of_accepted_groups() -> None:
    started = []
    with DriverLoop() as loop:
        runner = FakeRunner(lambda index: (index % 7, index % 3 == 0))
        rollouts = source(runner, loop, drop_zero_variance_groups=True, max_oversampling=2.0)
        for step in range(6):
            started.append(math.ceil(3 / rollouts.state()["acceptance"]))
            assert rollouts.collect(step).started == 6
    assert started[0] == 3
    assert started == sorted(started)
    assert started[-1] > 6


def test_the_filter_wants_different_rewards() -> None:
    config = RolloutConfig(prompts_per_step=3, samples_per_prompt=2)
    plain = GroupFilter(config)
    filtering = GroupFilter(config.model_copy(update={"drop_zero_variance_groups": True}))
    same, different, lonely = (group(task(), rewards) for rewards in ([0.1 + 0.2, 0.3], [0.0, 1.0], [1.0]))
    assert [plain(one) for one in (same, different, lonely)] == [True, True, True]
    assert [filtering(one) for one in (same, different, lonely)] == [False, True, False]
    assert not plain(group(task(), []))


def test_too_many_failures_end_the_run_and_show_the_first() -> None:
    with DriverLoop() as loop:
        runner = FakeRunner()
        rollouts = source(runner, loop, max_failure_fraction=0.2)
        runner.failures = 1
        rollouts.collect(0)
        runner.failures = 2
        with pytest.raises(GenerationError, match=r"2 of 8 samples .*max_failure_fraction: 0.2") as caught:
            rollouts.collect(1)
    assert "broke" in str(caught.value)
    assert "'judge' for fake.jsonl:1" in str(caught.value)


def test_rollout_metrics_are_over_samples_not_over_groups() -> None:
    groups = [group(task(0), [1.0, 1.0, 1.0]), group(task(1), [0.0], response=5, version=2)]
    rejected = (group(task(2), [0.0, 0.0], stop_reason=StopReason.LENGTH),)
    values = reduce(rollout_metrics(collected(groups, rejected=rejected), policy_version=2))
    assert values["rollout/reward/mean"] == pytest.approx(3 / 6)
    assert values["rollout/reward/r"] == pytest.approx(0.5)
    assert values["rollout/r/strict"] == pytest.approx(0.5)
    assert values["rollout/reward/std"] == pytest.approx(np.std([1, 1, 1, 0, 0, 0]))
    assert values["rollout/response_length/mean"] == pytest.approx((5 * 3 + 5) / 6)
    assert values["rollout/response_length/max"] == 5
    assert values["rollout/truncated"] == pytest.approx(2 / 6)
    assert values["rollout/groups/zero_variance"] == 1.0
    assert values["rollout/reward/pass"] == pytest.approx(1 / 3)
    assert values["staleness/mean"] == pytest.approx(2 * 3 / 4)  # of trained samples only
    assert values["staleness/max"] == 2
    assert values["rollout/samples"] == 6


def test_a_group_that_lost_all_samples_is_neither_unsolved_nor_without_variance() -> None:
    groups = [group(task(0), [1.0, 0.0]), group(task(1), [1.0, 0.5])]
    values = reduce(rollout_metrics(collected(groups), policy_version=2))
    lost = (group(task(2), []), group(task(3), []))
    with_lost = reduce(rollout_metrics(collected(groups, rejected=lost), policy_version=2))
    assert with_lost == values
    assert (values["rollout/reward/pass"], values["rollout/groups/zero_variance"]) == (1.0, 0.0)


def test_a_step_without_samples_has_no_means() -> None:
    values = reduce(rollout_metrics(collected([]), policy_version=0))
    assert "rollout/reward/mean" not in values
    assert values["rollout/samples"] == 0


def test_evaluation_metrics_and_rows() -> None:
    groups = [group(task(0), [1.0, 0.0]), group(task(1), [0.0, 0.5])]
    values = reduce(evaluation_metrics(collected(groups), 2))
    assert values["eval/avg"] == pytest.approx(0.375)
    assert values["eval/pass@2"] == pytest.approx(0.5)
    assert values["eval/incomplete_tasks"] == 0
    rows = rollout_rows(groups)
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.0, 0.5]
    assert rows[0]["prompt"] == "task 0"
    assert rows[0]["tokens"] == scored(task(), 0.0).trajectory.response_length


@pytest.mark.parametrize(
    ("samples", "solved", "k", "expected"),
    [
        (4, 0, 4, 0.0),
        (4, 1, 4, 1.0),
        (4, 1, 1, 1 / 4),
        (5, 2, 3, 9 / 10),  # of 10 triples only one misses both
        (10, 3, 2, 1 - (7 * 6) / (10 * 9)),
        (3, 2, 2, 1.0),  # one miss: every pair has a hit
    ],
)
def test_pass_at_k_is_the_unbiased_estimate(samples: int, solved: int, k: int, expected: float) -> None:
    assert pass_at_k(samples, solved, k) == pytest.approx(expected)
    drawn = itertools.combinations(range(samples), k)
    assert pass_at_k(samples, solved, k) == pytest.approx(np.mean([min(chosen) < solved for chosen in drawn]))


def test_tasks_that_lost_samples_are_left_out_of_pass_at_k_and_counted() -> None:
    whole = [group(task(0), [1.0, 0.0, 0.0, 0.0]), group(task(1), [0.0, 0.0, 0.0, 0.0])]
    lost = [group(task(2), [0.0, 0.0, 0.0]), group(task(3), [0.0])]
    gone = (group(task(4), []),)
    values = reduce(evaluation_metrics(collected([*whole, *lost], rejected=gone), 4))
    assert values["eval/pass@4"] == 0.5  # of the two whole tasks; any success in what is left would give 1/4
    assert values["eval/incomplete_tasks"] == 3
    assert values["eval/avg"] == pytest.approx(1 / 12)  # of every scored sample
    assert not any(name.startswith("eval/pass") for name in reduce(evaluation_metrics(collected(lost), 4)))


def test_pass_at_j_is_estimated_from_the_same_samples_for_powers_of_two_and_k() -> None:
    one, none = group(task(0), [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]), group(task(1), [0.0] * 6)
    values = reduce(evaluation_metrics(collected([one, none]), 6))
    passes = {name: value for name, value in values.items() if "pass@" in name}
    # of six samples one is solved: a draw of j has it with probability j/6; the other task halves that
    expected = {"eval/pass@1": 1 / 12, "eval/pass@2": 2 / 12, "eval/pass@4": 4 / 12, "eval/pass@6": 1 / 2}
    assert passes == pytest.approx(expected)
    assert [name for name in reduce(evaluation_metrics(collected([group(task(), [1.0])]), 1)) if "pass@" in name] == [
        "eval/pass@1"
    ]


def voted(which: Task, answers: Sequence[str | None], rewards: Sequence[float]) -> Group[Scored]:
    """Return a group whose samples have answers."""
    whole = group(which, list(rewards))
    samples = (replace(one, answer=answer) for one, answer in zip(whole.samples, answers, strict=True))
    return replace(whole, samples=tuple(samples))


@pytest.mark.parametrize(
    ("answers", "rewards", "expected"),
    [
        (["7", "7", "9", "8"], [1.0, 1.0, 0.0, 0.0], 1.0),
        (["9", "9", "7", "8"], [0.0, 0.0, 1.0, 0.0], 0.0),  # pass@4 is 1
        (["7", "7", "9", "9"], [1.0, 1.0, 0.0, 0.0], 1 / 2),  # a tie of two, one of them right
        (["7", "8", "9", ""], [1.0, 0.0, 0.0, 0.0], 1 / 3),  # a tie of three; a missing answer does not vote
        (["", None, "", "7"], [0.0, 0.0, 0.0, 1.0], 1.0),  # more have none, and that is no answer
        (["", "", "", ""], [0.0] * 4, 0.0),  # nobody votes: not solved
        (["7", "7", "7", "9"], [1.0, 1.0, 0.5, 0.0], 2 / 3),  # one of three right answers lost another reward
    ],
)
def test_the_most_frequent_answer_is_scored(answers: list[str | None], rewards: list[float], expected: float) -> None:
    values = reduce(evaluation_metrics(collected([voted(task(), answers, rewards)]), 4))
    assert values["eval/maj@4"] == pytest.approx(expected)


def test_only_whole_tasks_of_sources_whose_answers_are_compared_vote() -> None:
    right = voted(task(0), ["7", "7"], [1.0, 1.0])
    lost = voted(task(1), ["9"], [0.0])
    silent = replace(task(2), source="essays", domain="essays")
    values = reduce(evaluation_metrics(collected([right, lost, group(silent, [0.0, 0.0])]), 2))
    assert values["eval/maj@2"] == 1.0
    assert values["eval/pass@2"] == 0.5
    assert values[f"eval/domain/{right.task.domain}/maj@2"] == 1.0
    assert "eval/domain/essays/maj@2" not in values
    assert not any("maj@" in name for name in reduce(evaluation_metrics(collected([group(silent, [0.0, 0.0])]), 2)))
    assert not any("maj@" in name for name in reduce(evaluation_metrics(collected([right]), 1)))  # nothing to vote
    rows = rollout_rows([right, group(silent, [0.0])])
    assert (rows[0]["answer"], "answer" in rows[2]) == ("7", False)


class Plans:
    """A scheduler that keeps the plans that it is given."""

    def __init__(self) -> None:
        self.engines = self.fake = FakeRunner()
        self.plans: list[GroupPlan] = []

    def runner(self, plan: GroupPlan, seed: int | None, progress: SampleProgress) -> FakeRunner:
        self.plans.append(plan)
        return self.fake.make(seed, progress)


def prompt_workers(config: RLVRConfig, scheduler: Any, loop: Any = None) -> reward_workers.PromptWorkers[RLVRConfig]:
    nothing: Any = None
    prompts = reward_workers.PromptWorkers(config, nothing, nothing)
    prompts._scheduler, prompts._runner, prompts._progress = scheduler, loop, no_progress
    return prompts


def test_a_greedy_baseline_is_asked_for_and_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_workers, "tasks_of", lambda config: taskset())
    scheduler: Any = Plans()
    rollout = {"prompts_per_step": 3, "samples_per_prompt": 2, "redundant_samples": 3, "temperature": 0.7}
    remax = {"algorithm": {"advantage": {"type": "remax"}}}
    for more in (remax, {}):
        config = RLVRConfig.model_validate({**MINIMAL, "rollout": rollout, **more})
        groups = prompt_workers(config, scheduler).groups(pytest.fail)
        groups.make_runner(0, no_progress)
        complete = group(task(), [0.0, 1.0])
        assert groups.accept(replace(complete, baselines=complete.samples[:1]))
        # the greedy sample was lost: there is nothing to compare with
        assert groups.accept(complete) is (more is not remax)
    greedy, plain = scheduler.plans
    assert greedy.baseline is not None
    assert (greedy.baseline.temperature, greedy.sampling.temperature) == (0.0, 0.7)
    assert plain.baseline is None
    assert (greedy.redundant, plain.redundant) == (3, 3)


def evaluator(monkeypatch: pytest.MonkeyPatch, scheduler: Any, loop: DriverLoop, **section: Any) -> Evaluator:
    monkeypatch.setattr(reward_workers, "load_renderer", lambda *arguments, **named: None)
    monkeypatch.setattr(reward_workers, "load_tasks", lambda *arguments, **named: [task(0), task(1)])
    section = {"sources": [{"path": "toy.jsonl"}], "samples_per_prompt": 2, **section}
    config = RLVRConfig.model_validate({**MINIMAL, "evaluation": section, "training": {"lora": {}}})
    found = prompt_workers(config, scheduler, loop).evaluator(print)
    assert found is not None
    return found


def test_an_evaluation_names_the_k_of_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Plans()
    with DriverLoop() as loop:
        values = reduce(evaluator(monkeypatch, scheduler, loop).evaluate()[0])
    assert values["eval/pass@2"] == 1.0
    assert scheduler.plans[0].urgent


def test_what_stays_as_it_is_is_measured_once_and_reported_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Plans()
    with DriverLoop() as loop:
        measure = evaluator(monkeypatch, scheduler, loop, base_model=True, adapters={"sft": "adapters/sft"})
        first, second = (reduce(measure.evaluate()[0]) for _ in range(2))
    assert [each.adapter for each in scheduler.plans] == ["policy", "sft", "base", "policy"]
    assert len(set(scheduler.fake.seeds)) == 1
    assert first == second
    names = {name.removeprefix("eval/") for name in first}
    own = {name for name in names if not name.startswith(("base/", "adapter/"))}
    assert names == own | {f"base/{name}" for name in own} | {f"adapter/sft/{name}" for name in own}
    assert {"avg", "pass@2"} < own


def test_domains_have_filters_and_figures_of_their_own() -> None:
    maths, code = (replace(task(index), domain=domain) for index, domain in enumerate(("maths", "code")))
    config = RolloutConfig(prompts_per_step=3, samples_per_prompt=2, max_oversampling=2.0)
    accept = GroupFilter(config, domains={"maths": True})
    assert [accept(group(one, [1.0, 1.0])) for one in (maths, code)] == [False, True]
    groups = [group(maths, [1.0, 0.0]), group(code, [0.5, 0.5])]
    values = reduce(rollout_metrics(collected(groups), policy_version=1))
    assert values["rollout/domain/maths/reward"] == values["rollout/domain/code/reward"] == 0.5
    assert values["rollout/domain/maths/zero_variance"] == 0
    assert values["rollout/domain/code/zero_variance"] == 1
    values = reduce(evaluation_metrics(collected(groups), 2))
    assert (values["eval/domain/maths/pass@2"], values["eval/domain/code/pass@2"]) == (1, 0)


def test_a_domain_may_be_called_as_its_source_is() -> None:
    named, other = (replace(task(index), domain=domain) for index, domain in enumerate((task().source, "maths")))
    groups = [group(named, [1.0, 0.5]), group(other, [0.0, 0.0])]
    values = reduce(rollout_metrics(collected(groups), policy_version=1))
    assert values[f"rollout/source/{named.source}/reward"] == 0.375
    assert values[f"rollout/domain/{named.domain}/reward"] == 0.75
    alone = reduce(rollout_metrics(collected(groups[:1]), policy_version=1))
    assert not any(name.startswith("rollout/domain") for name in alone), "there the source's figures are the same"
    alone = reduce(rollout_metrics(collected(groups[1:]), policy_version=1))
    assert (alone["rollout/domain/maths/reward"], alone["rollout/domain/maths/groups"]) == (0, 1)
    assert not any("domain" in name for name in reduce(rollout_metrics(collected([group(task(), [1.0])]), 1)))


def test_an_episode_that_a_limit_ended_was_not_solved_and_one_that_was_solved_passes() -> None:
    solved, cut, unspoken = (group(replace(task(index), source=name), [0.4, 0.4]) for index, name in enumerate("aab"))
    details = ({"success": 1.0}, {"success": 0.0})
    solved = replace(
        solved, samples=tuple(replace(one, details=own) for one, own in zip(solved.samples, details, strict=True))
    )
    unspoken = group(unspoken.task, [1.0, 0.0])
    values = reduce(evaluation_metrics(collected([solved, cut, unspoken]), 2))
    assert values["eval/success"] == pytest.approx(1 / 4)  # of source a; source b says nothing
    assert values["eval/pass@2"] == pytest.approx(2 / 3)  # of a by what its environment says, of b by its reward
