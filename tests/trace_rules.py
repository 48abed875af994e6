"""The rules by which Perfetto and Chrome read a JSON trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file, after they were found to follow the rules."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    check_events(events)
    return events


def check_events(events: list[dict[str, Any]]) -> None:
    """Complete events have times and nest within their thread; flows have an end; every process has a name once."""
    threads: dict[tuple[Any, Any], list[tuple[float, float, str]]] = {}
    names: dict[int, set[str]] = {}
    flows: dict[str, list[str]] = {}
    for event in events:
        assert event["ph"] in "XMisfC", event
        assert isinstance(event["pid"], int), event
        if event["ph"] == "M":
            assert isinstance(event["args"], dict), event
            if event["name"] == "process_name":
                names.setdefault(event["pid"], set()).add(event["args"]["name"])
            continue
        assert isinstance(event["tid"], int | str), event
        assert isinstance(event["name"], str), event
        assert isinstance(event["ts"], int | float), event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"], event["name"]))
        if event["ph"] in "sf":
            flows.setdefault(f"{event['cat']} {event['id']}", []).append(event["ph"])
    assert all(sorted(phases) == ["f", "s"] for phases in flows.values()), flows
    assert all(len(found) == 1 for found in names.values()), names
    assert {pid for pid, _ in threads} <= names.keys()
    for thread, spans in threads.items():
        open_ends: list[float] = []
        for began, minus_duration, name in sorted(spans):
            while open_ends and open_ends[-1] <= began + 0.002:  # times are rounded to nanoseconds
                open_ends.pop()
            ended = began - minus_duration
            assert not open_ends or ended <= open_ends[-1] + 0.002, (thread, name)
            open_ends.append(ended)
