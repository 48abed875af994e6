"""The driver is killed in each phase, or its interpreter is held; `--restart` goes on to the undisturbed weights."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from hygiene import nothing_left
from run_config import read_lines, start_run
from test_healing import Ended, ended, rlvr
from tiny_model import make_tiny_model

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.usefixtures("warm_ray")]

#: `roll-like` in which methods of the driver have an end: each in its n-th call, once in all attempts.
PROGRAM = """
import importlib, itertools, os, re, signal, sys
from pathlib import Path

import psutil

from roll_like.cli import main
from roll_like.run import supervise

supervise.QUIET_SECONDS = 30.0

def driver():
    os.kill(os.getpid(), signal.SIGKILL)

def interpreter():
    re.fullmatch("(a|a)*b", "a" * 99)  # takes for ever, and no other thread runs meanwhile

def trainer():
    for process in psutil.Process().children(recursive=True):
        if process.name().startswith("ray::TrainingRank"):
            process.kill()

def ending(number, path, call, who):
    module, owner, name = path.rsplit(".", 2)
    owner = getattr(importlib.import_module(module), owner)
    method, calls = getattr(owner, name), itertools.count(1)

    def called(*arguments, **keywords):
        if next(calls) == call:
            try:
                os.close(os.open(Path(__file__).with_name(f"{number}.once"), os.O_CREAT | os.O_EXCL))
                who()
            except FileExistsError:
                pass
        return method(*arguments, **keywords)

    setattr(owner, name, called)

for number, fault in enumerate(FAULTS):
    ending(number, *fault)
sys.exit(main())
"""
PHASES = {
    "starting": [("roll_like.policy_gradient.residency.Residency.starting", 1, "driver")],
    "generating": [("roll_like.policy_gradient.workers.Workers.generating", 3, "driver")],
    "rewarding": [("roll_like.rollout.handles.RewardPool.score", 9, "driver")],
    "training": [("roll_like.training.engine.TrainingEngine.train_step", 3, "driver")],
    "syncing": [("roll_like.inference.weight_transfer.sync.WeightSync.push", 3, "driver")],
    "saving": [("roll_like.run.state.RunState._save_engines", 2, "driver")],
    "copying": [("roll_like.run.checkpoint.CheckpointStore.copy", 1, "driver")],
    "evaluating": [("roll_like.rollout.evaluate.Evaluator.evaluate", 2, "driver")],
    "exporting": [("roll_like.training.engine.TrainingEngine.export", 1, "driver")],
    "holding": [("roll_like.training.engine.TrainingEngine.train_step", 3, "interpreter")],
    "recovering": [
        ("roll_like.training.engine.TrainingEngine.train_step", 3, "trainer"),
        ("roll_like.training.engine.TrainingEngine.rebuild", 1, "driver"),
    ],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), dtype="float32")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Ended:
    return ended(rlvr(tmp_path_factory.mktemp("undisturbed"), model))


@pytest.mark.parametrize("phase", PHASES)
def test_a_driver_that_is_killed(tmp_path: Path, model: Path, undisturbed: Ended, phase: str) -> None:
    config = rlvr(tmp_path, model)
    faults = ", ".join(f"({path!r}, {call}, {who})" for path, call, who in PHASES[phase])
    (tmp_path / "ending.py").write_text(PROGRAM.replace("FAULTS", f"[{faults}]"))
    with nothing_left():
        process = start_run(config, "--restart", "1", program="ending")
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert len(list(tmp_path.glob("*.once"))) == len(PHASES[phase])
    run = Ended(tmp_path / "runs" / "tiny", output)
    attempts: list[dict[str, Any]] = read_lines(run.folder / "attempts.jsonl")
    assert [one["exit"] for one in attempts] == [-signal.SIGKILL, 0]
    assert run.weights == undisturbed.weights
    assert run.series == undisturbed.series
