"""One run's figures: reduced exactly, in order, resumed without a gap, never lost to a tracker's failure."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from roll_like.cluster.node_watch import RoleMemory
from roll_like.config.base import PluginConfig
from roll_like.config.run import MetricsConfig
from roll_like.errors import ConfigError
from roll_like.metrics import files
from roll_like.metrics.console import LiveConsole
from roll_like.metrics.manager import MetricsManager
from roll_like.metrics.names import metric_info
from roll_like.metrics.sinks import Sink
from roll_like.registry import TRACKERS
from roll_like.run.launch import memory_metrics
from roll_like.values import Last, Max, Mean, Metrics, Min, Sum, merge, reduce

pytestmark = pytest.mark.usefixtures("plain_curves")

PARAMS = {"pipeline": "rlvr", "steps": 4}


class MemoryConfig(PluginConfig):
    type: Literal["memory"] = "memory"
    broken_start: bool = False


@TRACKERS.register("memory")
class MemoryTracker:
    """Keeps runs as a server would, across managers, and fails on demand."""

    Config = MemoryConfig
    runs: ClassVar[dict[str, list[tuple[int, dict[str, float]]]]] = {}
    statuses: ClassVar[dict[str, str]] = {}
    artifacts: ClassVar[list[str]] = []
    fail: ClassVar[Callable[[int], bool]] = staticmethod(lambda step: False)

    def __init__(self, config: MemoryConfig) -> None:
        self.config = config

    def start(self, *, run_dir: Path, run_name: str, params: Mapping[str, Any], resume_id: str | None,
              resume_step: int | None) -> str:  # fmt: skip
        if self.config.broken_start:
            raise TimeoutError("no answer from tracker.example")
        if resume_id in self.runs:
            assert resume_step is not None
            self.run_id = resume_id
            self.runs[resume_id] = [entry for entry in self.runs[resume_id] if entry[0] <= resume_step]
        else:
            self.run_id = f"run{len(self.runs)}"
            self.runs[self.run_id] = []
        return self.run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if type(self).fail(step):
            raise OSError(28, "No space left on device")
        self.runs[self.run_id].append((step, dict(values)))

    def artifact(self, path: Path) -> None:
        self.artifacts.append(path.name)

    def close(self, status: str) -> None:
        self.statuses[self.run_id] = status


@pytest.fixture(autouse=True)
def _fresh_server() -> Iterator[None]:
    MemoryTracker.runs, MemoryTracker.statuses, MemoryTracker.artifacts = {}, {}, []
    MemoryTracker.fail = staticmethod(lambda step: False)
    yield
    MemoryTracker.fail = staticmethod(lambda step: False)


def manager(run_dir: Path, **kwargs: Any) -> MetricsManager:
    config = MetricsConfig(trackers=({"type": "memory", **kwargs.pop("tracker", {})},), console="plain")
    return MetricsManager(config, run_dir, "demo", 4, PARAMS, **kwargs)


def reward(value: float, weight: float = 1.0) -> dict[str, Mean]:
    return {"rollout/reward/mean": Mean(value, weight)}


def logged_steps(run_dir: Path) -> list[int]:
    return [record["step"] for record in files.read_jsonl(run_dir / files.METRICS)]


def test_how_long_the_start_took_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic() - 7.2
    with manager(tmp_path / "demo", began=began) as metrics:
        metrics.phase("starting workers")
        time.sleep(0.05)
        metrics.phase("starting workers", 1, 2)
        metrics.started()
        metrics.phase("generating", 0, 8)
        metrics.started()
        values = metrics.log(1, reward(0.5))
    (event,) = [event for event in files.read_jsonl(tmp_path / "demo" / files.EVENTS) if event["kind"] == "started"]
    assert list(event["phases"]) == ["checking", "opening metrics trackers", "starting workers"]
    assert event["phases"]["checking"] >= 7.2
    assert event["phases"]["starting workers"] >= 0.05, "said twice, counted once"
    assert sum(event["phases"].values()) <= event["elapsed"]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("started in ")]
    assert re.fullmatch(r"started in \d+s: checking \d+s, opening metrics trackers \d+s, starting workers \d+s", line)
    assert values["rollout/reward/mean"] == 0.5


def test_the_rate_of_a_run_on_pairs_is_that_of_training_also_where_it_samples(tmp_path: Path) -> None:
    trained = {"train/samples": Sum(8), "train/tokens": Sum(60), "time/step": Sum(2)}
    with manager(tmp_path / "demo") as metrics:
        rates = [
            metrics.log(step, {**trained, **sampled})["throughput/tokens_per_second"]
            for step, sampled in enumerate(({}, {"rollout/tokens": Sum(900)}), 1)
        ]
    assert rates == [30, 30]


def test_rates_of_a_device_and_shares_of_a_step(tmp_path: Path) -> None:
    with manager(tmp_path / "demo", devices=4) as metrics:
        values = metrics.log(
            1, {"rollout/tokens": Sum(120), "time/step": Sum(10), "time/generate": Sum(6), "time/train_compute": Max(3)}
        )
    assert values["throughput/tokens_per_second_per_device"] == 3
    assert {name: value for name, value in values.items() if name.startswith("share/")} == {"share/generate": 0.6}


def test_figures_of_several_roles_reduce_each_by_its_own_rule(tmp_path: Path) -> None:
    with manager(tmp_path / "demo") as metrics:
        values = metrics.log(
            1,
            {**reward(1.0, 3), "rollout/tokens": Sum(100), "rollout/response_length/max": Max(4)},
            {**reward(0.0, 1), "rollout/tokens": Sum(50), "rollout/response_length/max": Max(9)},
            {"time/step": Sum(5.0), "train/learning_rate": Last(0.1)},
        )
    assert values["rollout/reward/mean"] == 0.75
    assert values["rollout/response_length/max"] == 9
    assert values["throughput/tokens_per_second"] == 30
    assert "throughput/samples_per_second" not in values
    assert values["memory/rss_gib"] > 0
    (line,) = files.read_jsonl(tmp_path / "demo" / files.METRICS)
    assert files.values_of(line) == values
    assert MemoryTracker.runs == {"run0": [(1, values)]}
    assert MemoryTracker.statuses == {"run0": "finished"}
    assert {"curves.png", "summary.json"} <= set(MemoryTracker.artifacts)


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_not_finite_on_one_rank_is_not_hidden_by_others(order: int) -> None:
    """Python's `max(3.0, nan)` is 3, and `max(nan, 3.0)` is NaN."""
    parts: list[Metrics] = [{"a": Max(3.0), "b": Min(3.0)}, {"a": Max(math.nan), "b": Min(math.nan)}]
    assert all(math.isnan(value) for value in reduce(merge(parts[::order])).values())
    assert reduce(merge([{"a": Max(3.0), "b": Min(math.inf)}, {"a": Max(4.0), "b": Min(2.0)}])) == {"a": 4.0, "b": 2.0}


