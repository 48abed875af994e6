"""A run's figures on disk, which everything else is derived from.

    RUN/metrics.jsonl           one line per training step
    RUN/evaluations.jsonl       one line per evaluation
    RUN/events.jsonl            warnings, workers that hung, tracker failures, how the run ended
    RUN/run.json                what the run is
    RUN/rollouts/step_000001.jsonl, eval_000000.jsonl
    RUN/profile/                profiles of single steps
    RUN/.lock                   held by the process that runs, with its number

Every line is one JSON object, written with one call. A line that a killed process left half
written is ignored when read and cut off when the file is continued.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
EVENTS = "events.jsonl"
RUN = "run.json"
ROLLOUTS = "rollouts"
PROFILE = "profile"
PROFILE_REQUEST = "request"
LOCK = ".lock"
RESERVED = frozenset({"step", "time", "elapsed"})


def rollouts_path(run_dir: Path, step: int, *, kind: str = "step") -> Path:
    """Return where the rollouts of a training step (`step`) or an evaluation (`eval`) lie."""
    return run_dir / ROLLOUTS / f"{kind}_{step:06d}.jsonl"


def json_line(record: Mapping[str, Any]) -> str:
    r"""Return one line of JSON. Numbers that JSON has no form for become the strings `NaN`, `Infinity`, `-Infinity`.

    Half a surrogate pair, which a policy can write as `"\ud83d"` in a call's arguments, stays such an escape: UTF-8
    has no form for it.
    """
    text = json.dumps(plain(record), ensure_ascii=False, allow_nan=False, default=str) + "\n"
    return text.encode("utf-8", "backslashreplace").decode()


def encode_pretty(record: Mapping[str, Any]) -> str:
    """Return the same as a file for people."""
    return json.dumps(plain(record), ensure_ascii=False, allow_nan=False, default=str, indent=2) + "\n"


def plain(value: Any) -> Any:
    """Return a value with nothing in it that JSON has no form for, except what `str` has to write."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def append(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Add lines to a file, all or none.

    Raises:
        OSError: They cannot be written (disk full, say); the file is as it was before.
    """
    data = "".join(json_line(record) for record in records).encode()
    with path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(size)
            raise


def replace(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a whole file of lines under a temporary name and rename it.

    Raises:
        OSError: It cannot be written; the old file stays.
    """
    replace_text(path, "".join(json_line(record) for record in records))


def replace_text(path: Path, text: str) -> None:
    """Write a whole file under a temporary name and rename it; half a surrogate pair becomes an escape."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name to write under; at the end the file takes the place of `path`, which an error leaves as it was."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, an empty list when there is none; a half-written last line is left out.

    Raises:
        ValueError: A line before the last is not a JSON object; names file and line.
    """
    return read_whole_lines(path)[0]


def read_whole_lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the same, and whether there was a half-written last line."""
    if not path.exists():
        return [], False
    lines = path.read_bytes().split(b"\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise TypeError
        except (ValueError, TypeError) as error:
            if number == len(lines):  # no newline after it: the writer was killed in the middle
                return records, True
            raise ValueError(f"{path}:{number}: expected one JSON object per line, found {line[:60]!r}") from error
        records.append(record)
    return records, False


def cut_after(path: Path, last_step: int) -> int:
    """Remove the lines of steps after `last_step`, and a half-written last line.

    Returns:
        How many whole lines were removed.
    """
    if not path.exists():
        return 0
    records = read_jsonl(path)
    kept = [record for record in records if record["step"] <= last_step]
    replace(path, kept)
    return len(records) - len(kept)


def values_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a line's metrics as numbers: every key but `step`, `time` (of day) and `elapsed`, in seconds."""
    return {name: float(value) for name, value in record.items() if name not in RESERVED}
