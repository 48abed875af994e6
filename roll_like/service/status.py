"""What a service is doing: for people who watch it, for `metrics.jsonl`, and for trackers."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from roll_like.config.base import PluginConfig
from roll_like.errors import OK
from roll_like.metrics import files
from roll_like.metrics.runs import is_running
from roll_like.metrics.sinks import Payload, Sink
from roll_like.metrics.trackers import Status, SystemTracker, Tracker, start_tracker

_log = logging.getLogger(__name__)

#: File that says what a service is doing now.
STATUS = "status.json"
#: How often metrics are logged. Seconds.
METRICS_SECONDS = 10.0
#: Figures that wait for a tracker that is away; a day of them.
KEPT_FIGURES = 8640
#: How often a watcher looks. Seconds.
WATCH_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLine:
    """A model, for people.

    Attributes:
        model: Its name.
        rank: Of its adapters; None for a whole model.
        updates: How often its weights have changed.
        queued: Requests that are not done.
        loaded: Whether it is in the trainer's memory; else on disk.
    """

    model: str
    rank: int | None
    updates: int
    queued: int
    loaded: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """What a service is doing.

    Attributes:
        name: Of the service.
        base_model: What clients call the model.
        sessions: Clients that are there.
        models: Their models.
        unfinished: Requests that are not done, samples included.
        train_tokens_per_second: Lately.
        sampled_tokens_per_second: Lately.
        requests: Done since the start.
        failed: Of them.
    """

    name: str
    base_model: str
    sessions: int
    models: Sequence[ModelLine]
    unfinished: int
    train_tokens_per_second: float
    sampled_tokens_per_second: float
    requests: int
    failed: int

    @property
    def metrics(self) -> Mapping[str, float]:
        """The figures, by the names of metrics."""
        return {
            "service/sessions": float(self.sessions),
            "service/models": float(len(self.models)),
            "service/queue": float(self.unfinished),
            "service/train_tokens_per_second": self.train_tokens_per_second,
            "service/sampled_tokens_per_second": self.sampled_tokens_per_second,
            "service/requests": float(self.requests),
            "service/failed_requests": float(self.failed),
        }


@dataclass(slots=True)
class Rates:
    """Tokens a second between two logs of metrics, so that each token is in one of these."""

    _last: tuple[float, int, int] = field(default_factory=lambda: (time.monotonic(), 0, 0))
    _rates: tuple[float, float] = (0.0, 0.0)

    def of(self, trained: int, sampled: int) -> tuple[float, float]:
        """Return tokens a second that were trained on, and sampled, of totals."""
        now, (then, trained_then, sampled_then) = time.monotonic(), self._last
        seconds = now - then
        if seconds >= METRICS_SECONDS:
            self._last = (now, trained, sampled)
            self._rates = ((trained - trained_then) / seconds, (sampled - sampled_then) / seconds)
        return self._rates


class StatusWriter:
    """Writes what a service is doing.

    Args:
        trackers: Where figures go beside `metrics.jsonl`.
    """

    def __init__(self, directory: Path, name: str, trackers: Sequence[PluginConfig], params: Mapping[str, Any]) -> None:
        self._directory = directory
        self._began = time.monotonic()
        self._logged = -METRICS_SECONDS
        self._number = 0
        self._trackers: list[Tracker] = []
        self._sinks = [self._sink(files.METRICS, self._write_line)]

        def start(tracker: Tracker) -> str:
            return tracker.start(run_dir=directory, run_name=name, params=params, resume_id=None, resume_step=None)

        for index, config in enumerate(trackers):
            try:
                tracker, _ = start_tracker(config, f"trackers.{index}", start)
            except BaseException:
                self.close("failed")
                raise
            self._trackers.append(tracker)
            self._sinks.append(self._sink(f"trackers.{index} ({config.type})", tracker.log))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close as finished, because a signal ends a service; or as failed."""
        self.close("failed" if isinstance(error, Exception) else "finished")

    def watch(
        self,
        *,
        engines: Callable[[], Mapping[int, str]] | None = None,
        cluster: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """Tell the trackers that show it whom to ask about engines and Ray. See `SystemTracker.watch`."""
        for sink, tracker in zip(self._sinks[1:], self._trackers, strict=True):
            if isinstance(tracker, SystemTracker):
                sink.attempt(partial(tracker.watch, engines=engines, cluster=cluster), "told of engines")

    @staticmethod
    def _sink(name: str, deliver: Callable[[int, Payload], None]) -> Sink:
        return Sink(name, deliver, _log.warning, keep=KEPT_FIGURES, whose="the service")

    def _write_line(self, step: int, figures: Payload) -> None:
        with (self._directory / files.METRICS).open("a") as file:
            file.write(f"{json.dumps({'step': step, **figures})}\n")

    def write(self, status: ServiceStatus) -> None:
        """Write what a service is doing, and now and then its figures."""
        elapsed = time.monotonic() - self._began
        partial = self._directory / f".{STATUS}"
        partial.write_text(json.dumps({**asdict(status), "elapsed": elapsed}))
        partial.replace(self._directory / STATUS)
        if elapsed - self._logged < METRICS_SECONDS:
            return
        self._logged = elapsed
        self._number += 1
        lines, *trackers = self._sinks
        lines.send(self._number, {"elapsed": elapsed, **status.metrics})
        for sink in trackers:
            sink.send(self._number, dict(status.metrics))

    def close(self, status: Status = "finished") -> None:
        """Deliver what is pending, say what could not be, and end the trackers' runs."""
        for sink in self._sinks:
            sink.flush()
            missing = sink.report()
            if missing["undelivered"]:
                _log.warning("%s lacks %d figures (%s)", sink.name, missing["undelivered"], missing["last_error"])
        for sink, tracker in zip(self._sinks[1:], self._trackers, strict=True):
            sink.attempt(partial(tracker.close, status), "closed")


def watch_status(folder: Path, *, wait: Callable[[float], None] = time.sleep) -> int:
    """Show what a service is doing until it ends; Ctrl-C leaves it running.

    Args:
        wait: Waits between looks, in seconds.
    """
    from rich.console import Console
    from rich.live import Live

    try:
        with Live(console=Console(), auto_refresh=False) as live:
            while is_running(folder):
                live.update(table_of(json.loads((folder / STATUS).read_text())), refresh=True)
                wait(WATCH_SECONDS)
    except KeyboardInterrupt:
        print(f"left {folder}; the service goes on")
        return OK
    print(f"{folder}: the service has ended")
    return OK


def _place(model: Mapping[str, Any]) -> str:
    return "memory" if model["loaded"] else "disk"


def table_of(status: Mapping[str, Any]) -> RenderableType:
    """Return what a service is doing as tables."""
    table = Table("model", "rank", "updates", "queued", "in", title=Text(f"{status['name']}: {status['base_model']}"))
    for model in status["models"]:
        rank = "whole" if model["rank"] is None else str(model["rank"])
        table.add_row(Text(model["model"]), rank, f"{model['updates']:,}", f"{model['queued']:,}", _place(model))
    line = (
        f"{status['sessions']} sessions, {status['unfinished']} requests waiting or under way, "
        f"{status['requests']:,} done ({status['failed']:,} failed)\n"
        f"{status['train_tokens_per_second']:,.0f} tokens/s trained, "
        f"{status['sampled_tokens_per_second']:,.0f} tokens/s sampled"
    )
    return Group(table, Text(line))
