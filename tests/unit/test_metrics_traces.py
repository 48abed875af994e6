"""Episodes as MLflow traces, read back from a real store; trackers that fail, resumption, how many are sent."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from episodes import episode, rows
from tests_support import group, task

from roll_like.config.base import PluginConfig
from roll_like.config.run import MetricsConfig
from roll_like.metrics import files
from roll_like.metrics.manager import MetricsManager
from roll_like.metrics.traces import as_markdown
from roll_like.metrics.trackers import MLflowConfig, MLflowTracker
from roll_like.registry import TRACKERS
from roll_like.rollout.metrics import rollout_rows
from roll_like.values import Mean

pytestmark = pytest.mark.usefixtures("plain_curves")

PARAMS: dict[str, Any] = {"pipeline": "agentic"}
ROWS = rows([episode(["left", "right"], sample=sample) for sample in range(2)])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs whose MLflow store is created once."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def run_dir(runs: Path) -> Path:
    return runs / f"run-{len(list(runs.iterdir()))}"


def manager(run_dir: Path, tracker: Any = "mlflow", **settings: Any) -> MetricsManager:
    state = settings.pop("state", None)
    config = MetricsConfig(trackers=(tracker,), console="quiet", **settings)
    return MetricsManager(config, run_dir, run_dir.name, 9, PARAMS, state=state)


def client_of(run_dir: Path) -> Any:
    tracker = MLflowTracker(MLflowConfig())
    tracker.start(run_dir=run_dir, run_name="reader", params=PARAMS, resume_id=None, resume_step=None)
    return tracker._client


def traces_of(run_dir: Path, run_id: str, *, spans: bool = False) -> dict[str, Any]:
    """Every trace of a run, by its rollout's id."""
    client = client_of(run_dir)
    experiment = client.get_run(run_id).info.experiment_id
    found = client.search_traces(locations=[experiment], run_id=run_id, include_spans=spans, max_results=500)
    assert len({one.info.tags["rollout"] for one in found}) == len(found)
    return {one.info.tags["rollout"]: one for one in found}