def test_what_each_role_holds_is_asked_for_once_a_step(tmp_path: Path) -> None:
    held = {"training": RoleMemory(3 << 30, 7 << 30), "teacher math/1": RoleMemory(1 << 29, 0)}
    with manager(tmp_path / "demo") as metrics:
        metrics.usage = lambda: memory_metrics(held)
        values = metrics.log(1, {"time/step": Sum(5)})
    figures = {name: value for name, value in values.items() if name.startswith("memory/")}
    del figures["memory/rss_gib"]
    assert figures == {"memory/trainer_gib": 3, "memory/trainer_gpu_gib": 7, "memory/teacher_math_1_gib": 0.5}
    assert [metric_info(name).label for name in figures] == ["trainer", "trainer GPU", "teacher_math_1"]


def test_figures_that_were_measured_are_not_derived_again(tmp_path: Path) -> None:
    with manager(tmp_path / "demo") as metrics:
        values = metrics.log(
            1,
            {"rollout/tokens": Sum(10), "time/step": Sum(5), "throughput/tokens_per_second": Last(7)},
            {"time/engines": Sum(4)},
            {"memory/rss_gib": Max(1.5)},
        )
    assert (values["throughput/tokens_per_second"], values["memory/rss_gib"]) == (7, 1.5)
    assert values["util/engines"] == 0.8


