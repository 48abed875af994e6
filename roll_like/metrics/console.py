"""What a person sees while a run works: a live view on a terminal, one line a step elsewhere.

    console = make_console("auto", title="quickstart", progress=Progress(40, evaluations=(0, 40)))
    console.phase("generating", 96, 128)
    console.step(7, values)

Both say what was learned so far (the first steps beside the last ones, and evaluations) and how long the run still
takes. A console never fails a run: it draws from numbers it is given and restores the terminal when
the run ends, is interrupted or dies of an exception.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from roll_like.metrics.names import TIMERS, metric_info
from roll_like.metrics.progress import (
    Progress,
    curve_text,
    duration,
    evaluation_line,
    shown_curves,
    sparkline,
    startup_line,
    step_line,
    time_left,
    timed,
)

Mode = Literal["auto", "live", "plain", "quiet"]


class Console:
    """How a run is shown. This one shows nothing but warnings, on standard error; others show more."""

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Say what the run is doing now, and how much of it is done."""

    def started(self, phases: Mapping[str, float]) -> None:
        """Show how many seconds each phase before the first step took."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Show the figures of a finished step."""

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Show the figures of an evaluation."""

    def warn(self, text: str) -> None:
        """Show a warning."""
        print(f"warning: {text}\n", end="", file=sys.stderr, flush=True)

    def sample(self, text: str) -> None:
        """Show one of the step's answers, as a line."""

    def print(self, *content: RenderableType) -> None:
        """Show something after the run, such as its summary."""

    def close(self) -> None:
        """Give the terminal back; may be called again."""


class PlainConsole(Console):
    """One line for each step, evaluation and warning; before the first step and after the last, one for each phase."""

    def __init__(self, progress: Progress, stream: TextIO | None = None) -> None:
        self._progress = progress
        self._stream = stream
        self._phase = ""

    def _line(self, text: str) -> None:
        # looked up at each call: notebooks and tests exchange sys.stdout
        # in one piece: warnings come from other threads too
        print(f"{text}\n", end="", file=self._stream or sys.stdout, flush=True)

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:  # noqa: ARG002
        """Say what starts; while steps go by, their lines say enough."""
        if done is not None:
            return  # how much of what has started is done
        if name != self._phase and self._progress.step in (0, self._progress.total_steps):
            self._line(f"{name} …")
        self._phase = name

    def started(self, phases: Mapping[str, float]) -> None:
        """Write them as a line."""
        self._line(startup_line(phases))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Write the step's line."""
        self._progress.add(step, values)
        self._line(step_line(self._progress, values))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write the evaluation's line."""
        self._progress.add_evaluation(step, values)
        self._line(evaluation_line(self._progress, step, values))

    def warn(self, text: str) -> None:
        """Write the warning where it happens."""
        self._line(f"warning: {text}")

    def sample(self, text: str) -> None:
        """Write the answer below its step."""
        self._line(f"  sample {text}")

    def print(self, *content: RenderableType) -> None:
        """Write tables as text."""
        stream = self._stream or sys.stdout
        RichConsole(file=stream, width=None if stream.isatty() else 110, highlight=False).print(*content)


