"""Scored groups on disk, exact to the last bit: a pair of files that is complete or absent.

    step_000001.npz     the arrays of all samples, one flat array for each dtype
    step_000001.json    everything else, and where in the arrays each sample's lie

JSON has no form for tuples, dates, NaN or keys that are not text. Each such value is an object with one key that begins
with `~` and names its type: `{"~tuple": [1, 2]}`. A task is written once; its samples refer to it. So is an
image.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from roll_like.content.unicode import is_whole
from roll_like.errors import CheckpointError, DataError
from roll_like.metrics.files import replacing
from roll_like.types import (
    Failure,
    Group,
    KeptTokens,
    Origin,
    Part,
    Picture,
    PlacedImage,
    ReasoningTags,
    Scored,
    Segment,
    StepScore,
    StopReason,
    Task,
    TrainingValues,
    Trajectory,
    TurnRecord,
)

FORMAT = 1

#: Types whose fields are written by name. `Task` is one too, once for all that refer to it.
_RECORDS = (
    *(Group, Scored, Trajectory, Segment, Part, TurnRecord, Failure, TrainingValues, PlacedImage),
    *(ReasoningTags, KeptTokens, StepScore),
)
_FIELDS = {record: tuple(field.name for field in fields(record)) for record in (*_RECORDS, Task, Picture)}
#: Kinds of dtype that a file without pickles can hold: bool, integers, floats.
_KINDS = "biuf"
_MARK = "~"

_Json: TypeAlias = Any
_Array: TypeAlias = npt.NDArray[Any]


def write_groups(stem: Path, groups: Sequence[Group[Scored]], values: TrainingValues | None = None) -> None:
    """Write groups to `STEM.npz` and `STEM.json`, in place of an earlier pair of that name.

    The JSON file is removed first and written last, so that a killed process leaves a whole pair or none.

    Args:
        stem: The path without an ending; its directory exists.
        values: What training made of their tokens, if that is to be written too.

    Raises:
        DataError: A field holds a value that would not come back equal; names task and field.
        OSError: The files cannot be written.
    """
    packer = _Packer()
    packed = [packer.group(group) for group in groups]
    content = {"format": FORMAT, "groups": packed, "values": packer.values(values)}
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    arrays, described = _paths(stem)
    described.unlink(missing_ok=True)
    with _synced(arrays) as file:
        np.savez(file, allow_pickle=False, **packer.flat_arrays())
    with _synced(described) as file:
        file.write(text.encode())


def read_groups(stem: Path) -> list[Group[Scored]]:
    """Return the groups that `write_groups` wrote to `stem`, equal in every value and type.

    Raises:
        CheckpointError: The files are missing, damaged, or of another version of this package.
    """
    return read_groups_and_values(stem)[0]


def read_groups_and_values(stem: Path) -> tuple[list[Group[Scored]], TrainingValues | None]:
    """Return the same, and what training made of their tokens, if that was written.

    Raises:
        CheckpointError: The files are missing, damaged, or of another version of this package.
    """
    arrays, described = _paths(stem)
    try:
        with arrays.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            unpacker = _Unpacker({name: file[name] for name in file.files})
        content = json.loads(described.read_bytes(), object_hook=unpacker.value)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}, and this version reads {FORMAT}")
        groups: list[Group[Scored]] = content["groups"]
        values: TrainingValues | None = content.get("values")
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{described} and {arrays.name} hold no rollouts that can be read: {error}",
            fix="both files must come from one run of this version of roll_like",
        ) from error
    return groups, values


def has_groups(stem: Path) -> bool:
    """Return whether `write_groups` finished a pair of that name."""
    return all(path.is_file() for path in _paths(stem))


def _paths(stem: Path) -> tuple[Path, Path]:
    return stem.with_name(f"{stem.name}.npz"), stem.with_name(f"{stem.name}.json")


@contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    """Write a file under a temporary name; at the end it is synced to disk and renamed."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class _Packer:
    """Turns values into what JSON can hold, and collects their arrays."""

    def __init__(self) -> None:
        self._tasks: dict[int, int] = {}  # by identity: equal tasks share their object within a group
        self._pictures: dict[tuple[bytes, str], int] = {}
        self._arrays: dict[str, list[_Array]] = {}
        self._lengths: dict[str, int] = {}
        self._path: list[str | int] = []  # fields and indices down to the value at hand, for messages
        self._task: Task | None = None
        self._by_type: dict[type, Callable[[Any], _Json]] = {
            type(None): _same,
            bool: _same,
            int: _same,
            float: _pack_float,
            str: _pack_text,
            list: self._list,
            tuple: lambda value: {"~tuple": self._list(value)},
            dict: self._mapping,
            np.ndarray: self._array,
            Task: self._task_reference,
            Picture: self._picture_reference,
            **dict.fromkeys(_RECORDS, self._record),
        }

    def group(self, group: Group[Scored]) -> _Json:
        """Return a group as JSON.

        Raises:
            DataError: A value would not come back equal.
        """
        self._task, self._path = group.task, []
        return self._pack(group)

    def values(self, values: TrainingValues | None) -> _Json:
        """Return what training made of the groups' tokens as JSON."""
        return self._pack(values)

    def flat_arrays(self) -> dict[str, _Array]:
        """Return all arrays, joined by dtype."""
        return {name: np.concatenate(parts) for name, parts in self._arrays.items()}

    def _pack(self, value: Any) -> _Json:
        pack = self._by_type.get(type(value))
        return self._other(value) if pack is None else pack(value)

    def _inside(self, place: str | int, value: Any) -> _Json:
        self._path.append(place)
        packed = self._pack(value)
        self._path.pop()
        return packed

    def _record(self, value: Any) -> _Json:
        packed = {name: self._inside(name, getattr(value, name)) for name in _FIELDS[type(value)]}
        return {_MARK + type(value).__name__: packed}

    def _task_reference(self, task: Task) -> _Json:
        if id(task) in self._tasks:
            return {"~task": self._tasks[id(task)]}
        packed = self._record(task)
        self._tasks[id(task)] = len(self._tasks)
        return packed

    def _picture_reference(self, picture: Picture) -> _Json:
        key = (picture.digest, picture.label)
        if key in self._pictures:
            return {"~picture": self._pictures[key]}
        self._pictures[key] = len(self._pictures)
        return self._record(picture)

    def _list(self, value: Sequence[Any]) -> _Json:
        return [self._inside(index, item) for index, item in enumerate(value)]

    def _mapping(self, value: Mapping[Any, Any]) -> _Json:
        if all(type(key) is str and not key.startswith(_MARK) and is_whole(key) for key in value):
            return {key: self._inside(key, item) for key, item in value.items()}
        return {"~dict": [[self._pack(key), self._inside(str(key), item)] for key, item in value.items()]}

    def _array(self, value: _Array) -> _Json:
        name = value.dtype.name
        if value.dtype.kind not in _KINDS or value.dtype != np.dtype(name):
            self._refuse(value, f"an array of {value.dtype}")
        start = self._lengths.get(name, 0)
        self._arrays.setdefault(name, []).append(value.ravel())
        self._lengths[name] = start + value.size
        return {"~array": [name, start, *value.shape]}

    def _other(self, value: Any) -> _Json:
        """Pack a type that is rare. A subclass comes back as the built-in value that it is equal to."""
        if isinstance(value, np.generic) and value.dtype.kind in _KINDS:
            return {"~scalar": self._array(np.asarray(value))["~array"]}
        if type(value) in _RARE:
            name, pack, unpack = _RARE[type(value)]
            if unpack(pack(value)) == value:
                return {_MARK + name: pack(value)}
        for kind, plain in _BASES.items():
            if isinstance(value, kind) and plain(value) == value:
                return self._pack(plain(value))
        self._refuse(value, repr(value))

    def _refuse(self, value: object, shown: str) -> NoReturn:
        assert self._task is not None
        first, *rest = self._path
        place = str(first) + "".join(f"[{part!r}]" if isinstance(part, int) else f".{part}" for part in rest)
        raise DataError(
            f"{self._task.origin}: task {self._task.task_id!r}: {place} is of the type {type(value).__name__}, which "
            f"cannot be written to a file and read back: {shown[:80]}",
            fix="leave that column out of the dataset, or make it text, numbers, lists and mappings",
        )


