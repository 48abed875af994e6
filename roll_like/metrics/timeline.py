"""One step on one time axis: a trace for Perfetto and Chrome, lanes for the report, and the largest waits in words.

The format of a trace is Chrome's (JSON, gzip): complete events (`ph: X`) with begin and duration in microseconds.
Spans of one track that overlap go to lanes (threads) of their own, because events of a thread have to nest.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_like.cluster.spans import Span
from roll_like.metrics.files import replacing
from roll_like.metrics.timing import Interval, length, union

#: Spans of one lane that the report draws at most: the longest.
MOST_DRAWN = 400
#: Waits that are said.
MOST_WAITS = 3
#: A wait below this share of the step is not worth a sentence.
_LEAST_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Wait:
    """Time in which something did nothing.

    Attributes:
        who: What waited, in words.
        reason: What it waited for, in words.
        seconds: How long, all together; of several that wait independently the mean.
    """

    who: str
    reason: str
    seconds: float

    def sentence(self, step_seconds: float) -> str:
        """Return it in words.

        >>> Wait("the trainer", "samples", 2.5).sentence(10.0)
        'the trainer waited 2.5 s (25 % of the step) for samples'
        """
        share = 100 * self.seconds / step_seconds
        return f"{self.who} waited {self.seconds:.3g} s ({share:.0f} % of the step) for {self.reason}"


# ---- traces ------------------------------------------------------------------------------------------


def lanes_of(spans: Iterable[Span]) -> list[list[Span]]:
    """Return spans in as few lanes as there are at a time; those of a lane do not overlap.

    >>> [len(lane) for lane in lanes_of([Span("", "a", 0, 2), Span("", "b", 1, 3), Span("", "c", 2, 4)])]
    [2, 1]
    """
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda each: (each.began, each.ended)):
        free = next((lane for lane in lanes if lane[-1].ended <= span.began), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def trace_events(spans: Sequence[Span], ranks: Mapping[str, Path], began: float) -> Iterator[dict[str, Any]]:
    """Yield the events of a step's trace.

    Args:
        spans: Of all processes; the first word of a track is its process (`engine 0` → `engine`), except for ranks,
            whose whole track is the name of one.
        ranks: Traces of `torch.profiler`, by the names of the ranks.
        began: Where the time axis begins. Unix seconds.
    """
    names = dict.fromkeys([*(_process(span.track, ranks) for span in spans), *ranks])
    order = sorted(names, key=lambda name: (name != "driver", name in ranks, name))
    pids = itertools.count(1)
    for place, name in enumerate(order):
        pid = next(pids)
        yield from _named(pid, name, place)
        tids = itertools.count(1)
        tracks: dict[str, list[Span]] = {}
        for span in spans:
            if _process(span.track, ranks) == name:
                tracks.setdefault(span.track, []).append(span)
        for track, of_track in sorted(tracks.items()):
            for number, lane in enumerate(lanes_of(of_track)):
                tid = next(tids)
                label = "phases" if track in ranks else f"{track} ({number + 1})" if number else track
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": label}}
                for span in lane:
                    times = {"ts": _micros(span.began - began), "dur": _micros(span.ended - span.began)}
                    yield {"ph": "X", "cat": "roll_like", "name": span.name, "pid": pid, "tid": tid, **times}
        if name in ranks:
            yield from _of_torch(ranks[name], name, pids, began)


def _of_torch(path: Path, rank: str, pids: Iterator[int], began: float) -> Iterator[dict[str, Any]]:
    """Yield a rank's own events on the common axis, with processes and flows that no other rank has."""
    found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    shift = found.get("baseTimeNanoseconds", 0) / 1e3 - began * 1e6
    own: dict[Any, int] = {}
    for recorded in found["traceEvents"]:
        pid = recorded.get("pid")
        if not isinstance(pid, int):  # of no process: how long the profiler recorded
            continue
        if pid not in own:
            own[pid] = next(pids)
        event = {**recorded, "pid": own[pid]}
        if event["ph"] == "M":
            event.pop("ts", None)
            if event["name"] == "process_name":
                event["args"] = {"name": f"{rank}: {event['args']['name']}"}
            elif event["name"] == "process_sort_index":
                event["args"] = {"sort_index": 1000 + own[pid]}
        else:
            event["ts"] = round(event["ts"] + shift, 3)
        if "id" in event:
            event["id"] = f"{rank} {event['id']}"
        yield event


