"""Profiles of steps: traces that Perfetto reads, waits computed by hand, and what is said of steps that never come."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from run_folders import data_of, make_run
from trace_rules import check_events, read_trace

from roll_like import cli
from roll_like.cluster import WorkerDied
from roll_like.cluster.progress import PROGRESS
from roll_like.cluster.spans import SPANS, Span
from roll_like.config.run import MetricsConfig, ProfileConfig
from roll_like.errors import ConfigError, WorkerError
from roll_like.metrics import files
from roll_like.metrics.manager import MetricsManager
from roll_like.metrics.profiles import profile_stem, read_profiles, request_profile
from roll_like.metrics.timeline import Wait, drawn_lanes, lanes_of, largest_waits, trace_events, write_trace
from roll_like.metrics.timing import StepTimer
from roll_like.run.profile import StepProfiler
from roll_like.training.profiled import RANK_TRACE, RankProfiler
from roll_like.viewer.comparison import read_runs
from roll_like.viewer.page import report_page


@pytest.fixture(autouse=True)
def nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other tests' routers and pools."""
    monkeypatch.setattr(SPANS, "_watched", WeakSet())


RANKS = ["training rank 0", "training rank 1"]
#: A step of ten seconds: engine 0 samples for 4 s, engine 1 for 3 s; rewards until 5; ranks train from 6 to 8 and 9.
STEP = [
    Span("driver", "generate", 0, 5),
    Span("driver", "train", 5.5, 9),
    Span("driver", "sync", 9, 9.5),
    Span("engine 0", "request", 0, 3),
    Span("engine 0", "request", 1, 4),
    Span("engine 1", "request", 0, 3),
    Span("rewards 0", "score", 3.5, 5),
    Span(RANKS[0], "forward_backward", 6, 8),
    Span(RANKS[1], "forward_backward", 6, 9),
]


def test_what_waits_longest_and_for_what() -> None:
    assert largest_waits(STEP, RANKS, (0, 10)) == [
        Wait("the trainer", "samples", 4),  # from 0 to 4; the rewards' second from 4 to 5 is another wait
        Wait("the engines", "the trainer", 3),  # from 6 to 9
        Wait("the trainer", "the driver", 1.5),  # from 5 to 6 and from 9.5 to 10
    ]


def test_one_of_a_role_that_waits_for_the_others() -> None:
    spans = [Span("engine 0", "request", 0, 8), Span("engine 1", "request", 0, 2), Span(RANKS[0], "step", 8, 10)]
    assert largest_waits(spans, RANKS[:1], (0, 10)) == [
        Wait("the trainer", "samples", 8),
        Wait("on average an engine", "others of its role", 3),  # 0 s and 6 s
        Wait("the engines", "the trainer", 2),
    ]


def test_pools_of_rewards_count_as_rewards_whatever_their_name() -> None:
    spans = [Span(RANKS[0], "step", 0, 4), Span("rewards engine 0", "score", 4, 10)]
    assert largest_waits(spans, RANKS[:1], (0, 10)) == [Wait("the trainer", "rewards", 6)]


def test_a_step_without_engines_waits_for_the_driver_alone() -> None:
    assert largest_waits([Span(RANKS[0], "step", 0, 9.99)], RANKS[:1], (0, 10)) == []  # less than a hundredth
    assert largest_waits([Span(RANKS[0], "step", 2, 10)], RANKS[:1], (0, 10)) == [Wait("the trainer", "the driver", 2)]


def test_lanes_hold_what_does_not_overlap() -> None:
    lanes = lanes_of(Span("", str(number), number, number + 2.5) for number in range(6))
    assert [[span.name for span in lane] for lane in lanes] == [["0", "3"], ["1", "4"], ["2", "5"]]


def test_what_the_report_draws() -> None:
    lanes = {lane["label"]: lane["spans"] for lane in drawn_lanes(STEP, RANKS, (1, 10))}
    assert list(lanes) == [
        *("driver: generate", "driver: train", "driver: sync", "engine 0", "engine 1", "rewards 0"),
        *RANKS,
    ]
    assert lanes["engine 0"] == [[0, 3, "busy"]]  # cut at the begin of the step
    assert lanes[RANKS[1]] == [[5, 8, "forward_backward"]]


def trained(stem: Path) -> Any:
    """What a rank records of a forward and a backward pass."""
    profiler = RankProfiler("cpu", stacks=False, memory=True)
    with PROGRESS.phase("forward_backward"):
        x = torch.randn(8, 8, requires_grad=True)
        (x @ x).sum().backward()
    return profiler.finish(stem)


