"""Sources that are read as steps need them: the order of their rows, where they go on, what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny_model import make_tiny_tokenizer

from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.config.data import ConversationData, DataSource
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.data.order import Order
from roll_like.data.tasks import TaskOrder, TaskSet, load_tasks
from roll_like.errors import CheckpointError, ConfigError, DataError

ROWS, BLOCK = 10, 4


@pytest.fixture(scope="module")
def render() -> Renderer:
    return Renderer(make_tiny_tokenizer())


def write(file: Path, count: int = ROWS, *, too_long: tuple[int, ...] = ()) -> Path:
    words = [f"{number}?" + " x" * 100 * (number in too_long) for number in range(1, count + 1)]
    file.write_text("".join(json.dumps({"prompt": word, "completion": "Yes."}) + "\n" for word in words))
    return file


def tasks(file: Path, render: Renderer, limit: int = 60, **further: Any) -> TaskSet:
    source = {"path": str(file), "streaming": True, "stream_block": BLOCK, **further}
    return load_tasks([DataSource(**source)], render, limit)


def numbers(order: Order[Any], count: int) -> list[int]:
    return [int(item.origin.rpartition(":")[2]) for item in order.take(count)]


def test_blocks_are_shuffled_and_every_row_comes_once_in_a_pass(tmp_path: Path, render: Renderer) -> None:
    file = write(tmp_path / "rows.jsonl")
    order = TaskOrder(tasks(file, render), seed=3)
    passes = [numbers(order, ROWS) for _ in range(3)]
    for drawn in passes:
        assert sorted(drawn[:4]) == [1, 2, 3, 4]
        assert sorted(drawn[4:8]) == [5, 6, 7, 8]
        assert sorted(drawn[8:]) == [9, 10]
    assert len({tuple(drawn) for drawn in passes}) == 3
    assert order.drawn == 3 * ROWS
    assert numbers(TaskOrder(tasks(file, render), seed=3), ROWS) == passes[0]
    assert numbers(TaskOrder(tasks(file, render), seed=4), ROWS) != passes[0]
    in_order = TaskOrder(tasks(file, render), seed=3, shuffle=False)
    assert numbers(in_order, 12) == [*range(1, 11), 1, 2]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drawn", [0, 1, 4, 5, 9, 10, 11, 23])
def test_a_resumed_stream_goes_on_with_the_next_item(
    drawn: int, shuffle: bool, tmp_path: Path, render: Renderer
) -> None:
    """At the beginning, within a block, between two, at the end of a pass; also beside a source that is in memory."""
    file, other = write(tmp_path / "rows.jsonl", too_long=(3,)), write(tmp_path / "other.jsonl", 3)
    sources = [
        DataSource(path=str(file), streaming=True, stream_block=BLOCK, weight=2),
        DataSource(path=str(other)),
    ]
    order = TaskOrder(load_tasks(sources, render, 60), seed=1, shuffle=shuffle)
    order.take(drawn)
    state = json.loads(json.dumps(order.state()))
    expected = [task.task_id for task in order.take(20)]
    resumed = TaskOrder(load_tasks(sources, render, 60), seed=1, shuffle=shuffle)
    resumed.load_state(state)
    assert resumed.drawn == drawn
    assert [task.task_id for task in resumed.take(20)] == expected
    assert Counter(name.split(":")[0] for name in expected)["other"] in (6, 7)


def test_rows_that_are_left_out_do_not_count(tmp_path: Path, render: Renderer) -> None:
    file = write(tmp_path / "rows.jsonl", too_long=(1, 2, 3, 4, 9, 10))
    order = TaskOrder(tasks(file, render), seed=0, shuffle=False)
    assert numbers(order, 9) == [5, 6, 7, 8, 5, 6, 7, 8, 5]
    assert [task.task_id for task in order.take(2)] == ["rows:6", "rows:7"]
    assert order.find("rows:8").origin == f"{file}:8"
    with pytest.raises(CheckpointError, match="the task 'rows:9'"):
        order.find("rows:9")


def test_rows_that_changed_are_noticed(tmp_path: Path, render: Renderer) -> None:
    file = write(tmp_path / "rows.jsonl", 3000)
    many = {"stream_block": 100}
    order = TaskOrder(tasks(file, render, **many), seed=0)
    order.take(1950)
    state = order.state()
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:1949], json.dumps({"prompt": "other"}), *lines[1950:]]))
    with pytest.raises(CheckpointError, match=r"rows of 'rows' changed since the checkpoint: those from row 1901 on"):
        TaskOrder(tasks(file, render, **many), seed=0).load_state(state)
    file.write_text("\n".join(lines[:1500]))
    with pytest.raises(CheckpointError, match="changed since the checkpoint"):
        TaskOrder(tasks(file, render, **many), seed=0).load_state(state)
    file.write_text("\n".join(lines))
    with pytest.raises(CheckpointError, match="the data changed"):
        TaskOrder(tasks(file, render, stream_block=99), seed=0).load_state(state)
    with pytest.raises(CheckpointError, match="is damaged"):
        TaskOrder(tasks(file, render, **many), seed=0).load_state({**state, "streams": {}})


def test_a_stream_without_a_row_that_is_trained_on_ends(tmp_path: Path, render: Renderer) -> None:
    file = write(tmp_path / "rows.jsonl")
    order = TaskOrder(tasks(file, render), seed=0)
    write(file, too_long=tuple(range(1, 11)))
    with pytest.raises(DataError, match="no row of rows can be trained on"):
        order.next()


def test_samples_are_streamed_too(tmp_path: Path, render: Renderer) -> None:
    """The same samples as without streaming, and the first rows for the check."""
    file = write(tmp_path / "rows.jsonl", 1500, too_long=(7,))
    source = {"path": str(file), "streaming": True, "stream_block": 1000}
    streamed = load_conversations(ConversationData(sources=[source], max_tokens=60, cache_dir=tmp_path), render)
    whole = load_conversations(
        ConversationData(sources=[{"path": str(file)}], max_tokens=60, cache_dir=tmp_path), render
    )
    assert streamed.report[0].rows == 1024
    assert len(whole) == 1499
    drawn = streamed.order(seed=0).take(1499)
    assert {sample.content() for sample in drawn} == {sample.content() for sample in whole}
    assert len({sample.origin for sample in drawn}) == 1499


CONFIG = {
    "model": {"path": "model"},
    "resources": {"devices_per_node": 1, "device": "cpu", "device_mapping": {"training": 0}},
}
STREAM = {"path": "a.jsonl", "streaming": True}


def test_what_needs_all_rows_is_refused() -> None:
    data = {"sources": [{"path": "b.jsonl"}, STREAM], "samples_per_step": 1}
    assert SFTConfig(steps=3, data=data, **CONFIG).steps == 3
    with pytest.raises(ConfigError, match=r"epochs: .*data.sources.1 is read as steps need it"):
        SFTConfig(epochs=1, data=data, **CONFIG)
    with pytest.raises(ConfigError, match=r"evaluation.sources.0.streaming: .*an evaluation measures all rows"):
        SFTConfig(steps=3, data=data, evaluation={"sources": [STREAM]}, **CONFIG)
    pairs = {"sources": [STREAM], "pairs_per_step": 1}
    with pytest.raises(ConfigError, match=r"reference.mode: .*set mode: copy or cluster"):
        DPOConfig(steps=3, data=pairs, reference={}, **CONFIG)
    assert DPOConfig(steps=3, data=pairs, reference={"mode": "cluster"}, **CONFIG).data.sources[0].streaming
