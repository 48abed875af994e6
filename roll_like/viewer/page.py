"""Runs as one page for the browser: figures, curves, rollouts turn by turn and token by token, timeline, configuration.

The page stands alone: its data, its style and its script are in it, and it loads nothing. What a policy or an
environment wrote is data to the script, which puts it into the page as text only; a Content-Security-Policy lets no
other script run.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

from roll_like.errors import ConfigError, DataError
from roll_like.metrics import files
from roll_like.metrics.curves import Line, Points, averaged, choose_panels, lines_of, mean_line, thinned
from roll_like.metrics.names import STEP_PHASES, TIMERS, metric_info
from roll_like.metrics.profiles import read_profiles
from roll_like.metrics.progress import duration
from roll_like.metrics.rollout_text import printable
from roll_like.metrics.rollouts import KINDS, RolloutRow, group_of, rollout_steps, solved, subsample
from roll_like.metrics.runs import Run, as_yaml, read_config
from roll_like.metrics.summary import SamplePair, pick_pairs, status_of
from roll_like.rollout.replay import tokens_stem
from roll_like.rollout.storage import has_groups
from roll_like.rollout.thumbnails import thumbnails_folder
from roll_like.viewer.browse import Rollouts, Wanted, domain_of, with_place
from roll_like.viewer.comparison import RunComparison
from roll_like.viewer.events import failures_of, sentence
from roll_like.viewer.tokens import decoder, step_tokens

#: Rollouts on a page by default.
PAGE_LIMIT = 1000
#: Files of rollouts that a page is made of where no step is asked for: evenly over the run.
MOST_FILES = 100
#: Events of a run that a page shows at most: the last ones.
MOST_EVENTS = 200
#: Profiled steps of a run that a page shows at most: the last ones.
MOST_PROFILES = 4
#: Most bytes of pictures in a page.
PICTURE_BYTES = 32 * 2**20
_THUMBNAIL = re.compile(r"[0-9a-f]{32}\.webp")
_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRollouts:
    """Rollouts for a page.

    Attributes:
        records: As the script takes them: rows, and what filters and lists need of each.
        pictures: Small copies of their images as addresses of data, by their files.
        found: How many were wanted.
        notes: What is missing, and why.
    """

    records: list[dict[str, Any]]
    pictures: dict[str, str]
    found: int
    notes: tuple[str, ...]


def choose_rollouts(
    rollouts: Rollouts,
    rows: Iterable[RolloutRow],
    *,
    limit: int | None = None,
    always: Sequence[RolloutRow] = (),
    label: str = "",
) -> ChosenRollouts:
    """Return rollouts of a run as a page holds them.

    Args:
        rows: Rollouts that are wanted.
        limit: Most of them; 0 is endless, None is `PAGE_LIMIT`. Of more, as many of each group are chosen.
        always: Further ones, which are there in any case.
        label: The run's, where the page has several.

    Raises:
        DataError: A file cannot be read.
        CheckpointError: Saved tokens cannot be read.
    """
    wanted = list(rows)
    chosen = {row["id"]: row for row in subsample(wanted, (PAGE_LIMIT if limit is None else limit) or None)}
    found = len(wanted) + sum(row["id"] not in chosen for row in always)
    chosen |= {row["id"]: row for row in always}
    tokens, notes = _tokens_of(rollouts.run_dir, chosen.values())
    pictures, missing = _pictures(rollouts.run_dir, chosen.values())
    damaged = tuple(f"the last line of {path} is half written and was left out" for path in rollouts.damaged)
    in_order = sorted(chosen.values(), key=lambda row: (row["step"], row["kind"] != "train"))
    records = [_record(row, tokens.get(row["id"]), label) for row in in_order]
    return ChosenRollouts(records=records, pictures=pictures, found=found, notes=notes + missing + damaged)


def report_page(comparison: RunComparison, *, together: bool = True) -> tuple[str, list[str]]:
    """Return the page of one run or several (figures, curves, rollouts, timeline, configuration), and what it lacks.

    Args:
        together: Whether curves of several runs are shown as their mean and range first, or each by itself.

    Raises:
        DataError: A file of rollouts cannot be read.
        CheckpointError: Saved tokens cannot be read.
    """
    held, answers = [], []
    several = len(comparison.runs) > 1
    most_files = max(2, MOST_FILES // len(comparison.runs))
    for place, (name, run) in enumerate(comparison.runs.items()):
        label = name if several else ""
        pairs = _pairs(run) if place == 0 else []
        for pair in pairs:
            keys = [rollout_key(row["id"], label) for row in (pair.before, pair.after)]
            answers.append((*keys, pair.before_label, pair.after_label))
        rollouts = Rollouts(run.folder)
        rows = rollouts.select(Wanted(), most_files=most_files)
        always = [with_place(row) for pair in pairs for row in (pair.before, pair.after)]
        limit = max(1, PAGE_LIMIT // len(comparison.runs))
        held.append(choose_rollouts(rollouts, rows, limit=limit, always=always, label=label))
    overview = _overview(comparison, answers, together=together)
    title = _title([run.name for run in comparison.runs.values()])
    notes = [*comparison.notes, *(note for chosen in held for note in chosen.notes)]
    written = [sum(len(rollout_steps(run.folder, kind)) for kind in KINDS) for run in comparison.runs.values()]
    partly = max(written) > most_files or any(chosen.found > len(chosen.records) for chosen in held)
    return page(title, overview=overview, rollouts=held, notes=notes, partly=partly), notes


def page(
    title: str,
    *,
    overview: Mapping[str, Any] | None = None,
    rollouts: Sequence[ChosenRollouts] = (),
    beside: Sequence[str] = (),
    notes: Sequence[str] = (),
    partly: bool = False,
) -> str:
    """Return a page.

    Args:
        overview: What the page says of runs, if more than their rollouts.
        rollouts: Those of each run.
        beside: Keys of two rollouts that are shown beside each other first.
        notes: What is shown above everything.
        partly: Whether the rollouts are some of the whole run.
    """
    data = {
        "overview": overview,
        "rollouts": [record for chosen in rollouts for record in chosen.records],
        "pictures": {name: address for chosen in rollouts for name, address in chosen.pictures.items()},
        "beside": list(beside),
        "partly": partly,
    }
    return _render(title, _clean(files.plain(data)), notes)


def _render(title: str, data: Any, notes: Sequence[str]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from jinja2.utils import htmlsafe_json_dumps

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # control characters, and those that turn the direction of what follows, are no text
    environment.filters["printable"] = lambda text: printable(str(text))
    parts = [(_TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.js", "rollouts.js")]
    script = "\n".join(["(() => {", *parts, "})();"])
    return environment.get_template("page.html").render(
        version=version("roll-like"),
        title=title,
        data=htmlsafe_json_dumps(data, separators=(",", ":")),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        notes=notes,
    )


def write_page(path: Path, text: str) -> None:
    """Write a page, and the folder that it is to lie in.

    Raises:
        ConfigError: It cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace_text(path, text)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> ConfigError:
    """Return the error of a page or an image that cannot be written."""
    return ConfigError(
        f"-o {path} cannot be written: {error.strerror}", fix="name a file in a folder that you may write to"
    )