def test_an_episode_is_a_tree_of_spans(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    calls = (
        {"name": "calculator", "arguments": {"expression": "1+1"}, "result": "2", "error": False},
        {"name": "", "arguments": "calc(", "result": "Error: cannot be read", "error": True},
    )
    (row,) = rows([episode(["left", "right"], reward=0.5, tool_calls=calls, invalid=True)])
    with manager(run_dir) as metrics:
        metrics.log(4, {"rollout/reward/mean": Mean(0.5)})
        metrics.log_rollouts(4, [row])
        run_id = metrics.state()["trackers"]["mlflow"]
    assert capfd.readouterr() == ("", "")
    (trace,) = traces_of(run_dir, run_id, spans=True).values()

    info = trace.info
    assert (info.state, info.request_time, info.execution_duration) == ("OK", 1_800_000_000_000, 1750)
    assert (info.request_preview, info.response_preview) == ("You are at 0.\nSF\nFG", "right")
    assert info.trace_metadata["mlflow.sourceRun"] == run_id
    assert json.loads(info.trace_metadata["mlflow.trace.tokenUsage"]) == {
        "input_tokens": 50,
        "output_tokens": 7,
        "total_tokens": 57,
    }
    tags = {name: value for name, value in info.tags.items() if not name.startswith("mlflow.")}
    assert tags == {
        "step": "4",
        "kind": "step",
        "domain": "lake",
        "task": "lake/0",
        "rollout": "4/0.0",
        "reward": "0.5",
        "success": "false",
    }
    assert {one.name: one.value for one in info.assessments} == {"reward": 0.5, "success": False}

    spans = {span.span_id: span for span in trace.data.spans}
    tree = [(span.name, span.span_type, span.parent_id and spans[span.parent_id].name) for span in spans.values()]
    assert tree == [
        ("lake", "AGENT", None),
        ("turn 1", "CHAIN", "lake"),
        ("policy", "CHAT_MODEL", "turn 1"),
        ("environment", "TASK", "turn 1"),
        ("turn 2: invalid, reward 0.5", "CHAIN", "lake"),
        ("policy", "CHAT_MODEL", "turn 2: invalid, reward 0.5"),
        ("environment", "TASK", "turn 2: invalid, reward 0.5"),
        ("calculator", "TOOL", "environment"),
        ("unreadable call", "TOOL", "environment"),
    ]
    root, _, policy, environment, turn, caller, last, tool, broken = spans.values()
    begun = [
        {"role": "system", "content": "Walk to G."},
        {"role": "user", "content": "You are at 0.  \nSF  \nFG"},  # Markdown of the same lines
    ]
    assert root.inputs == {"messages": begun, "task": "lake/0"}
    # the whole conversation in one place, as chat
    said = root.outputs
    assert [(one["role"], one["content"]) for one in said.pop("messages")] == [
        ("assistant", "left"),
        ("user", "You are at 1.  \nSF  \nFG"),
        ("assistant", "right"),
        ("user", "It is over."),
    ]
    assert said == {"reward": 0.5, "success": False}
    assert {"step": 4, "turns": 2, "cuts": 0, "seed": 0}.items() <= root.attributes.items()
    assert policy.inputs["messages"] == begun
    assert policy.outputs["choices"][0]["message"] == {"role": "assistant", "content": "left"}
    assert caller.outputs["choices"][0]["message"] == {
        "role": "assistant",
        "content": "right",
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "calculator", "arguments": '{"expression": "1+1"}'},
            }
        ],
    }
    assert policy.attributes["mlflow.chat.tokenUsage"]["output_tokens"] == 3
    assert (policy.start_time_ns, policy.end_time_ns) == (1_800_000_000 * 10**9, 1_800_000_000_500_000_000)
    # what the environment shows is what the next turn reads, and at the end what nobody reads any more
    assert environment.outputs["messages"][0]["content"] == "You are at 1.  \nSF  \nFG"
    assert last.outputs == {"messages": [{"role": "user", "content": "It is over."}], "reward": 0.5}
    assert {"reward": 0.5, "invalid": True, "state": "at 1"}.items() <= turn.attributes.items()
    assert (environment.status.status_code, last.status.status_code) == ("OK", "ERROR")
    assert (tool.inputs, tool.outputs, tool.status.status_code) == ({"expression": "1+1"}, "2", "OK")
    assert (broken.inputs, broken.status.status_code) == ("calc(", "ERROR")


def test_a_single_answer_is_one_span(run_dir: Path) -> None:
    with manager(run_dir) as metrics:
        metrics.log_rollouts(0, rollout_rows([group(task(2), [1.0])]), kind="eval")
        run_id = metrics.state()["trackers"]["mlflow"]
    (trace,) = traces_of(run_dir, run_id, spans=True).values()
    (span,) = trace.data.spans
    assert trace.info.tags["rollout"] == "eval0/0.0"
    assert (span.span_type, span.inputs["messages"][0]["content"]) == ("CHAT_MODEL", "task 2")
    assert span.outputs["choices"][0]["message"]["content"] == "text"
    assert span.attributes["rewards"] == {"r": 1.0}
    assert "success" not in trace.info.tags


def test_text_of_any_kind_and_rewards_that_json_lacks(run_dir: Path) -> None:
    (row,) = rows([episode(["ünïcode ↯ \ufffd", "x" * 100_000])])
    with manager(run_dir) as metrics:
        metrics.log_rollouts(1, [{**row, "reward": float("nan"), "details": {"score": float("inf")}}])
        state = metrics.state()
    (trace,) = traces_of(run_dir, state["trackers"]["mlflow"], spans=True).values()
    assert state["pending"] == {}
    assert trace.info.tags["reward"] == "nan"
    assert trace.data.spans[0].attributes["details"] == {"score": "Infinity"}
    assert len(trace.data.spans[5].outputs["choices"][0]["message"]["content"]) == 100_000