def test_a_trace_with_two_ranks_is_one_that_perfetto_reads(tmp_path: Path) -> None:
    began = time.time()
    found = {rank: trained(tmp_path / f"rank_{number}") for number, rank in enumerate(RANKS)}
    ended = time.time()
    half = (began + ended) / 2
    spans = [
        Span("driver", "train", began, ended),
        *(Span(rank, s.name, s.began, s.ended) for rank in RANKS for s in found[rank].spans),
    ]
    spans += [
        Span("engine 0", "request", began, ended),
        Span("engine 0", "request", half, ended),
    ]
    path = tmp_path / "step.json.gz"
    write_trace(path, trace_events(spans, {rank: found[rank].trace for rank in RANKS}, began), {"step": 5})
    events = read_trace(path)
    seconds = (time.time() - began) * 1e6
    timed = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["ts"] + event["dur"] <= seconds for event in timed), "one time axis"
    products = [event for event in timed if event["name"] == "aten::mm"]
    assert len({event["pid"] for event in products}) == 2
    phases = [(each["ts"], each["ts"] + each["dur"]) for each in timed if each["name"] == "forward_backward"]
    assert len(phases) == 2
    assert all(any(begin - 1e5 < event["ts"] < end + 1e5 for begin, end in phases) for event in products)
    assert any(event["ph"] == "i" and event["name"] == "[memory]" for event in events)
    assert len({event["tid"] for event in timed if event["name"] == "request"}) == 2  # they overlap
    assert all(profile.snapshot is None for profile in found.values()), "snapshots are of GPUs"


@pytest.mark.parametrize(
    "wrong",
    [
        [{"ph": "X", "pid": 1, "tid": 1, "name": "a", "ts": 0, "dur": 2}],  # a process without a name
        [
            {"ph": "X", "pid": 1, "tid": 1, "name": "a", "ts": 0, "dur": 2},
            {"ph": "X", "pid": 1, "tid": 1, "name": "b", "ts": 1, "dur": 2},
        ],
        [{"ph": "X", "pid": 1, "tid": 1, "name": "a", "ts": 0, "dur": -1}],
        [{"ph": "s", "pid": 1, "tid": 1, "name": "a", "ts": 0, "cat": "c", "id": 1}],
    ],
)
def test_the_rules_find_what_breaks_them(wrong: list[dict[str, Any]]) -> None:
    named = (
        []
        if len(wrong) == 1 and wrong[0].get("dur") == 2
        else [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "p"}}]
    )
    with pytest.raises(AssertionError):
        check_events([*named, *wrong])


def test_nothing_is_kept_while_nothing_is_profiled() -> None:
    timer = StepTimer()
    with timer("generate"), PROGRESS.phase("work"):
        pass
    assert SPANS.end() == []
    SPANS.begin()
    began = time.time()
    with timer("train"), PROGRESS.phase("work"):
        time.sleep(0.01)
    spans = SPANS.end()
    seconds = time.time() - began
    assert [(span.track, span.name) for span in spans] == [("", "work"), ("driver", "train")]
    assert all(0.009 < span.ended - span.began < seconds + 0.1 for span in spans)
    assert all(began - 0.1 < span.began < span.ended < began + seconds + 0.1 for span in spans)


def manager(folder: Path) -> MetricsManager:
    config = MetricsConfig.model_validate({"trackers": [], "console": "plain"})
    return MetricsManager(config, folder, folder.name, 20, {"pipeline": "sft"})


def test_steps_that_never_come_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with manager(tmp_path / "demo") as metrics:
        profiler = StepProfiler(ProfileConfig(steps=(3, 7, 50)), tmp_path / "demo", metrics)
        profiler.expect(5, 20)
        assert (
            "profile.steps: 3, 50 will not be profiled, because this run does steps 5 to 20" in capsys.readouterr().out
        )
        profiler.begin(7, [])
        assert SPANS.on
        profiler.expect(7, 20)  # the step failed; the run goes on
        assert not SPANS.on
        assert "step 7 was left while it was profiled" in capsys.readouterr().out
        profiler.begin(8, [])
        profiler.end()
        assert read_profiles(tmp_path / "demo") == []


def test_a_step_that_was_asked_for_is_profiled_and_the_next_is_not(tmp_path: Path) -> None:
    with manager(tmp_path / "demo") as metrics:
        profiler = StepProfiler(ProfileConfig(), tmp_path / "demo", metrics)
        (tmp_path / "demo" / files.PROFILE).mkdir()
        (tmp_path / "demo" / files.PROFILE / files.PROFILE_REQUEST).touch()
        for step in (4, 5):
            profiler.begin(step, [])
            timer = StepTimer()
            with timer("train"):
                time.sleep(0.01)
            profiler.end()
    (found,) = read_profiles(tmp_path / "demo")
    assert found["step"] == 4
    assert [lane["label"] for lane in found["lanes"]] == ["driver: train"]
    events = read_trace(profile_stem(tmp_path / "demo", 4).with_suffix(".json.gz"))
    assert [event["name"] for event in events if event["ph"] == "X"] == ["train"]


class Sampling:
    """Something that is in the middle of a request."""

    def __init__(self, began: float) -> None:
        self.began = began

    def under_way(self) -> list[Span]:
        return [Span("engine 0", "request", self.began, time.time())]