@pytest.mark.parametrize("step", [0, 1])
def test_a_step_cannot_repeat(tmp_path: Path, step: int) -> None:
    with manager(tmp_path / "demo") as metrics:
        metrics.log(1, reward(0.5))
        with pytest.raises(ValueError, match=f"step {step} was logged after step 1"):
            metrics.log(step, reward(0.5))


def test_names_of_the_line_itself_are_reserved(tmp_path: Path) -> None:
    with manager(tmp_path / "demo") as metrics, pytest.raises(ValueError, match="called 'elapsed'"):
        metrics.log(1, {"elapsed": Last(1.0)})


def test_a_figure_that_is_not_finite_is_warned_of_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with manager(tmp_path / "demo") as metrics:
        for step in (1, 2):
            metrics.log(step, {"train/loss": Last(math.nan), "train/grad_norm": Last(math.inf)})
    out = capsys.readouterr().out
    assert out.count("warning: train/loss is nan at step 1") == 1
    assert "warning: train/grad_norm" not in out  # a skipped update has a warning of its own, and float16 needs none
    assert math.isnan(MemoryTracker.runs["run0"][1][1]["train/loss"])


def test_a_failing_tracker_is_warned_of_once_and_caught_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with manager(tmp_path / "demo") as metrics:
        for step in (1, 2, 3, 4):
            MemoryTracker.fail = staticmethod(lambda s, now=step: now in (2, 3))
            metrics.log(step, reward(step / 10))
    assert [step for step, _ in MemoryTracker.runs["run0"]] == [1, 2, 3, 4]
    assert logged_steps(tmp_path / "demo") == [1, 2, 3, 4]
    out = capsys.readouterr().out
    assert out.count("memory could not be written (OSError: [Errno 28] No space left on device)") == 1
    assert "never arrived" not in out
    assert metrics.summary is not None
    assert metrics.summary.figures["tracker_failures"]["memory"]["undelivered"] == 0


def test_what_never_arrives_is_said_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MemoryTracker.fail = staticmethod(lambda step: True)
    with manager(tmp_path / "demo") as metrics:
        for step in (1, 2):
            metrics.log(step, reward(0.5))
    out = capsys.readouterr().out
    assert "memory: 2 steps never arrived (OSError: [Errno 28] No space left on device)" in out
    assert re.search(r"memory: \d failed attempts, 2 steps missing", out)
    figures = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert figures["tracker_failures"]["memory"]["undelivered"] == 2
    assert figures["status"] == "finished"
    assert logged_steps(tmp_path / "demo") == [1, 2]


def test_a_slow_failure_is_retried_less_often() -> None:
    clock = [0.0]
    attempts = []

    def time_out(step: int, payload: dict[str, Any]) -> None:
        attempts.append(step)
        clock[0] += 10
        raise TimeoutError

    sink = Sink("server", time_out, lambda text: None, clock=lambda: clock[0])
    for step in range(1, 401):
        clock[0] += 1
        sink.send(step, {})
    assert len(attempts) == pytest.approx(400 / 190, abs=1.1)  # waiting costs a twentieth of the time
    assert [step for step, _ in sink.pending] == list(range(1, 401))


def test_a_sink_that_keeps_few_counts_what_it_drops() -> None:
    def fail(step: int, payload: dict[str, Any]) -> None:
        raise OSError("full")

    sink = Sink("rollouts", fail, lambda text: None, keep=2, clock=lambda: 0.0)
    for step in range(5):
        sink.send(step, {})
    assert [step for step, _ in sink.pending] == [3, 4]
    assert sink.report() == {"failures": 5, "undelivered": 5, "last_error": "OSError: full"}


def test_jsonl_on_a_full_disk_is_caught_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, full = files.append, [False]

    def append(path: Path, records: Any) -> None:
        if full[0]:
            time.sleep(0.1)  # the next attempt would be after the end of the run
            raise OSError(28, "No space left on device")
        real(path, records)

    monkeypatch.setattr(files, "append", append)
    with manager(tmp_path / "demo") as metrics:
        for step in (1, 2, 3):
            full[0] = step == 2
            metrics.log(step, reward(0.5))
    assert logged_steps(tmp_path / "demo") == [1, 2, 3]
    assert [event["kind"] for event in files.read_jsonl(tmp_path / "demo" / files.EVENTS)] == ["warning", "end"]


