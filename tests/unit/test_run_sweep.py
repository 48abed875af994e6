"""Sweeps: which runs there are, what they are called, and what the command makes of them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_files import MINIMAL, write
from run_folders import make_run

from roll_like import cli
from roll_like.config.load import load_config
from roll_like.errors import ConfigError
from roll_like.run.supervise import Child
from roll_like.run.sweep import swept_runs


@pytest.fixture
def minimal(tmp_path: Path) -> str:
    return str(write(tmp_path / "minimal.yaml", MINIMAL))


def test_every_combination_is_a_run_with_a_name_of_its_own(minimal: str) -> None:
    over = ["training.optimizer.lr=[1e-6, 2.5e-05]", "algorithm.advantage=[grpo, {type: rloo}]", "seed=[3]"]
    runs = swept_runs("demo", over)
    assert [run.name for run in runs] == [
        "demo-lr-1e-6-advantage-grpo-seed-3",
        "demo-lr-1e-6-advantage-type_rloo-seed-3",
        "demo-lr-2.5e-05-advantage-grpo-seed-3",
        "demo-lr-2.5e-05-advantage-type_rloo-seed-3",
    ]
    config: Any = load_config(minimal, runs[-1].overrides)
    assert (config.name, config.seed, config.training.optimizer.lr) == (runs[-1].name, 3, 2.5e-5)
    assert config.algorithm.advantage.type == "rloo"
    assert load_config(minimal, runs[0].overrides).training.optimizer.lr == 1e-6  # type: ignore[attr-defined]


def test_texts_that_look_like_numbers_stay_texts() -> None:
    (run,) = swept_runs("demo", ['model.revision=["1"]'])
    assert run.overrides == ("model.revision='1'", "name=demo-revision-1")
    (run,) = swept_runs("demo", ["model.path=[org/a b]"])
    assert run.overrides == ("model.path=org/a b", "name=demo-path-a_b")


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (["seed"], r"--over seed: expected key=\[value, …\]"),
        (["seed=3"], r"--over seed=3: expected key=\[value, …\]"),
        (["seed=[]"], r"expected key=\[value, …\]"),
        (["seed=[1"], r"expected key=\[value, …\]"),
        (["=[1]"], r"expected key=\[value, …\]"),
        (["seed=[1]", "seed=[2]"], "--over names 'seed' twice"),
        (["seed=[1, 1]"], "two runs of the sweep would be called 'demo-seed-1'"),
        (["name=[a, b]"], "named by what they change"),
    ],
)
def test_what_cannot_be_swept_over(over: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        swept_runs("demo", over)


def test_the_command_goes_on_after_a_failure_and_compares_what_finished(
    minimal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    started: list[list[str]] = []

    def call(child: Child, command: list[str]) -> int:
        started.append(command)
        name = command[-1].removeprefix("name=")
        if name.endswith("seed-1"):
            return 1
        make_run(tmp_path / "runs" / name, seed=int(name[-1]), lift=int(name[-1]) / 10)
        return 0

    monkeypatch.setattr(Child, "run", call)
    arguments = ["sweep", "--config", minimal, "steps=4", "--over", "seed=[0,1,2]"]
    assert cli.main(arguments) == 1
    name = load_config(minimal).name  # type: ignore[attr-defined]
    assert [command[-1] for command in started] == [f"name={name}-seed-{seed}" for seed in (0, 1, 2)]
    for seed, command in enumerate(started):
        run = ["-m", "roll_like.cli", "run", "--config", minimal, "--resume", "auto"]
        assert command[1:] == [*run, "steps=4", f"seed={seed}", f"name={name}-seed-{seed}"]
    printed = capsys.readouterr()
    assert "run 2 of 3: seed=1" in printed.out
    assert f"{name}-seed-2" in printed.out
    assert f"error: 1 of 3 runs failed: {name}-seed-1 (exit code 1)" in printed.err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)]
)
def test_a_signal_reaches_the_run_under_way_and_no_further_one_starts(
    minimal: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    run, started = Child.run, []

    def stopped(child: Child, command: list[str]) -> int:
        started.append(command)
        if len(started) == 1:
            return 0
        # a terminal sends Ctrl-C to both
        seconds = 1 if number == signal.SIGINT else 600
        program = f"import os, time; os.kill(os.getppid(), {number:d}); time.sleep({seconds})"
        return run(child, [sys.executable, "-c", program])

    monkeypatch.setattr(Child, "run", stopped)
    assert cli.main(["sweep", "--config", minimal, "--over", "seed=[0,1,2]"]) == code
    assert len(started) == 2
    assert "stopped in run 2 of 3; the same command continues it" in capsys.readouterr().err


def test_a_mistake_is_found_before_the_first_run(
    minimal: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Child, "run", lambda child, command: pytest.fail("started"))
    assert cli.main(["sweep", "--config", minimal, "--over", "seed=[0, -1]"]) == 2
    assert "seed: found -1; expected a number greater than or equal to 0" in capsys.readouterr().err


def test_the_whole_configuration_is_printed(minimal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--config", minimal, "--print-config", "steps=7"]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["steps"] == 7
    (tmp_path / "again.yaml").write_text(printed)
    assert load_config(tmp_path / "again.yaml") == load_config(minimal, ["steps=7"])