# ---- figures and curves ---------------------------------------------------------------------------


def _title(names: Sequence[str]) -> str:
    """Return what names of runs begin with, without a half-said seed: `demo` of `demo-seed-0` and `demo-seed-1`."""
    if len(names) == 1:
        return names[0]
    shared = "".join(letters[0] for letters in takewhile(lambda one: len(set(one)) == 1, zip(*names, strict=False)))
    return re.sub(r"[-_. ]+(?:seed|s)?[-_. ]*\d*$", "", shared) or names[0]


def _pairs(run: Run) -> list[SamplePair]:
    try:
        return pick_pairs(run.folder, int(run.info["sampled_rollouts"]))
    except (ValueError, KeyError) as error:
        raise DataError(
            f"the rollouts of {run.folder} cannot be read: {error}",
            fix="move the damaged file out of rollouts/; the page is made without it",
        ) from error


def _overview(comparison: RunComparison, answers: Sequence[Sequence[str]], *, together: bool) -> dict[str, Any]:
    runs = comparison.runs
    names = dict.fromkeys(name for key in ("before_after", "time") for one in comparison.figures for name in one[key])
    several = len(runs) > 1
    return {
        "runs": [
            _run(label, run, config, figures)
            for (label, run), config, figures in zip(runs.items(), comparison.configs, comparison.figures, strict=True)
        ],
        "together": together,
        "began": "" if several else _began(next(iter(runs.values()))),
        "headlines": comparison.headlines(),
        "metrics": {name: _metric(name) for name in names},
        "panels": [
            {
                "title": panel.title,
                "unit": metric_info(panel.names[0]).unit,
                "marked": panel.kind == "evaluations",
                "lines": [_line(line) for line in lines],
                "mean": _line(mean) if several and (mean := mean_line(lines)) is not None else None,
            }
            for panel, lines in comparison.curves()
        ],
        "answers": answers,
        "failures": failures_of(runs.values()),
        "differing": comparison.differing if several else {},
        "config": as_yaml(comparison.configs[0]),
        "versions": next(iter(runs.values())).info["versions"],
    }


