from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_like.data.bad_rows import RowsReport
from roll_like.data.tasks import TaskOrder, TaskSet, TaskSource
from roll_like.errors import CheckpointError, ConfigError
from roll_like.types import Task


def make_source(name: str, size: int, weight: float, first: int = 0) -> TaskSource:
    tasks = tuple(
        Task(
            task_id=f"{name}:{number}",
            source=name,
            domain=name,
            messages=({"role": "user", "content": str(number)},),
            prompt_ids=np.asarray([number + first], dtype=np.int32),
            answer=None,
            metadata={},
            origin=f"{name}.jsonl:{number}",
        )
        for number in range(size)
    )
    report = RowsReport(name=name, rows=size, kept=size, left_out=(), longest=1)
    return TaskSource(name=name, key="data.sources.0", weight=weight, items=tasks, answer_field=None, report=report)


def make_set(sizes: Sequence[int], weights: Sequence[float], first: int = 0) -> TaskSet:
    named = zip("abcdef", sizes, weights, strict=False)
    return TaskSet(sources=tuple(make_source(name, size, weight, first) for name, size, weight in named))


def draw(order: TaskOrder, count: int) -> list[str]:
    return [order.next().task_id for _ in range(count)]


mixtures = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from([0.1, 0.25, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 7.0])),
    min_size=1,
    max_size=5,
).map(lambda parts: make_set(*zip(*parts, strict=True)))


def test_weights_two_to_one():
    order = TaskOrder(make_set([9, 9], [2, 1]), seed=0)
    assert [task_id[0] for task_id in draw(order, 6)] == ["a", "b", "a", "a", "b", "a"]


@given(mixtures, st.integers(0, 3))
def test_shares_are_exact(taskset, seed):
    order = TaskOrder(taskset, seed=seed)
    weights = {source.name: round(source.weight * 20) for source in taskset.sources}  # all are multiples of 1/20
    total = sum(weights.values())
    counts: Counter[str] = Counter()
    for number in range(1, 2 * total + 1):
        counts[order.next().source] += 1
        # integers: a source is never a whole task ahead of its share
        assert all(counts[name] * total - number * weight < total for name, weight in weights.items())
    assert counts == {name: 2 * weight for name, weight in weights.items()}


@given(mixtures, st.integers(0, 3), st.booleans())
def test_every_pass_holds_every_task_once(taskset, seed, shuffle):
    order = TaskOrder(taskset, seed=seed, shuffle=shuffle)
    seen: dict[str, list[str]] = {source.name: [] for source in taskset.sources}
    for _ in range(200):
        task = order.next()
        seen[task.source].append(task.task_id)
    for source in taskset.sources:
        everything = [task.task_id for task in source.items]
        whole = len(seen[source.name]) // len(everything)
        for number in range(whole):
            one = seen[source.name][number * len(everything) : (number + 1) * len(everything)]
            assert sorted(one) == sorted(everything)
            assert shuffle or one == everything


@given(mixtures, st.integers(0, 3), st.integers(0, 60), st.booleans())
def test_resuming_continues_the_same_sequence(taskset, seed, before, shuffle):
    order = TaskOrder(taskset, seed=seed, shuffle=shuffle)
    draw(order, before)
    saved = json.dumps(order.state())
    expected = draw(order, 60)
    resumed = TaskOrder(taskset, seed=seed, shuffle=shuffle)
    draw(resumed, 7)  # where it stood before does not matter
    resumed.load_state(json.loads(saved))
    assert draw(resumed, 60) == expected


def test_passes_seeds_and_sources_are_shuffled_differently():
    order = TaskOrder(make_set([50], [1]), seed=1)
    first, second = draw(order, 50), draw(order, 50)
    assert first != second
    assert draw(TaskOrder(make_set([50], [1]), seed=1), 50) == first
    assert draw(TaskOrder(make_set([50], [1]), seed=2), 50) != first
    pair = draw(TaskOrder(make_set([50, 50], [1, 1]), seed=1), 100)
    of_a, of_b = ([task_id[2:] for task_id in pair if task_id[0] == name] for name in "ab")
    assert of_a != of_b
    assert of_a == [task_id[2:] for task_id in first]  # another source beside it changes nothing


def test_the_order_is_the_same_on_every_machine():
    # written down once; a change here breaks the resumption of every run that exists
    expected = ["a:5", "a:4", "a:2", "a:0", "a:3", "a:1", "a:4", "a:0"]
    assert draw(TaskOrder(make_set([6], [1]), seed=3), 8) == expected


@pytest.mark.parametrize(
    "other",
    [
        TaskOrder(make_set([5, 3], [2, 1], first=1), seed=0),
        TaskOrder(make_set([5, 4], [2, 1]), seed=0),
        TaskOrder(make_set([5, 3], [3, 1]), seed=0),
        TaskOrder(make_set([5, 3], [2, 1]), seed=1),
        TaskOrder(make_set([5, 3], [2, 1]), seed=0, shuffle=False),
    ],
    ids=["rows", "rows added", "weights", "seed", "shuffle"],
)
def test_a_state_of_other_data_is_refused(other):
    state = TaskOrder(make_set([5, 3], [2, 1]), seed=0).state()
    with pytest.raises(CheckpointError, match="the data changed since the checkpoint"):
        other.load_state(state)


def test_equal_ratios_are_the_same_data():
    order = TaskOrder(make_set([5, 3], [2, 1]), seed=0)
    order.load_state(TaskOrder(make_set([5, 3], [0.2, 0.1]), seed=0).state())


@pytest.mark.parametrize("damage", [{"credits": [1]}, {"credits": [1, 1]}, {"drawn": {}}, {"drawn": {"a": -1, "b": 0}}])
def test_a_damaged_state_is_refused(damage):
    order = TaskOrder(make_set([5, 3], [2, 1]), seed=0)
    with pytest.raises(CheckpointError, match="damaged"):
        order.load_state(order.state() | damage)


def test_an_infinite_weight_is_refused():
    with pytest.raises(ConfigError, match=r"data\.sources\.0\.weight is inf"):
        TaskOrder(make_set([5], [float("inf")]), seed=0)
