"""A run's figures as lines of text, and how long it will still take."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import repeat

from roll_like.metrics.names import STEP_PHASES, TIMERS, metric_info, without_smaller_passes

REWARD = "rollout/reward/mean"
#: What a run is about: shown as it began and as it is now.
HEADLINES = (REWARD, "train/perplexity", "preference/accuracy", "distill/top1_agreement", "distill/reverse_kl")
#: Steps whose mean stands for the beginning, and for now: one step says little.
WINDOW = 3
CURVES = (
    *HEADLINES,
    "eval/avg",
    "eval/perplexity",
    "distill/kl",
    "eval/top1_agreement",
    "eval/reverse_kl",
    "preference/reward_margin",
    "preference/margin",
    "eval/accuracy",
    "eval/pair_accuracy",
    "rollout/response_length/mean",
    "train/kl",
    "mismatch/kl",
    "train/grad_norm",
    "throughput/tokens_per_second",
    "util/trainer_mfu",
    "memory/trainer_gpu_gib",
)
#: Shown of runs that sample while they train: only those log `util/trainer_wait`.
ASYNCHRONOUS = ("staleness/mean", "schedule/ready", "util/engines", "util/trainer_wait", "time/blocked")
_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw the last `width` values; what is not finite is a blank.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▄█'
    """
    shown = list(values)[-width:]
    finite = [value for value in shown if abs(value) < float("inf")]
    if not finite:
        return " " * len(shown)
    low, high = min(finite), max(finite)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[int((value - low) * scale)] if abs(value) < float("inf") else " " for value in shown)


def duration(seconds: float) -> str:
    """Write seconds for people.

    >>> duration(190), duration(42.4), duration(7260)
    ('3m10s', '42s', '2h01m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def startup_line(phases: Mapping[str, float]) -> str:
    """Write how long a run took to start.

    >>> startup_line({"checking": 4.2, "starting workers": 61.0})
    'started in 1m05s: checking 4s, starting workers 1m01s'
    """
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in phases.items())
    return f"started in {duration(sum(phases.values()))}: {parts}"


def format_number(value: float) -> str:
    """Write a figure in at most seven characters.

    >>> [format_number(value) for value in (0.5123, 31.24, 1834.2, 0.00123, 0.0)]
    ['0.512', '31.2', '1834', '0.0012', '0']
    """
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e6 or size < 1e-4:
        return f"{value:.1e}"
    if size >= 1000:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.3f}" if size >= 0.1 else f"{value:.4f}"


class Progress:
    """The curves of a run so far, and how long it will still take.

    Args:
        total_steps: Steps of the whole run.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, total_steps: int, evaluations: Collection[int] = (), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total_steps = total_steps
        self.step = 0
        self.curves: dict[str, list[float]] = {}
        self._evaluations_left = set(evaluations)
        self._clock = clock
        self._last: float | None = None
        self._durations: deque[float] = deque(maxlen=10)
        self._evaluation_seconds: list[float] = []

    def add(self, step: int, values: Mapping[str, float], *, timed: bool = True) -> None:
        """Take one step's values; `timed=False` for those of an earlier process."""
        self._add_curves(values)
        self.step = step
        now = self._clock()
        since, self._last = self._last, now if timed else None
        if timed and since is not None:  # checkpoints between steps count
            self._durations.append(now - since)
        elif timed and "time/step" in values:  # the first step: what came before it was start-up
            self._durations.append(values["time/step"])

    def add_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of an evaluation after `step` steps."""
        self._add_curves(values)
        self._evaluations_left.discard(step)
        seconds = values.get("time/evaluate")
        if seconds is None:
            return
        self._evaluation_seconds.append(seconds)
        if self._last is not None:  # it is no part of the step that follows
            self._last += seconds

    def _add_curves(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.curves.setdefault(name, []).append(value)

    def seconds_left(self) -> float | None:
        """Medians of steps and evaluations, times what is left of each; None before the first step.

        Of steps the last ten count: lengths and loads change while a policy learns.
        """
        if not self._durations:
            return None
        left = statistics.median(self._durations) * max(0, self.total_steps - self.step)
        if self._evaluation_seconds:
            due = sum(step >= self.step for step in self._evaluations_left)
            left += statistics.median(self._evaluation_seconds) * due
        return left

    def learned(self, name: str) -> tuple[float, float] | None:
        """Return a curve's mean over its first values and over its last; None with fewer than two.

        Of a training figure `WINDOW` values each, of fewer than twice as many the halves; of an evaluation one each.
        """
        curve = self.curves.get(name, [])
        if len(curve) < 2:
            return None
        window = 1 if name.startswith("eval/") else min(WINDOW, len(curve) // 2)
        return statistics.fmean(curve[:window]), statistics.fmean(curve[-window:])


def curve_text(progress: Progress, name: str) -> str:
    """Write a curve's last value and what was learned so far: `0.512 (so far 0.402 → 0.507)`."""
    learned = progress.learned(name)
    last = progress.curves[name][-1]
    if learned is None or not (name in HEADLINES or name.startswith("eval/")):
        return format_number(last)
    so_far = " → ".join(map(format_number, learned))
    return so_far if learned[1] == last else f"{format_number(last)} (so far {so_far})"


def time_left(progress: Progress) -> str:
    """Write how long the run still takes, or nothing while that is unknown."""
    left = progress.seconds_left()
    return "" if left is None else f"about {duration(left)} left"


def shown_curves(curves: Collection[str]) -> list[str]:
    """Return which of these figures a console shows, in its order."""
    names = (*CURVES, *(ASYNCHRONOUS if "util/trainer_wait" in curves else ()))
    return [name for name in names if name in curves]


def step_line(progress: Progress, values: Mapping[str, float]) -> str:
    """Write a step on one line: what was learned, what it cost, how long is left."""
    width = len(str(progress.total_steps))
    parts = [f"step {progress.step:>{width}}/{progress.total_steps}"]
    parts += [f"{metric_info(name).label} {curve_text(progress, name)}" for name in shown_curves(values)]
    timers = {name: values[name] for name in TIMERS if values.get(name, 0) > 0}
    parts.append(" ".join(map(timed, timers, timers.values(), repeat(values.get("time/step", 0.0)))))
    parts.append(time_left(progress))
    return "  ".join(part for part in parts if part)


def timed(name: str, seconds: float, step: float) -> str:
    """Write a timer, and its share of the step where that is known.

    >>> timed("time/train", 3.5, 5.0)
    'train 3.5s (70%)'
    """
    share = f" ({seconds / step:.0%})" if step > 0 and name in STEP_PHASES else ""
    return f"{metric_info(name).label} {seconds:.1f}s{share}"


def evaluation_line(progress: Progress, step: int, values: Mapping[str, float]) -> str:
    """Write an evaluation on one line: its own figures, and how those of the run's first one have changed.

    What a reward reports beside its value has a path of its own (`eval/ifeval/…`) and is in `evaluations.jsonl`.
    """
    when = "before training" if step == 0 else f"after step {step}"
    names = without_smaller_passes(name for name in values if name.count("/") == 1 and name.startswith("eval/"))
    names += [name for name in values if name.count("/") > 1 and name.endswith("/avg")]
    return "  ".join(
        [f"evaluation {when}", *(f"{name.removeprefix('eval/')} {curve_text(progress, name)}" for name in names)]
    )
