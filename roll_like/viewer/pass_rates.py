"""How often a run solved each task, written beside the rows of its data, for `where` and `rate_field` of later runs."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from roll_like.config.data import DataSource
from roll_like.config.load import load_config
from roll_like.config.sampling import PromptRunConfig
from roll_like.data.rows import as_read, written_rows
from roll_like.errors import ConfigError, DataError
from roll_like.metrics.files import replacing
from roll_like.metrics.rollouts import RolloutKind, read_rollouts, rollout_steps
from roll_like.values import at_least

#: What each row gets beside its own fields.
PASS_RATE, ATTEMPTS = "pass_rate", "attempts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file of rows with pass rates.

    Attributes:
        rows: Rows of the source.
        measured: Those among them that were sampled.
        never: Those that no answer solved.
        always: Those that every answer solved.
    """

    path: Path
    rows: int
    measured: int
    never: int
    always: int

    def __str__(self) -> str:
        between = self.measured - self.never - self.always
        return (
            f"written: {self.path}: {self.measured} of {self.rows} rows were sampled; solved never {self.never}, "
            f"sometimes {between}, always {self.always}"
        )


def write_pass_rates(folder: Path, output: Path, kind: RolloutKind, solved_at: float) -> list[Written]:
    """Write the rows of each source that a run sampled, with `pass_rate` and `attempts`.

    Rows that were not sampled keep what they have of both: if nothing, null and 0.

    Args:
        folder: The run's.
        output: Directory for the files, one a source, named after it.
        kind: Whether answers of training or of evaluations count, those of all steps.
        solved_at: An answer is right if its reward is at least this.

    Raises:
        ConfigError: The run has no prompts, none of this kind were sampled, only some of the groups were recorded, or a
            file would be written where a source is read.
        DataError: Rollouts or rows cannot be read, or a row cannot be written as JSON.
    """
    config = load_config(folder / "config.yaml")
    if not isinstance(config, PromptRunConfig):
        raise ConfigError(
            f"{folder}: pipeline {config.pipeline!r} samples no prompts of rows, so there are no rows to write",
            fix="name a run of rlvr, online_dpo or on_policy_distill",
        )
    if kind == "step" and (config.rollout.drop_zero_variance_groups or any(config.domain_filters.values())):
        raise ConfigError(
            f"{folder} replaced groups that were solved always or never (drop_zero_variance_groups) and did not record "
            "them, so the rates of training would be wrong",
            fix="evaluate on these rows (evaluation.sources), and use --kind evaluate",
        )
    right, attempts = _counts(folder, kind, solved_at)
    section = "data" if kind == "step" else "evaluation"
    sources = config.data.sources if kind == "step" else (config.evaluation.sources if config.evaluation else ())
    sampled = {task_id.rpartition(":")[0] for task_id in attempts}
    chosen = [(index, source) for index, source in enumerate(sources) if source.label in sampled]
    if not chosen:
        raise ConfigError(
            f"{folder} has no rollouts of {section}.sources",
            fix="let the run take a step, or an evaluation (`--kind evaluate`), first",
        )
    paths = [output / f"{source.label}.jsonl" for _, source in chosen]
    _refuse_sources(paths, config.sources)
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for path, (index, source) in zip(paths, chosen, strict=True):
        shares: list[float | None] = []
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            for number, (origin, fields) in enumerate(_rows(source, f"{section}.sources.{index}"), start=1):
                task_id = f"{source.label}:{number}"
                tried = attempts[task_id]
                shares.append(right[task_id] / tried if tried else None)
                measured = {PASS_RATE: shares[-1], ATTEMPTS: tried}
                file.write(_line({**fields, **measured} if tried else {**measured, **fields}, origin))
        written.append(
            Written(
                path=path,
                rows=len(shares),
                measured=sum(share is not None for share in shares),
                never=shares.count(0.0),
                always=shares.count(1.0),
            )
        )
    return written


def _refuse_sources(paths: Iterable[Path], sources: Iterable[DataSource]) -> None:
    """Check that no file is one that a source reads, or lies in a directory that it reads."""
    for path, source in product(paths, sources):
        place = Path(os.path.expanduser(source.path)).resolve()
        if source.path and place.exists() and (path.resolve() == place or place in path.resolve().parents):
            raise ConfigError(
                f"{path} would be written where the source {source.label!r} is read: {source.path}",
                fix="name another directory with -o",
            )


def _counts(folder: Path, kind: RolloutKind, solved_at: float) -> tuple[Counter[str], Counter[str]]:
    """Return how many answers to each task were right, and how many there were."""
    right: Counter[str] = Counter()
    attempts: Counter[str] = Counter()
    for step in rollout_steps(folder, kind):
        try:
            rows = read_rollouts(folder, step, kind)
        except ValueError as error:
            raise DataError(str(error), fix="restore the file, or move it away") from error
        for row in rows:
            attempts[row["task_id"]] += 1
            right[row["task_id"]] += at_least(float(row["reward"]), solved_at)
    return right, attempts


def _rows(source: DataSource, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield rows as they stand in the file, with their origins."""
    for row in written_rows(source, key):
        if as_read(row, source).images:
            raise DataError(
                f"{row.origin}: a row with images cannot be written as JSON beside other files",
                fix="add the column with a program of your own: `roll-like rollouts RUN --json` has task_id and reward",
            )
        yield row.origin, row.fields


def _line(fields: Mapping[str, Any], origin: str) -> str:
    try:
        return json.dumps(fields, ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        raise DataError(f"{origin}: the row cannot be written as JSON: {error}", fix="leave that column out") from error
