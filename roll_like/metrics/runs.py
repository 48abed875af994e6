"""A run's folder as others see it: found by its name, read whole, its configuration compared, still written or not."""

from __future__ import annotations

import difflib
import fcntl
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from roll_like.errors import ConfigError, DataError
from roll_like.metrics import files
from roll_like.metrics.trackers import flatten_params

#: A line of `metrics.jsonl` or `evaluations.jsonl`.
MetricRecord: TypeAlias = Mapping[str, Any]
#: The resolved configuration of a run.
CONFIG = "config.yaml"
#: What seeds of one experiment may differ in, and what says where a run lies and who is told.
NOT_COMPARED = ("name", "seed", "output_dir", "metrics", "checkpoint")
HIDDEN = "(hidden)"
_SECRET_KEY = re.compile(r"(?:password|secret|token|api_?key|credentials)$", re.IGNORECASE)
_USER_IN_URI = re.compile(r"(?<=://)[^/@\s]+(?=@)")

#: What stands for the value of a key that a configuration does not have.
ABSENT = "–"


@dataclass(frozen=True, slots=True)
class Run:
    """What the files of a run hold.

    Attributes:
        folder: Where they lie.
        info: `run.json`: name, pipeline, total steps, versions.
        steps: One line per training step, in order.
        evaluations: One line per evaluation, in order.
        events: Warnings, recoveries, how the run ended; in the order in which they happened.
    """

    folder: Path
    info: Mapping[str, Any]
    steps: tuple[MetricRecord, ...]
    evaluations: tuple[MetricRecord, ...]
    events: tuple[MetricRecord, ...]

    @property
    def name(self) -> str:
        """The run's name, for people."""
        return str(self.info["name"])

    @property
    def end(self) -> MetricRecord | None:
        """The event of the run's end; None of one that goes on, or died.

        A run that died after it was resumed has an end of its earlier life only.
        """
        last = self.events[-1] if self.events else None
        return last if last is not None and last["kind"] == "end" else None


def find_run(run: str, output_dir: Path, *, command: str) -> Path:
    """Return a run's folder.

    Args:
        run: Its folder, or its name under `output_dir`.

    Raises:
        ConfigError: There is none; names those that there are.
    """
    folder = Path(run) if Path(run).is_dir() else output_dir / run
    if folder.is_dir():
        return folder
    names = sorted(path.parent.name for path in output_dir.glob(f"*/{files.RUN}"))
    nearest = difflib.get_close_matches(run, names, 5, 0.4) or names[-5:]
    raise ConfigError(
        f"{command} {run}: there is no run in {folder}",
        fix=f"name a run's folder, or one of {output_dir}: {', '.join(nearest)}; "
        "--output-dir names another folder of runs"
        if nearest
        else f"{output_dir} holds no runs: start in the folder that has it, or name another one with --output-dir",
    )


def read_run(folder: Path) -> Run:
    """Read a run that goes on, ended, was resumed or died.

    Raises:
        DataError: The folder holds no run, or a file of it is damaged.
    """
    try:
        found = files.read_jsonl(folder / files.RUN)
        steps, evaluations, events = (
            files.read_jsonl(folder / name) for name in (files.METRICS, files.EVALUATIONS, files.EVENTS)
        )
    except ValueError as error:
        raise DataError(str(error), fix="restore the file, or remove the damaged line") from error
    if not found:
        raise DataError(
            f"{folder} holds no {files.RUN}; expected the folder of a run",
            fix="name the folder that holds run.json and metrics.jsonl; a run writes them when it starts",
        )
    return Run(folder, found[0], _by_step(steps), _by_step(evaluations), tuple(events))


def labels_of(folders: Sequence[Path]) -> list[str]:
    """Return the folders' names, with as many folders above them as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        labels = [str(Path(*one[-depth:])) for one in parts]
        if len(set(labels)) == len(labels):
            break
    return labels


def _by_step(records: Iterable[dict[str, Any]]) -> tuple[MetricRecord, ...]:
    """Return one record per step, in order; of two for the same step, the later one."""
    latest = {record["step"]: record for record in records}
    return tuple(latest[step] for step in sorted(latest))


def read_config(folder: Path) -> dict[str, Any]:
    """Return a run's resolved configuration as plain data, empty where it was not kept.

    Raises:
        DataError: The file is no YAML, or no mapping.
    """
    path = folder / CONFIG
    if not path.is_file():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", fix="restore the file") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise DataError(f"{path} holds {type(content).__name__}, expected keys and values", fix="restore the file")
    return content


def without_secrets(value: Any, key: str = "") -> Any:
    """Return a configuration whose passwords and keys are hidden: a page is passed on.

    >>> without_secrets({"uri": "http://me:pass@host", "api_key": "k", "max_tokens": 5})
    {'uri': 'http://(hidden)@host', 'api_key': '(hidden)', 'max_tokens': 5}
    """
    if isinstance(value, Mapping):
        return {name: without_secrets(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if _SECRET_KEY.search(key) else _USER_IN_URI.sub(HIDDEN, value)


def as_yaml(config: Mapping[str, Any]) -> str:
    """Return a configuration as it stands in its file, secrets hidden; "" for an empty one."""
    return yaml.safe_dump(without_secrets(config), sort_keys=False, allow_unicode=True, width=110) if config else ""


def differences(configs: Sequence[Mapping[str, Any]], *, leave_out: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the keys whose values are not the same in all configurations, each with its values, `–` for none.

    Secrets that differ are both `(hidden)`.

    Args:
        configs: At least one.
        leave_out: Keys, or sections, that do not count.
    """
    flat = [flatten_params(config) if config else {} for config in configs]
    shown = [flatten_params(without_secrets(config)) if config else {} for config in configs]
    keys = dict.fromkeys(key for one in flat for key in one)
    return {
        key: [one.get(key, ABSENT) for one in shown]
        for key in keys
        if key.partition(".")[0] not in leave_out and len({one.get(key) for one in flat}) > 1
    }


def is_running(folder: Path) -> bool:
    """Return whether a process runs in a folder: it holds the folder's lock, on this machine or another one.

    A folder without a lock, such as a copy, has none.
    """
    path = folder / files.LOCK
    try:
        if not path.read_text(encoding="utf-8").strip():
            return True  # opened by a process that is about to take it
        # held for an instant, if nobody else holds it: a run that starts then finds a dead holder, and tries again
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or it is not ours to read
        return False
    return False
