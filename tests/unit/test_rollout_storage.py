"""Groups come back from disk as they were, or are refused."""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from decimal import Decimal
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests_support import group, scored, task

from roll_like.errors import CheckpointError, DataError
from roll_like.rollout.storage import has_groups, read_groups, write_groups
from roll_like.types import (
    Failure,
    Group,
    KeptTokens,
    Part,
    Scored,
    Segment,
    StepScore,
    StopReason,
    Task,
    Trajectory,
    TurnRecord,
)


def assert_same(left: Any, right: Any) -> None:
    """Fail unless both are of one type and equal in every part, NaN being equal to NaN."""
    assert type(left) is type(right)
    if is_dataclass(left):
        for field in fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    elif isinstance(left, np.ndarray | np.generic):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    elif isinstance(left, Mapping):
        assert list(left) == list(right)
        for one, other in zip(left.values(), right.values(), strict=True):
            assert_same(one, other)
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right or (left != left and right != right)


def round_trip(groups: list[Group[Scored]]) -> list[Group[Scored]]:
    with tempfile.TemporaryDirectory() as directory:
        write_groups(Path(directory) / "rollouts", groups)
        return read_groups(Path(directory) / "rollouts")


def holding(value: Any) -> Group[Scored]:
    return group(replace(task(7), metadata={"column": value}), [1.0])


texts = st.text(st.characters(codec=None), max_size=5) | st.sampled_from(["\ud83d\ude00", "~tuple", "~"])
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | texts
    | st.binary(max_size=4)
    | st.dates()
    | st.datetimes(timezones=st.none() | st.just(datetime.UTC))
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | arrays.from_dtype(np.dtype(np.float32))
    | arrays.from_dtype(np.dtype(np.int64))
    | arrays.from_dtype(np.dtype(np.bool_))
    | arrays.arrays(arrays.boolean_dtypes() | arrays.integer_dtypes(endianness="="), arrays.array_shapes(min_dims=0))
)
keys = texts | st.integers() | st.none() | st.tuples(st.integers(), texts)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)
columns = st.dictionaries(texts, values, max_size=3)
figures = st.dictionaries(texts, st.floats(), max_size=3)
many = lambda of: st.lists(of, max_size=2).map(tuple)  # noqa: E731 - a strategy, not a function of the test
messages = many(st.fixed_dictionaries({"role": texts, "content": texts}))

turns = st.builds(TurnRecord, shown=many(columns), text=texts, tool_calls=many(columns), after=many(columns))


turns = st.builds(TurnRecord, shown=many(columns), text=texts, tool_calls=many(columns), after=many(columns))


@st.composite
def trajectories(draw: st.DrawFn, owner: Task) -> Trajectory:
    length = draw(st.integers(0, 4))
    of = lambda dtype: draw(arrays.arrays(dtype, length))  # noqa: E731
    counts = np.array([2, 1], np.int32)
    return Trajectory(
        task=owner,
        sample_index=draw(st.integers(0, 9)),
        token_ids=of(np.int32),
        sampled=of(np.bool_),
        logprobs=of(np.float32),
        turns=of(np.int32),
        parts=draw(many(st.builds(Part))),
        segments=draw(many(st.builds(Segment))),
        text=draw(texts),
        stop_reason=draw(st.sampled_from(StopReason)),
        record=draw(many(turns)),
        kept=draw(st.none() | st.builds(KeptTokens, ids=st.just(np.arange(3, dtype=np.int32)), counts=st.just(counts))),
        routes=draw(st.none() | arrays.arrays(np.uint8, (length, 2, 3)) | arrays.arrays(np.uint16, (length, 1, 2))),
    )


@st.composite
def groups_of(draw: st.DrawFn) -> Group[Scored]:
    owner = draw(
        st.builds(
            Task,
            task_id=texts,
            messages=messages,
            prompt_ids=arrays.arrays(np.int32, st.integers(0, 4)),
            metadata=columns,
        )
    )
    sample = st.builds(
        Scored,
        trajectory=trajectories(owner),
        reward=st.floats(),
        rewards=figures,
        details=figures,
        weights=figures,
        turn_rewards=many(st.floats()),
        turn_states=many(texts),
        answer=st.none() | texts,
        step_scores=st.dictionaries(texts, many(st.builds(StepScore, st.floats(), st.integers()))),
    )
    return Group(
        task=owner, samples=draw(many(sample)), failures=draw(many(st.builds(Failure))), baselines=draw(many(sample))
    )