def test_a_disk_that_stays_full_is_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def append(path: Path, records: Any) -> None:
        raise OSError(28, "No space left on device")

    with manager(tmp_path / "demo") as metrics:
        monkeypatch.setattr(files, "append", append)
        metrics.log(1, reward(0.5))
    said = capsys.readouterr().out
    assert "metrics.jsonl: 1 steps never arrived (OSError: [Errno 28] No space left on device)" in said
    # the two warnings about metrics.jsonl, and the end
    assert said.count("events.jsonl: 3 lines never arrived") == 1


def test_a_resumed_run_continues_every_series(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    first = manager(run_dir).__enter__()
    first.log_evaluation(0, {"eval/avg": Mean(0.2)})
    for step in (1, 2, 3):
        first.log(step, reward(step / 10))
        first.log_rollouts(step, [{"task_id": "a", "prompt": "p", "text": f"t{step}", "reward": 0.0}])
        files.rollouts_path(run_dir, step).with_suffix(".npz").touch()
        if step == 2:
            state = json.loads(json.dumps(first.state()))
    first.log_evaluation(3, {"eval/avg": Mean(0.9)})
    first.close("failed")
    assert MemoryTracker.statuses == {"run0": "failed"}

    with manager(run_dir, state=state) as second:
        assert [(step, values["rollout/reward/mean"]) for step, values in second.history] == [(1, 0.1), (2, 0.2)]
        assert logged_steps(run_dir) == [1, 2]
        assert not list((run_dir / files.ROLLOUTS).glob("*_000003.*"))
        assert len(list((run_dir / files.ROLLOUTS).glob("step_000002.*"))) == 2
        for step in (3, 4):
            second.log(step, reward(step))
        second.log_evaluation(4, {"eval/avg": Mean(0.5)})
    assert logged_steps(run_dir) == [1, 2, 3, 4]
    assert [record["step"] for record in files.read_jsonl(run_dir / files.EVALUATIONS)] == [0, 4]
    assert [step for step, _ in MemoryTracker.runs["run0"]] == [0, 1, 2, 3, 4, 4]
    assert MemoryTracker.statuses == {"run0": "finished"}
    elapsed = [record["elapsed"] for record in files.read_jsonl(run_dir / files.METRICS)]
    assert elapsed == sorted(elapsed)
    assert second.summary is not None
    assert (second.summary.figures["eval_before"], second.summary.figures["eval_after"]) == (0.2, 0.5)
    assert second.summary.figures["status"] == "finished"


def test_a_tracker_that_lost_the_run_or_is_new_gets_the_whole_history(tmp_path: Path) -> None:
    with manager(tmp_path / "demo") as first:
        first.log_evaluation(0, {"eval/avg": Mean(0.2)})
        first.log(1, reward(0.1))
        state = first.state()
    MemoryTracker.runs = {"unrelated": []}
    with manager(tmp_path / "demo", state=state) as second:
        second.log(2, reward(0.2))
        assert second.state()["trackers"] == {"memory": "run1"}
    assert [step for step, _ in MemoryTracker.runs["run1"]] == [0, 1, 2]

    state["trackers"] = {}
    with manager(tmp_path / "demo", state={**state, "step": 2}):
        pass
    assert [step for step, _ in MemoryTracker.runs["run2"]] == [0, 1, 2]


def test_a_checkpoint_keeps_what_a_tracker_still_misses(tmp_path: Path) -> None:
    with manager(tmp_path / "demo") as first:
        first.log(1, reward(0.1))
        MemoryTracker.fail = staticmethod(lambda step: True)
        first.log(2, reward(0.2))
        state = json.loads(json.dumps(first.state()))
    assert [step for step, _ in MemoryTracker.runs["run0"]] == [1]
    MemoryTracker.fail = staticmethod(lambda step: False)
    with manager(tmp_path / "demo", state=state) as second:
        second.log(3, reward(0.3))
    assert [step for step, _ in MemoryTracker.runs["run0"]] == [1, 2, 3]


def test_a_new_run_never_overwrites_an_earlier_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with manager(tmp_path / "demo") as metrics:
            metrics.log(1, reward(0.5))
    assert logged_steps(tmp_path / "demo") == [1]
    assert logged_steps(tmp_path / "demo" / "earlier-1") == [1]
    assert (tmp_path / "demo" / "earlier-1" / "summary.json").exists()
    assert "they are now in earlier-1" in capsys.readouterr().out


def test_a_tracker_that_cannot_start_names_its_key_and_ends_the_others(tmp_path: Path) -> None:
    config = MetricsConfig(trackers=({"type": "memory"}, {"type": "memory", "broken_start": True}), console="quiet")
    metrics = MetricsManager(config, tmp_path / "demo", "demo", 4, PARAMS)
    with (
        pytest.raises(ConfigError, match=r"metrics\.trackers\.1 \(memory\).*TimeoutError: no answer") as caught,
        metrics,
    ):
        pytest.fail("it must not start")
    assert "metrics.trackers" in str(caught.value.fix)
    assert MemoryTracker.statuses == {"run0": "failed"}


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), "stopped"), (SystemExit(0), "stopped"), (ValueError("x"), "failed")]
)
def test_how_a_run_ended(tmp_path: Path, error: BaseException, status: str) -> None:
    def run() -> None:
        with manager(tmp_path / "demo") as metrics:
            metrics.log(1, reward(0.5))
            raise error

    with pytest.raises(type(error)):
        run()
    assert MemoryTracker.statuses == {"run0": status}
    assert json.loads((tmp_path / "demo" / "summary.json").read_text())["status"] == status