def test_what_is_under_way_at_the_end_of_a_step_is_part_of_it(tmp_path: Path) -> None:
    sampling = Sampling(time.time() - 100)
    SPANS.watch(sampling)
    with manager(tmp_path / "demo") as metrics:
        profiler = StepProfiler(ProfileConfig(steps=(4,)), tmp_path / "demo", metrics)
        profiler.begin(4, [])
        time.sleep(0.02)
        profiler.end()
    (found,) = read_profiles(tmp_path / "demo")
    ((_, ended, _),) = found["lanes"][0]["spans"]
    assert ended == round(found["seconds"], 4)
    assert found["waits"] == []
    events = read_trace(profile_stem(tmp_path / "demo", 4).with_suffix(".json.gz"))
    (event,) = [event for event in events if event["ph"] == "X"]
    assert event["ts"] == 0
    assert event["dur"] < 50e6, "not the 100 s since it began"
    SPANS.begin()
    del sampling
    assert SPANS.end() == []


def test_traces_of_ranks_are_no_profiles(tmp_path: Path) -> None:
    stem = profile_stem(tmp_path, 5)
    stem.parent.mkdir()
    assert trained(Path(f"{stem}_training_0")).trace.exists()
    assert read_profiles(tmp_path) == []


class FailingRanks:
    """Two ranks, of which the second fails in one method when the first has written its trace."""

    name = "training"

    def __init__(self, method: str, error: WorkerError) -> None:
        self.failing, self.error, self.called = method, error, list[str]()
        self.cluster = self

    def everywhere(self, method: Any, *arguments: str, **_: Any) -> list[Any]:
        self.called.append(method.__name__)
        for stem in arguments:
            Path(f"{stem}_0{RANK_TRACE}").write_text("{}")
        if method.__name__ == self.failing:
            raise self.error
        return []


@pytest.mark.parametrize("method", ["begin_profile", "end_profile"])
@pytest.mark.parametrize("kind", [WorkerError, WorkerDied])
def test_a_rank_that_cannot_write_its_profile_is_not_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, kind: type[WorkerError]
) -> None:
    message = f"training worker 1 in {method} raised OSError: No space left on device\nits traceback"
    ranks: Any = FailingRanks(method, kind(message))
    with manager(tmp_path / "demo") as metrics:
        profiler = StepProfiler(ProfileConfig(steps=(4,)), tmp_path / "demo", metrics)
        with contextlib.nullcontext() if kind is WorkerError else pytest.raises(WorkerDied):
            profiler.begin(4, [ranks])
            profiler.end()
    printed = " ".join(capsys.readouterr().out.split())
    assert "step 4 is not profiled" in printed or "profile of step 4 cannot be written" in printed
    assert "raised OSError: No space left on device" in printed
    assert "traceback" not in printed
    assert (ranks.called[-1] == "drop_profile") is (kind is WorkerError)
    assert list((tmp_path / "demo" / files.PROFILE).iterdir()) == []
    assert not SPANS.on


def test_a_rank_that_drops_its_profile_can_begin_another(tmp_path: Path) -> None:
    RankProfiler("cpu", stacks=False, memory=True).drop()
    assert not SPANS.on
    assert [span.name for span in trained(tmp_path / "rank").spans] == ["forward_backward"]


def test_a_run_that_does_not_go_on_has_no_next_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "demo")
    with pytest.raises(ConfigError, match="the run does not go on"):
        request_profile(folder)
    assert cli.main(["profile", str(folder)]) != 0
    assert "profile: {steps: [5]}" in capsys.readouterr().err


def test_a_run_that_ends_before_its_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, answers = make_run(tmp_path / "demo"), iter([True, True, False])
    monkeypatch.setattr("roll_like.metrics.profiles.is_running", lambda _: next(answers))
    with pytest.raises(ConfigError, match="ended before a step was profiled"):
        request_profile(folder, poll_seconds=0.001)
    assert not (folder / files.PROFILE / files.PROFILE_REQUEST).exists()


def test_the_report_shows_the_step_and_its_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll_like.metrics.summary.draw_curves", lambda path, *_: path.write_bytes(b""))
    folder = make_run(tmp_path / "demo")
    profile = {
        "step": 2,
        "seconds": 10.0,
        "trace": "step_000002.json.gz",
        "lanes": drawn_lanes(STEP, RANKS, (0, 10)),
        "waits": [wait.sentence(10) for wait in largest_waits(STEP, RANKS, (0, 10))],
    }
    path = profile_stem(folder, 2).with_suffix(".json")
    path.parent.mkdir()
    path.write_text(json.dumps(profile) + "\n")
    page = data_of(report_page(read_runs([folder], command="report", seeds=False))[0])
    (shown,) = page["overview"]["runs"][0]["profiles"]
    assert shown == profile
    assert shown["waits"][0] == "the trainer waited 4 s (40 % of the step) for samples"