@given(st.lists(groups_of(), max_size=3))
@settings(max_examples=settings().max_examples)
def test_groups_come_back_as_they_were(groups):
    assert_same(round_trip(groups), groups)


@given(values)
@settings(max_examples=2 * settings().max_examples)
def test_any_column_of_a_dataset_comes_back_as_it_was(value):
    assert_same(round_trip([holding(value)]), [holding(value)])


def test_the_samples_of_a_group_share_their_task_again():
    owner, episode = task(0), task(0, prompt=5)
    one = group(owner, [1.0, 0.0])
    one = replace(one, samples=(one.samples[0], scored(episode, 0.5), scored(episode, 1.5)))
    (read,) = round_trip([one])
    assert read.samples[0].trajectory.task is read.task
    assert read.samples[1].trajectory.task is read.samples[2].trajectory.task
    assert_same(read, one)


class Point(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    ("value", "comes_back"),
    [
        (OrderedDict(a=1), {"a": 1}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (Point(1, 2), (1, 2)),
        (np.str_("text"), "text"),
        (StopReason.LENGTH, StopReason.LENGTH),
    ],
)
def test_subclasses_come_back_as_what_they_are_equal_to(value, comes_back):
    (read,) = round_trip([holding(value)])
    assert_same(read.task.metadata["column"], comes_back)


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        1j,
        Colour.RED,
        Decimal("nan"),
        np.datetime64("2026-01-01"),
        np.array(["text"]),
        np.array([None]),
        np.array([1], np.dtype(np.int32).newbyteorder()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_equal_is_refused(tmp_path, value):
    with pytest.raises(DataError, match=r"fake\.jsonl:8: task 'fake/7': task\.metadata\.column\[1\]\.inner is of the"):
        write_groups(tmp_path / "rollouts", [holding([0, {"inner": value}])])
    assert not list(tmp_path.iterdir())


def test_the_json_of_plain_values_is_standard_json(tmp_path):
    write_groups(tmp_path / "step.000001", [group(task(1), [float("nan"), float("inf")])])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.000001.json", "step.000001.npz"]

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    content = json.loads((tmp_path / "step.000001.json").read_text(), parse_constant=refuse)
    assert content["groups"][0]["~Group"]["task"]["~Task"]["task_id"] == "fake/1"


def test_a_failed_write_leaves_no_pair_of_two_kinds(tmp_path, monkeypatch):
    write_groups(tmp_path / "rollouts", [group(task(1), [1.0])])
    real = os.replace

    def fails(source: Path, target: Path) -> None:
        if target.suffix == ".json":
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="No space left"):
        write_groups(tmp_path / "rollouts", [group(task(2), [1.0])])
    assert not has_groups(tmp_path / "rollouts")
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts.npz"]
    monkeypatch.undo()
    write_groups(tmp_path / "rollouts", [group(task(3), [1.0])])
    assert has_groups(tmp_path / "rollouts")
    assert read_groups(tmp_path / "rollouts")[0].task.task_id == "fake/3"


@pytest.mark.parametrize("ending", ["npz", "json"])
def test_damaged_files_are_named(tmp_path, ending):
    write_groups(tmp_path / "rollouts", [group(task(1), [1.0])])
    path = tmp_path / f"rollouts.{ending}"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(CheckpointError, match=r"rollouts\.json and rollouts\.npz hold no rollouts"):
        read_groups(tmp_path / "rollouts")
    path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        read_groups(tmp_path / "rollouts")


def test_files_of_another_version_are_refused(tmp_path):
    write_groups(tmp_path / "rollouts", [])
    assert read_groups(tmp_path / "rollouts") == []
    (tmp_path / "rollouts.json").write_text('{"format": 99, "groups": []}')
    with pytest.raises(CheckpointError, match="its format is 99, and this version reads 1"):
        read_groups(tmp_path / "rollouts")