class _Unpacker:
    """Turns JSON objects with a mark back into values, innermost first."""

    def __init__(self, arrays: Mapping[str, _Array]) -> None:
        self._arrays = arrays
        self._tasks: list[Task] = []
        self._pictures: list[Picture] = []
        self._by_name: dict[str, Callable[[Any], Any]] = {
            "~tuple": tuple,
            "~dict": dict,
            "~float": float,
            "~text": _unpack_text,
            "~array": self._array,
            "~scalar": lambda place: self._array(place)[()],
            "~Task": self._task,
            "~task": lambda index: self._tasks[index],
            "~Picture": self._picture,
            "~picture": lambda index: self._pictures[index],
            **{_MARK + record.__name__: partial(_unpack_record, record) for record in _RECORDS},
            "~Trajectory": _unpack_trajectory,
            **{_MARK + name: unpack for name, _, unpack in _RARE.values()},
        }

    def value(self, found: dict[str, Any]) -> Any:
        """Return what a JSON object stands for."""
        name = next(iter(found), "")
        return self._by_name[name](found[name]) if name.startswith(_MARK) else found

    def _array(self, place: Sequence[Any]) -> _Array:
        name, start, *shape = place
        flat = self._arrays[name][start : start + math.prod(shape)]
        return flat.reshape(shape)

    def _task(self, values: Mapping[str, Any]) -> Task:
        self._tasks.append(Task(**values))
        return self._tasks[-1]

    def _picture(self, values: Mapping[str, Any]) -> Picture:
        self._pictures.append(Picture(**values))
        return self._pictures[-1]


def _unpack_trajectory(values: Mapping[str, Any]) -> Trajectory:
    return Trajectory(**{"images": values["task"].images, **values})  # older files have a prompt's alone


def _same(value: Any) -> _Json:
    return value


def _pack_float(value: float) -> _Json:
    return value if math.isfinite(value) else {"~float": repr(value)}


def _pack_text(value: str) -> _Json:
    return value if is_whole(value) else {"~text": value.encode("utf-8", "surrogatepass").hex()}


def _unpack_text(packed: str) -> str:
    return bytes.fromhex(packed).decode("utf-8", "surrogatepass")


def _unpack_record(record: type, values: Mapping[str, Any]) -> Any:
    return record(**values)


#: Types that only columns of a dataset have: name in the file, to JSON, and back.
_RARE: Mapping[type, tuple[str, Callable[[Any], _Json], Callable[[Any], Any]]] = {
    StopReason: ("StopReason", str, StopReason),
    Origin: ("Origin", str, Origin),
    bytes: ("bytes", lambda value: base64.b64encode(value).decode(), base64.b64decode),
    datetime.datetime: ("datetime", datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: ("date", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: ("time", datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.timedelta: (
        "timedelta",
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda packed: datetime.timedelta(*packed),
    ),
    Decimal: ("Decimal", str, Decimal),
}
_BASES: Mapping[type, Callable[[Any], Any]] = {
    Mapping: dict,
    str: str,
    int: int,
    float: float,
    tuple: tuple,
    list: list,
}
