"""What happened in a run beside its steps: lines of `events.jsonl` as sentences, and counts of metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from roll_like.metrics import files
from roll_like.metrics.names import metric_info
from roll_like.metrics.progress import duration, format_number, startup_line
from roll_like.metrics.runs import Run

_COUNTED = ("rollout/failures", "eval/failures", "train/skipped_updates", "critic/skipped_updates", "health/rewinds")
_KNOWN = frozenset({"kind", "step", "time", "elapsed"})


def sentence(event: Mapping[str, Any]) -> str:
    """Return what an event says, for people."""
    try:
        return _SENTENCES[event["kind"]](event)
    except (KeyError, TypeError, ValueError, AttributeError):  # of a plugin, or another version: shown as it is
        return json.dumps(files.plain({key: event[key] for key in event if key not in _KNOWN}), ensure_ascii=False)


def _hang(event: Mapping[str, Any]) -> str:
    doing = f" in phase {event['phase']}" if event["phase"] else ""
    seconds = duration(float(event["seconds"]))
    return f"workers {event['ranks']} of {event['role']} stood still for {seconds}{doing} and were killed"


def _recovery(event: Mapping[str, Any]) -> str:
    if event["seconds"] is None:
        return f"workers of {event['role']} were lost and not replaced"
    return f"workers of {event['role']} were replaced in {duration(float(event['seconds']))}"


def _end(event: Mapping[str, Any]) -> str:
    missing = [
        f"{name}: {found['undelivered']} steps missing ({found['last_error']})"
        for name, found in event["failures"].items()
    ]
    why = [event["why"]] if "why" in event else []
    return "; ".join([f"the run ended: {event['status']}", *why, *missing])


def _profile(event: Mapping[str, Any]) -> str:
    return "; ".join([f"step {event['step']} was profiled: {files.PROFILE}/{event['trace']}", *event["waits"]])


_SENTENCES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "started": lambda event: startup_line(event["phases"]),
    "warning": lambda event: str(event["text"]),
    "hang": _hang,
    "recovery": _recovery,
    "profile": _profile,
    "rewind": lambda event: f"went back from step {event['step']} to the checkpoint of step {event['to']}",
    "early_end": lambda event: f"a callback ended the run after step {event['finished']}: {event['why']}",
    "end": _end,
}


def failures_of(runs: Iterable[Run]) -> dict[str, str]:
    """Return how often something failed or was replaced, summed over all steps and runs; only what is not 0."""
    totals: dict[str, float] = {}
    for run in runs:
        for record in (*run.steps, *run.evaluations):
            for name, value in record.items():
                if name in _COUNTED or name.startswith(("health/restarts/", "health/hangs/")):
                    totals[name] = totals.get(name, 0.0) + float(value)
    return {
        f"{metric_info(name).label} ({name})": format_number(total)
        for name, total in sorted(totals.items())
        if math.isfinite(total) and total
    }