def test_threads_may_warn_at_the_same_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    append = files.append

    def slowly(path: Path, records: list[dict[str, Any]]) -> None:
        time.sleep(0.002)
        append(path, records)

    monkeypatch.setattr(files, "append", slowly)
    with manager(tmp_path / "demo") as metrics:
        threads = [
            threading.Thread(target=lambda name=name: [metrics.warn(f"{name} {index}") for index in range(20)])
            for name in ("left", "right")
        ]
        for thread in threads:
            thread.start()
        for step in range(1, 5):
            metrics.log(step, reward(1.0))
        for thread in threads:
            thread.join()
        metrics.event("hang", role="training")
    expected = sorted(f"{name} {index}" for name in ("left", "right") for index in range(20))
    events = files.read_jsonl(tmp_path / "demo" / files.EVENTS)
    assert sorted(event["text"] for event in events if event["kind"] == "warning") == expected
    assert [event["role"] for event in events if event["kind"] == "hang"] == ["training"]
    printed = capsys.readouterr().out.splitlines()
    assert sorted(line.removeprefix("warning: ") for line in printed if line.startswith("warning: ")) == expected
    assert sum(line.startswith("step ") for line in printed) == 4


def test_rollouts_need_the_fields_that_are_shown(tmp_path: Path) -> None:
    with (
        manager(tmp_path / "demo") as metrics,
        pytest.raises(ValueError, match="row 0 of step 1 has no reward, text"),
    ):
        metrics.log_rollouts(1, [{"task_id": "a", "prompt": "p"}])


def test_the_phase_reaches_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with manager(tmp_path / "demo") as metrics:
        metrics.phase("starting engines")
    assert "starting engines …" in capsys.readouterr().out


def test_the_live_view_shows_an_answer_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(LiveConsole, "sample", lambda self, text: shown.append(text))
    rows = [{"task_id": f"t:{n}", "prompt": "p", "text": f"answer {n}", "reward": n, "reference": "3"} for n in (0, 1)]
    for mode in ("live", "plain"):
        config = MetricsConfig(trackers=(), console=mode)
        with MetricsManager(config, tmp_path / mode, "demo", 4, PARAMS) as metrics:
            metrics.log(1, reward(0.5))
            metrics.log_rollouts(1, rows)
            metrics.log_rollouts(1, rows, kind="eval")
    assert shown == ["1/1.0: reward 1.000, reference 3: answer 1"]