def test_half_a_surrogate_pair_is_no_reason_to_lose_a_step(run_dir: Path) -> None:
    calls = ({"name": "search", "arguments": {"query": "\ud83d"}, "result": "nothing", "error": False},)
    with manager(run_dir) as metrics:
        metrics.log_rollouts(1, rows([episode(["left"], tool_calls=calls)]))
        state = metrics.state()
    assert files.read_jsonl(run_dir / files.EVENTS)[-1]["failures"] == {}
    (trace,) = traces_of(run_dir, state["trackers"]["mlflow"], spans=True).values()
    assert trace.data.spans[-1].inputs == {"query": "\ufffd"}
    (row,) = files.read_jsonl(files.rollouts_path(run_dir, 1))
    assert row["turns"][0]["tool_calls"][0]["arguments"] == {"query": "\ud83d"}


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("one line", "one line"),
        ("one\nother", "one  \nother"),
        ("12\n34\n56", "```text\n12\n34\n56\n```"),
        ("Look:\n# #\n# @\n# #\n\nGo.", "Look:\n```text\n# #\n# @\n# #\n```\n  \nGo."),
        ("ab\ncd", "ab  \ncd"),
        ("a\n\n\n\nb", "a  \n  \n  \n  \nb"),
        ("```py\nabc\ndef\nghi\n```", "```py\nabc\ndef\nghi\n```"),
        ("", ""),
        ("Total\n---\n# 3\n- four", "Total  \n\\---  \n\\# 3  \n- four"),
        ("#5 and ==", "#5 and =="),
    ],
)
def test_markdown_keeps_lines_and_boards(text: str, drawn: str) -> None:
    assert as_markdown(text) == drawn


def test_a_resumed_run_has_each_trace_once(run_dir: Path) -> None:
    first = manager(run_dir).__enter__()
    other = manager(run_dir.with_name(run_dir.name + "-other")).__enter__()
    other.log_rollouts(3, ROWS)
    for step in (1, 2, 3):
        first.log(step, {})
        if step == 2:  # a checkpoint holds what was known before the step's rollouts
            state = json.loads(json.dumps(first.state()))
        first.log_rollouts(step, rows([episode([f"step {step}"])]) + ROWS)
    first.log_rollouts(3, ROWS, kind="eval")
    run_id = state["trackers"]["mlflow"]
    before = traces_of(run_dir, run_id)
    assert len(before) == 11
    first.close("failed")

    with manager(run_dir, state=state) as second:
        kept = traces_of(run_dir, run_id)
        assert set(kept) == {name for name in before if name.startswith(("1/", "2/"))}
        second.log(3, {})
        second.log_rollouts(3, rows([episode(["again"], reward=0.0)]))
    after = traces_of(run_dir, run_id, spans=True)
    assert set(after) == {*kept, "3/0.0"}
    assert after["3/0.0"].info.response_preview == "again"
    assert len(after["3/0.0"].data.spans) == 4
    # sent again, and there once, with one result of each kind
    assert [one.name for one in sorted(after["2/0.0"].info.assessments, key=lambda one: one.name)] == [
        "reward",
        "success",
    ]
    other.close("finished")
    assert len(traces_of(run_dir, other.state()["trackers"]["mlflow"])) == 2


class TraceConfig(PluginConfig):
    """A tracker that remembers what it is given."""

    type: str = "tracing-memory"


class TracingMemory:
    """Takes rollouts, and fails while it is told to."""

    Config = TraceConfig
    taken: list[tuple[int, str, list[str]]] = []  # noqa: RUF012 - emptied before each test
    broken = False

    def __init__(self, config: TraceConfig) -> None:
        """Nothing to keep."""

    def start(self, *, resume_id: str | None, **settings: Any) -> str:
        return resume_id or "run"

    def log(self, step: int, values: Any) -> None:
        """Take figures."""

    def trace(self, step: int, kind: str, given: list[dict[str, Any]]) -> None:
        if self.broken:
            raise ConnectionError("no route to host")
        self.taken.append((step, kind, [row["id"] for row in given]))

    def artifact(self, path: Path) -> None:
        """Take a file."""

    def close(self, status: str) -> None:
        """End."""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> type[TracingMemory]:
    TRACKERS.names()  # built-in ones are there before
    monkeypatch.setitem(TRACKERS._plugins, "tracing-memory", TracingMemory)
    TracingMemory.taken, TracingMemory.broken = [], False
    # a failure is not followed by a pause
    monkeypatch.setattr("roll_like.metrics.sinks.PATIENCE", 0.0)
    return TracingMemory