class LiveConsole(Console):
    """A view that is redrawn in place: progress, curves, the step's time split, warnings.

    What others print meanwhile appears above it.

    Args:
        rich: Where the view is drawn; default: standard output.
        elapsed: Seconds of the run; default: since now.
    """

    def __init__(
        self,
        title: str,
        progress: Progress,
        rich: RichConsole | None = None,
        *,
        elapsed: Callable[[], float] | None = None,
    ) -> None:
        self._title = title
        self._progress = progress
        self._rich = rich or RichConsole(highlight=False)
        self._phase = "starting"
        self._done: tuple[int, int] | None = None
        self._timers: dict[str, float] = {}
        self._warnings: deque[str] = deque(maxlen=3)
        self._warned = 0
        self._sample = ""
        started = time.monotonic()
        self._elapsed = elapsed or (lambda: time.monotonic() - started)
        self._live = Live(get_renderable=self.render, console=self._rich, refresh_per_second=4, transient=False)
        self._live.start()
        # the cursor comes back even when `close` is not called
        atexit.register(self.close)

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Show the phase on the progress line."""
        self._phase = name
        self._done = (done, total) if done is not None and total else None

    def started(self, phases: Mapping[str, float]) -> None:
        """Write them above the view."""
        self._rich.print(Text(startup_line(phases), style="bright_black"))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Extend the curves."""
        self._progress.add(step, values)
        self._timers = {name: values[name] for name in TIMERS if values.get(name, 0) > 0}

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Extend the evaluation's curve."""
        self._progress.add_evaluation(step, values)

    def warn(self, text: str) -> None:
        """Show the last three warnings."""
        if not self._live.is_started:
            self._rich.print(Text(f"warning: {text}", style="yellow"))
        self._warned += 1
        self._warnings.append(text)

    def sample(self, text: str) -> None:
        """Show the answer at the bottom, in place of the last one."""
        self._sample = text

    def print(self, *content: RenderableType) -> None:
        """Print below the view, which stops moving."""
        self.close()
        self._rich.print(*content)

    def close(self) -> None:
        """Draw the view a last time and give the terminal back."""
        atexit.unregister(self.close)
        if self._live.is_started:
            self._live.stop()

    def render(self) -> RenderableType:
        """Draw the view; called by the refreshing thread."""
        rows: list[RenderableType] = [self._head(), self._curves()]
        if self._timers:
            rows.append(time_bar(self._timers, self._progress.curves.get("time/step", [0.0])[-1], self._rich.width - 6))
        earlier = self._warned - len(self._warnings)
        if earlier:
            rows.append(Text(f"! {earlier} earlier warnings in events.jsonl", style="yellow"))
        rows += [Text(f"! {text}", style="yellow", overflow="ellipsis", no_wrap=True) for text in list(self._warnings)]
        if self._sample:
            rows.append(Text(f"sample {self._sample}", style="bright_black"))
        return Panel(
            Group(*rows), title=Text(self._title, style="bold"), title_align="left", border_style="bright_black"
        )

    def _head(self) -> RenderableType:
        progress = self._progress
        grid = Table.grid(expand=True, padding=(0, 1))
        for ratio in (None, 1, None):
            grid.add_column(ratio=ratio, no_wrap=True)
        phase = self._phase if self._done is None else f"{self._phase} {self._done[0]}/{self._done[1]}"
        times = ", ".join(text for text in (duration(self._elapsed()), time_left(progress)) if text)
        step = Text(f"step {progress.step}/{progress.total_steps}", style="bold")
        grid.add_row(step, ProgressBar(total=progress.total_steps, completed=progress.step), Text(times))
        return Group(grid, Text(phase, style="cyan"))

    def _curves(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        for name in shown_curves(tuple(self._progress.curves)):
            info = metric_info(name)
            text = f"{curve_text(self._progress, name)} {info.unit if info.unit != info.label else ''}"
            grid.add_row(info.label, Text(sparkline(self._progress.curves[name]), style="green"), text)
        return grid


def time_bar(timers: Mapping[str, float], step: float, width: int) -> RenderableType:
    """Draw a step's timers as one bar, with their seconds below. Overlapping timers shrink to fit."""
    total = max(step, sum(timers.values()))
    bar, legend = Text(no_wrap=True), Text()
    for name, seconds in timers.items():
        bar.append("█" * round(seconds / total * max(10, width)), style=TIMERS[name][0])
        legend.append("■ ", style=TIMERS[name][0])
        legend.append(f"{timed(name, seconds, step)}  ")
    return Group(bar, legend)


def make_console(mode: Mode, *, title: str, progress: Progress, elapsed: Callable[[], float] | None = None) -> Console:
    """Return the console of a mode; `auto` is live when standard output is a terminal that can redraw.

    Args:
        mode: Of the console.
        title: The run's, for people.
        progress: Of the run.
        elapsed: Seconds of a run that another process does; default: since now.
    """
    if mode == "quiet":
        return Console()
    if mode == "plain":
        return PlainConsole(progress)
    rich = RichConsole(highlight=False)
    if mode == "live" or (rich.is_terminal and not rich.is_dumb_terminal):
        return LiveConsole(title, progress, rich, elapsed=elapsed)
    return PlainConsole(progress)
