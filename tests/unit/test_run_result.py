"""What a notebook shows of configurations, checks and runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from config_files import MINIMAL

from roll_like import Callbacks, RLVRConfig, RunResult
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig as RLVR
from roll_like.check.findings import Finding, Report
from roll_like.check.plan import plan
from roll_like.errors import ConfigError


def result(**changes: Any) -> RunResult:
    figures = {"reward_first": 0.25, "reward_last": 0.8751, "eval_before": None, "eval_after": None}
    values: dict[str, Any] = {
        "name": "demo",
        "directory": Path("runs/demo"),
        "summary": SimpleNamespace(figures=figures),
        "metrics": [{"train/loss": 2.0}, {"train/loss": 1.0, "train/grad_norm": math.nan}],
        "evaluations": [(0, {"eval/avg": 0.25}), (2, {"eval/avg": 0.5})],
        "stopped": False,
    }
    return RunResult(**(values | changes))


def test_a_result_is_shown_in_a_line() -> None:
    assert repr(result()) == "RunResult(demo: 2 steps, reward 0.25 → 0.875; runs/demo)"
    figures = {"reward_first": 0.0, "reward_last": 1.0, "eval_before": 0.25, "eval_after": 0.5}
    stopped = result(summary=SimpleNamespace(figures=figures), stopped=True)
    assert repr(stopped) == "RunResult(demo: 2 steps, stopped, reward 0 → 1, evaluation 0.25 → 0.5; runs/demo)"
    assert repr(result(summary=None, metrics=[])) == "RunResult(demo: 0 steps; runs/demo)"


def test_metrics_as_a_table() -> None:
    steps = result().frame()
    assert steps.index.name == "step"
    assert steps["train/loss"].to_dict() == {1: 2.0, 2: 1.0}
    assert steps["train/grad_norm"].isna().tolist() == [True, True]
    assert result().frame("evaluations")["eval/avg"].to_dict() == {0: 0.25, 2: 0.5}
    assert result(metrics=[], evaluations=[]).frame().empty


def test_recorded_samples_as_a_table(tmp_path: Path) -> None:
    (folder := tmp_path / "rollouts").mkdir()
    row = {"prompt": "6 × 7?", "text": "42\u2028", "reward": 1.0, "rewards": {"math": 1.0}}
    for step, count in ((1, 2), (10, 1)):
        lines = [json.dumps(row, ensure_ascii=False) + "\n"] * count
        (folder / f"step_{step:06d}.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "eval_000000.jsonl").write_text(json.dumps(row) + "\n")
    table = result(directory=tmp_path).frame("rollouts")
    assert table["step"].tolist() == [1, 1, 10]
    assert table["text"].tolist() == ["42\u2028"] * 3
    assert result(directory=tmp_path / "none").frame("rollouts").empty
    with pytest.raises(ConfigError, match="no table 'samples'"):
        result().frame("samples")  # type: ignore[arg-type]


def test_a_configuration_evaluates_any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    pipeline = SimpleNamespace(evaluate=lambda _, model: asked.append(model) or {"eval/avg": 0.5})
    monkeypatch.setattr(RLVRConfig, "pipeline_class", lambda _: pipeline)
    config = RLVRConfig(**MINIMAL)
    assert config.evaluate(Path("runs/one/model")) == config.evaluate() == {"eval/avg": 0.5}
    assert asked == ["runs/one/model", "org/model"]


@pytest.mark.parametrize("name", ["on_step", "on_evaluation"])
def test_a_callback_that_takes_something_else_is_refused_before_a_run(name: str) -> None:
    seen: list[Any] = []
    with pytest.raises(ConfigError, match=f"{name} is called with a number of steps and figures, and .* too many pos"):
        Callbacks(**{name: seen.append})
    for function in (print, lambda step, figures, log=seen: log.append(step), lambda *anything: None, max):
        Callbacks(**{name: function})


def test_a_configuration_is_shown_in_a_line() -> None:
    config = RLVRConfig(**MINIMAL)
    assert repr(config) == str(config) == f"RLVRConfig(runs/{config.name}, model {config.model.path}, seed 0)"


def test_a_report_is_shown_as_a_check_prints_it() -> None:
    report = Report(plan(RLVR(**MINIMAL)), [Finding("warning", "steps", "few")])
    lines = repr(report).splitlines()
    assert lines[0] == "warning: steps: few"
    assert lines[1].startswith("Plan of ")
    assert lines[-1] == "no error, and 1 warning: see above"
    wrong = Report(report.plan, [Finding("error", "steps", "none")])
    assert str(wrong).splitlines() == ["error: steps: none", "1 problem found; nothing was started"]