def _named(pid: int, name: str, place: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": place}}


def _process(track: str, ranks: Mapping[str, Path]) -> str:
    return track if track in ranks else track.partition(" ")[0]


def _micros(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e6, 3)


def write_trace(path: Path, events: Iterable[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Write a trace as gzipped JSON, one event a line, as ui.perfetto.dev and chrome://tracing open it."""
    with replacing(path) as temporary, gzip.open(temporary, "wt", encoding="utf-8", compresslevel=3) as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(dict(about)) + ', "traceEvents": [\n')
        for number, event in enumerate(events):
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("\n]}\n")


# ---- waits -------------------------------------------------------------------------------------------


def largest_waits(spans: Sequence[Span], ranks: Sequence[str], window: Interval) -> list[Wait]:
    """Return what waited longest in a step, the longest first.

    The trainer and the engines are looked at, because they have the devices: the time in which none of them worked, by
    what worked meanwhile, and the time in which some were done and waited for others of their role.

    Args:
        ranks: Tracks of the trained models' ranks.
        window: Begin and end of the step. Unix seconds.
    """
    busy = _busy(spans, window)
    trainer = [busy.get(rank, []) for rank in ranks]
    engines = [found for track, found in busy.items() if track.startswith("engine ")]
    rewards = [found for track, found in busy.items() if track.startswith("rewards ")]
    environments = [busy.get("environments", [])]
    timers = {
        name: union([_cut(span, window) for span in spans if (span.track, span.name) == ("driver", name)])
        for name in ("sync", "evaluate")
    }
    others = [("environments", environments), ("rewards", rewards), ("the weight update", [timers["sync"]])]
    found: dict[tuple[str, str], float] = {}
    for who, role, causes in (
        ("the trainer", trainer, [("samples", engines), *others]),
        ("the engines", engines, [("the trainer", trainer), *others]),
    ):
        idle = _gaps(union(itertools.chain.from_iterable(role)), window)
        for reason, workers in causes if role else ():
            active = union(itertools.chain.from_iterable(workers))
            found[who, reason] = length(_common(idle, active))
            idle = _common(idle, _gaps(active, window))
        if role:
            found[who, "the driver"] = length(idle)
        if len(role) > 1:
            together = length(union(itertools.chain.from_iterable(role)))
            mean = sum(together - length(each) for each in role) / len(role)
            singular = {"the trainer": "a rank of the trainer", "the engines": "an engine"}[who]
            found[f"on average {singular}", "others of its role"] = mean
    least = _LEAST_SHARE * (window[1] - window[0])
    waits = [Wait(who, reason, seconds) for (who, reason), seconds in found.items() if seconds > least]
    return sorted(waits, key=lambda each: -each.seconds)[:MOST_WAITS]


def _busy(spans: Sequence[Span], window: Interval) -> dict[str, list[Interval]]:
    """Return when each track was busy."""
    tracks: dict[str, list[Interval]] = {}
    for span in spans:
        tracks.setdefault(span.track, []).append(_cut(span, window))
    return {track: union(found) for track, found in tracks.items()}


def _cut(span: Span, window: Interval) -> Interval:
    return max(span.began, window[0]), min(span.ended, window[1])


def _gaps(covered: Sequence[Interval], window: Interval) -> list[Interval]:
    """Return the rest of the window.

    >>> _gaps([(1, 2)], (0, 3))
    [(0, 1), (2, 3)]
    """
    edges = [window[0], *itertools.chain.from_iterable(covered), window[1]]
    return [(began, ended) for began, ended in zip(edges[::2], edges[1::2], strict=True) if ended > began]


def _common(ones: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the time that both cover.

    >>> _common([(0, 2), (3, 5)], [(1, 4)])
    [(1, 2), (3, 4)]
    """
    found, first, second = [], 0, 0
    while first < len(ones) and second < len(others):
        began = max(ones[first][0], others[second][0])
        ended = min(ones[first][1], others[second][1])
        if began < ended:
            found.append((began, ended))
        if ones[first][1] < others[second][1]:
            first += 1
        else:
            second += 1
    return found


# ---- the report --------------------------------------------------------------------------------------


def drawn_lanes(spans: Sequence[Span], ranks: Sequence[str], window: Interval) -> list[dict[str, Any]]:
    """Return lanes for the report: timers of the driver by name, then when each track was busy; seconds of the step."""
    lanes: dict[str, list[tuple[float, float, str]]] = {}
    timers = dict.fromkeys(span.name for span in sorted(spans, key=lambda each: each.began) if span.track == "driver")
    for name in timers:
        timed = union([_cut(span, window) for span in spans if (span.track, span.name) == ("driver", name)])
        lanes[f"driver: {name}"] = [(began, ended, name) for began, ended in timed]
    busy = _busy([span for span in spans if span.track != "driver"], window)
    for track in sorted(busy, key=lambda each: (each in ranks, each)):
        if track in ranks:
            phases = [(*_cut(span, window), span.name) for span in spans if span.track == track]
            lanes[track] = [phase for phase in phases if phase[1] > phase[0]]
        else:
            lanes[track] = [(began, ended, "busy") for began, ended in busy[track]]
    return [
        {
            "label": label,
            "spans": [
                [round(began - window[0], 4), round(ended - window[0], 4), name]
                for began, ended, name in sorted(sorted(found, key=lambda each: each[0] - each[1])[:MOST_DRAWN])
            ],
        }
        for label, found in lanes.items()
        if found
    ]
