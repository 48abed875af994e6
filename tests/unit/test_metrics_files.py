"""Lines on disk survive a killed writer, a full disk and numbers that JSON lacks."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path

import pytest

from roll_like.metrics import files


def test_lines_come_back_as_they_went(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    files.append(path, [{"step": 1, "time": 5.0, "elapsed": 1.0, "train/loss": 0.25, "plain": 2}])
    files.append(path, [{"step": 2, "train/loss": math.nan, "a/b": math.inf, "c/d": -math.inf}])
    first, second = files.read_jsonl(path)
    assert files.values_of(first) == {"train/loss": 0.25, "plain": 2.0}
    values = files.values_of(second)
    assert math.isnan(values["train/loss"])
    assert (values["a/b"], values["c/d"]) == (math.inf, -math.inf)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_half_written_last_line_is_ignored_and_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    files.append(path, [{"step": 1}, {"step": 2}])
    with path.open("a") as file:
        file.write('{"step": 3, "train/lo')
    assert [record["step"] for record in files.read_jsonl(path)] == [1, 2]
    assert files.cut_after(path, 2) == 0
    files.append(path, [{"step": 3}])
    assert [record["step"] for record in files.read_jsonl(path)] == [1, 2, 3]


def test_a_damaged_line_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nrubbish\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: expected one JSON object.*rubbish"):
        files.read_jsonl(path)


def test_steps_after_the_last_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    files.append(path, [{"step": step} for step in range(1, 6)])
    assert files.cut_after(path, 3) == 2
    assert [record["step"] for record in files.read_jsonl(path)] == [1, 2, 3]
    assert files.cut_after(tmp_path / "none.jsonl", 3) == 0


def test_an_append_that_does_not_fit_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    files.append(path, [{"step": 1}])
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="large"):
            files.append(path, [{"step": 2, "text": "x" * 100}])
        with pytest.raises(OSError, match="large"):
            files.replace(path, [{"step": 2, "text": "x" * 100}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "values.bin"
    path.write_bytes(b"old")

    def write() -> None:
        with files.replacing(path) as temporary:
            temporary.write_bytes(b"ne")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk"):
        write()
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])
    with files.replacing(path) as temporary:
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"new", [path])