def _run(label: str, run: Run, config: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    time = next((panel for panel in choose_panels(run.steps, []) if panel.kind == "time"), None)
    layers = [(line, averaged(line.points)) for line in lines_of(time, run)] if time is not None else []
    return {
        "label": label,
        "seed": str(config.get("seed", "–")),
        "status": status_of(run),
        "figures": figures,
        "timeline": [
            {"label": line.label, "colour": TIMERS[line.name][1], **_points(points)} for line, points in layers
        ],
        "profiles": read_profiles(run.folder)[-MOST_PROFILES:],
        "events": [
            {
                "kind": str(event["kind"]),
                "step": event.get("step", ""),
                "after": duration(float(event["elapsed"])) if "elapsed" in event else "",
                "text": sentence(event),
            }
            for event in run.events[-MOST_EVENTS:]
        ],
        "earlier": max(0, len(run.events) - MOST_EVENTS),
    }


def _metric(name: str) -> dict[str, Any]:
    info = metric_info(name)
    label = info.label if info.label != name else name.removeprefix("time/")
    colour = {"colour": TIMERS[name][1]} if name in TIMERS else {}
    return {
        "label": label,
        "unit": info.unit,
        "description": info.description,
        "phase": name in STEP_PHASES,
        **colour,
    }


def _line(line: Line) -> dict[str, Any]:
    thin = thinned(line)
    return {
        "name": line.name,
        "label": line.label,
        **_points(thin.points),
        **({"low": _numbers(thin.low), "high": _numbers(thin.high)} if thin.low else {}),
        "faint": None if thin.faint is None else list(_points(thin.faint).values()),
        "lost": _some(line.lost),
        "idle": _some(line.idle),
    }


def _some(steps: Sequence[int]) -> list[int]:
    return list(steps[:: 1 + len(steps) // MOST_EVENTS])


def _points(points: Points) -> dict[str, Any]:
    return {"x": list(points[0]), "y": _numbers(points[1])}


def _numbers(values: Sequence[float]) -> list[float | None]:
    """Return values with as many digits as a figure shows; None where there is no finite one."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _began(run: Run) -> str:
    first = min((*run.steps, *run.evaluations), key=lambda record: float(record["time"]), default=None)
    if first is None or not float(first["time"]):
        return ""
    began = datetime.fromtimestamp(float(first["time"]) - float(first["elapsed"]), tz=UTC)
    return f"began {began:%Y-%m-%d %H:%M} UTC · {run.folder.name}"


# ---- rollouts -------------------------------------------------------------------------------------


def _tokens_of(run_dir: Path, rows: Iterable[RolloutRow]) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Return the tokens of training rollouts by their ids, where they were saved, and why there are none."""
    steps = {row["step"] for row in rows if row["kind"] == "train" and has_groups(tokens_stem(run_dir, row["step"]))}
    if not steps:
        return {}, ()
    try:
        decode = decoder(read_config(run_dir))
    except ConfigError as error:
        return {}, (f"tokens were saved, and are not on the page, because they cannot be decoded: {error.message}",)
    return {one: found for step in sorted(steps) for one, found in step_tokens(run_dir, step, decode).items()}, ()


def _pictures(run_dir: Path, rows: Iterable[RolloutRow]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the small copies of the rows' images as addresses of data by their files, and why some are left out."""
    names = dict.fromkeys(str(image.get("file")) for row in rows for image in row.get("images") or ())
    found: dict[str, str] = {}
    left = PICTURE_BYTES
    for name in names:
        path = thumbnails_folder(run_dir) / name
        if not _THUMBNAIL.fullmatch(name) or not path.is_file():
            continue
        data = path.read_bytes()
        left -= len(data)
        if left < 0:
            break
        found[name] = f"data:image/webp;base64,{base64.b64encode(data).decode()}"
    lost = len(names) - len(found)
    if not lost:
        return found, ()
    return found, (
        f"{lost} of {len(names)} images are shown by their names: they are not there, or too many for a page",
    )


def rollout_key(rollout_id: str, label: str) -> str:
    """Return what names a rollout on a page: its id, with the run's label where there are several runs."""
    return f"{label}:{rollout_id}" if label else rollout_id


def _record(row: RolloutRow, tokens: Mapping[str, Any] | None, label: str) -> dict[str, Any]:
    """Return a rollout as the script takes it: the row, and what its filters and its list need."""
    turns: Sequence[Mapping[str, Any]] = row.get("turns") or ()
    return {
        **row,
        "key": rollout_key(row["id"], label),
        **({"run": label} if label else {}),
        "group": group_of(row["id"]),
        "domain": domain_of(row),
        "solved": solved(row),
        "invalid": sum(bool(turn.get("invalid")) for turn in turns),
        "failed_calls": sum(bool(call.get("error")) for turn in turns for call in turn.get("tool_calls", ())),
        **({} if tokens is None else {"saved": tokens}),
    }


def _clean(value: Any) -> Any:
    """Return JSON without control characters and without those that turn the direction of what follows."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(key): _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list) else value
