"""Curricula: which tasks are attempted, exactly resumable, and where it helps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
from test_rollout_asynchronous import FakeCollector
from tests_support import scored, task  # type: ignore[import-not-found]

from roll_like.cluster.driver_loop import DriverLoop
from roll_like.config.rollout import AsyncSchedule, RolloutConfig
from roll_like.data.tasks import TaskOrder, TaskSet, TaskSource
from roll_like.errors import CheckpointError, ConfigError, DataError
from roll_like.policy_gradient.reward_workers import with_curriculum
from roll_like.registry import CURRICULA
from roll_like.rollout.asynchronous import AsyncRollouts
from roll_like.rollout.collection import no_progress
from roll_like.rollout.curricula import Curriculum, CurriculumConfig, CurriculumOrder, Turns
from roll_like.rollout.source import GroupFilter, GroupSource
from roll_like.types import Group, Scored, Task
from roll_like.values import reduce

TASKS = 12


def source(count: int = TASKS, **fields: Any) -> TaskSource:
    """Tasks `fake/0` …; the n-th has difficulty n."""
    tasks = tuple(replace(task(index), metadata={"level": index, **fields}) for index in range(count))
    report: Any = None
    return TaskSource(name="fake", key="data.sources.0", weight=1.0, items=tasks, answer_field=None, report=report)


def curriculum(name: str, **settings: Any) -> Curriculum:
    plugin = CURRICULA.get(name)
    made: Curriculum = plugin(plugin.Config(**settings))
    return made


def order_of(name: str, *, tasks: TaskSource | None = None, shuffle: bool = True, **settings: Any) -> CurriculumOrder:
    tasks = source() if tasks is None else tasks
    order = TaskOrder(TaskSet(sources=(tasks,)), seed=0, shuffle=shuffle)
    return CurriculumOrder(order, curriculum(name, **settings), tasks=tasks.items, seed=0)


def group(attempted: Task, *rewards: float) -> Group[Scored]:
    return Group(
        task=attempted,
        samples=tuple(scored(attempted, reward, sample=at) for at, reward in enumerate(rewards)),
        failures=(),
    )


def test_the_chances_by_hand() -> None:
    band = curriculum("solve_rate", low=0.2, high=0.8, keep=0.3)
    assert [band.chance(task(), rate) for rate in (None, 0.0, 0.2, 0.8, 1.0)] == [1, 0.3, 1, 1, 0.3]
    spread = curriculum("difficulty", keep=0.1)
    assert [spread.chance(task(), rate) for rate in (None, 0.0, 0.25, 0.5, 1.0)] == [1, 0.1, 0.75, 1, 0.1]
    stages = curriculum("stages", field="level", limits=(1, 3), groups=2, advance_at=0.75)
    levels = [replace(task(), metadata={"level": level}) for level in (0, 1, 2, 3.5)]
    assert [stages.chance(row, None) for row in levels] == [1, 1, 0, 0]
    for rate in (0.5, 0.75, 0.75):  # the mean of the last two: 0.625, then 0.75
        stages.ended(levels[0], rate)
    assert [stages.chance(row, None) for row in levels] == [1, 1, 1, 0]
    stages.ended(levels[0], 1.0)  # the next stage counts groups of its own
    assert [stages.chance(row, None) for row in levels] == [1, 1, 1, 0]
    stages.ended(levels[0], 1.0)
    assert [stages.chance(row, None) for row in levels] == [1, 1, 1, 1]


def test_a_solve_rate_follows_its_groups() -> None:
    order = order_of("difficulty", memory=0.75, solved_at=0.5)
    first = task(3)
    order.ended(group(first, 1.0, 0.5, 0.49, 0.0))
    assert order.state()["curriculum"]["rates"] == {"fake/3": 0.5}
    order.ended(group(first, 1.0))
    assert order.state()["curriculum"]["rates"] == {"fake/3": 0.625}
    order.ended(Group(task=first, samples=(), failures=()))  # all were lost to failures: that says nothing
    assert order.state()["curriculum"]["rates"] == {"fake/3": 0.625}


def test_rounding_decides_nothing() -> None:
    """Weights of 0.7, 0.2 and 0.1 add up to 0.9999999999999999, and a mean of ten times 0.7 to a little less."""
    right = 0.7 + 0.2 + 0.1
    assert right < 1
    order = order_of("solve_rate", memory=0.3)
    order.ended(group(task(3), right, right, right, 0.9999))
    assert 0.7499999 < (rate := order.state()["curriculum"]["rates"]["fake/3"]) < 0.75
    assert curriculum("solve_rate", low=0.75).chance(task(3), rate) == 1
    assert curriculum("solve_rate", low=0.0, high=0.75 - 1e-9).chance(task(3), 0.75) == 1
    assert curriculum("solve_rate", low=0.7501).chance(task(3), rate) == pytest.approx(0.1)
    stages = curriculum("stages", field="level", limits=(1,), groups=10, advance_at=0.7)
    for _ in range(10):
        stages.ended(task(3), 0.7)
    assert stages.figures()["curriculum/stage"].value == 1


def test_every_task_comes_once_in_a_pass_and_is_never_lost() -> None:
    order = order_of("solve_rate", keep=0.25)
    first = [order.next().task_id for _ in range(TASKS)]
    assert sorted(first) == sorted(f"fake/{index}" for index in range(TASKS))
    for index in range(TASKS):  # all but two are solved
        order.ended(group(task(index), 1.0, float(index > 1)))
    later = [order.next().task_id for _ in range(200)]
    counts = {identity: later.count(identity) for identity in set(later)}
    assert len(counts) == TASKS, "solved tasks come back now and then"
    hard = [counts["fake/0"], counts["fake/1"]]
    assert abs(hard[0] - hard[1]) <= 1, "a task within the band comes once in each pass"
    easy = sum(counts.values()) - sum(hard)
    assert 0.15 < easy / (TASKS - 2) / np.mean(hard) < 0.35


@pytest.mark.parametrize("name", ["solve_rate", "difficulty", "stages"])
def test_a_run_that_continues_draws_what_it_would_have_drawn(name: str) -> None:
    settings: dict[str, Any] = {"field": "level", "limits": (3, 7), "groups": 4} if name == "stages" else {"keep": 0.2}
    draw = np.random.default_rng(1)

    def attempt(order: CurriculumOrder, random: np.random.Generator) -> str:
        attempted = order.next()
        order.ended(group(attempted, *random.integers(0, 2, 4).astype(float)))
        return attempted.task_id

    whole = order_of(name, **settings)
    for _ in range(30):
        attempt(whole, draw)
    state, random_state = json.loads(json.dumps(whole.state())), draw.bit_generator.state
    expected = [attempt(whole, draw) for _ in range(60)]
    again = order_of(name, **settings)
    again.load_state(state)
    draw.bit_generator.state = random_state
    assert [attempt(again, draw) for _ in range(60)] == expected
    assert again.state() == whole.state()
    assert again.figures() == whole.figures()


def test_a_run_may_begin_a_curriculum_and_drop_it() -> None:
    plain = TaskOrder(TaskSet(sources=(source(),)), seed=0)
    plain.take(5)
    order = order_of("difficulty")
    order.load_state(plain.state())
    assert order.next().task_id == plain.next().task_id
    plain.load_state(order.state())
    with pytest.raises(CheckpointError, match="the checkpoint's curriculum is another one"):
        order_of("stages", field="level", limits=(1,)).load_state(order.state())


def test_figures_are_of_what_was_drawn_since() -> None:
    order = order_of("solve_rate", keep=0.2)
    for _ in range(TASKS):
        order.ended(group(order.next(), 1.0, 1.0))
    found = reduce(order.figures())
    shares = {"curriculum/measured": 1.0, "curriculum/passed_by": 0.0, "curriculum/easy": 1.0, "curriculum/hard": 0.0}
    assert found == {"curriculum/attempted": TASKS, **shares}
    for _ in range(5):
        order.next()
    found = reduce(order.figures())
    assert found["curriculum/attempted"] == 5
    assert found["curriculum/solve_rate"] == 1.0
    assert 0.5 < found["curriculum/passed_by"] < 0.95
    assert reduce(order_of("stages", field="level", limits=(1,)).figures())["curriculum/stage"] == 0


def test_tasks_outside_of_the_band_are_counted() -> None:
    order = order_of("solve_rate", low=0.25, high=0.75, memory=0.0)
    for at, right in enumerate((0, 1, 2, 3, 4, 4)):  # of four answers each: 0, 0.25, 0.5, 0.75, 1, 1
        order.ended(group(task(at), *[1.0] * right, *[0.0] * (4 - right)))
    found = reduce(order.figures())
    assert (found["curriculum/hard"], found["curriculum/easy"]) == (1 / TASKS, 2 / TASKS)
    assert found["curriculum/measured"] == 6 / TASKS


def test_a_task_may_leave_the_band_some_times_before_it_is_skipped() -> None:
    band = curriculum("solve_rate", low=0.1, high=0.9, keep=0.3, after=3)

    def chance_after(*rates: float) -> float:
        for rate in rates:
            band.ended(task(1), rate)
        return band.chance(task(1), rates[-1])

    assert [chance_after(0.0), chance_after(0.0), chance_after(0.0), chance_after(0.0)] == [1, 1, 0.3, 0.3]
    assert chance_after(0.5) == 1
    assert [chance_after(1.0), chance_after(0.0), chance_after(1.0)] == [1, 1, 0.3]  # on either side
    assert band.chance(task(2), 0.0) == 1, "a rate that another run measured is no group of this one"
    again = curriculum("solve_rate", low=0.1, high=0.9, keep=0.3, after=3)
    again.load_state(json.loads(json.dumps(band.state())))
    assert again.state() == band.state() == {"outside": {"fake/1": 3}}
    again.load_state({})  # of an older checkpoint
    assert again.chance(task(1), 0.0) == 1


def test_a_better_group_skips_no_task() -> None:
    order = order_of("solve_rate", low=0.4, high=0.9, keep=0.001, memory=0.5, after=3)
    band = order._curriculum

    def chance_after(*rewards: float) -> float:
        order.ended(group(task(1), *rewards))
        return band.chance(task(1), order.rate(task(1)))

    assert chance_after(0.0, 0.0) == 1
    assert chance_after(0.0, 1.0) == 1, "the rate is 0.25 still, and the last group was within the band"
    assert [chance_after(0.0, 0.0) for _ in range(3)] == [1, 1, 0.001]


def test_pools_are_counted_as_rates_change() -> None:
    """As if they were counted anew, also of tasks that were measured before and after a checkpoint."""

    def order() -> CurriculumOrder:
        return order_of("solve_rate", tasks=rated(0.0, 0.5, 1, None, 0.1, 0.3), rate_field="before.rate", low=0.2)

    def counts(of: CurriculumOrder) -> tuple[float, float]:
        figures = of.figures()
        return figures["curriculum/hard"].value * 6, figures["curriculum/easy"].value * 6

    draw, chosen = np.random.default_rng(0), order()
    assert counts(chosen) == (2, 1)
    for _ in range(50):
        chosen.ended(group(task(int(draw.integers(6))), *draw.integers(0, 2, 2).astype(float)))
        rates = [chosen.rate(one) for one in chosen.tasks]
        known = [rate for rate in rates if rate is not None]
        expected = (sum(rate < 0.2 for rate in known), sum(rate > 0.95 for rate in known))
        assert counts(chosen) == pytest.approx(expected)
        again = order()
        again.load_state(json.loads(json.dumps(chosen.state())))
        assert counts(again) == counts(chosen)


def test_rows_are_read_once() -> None:
    class Counting(dict[str, Any]):
        reads = 0

        def __getitem__(self, key: str) -> Any:
            Counting.reads += key == "rate"
            return super().__getitem__(key)

    tasks = source(3)
    items = tuple(replace(one, metadata=Counting(rate=0.5)) for one in tasks.items)
    order = order_of("solve_rate", tasks=replace(tasks, items=items), rate_field="rate")
    before = Counting.reads
    for _ in range(5):
        order.ended(group(order.next(), 1.0))
        order.figures()
    assert Counting.reads == before > 0


def rated(*rates: object) -> TaskSource:
    tasks = source(len(rates))
    items = tuple(
        replace(one, metadata={"before": {"rate": rate}}) for one, rate in zip(tasks.items, rates, strict=True)
    )
    return replace(tasks, items=items)


def test_rates_of_another_run_are_known_from_the_beginning() -> None:
    settings = {"rate_field": "before.rate", "keep": 0.01, "memory": 0.5}
    order = order_of("solve_rate", tasks=rated(0.0, 0.5, "0.25", None, 1), **settings)
    first = [order.next().task_id for _ in range(9)]
    assert {"fake/1", "fake/2", "fake/3"} <= set(first)
    assert sum(name in ("fake/0", "fake/4") for name in first) <= 1
    figures = reduce(order.figures())
    assert (figures["curriculum/hard"], figures["curriculum/easy"], figures["curriculum/measured"]) == (0.2, 0.2, 0.0)
    order.ended(group(order.find("fake/1"), 1.0, 1.0))  # 0.5 before, 1 now
    assert order.state()["curriculum"]["rates"] == {"fake/1": 0.75}
    with pytest.raises(
        DataError, match=r"fake\.jsonl:1: expected a solve rate from 0 to 1 in 'before\.rate', found 40"
    ):
        order_of("solve_rate", tasks=rated(40), rate_field="before.rate")
    with pytest.raises(DataError, match=r"expected a number in 'before\.share', the solve rate, found None"):
        order_of("solve_rate", tasks=rated(0.5), rate_field="before.share")


def test_stages_may_follow_the_steps_of_the_run() -> None:
    order = order_of("stages", field="level", limits=(2, 5), after_steps=(10, 30))
    hardest = []
    for step in (0, 9, 10, 29, 30, 99):
        order.begin_step(step)
        hardest.append(max(order.next().metadata["level"] for _ in range(2 * TASKS)))
    assert hardest == [2, 2, 5, 5, 11, 11]
    section = curriculum("stages", field="level", limits=(2, 5), after_steps=(10, 30)).config
    assert type(section)(**section.model_dump()) == section, "a run's config.yaml has all settings"
    state = json.loads(json.dumps(order.state()))
    again = order_of("stages", field="level", limits=(2, 5), after_steps=(10, 30))
    again.load_state(state)
    assert [again.next().task_id for _ in range(20)] == [order.next().task_id for _ in range(20)]
    for settings, message in (
        ({"after_steps": (10,)}, r"one for each of 2 limits; found \[10\]"),
        ({"after_steps": (30, 10)}, r"after_steps ascend"),
        ({"after_steps": (10, 30), "advance_at": 0.5}, "advance_at has no effect"),
    ):
        with pytest.raises(ConfigError, match=message):
            curriculum("stages", field="level", limits=(2, 5), **settings)


class HardestConfig(CurriculumConfig):
    type: Literal["hardest"] = "hardest"


class Hardest(Curriculum):
    """Half of the time the task with the lowest rate, else the next in the order."""

    Config = HardestConfig
    seen = 0

    def next(self, turns: Turns) -> Task:
        self.seen += 1
        if turns.random() < 0.5:
            return turns.next()
        return min(turns.tasks, key=lambda one: 1.0 if turns.rate(one) is None else turns.rate(one))

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.seen = int(state["seen"])


def test_a_curriculum_of_ones_own_chooses_freely_and_resumes() -> None:
    def order() -> CurriculumOrder:
        return CurriculumOrder(
            TaskOrder(TaskSet(sources=(source(),)), seed=0), Hardest(HardestConfig()), tasks=source().items, seed=0
        )

    def attempt(of: CurriculumOrder) -> str:
        attempted = of.next()
        level = int(attempted.metadata["level"])
        of.ended(group(attempted, *[float(answer < 4 - level % 5) for answer in range(4)]))
        return attempted.task_id

    whole = order()
    began = [attempt(whole) for _ in range(30)]
    assert max(map(began.count, began)) > 5, "one task comes many times in a pass"
    state = json.loads(json.dumps(whole.state()))
    expected = [attempt(whole) for _ in range(60)]
    again = order()
    again.load_state(state)
    assert [attempt(again) for _ in range(60)] == expected
    assert again.state() == whole.state()
    assert again.state()["curriculum"]["own"] == {"seen": 90}
    assert set(expected) == {f"fake/{level}" for level in range(TASKS)}


def test_checkpoints_from_before_draws_were_counted_go_on() -> None:
    whole = order_of("difficulty", keep=0.2)
    for _ in range(30):
        whole.ended(group(whole.next(), 1.0, 1.0))
    state = whole.state()
    assert state["curriculum"].pop("draws") == sum(state["drawn"].values())
    again = order_of("difficulty", keep=0.2)
    again.load_state(state)
    assert [again.next().task_id for _ in range(20)] == [whole.next().task_id for _ in range(20)]


def test_each_step_is_told_whatever_the_schedule(loop: DriverLoop) -> None:
    told: list[int] = []
    collector = FakeCollector(loop)
    flow = flow_of(collector, begin_step=told.append)
    flow.published(1)
    for step in range(3):
        collector.finish(*(int(name.removeprefix("fake/")) for name in list(collector.running)))
        flow.collect(step)
        flow.published(step + 2)
    flow.close()
    assert told == [0, 1, 2]


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"the band is empty: low is 0\.9, high is 0\.1"):
        curriculum("solve_rate", low=0.9, high=0.1)
    with pytest.raises(ConfigError, match="never comes back"):
        curriculum("solve_rate", keep=0.0)
    with pytest.raises(ConfigError, match="limits ascend"):
        curriculum("stages", field="level", limits=(3, 1))
    with pytest.raises(ConfigError, match="lets all 12 tasks pass by"):
        order_of("stages", field="level", limits=(-1,)).next()
    for value in (None, "hard", True, float("nan")):
        with pytest.raises(DataError, match=r"fake\.jsonl:1: expected a number in 'level', the difficulty, found"):
            curriculum("stages", field="level", limits=(1,)).chance(replace(task(), metadata={"level": value}), None)


@pytest.mark.parametrize(("name", "settings"), [("solve_rate", {}), ("difficulty", {})])
def test_it_helps_where_most_tasks_are_hopeless_or_solved(name: str, settings: dict[str, Any]) -> None:
    """Groups with an advantage, of 4 answers each: of 100 tasks 10 can be learned from."""

    def with_signal(order: Any, ended: Any) -> float:
        draw, useful = np.random.default_rng(0), 0
        for _ in range(1000):
            attempted = order.next()
            level = attempted.metadata["level"]
            chance = 0.5 if level < 10 else float(level % 2)
            rewards = (draw.random(4) < chance).astype(float)
            useful += len(set(rewards)) > 1
            ended(group(attempted, *rewards))
        return useful / 1000

    plain = TaskOrder(TaskSet(sources=(source(100),)), seed=0)
    chosen = order_of(name, tasks=source(100), **settings)
    assert with_signal(plain, lambda _: None) < 0.1
    assert with_signal(chosen, chosen.ended) > 0.3


@pytest.fixture
def loop() -> Iterator[DriverLoop]:
    with DriverLoop() as started:
        yield started


def flow_of(collector: FakeCollector, **changes: Any) -> AsyncRollouts:
    """Three groups a step, sampled one version ahead, of twelve tasks in file order."""
    rollout = RolloutConfig(prompts_per_step=3, samples_per_prompt=2)
    plain = GroupSource(
        make_runner=collector.make,
        engines=collector,  # type: ignore[arg-type]
        order=TaskOrder(TaskSet(sources=(source(),)), seed=0, shuffle=False),
        accept=GroupFilter(rollout),
    )
    section = CURRICULA.get("solve_rate").Config(keep=0.2)
    config: Any = SimpleNamespace(data=SimpleNamespace(curriculum=section), seed=0)
    return AsyncRollouts(
        replace(with_curriculum(plain, config, source().items), **changes),
        rollout,
        AsyncSchedule(type="async", max_staleness=1, ahead=1.0),
        steps=100,
        seed=7,
        runner=collector.loop,
        progress=no_progress,
    )


def test_an_asynchronous_run_loses_no_task_and_has_none_twice(loop: DriverLoop, tmp_path: Path) -> None:
    first = FakeCollector(loop)
    flow = flow_of(first)
    flow.published(1)
    first.finish(0, 1, 2, rewards=(1.0, 1.0))  # solved
    assert flow.collect(0).metrics["curriculum/attempted"].value == 6
    flow.published(2)
    first.finish(4, rewards=(1.0, 1.0))
    state = json.loads(json.dumps(flow.state()))
    flow.save(tmp_path)
    assert first.begun == [f"fake/{index}" for index in range(9)]
    assert state["order"]["curriculum"]["rates"] == {f"fake/{index}": 1.0 for index in (0, 1, 2, 4)}
    flow.close()

    again = FakeCollector(loop)
    resumed = flow_of(again)
    resumed.load_state(state)
    resumed.load(tmp_path)
    resumed.published(2)
    again.finish(3, 5)  # half of the answers are right: within the band
    trained = [one.task.task_id for one in resumed.collect(1).groups]
    assert sorted(trained) == ["fake/3", "fake/4", "fake/5"]
    for step in range(2, 6):
        resumed.published(step + 1)
        again.finish(*(int(name.removeprefix("fake/")) for name in list(again.running)))
        trained += [one.task.task_id for one in resumed.collect(step).groups]
    resumed.close()
    # what ran when the checkpoint was written runs again, in its order, and then the rest of the pass
    assert again.begun[:8] == [f"fake/{index}" for index in (3, 5, 6, 7, 8, 9, 10, 11)]
    assert sorted(trained[:9], key=lambda name: int(name[5:])) == [f"fake/{index}" for index in range(3, 12)]
    # in the next pass the solved ones pass by, and each of the others comes once
    solved = {f"fake/{index}" for index in (0, 1, 2, 4)}
    others = [name for name in again.begun[8:] if name not in solved]
    assert others[:8] == [f"fake/{index}" for index in (3, 5, 6, 7, 8, 9, 10, 11)]
    assert len(again.begun[8:]) - len(others) < 3