MEMORY = {"type": "tracing-memory"}


def test_a_tracker_that_fails_gets_its_traces_later(
    tmp_path: Path, memory: type[TracingMemory], capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = memory
    with manager(tmp_path / "demo", MEMORY) as metrics:
        tracker.broken = True
        metrics.log_rollouts(1, ROWS)
        metrics.log_rollouts(2, ROWS)
        assert metrics.state()["pending"] == {
            "tracing-memory traces": [[1, {"kind": "step"}], [2, {"kind": "step"}]],
        }
        tracker.broken = False
        metrics.log_rollouts(2, ROWS, kind="eval")
    assert [(step, kind) for step, kind, _ in tracker.taken] == [(1, "step"), (2, "step"), (2, "eval")]
    assert tracker.taken[2][2] == ["eval2/0.0", "eval2/0.1"]
    assert "tracing-memory traces could not be written (ConnectionError: no route to host)" in capsys.readouterr().err
    end = files.read_jsonl(tmp_path / "demo" / files.EVENTS)[-1]
    assert end["failures"]["tracing-memory traces"] == {
        "failures": 2,
        "undelivered": 0,
        "last_error": "ConnectionError: no route to host",
    }


def test_what_never_arrives_is_counted(tmp_path: Path, memory: type[TracingMemory]) -> None:
    memory.broken = True
    with manager(tmp_path / "demo", MEMORY) as metrics:
        for step in range(1, 12):
            metrics.log_rollouts(step, ROWS)
    end = files.read_jsonl(tmp_path / "demo" / files.EVENTS)[-1]
    assert end["failures"]["tracing-memory traces"]["undelivered"] == 11
    assert len(list((tmp_path / "demo" / "rollouts").iterdir())) == 11


def test_a_continued_run_sends_what_was_missing_from_its_files(tmp_path: Path, memory: type[TracingMemory]) -> None:
    tracker = memory
    tracker.broken = True
    first = manager(tmp_path / "demo", MEMORY).__enter__()
    first.log_rollouts(0, ROWS, kind="eval")
    first.log(1, {})
    state = json.loads(json.dumps(first.state()))
    first.log_rollouts(1, ROWS)
    first.close("failed")
    tracker.broken = False
    with manager(tmp_path / "demo", MEMORY, state=state, traces_per_step=1):
        pass
    assert tracker.taken == [(0, "eval", ["eval0/0.0"]), (1, "step", ["1/0.0"])]


@pytest.mark.parametrize(("limit", "expected"), [(None, 40), (16, 16), (3, 3), (0, 0)])
def test_how_many_are_sent(tmp_path: Path, memory: type[TracingMemory], limit: int | None, expected: int) -> None:
    tracker = memory
    groups = [[episode(["left"], index=index, sample=sample) for sample in range(8)] for index in range(5)]
    with manager(tmp_path / "demo", MEMORY, traces_per_step=limit) as metrics:
        metrics.log_rollouts(1, rows(*groups))
    sent = list(itertools.chain.from_iterable(ids for _, _, ids in tracker.taken))
    assert len(sent) == expected
    if limit == 3:
        assert sent == ["1/0.0", "1/1.0", "1/3.0"]
    assert len(files.read_jsonl(files.rollouts_path(tmp_path / "demo", 1))) == 40


def test_a_tracker_without_traces_is_left_alone(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with manager(tmp_path / "demo", "tensorboard") as metrics:
        metrics.log_rollouts(1, ROWS)
    assert files.read_jsonl(tmp_path / "demo" / files.EVENTS)[-1]["failures"] == {}
