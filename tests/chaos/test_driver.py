"""The driver or its Ray is killed, or its interpreter is held; `--restart` goes on to the undisturbed weights."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hygiene import nothing_left
from run_config import read_lines, start_run
from test_healing import Ended, ended, rlvr
from tiny_model import make_tiny_model

from roll_like.errors import RETRY

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.usefixtures("warm_ray")]

#: `roll-like` in which methods of the driver have an end: each in its n-th call, once in all attempts.
PROGRAM = """
import importlib, itertools, os, re, signal, sys, time
from pathlib import Path

import psutil

from roll_like.cli import main
from roll_like.run import supervise

supervise.QUIET_SECONDS = 30.0

def driver():
    os.kill(os.getpid(), signal.SIGKILL)

def driver_and_guardian():
    for process in psutil.Process().children():
        if any(each.endswith("guardian.py") for each in process.cmdline()):
            process.kill()
            process.wait()
    driver()

def wait():
    time.sleep(60)  # a run of a few steps might be over before Ray's end is noticed

def interpreter():
    re.fullmatch("(a|a)*b", "a" * 99)  # takes for ever, and no other thread runs meanwhile

def of_ray(name, number):
    def end():
        for process in psutil.Process().children():  # of this run's own Ray
            if process.name() == name:
                process.send_signal(number)
    return end

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
    "starting": [("roll_like.policy_gradient.gpu_sharing.GPUSharing.starting", 1, "driver")],
    "generating": [("roll_like.policy_gradient.workers.Workers.generating", 3, "driver")],
    "rewarding": [("roll_like.rollout.reward_pools.RewardPool.score", 9, "driver")],
    "training": [("roll_like.training.engine.TrainingEngine.train_step", 3, "driver")],
    "training, with what would clear up": [
        ("roll_like.training.engine.TrainingEngine.train_step", 3, "driver_and_guardian")
    ],
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
    run = restarted(tmp_path, model, PHASES[phase], -signal.SIGKILL)
    assert run.weights == undisturbed.weights
    assert run.series == undisturbed.series


@pytest.mark.parametrize(
    ("part", "number", "said"),
    [
        ("raylet", signal.SIGKILL, "is gone (killed, or it failed)"),
        ("gcs_server", signal.SIGKILL, "is gone (killed, or it failed)"),
        ("raylet", signal.SIGSTOP, "was stopped (SIGSTOP) for 1"),
        ("gcs_server", signal.SIGSTOP, "was stopped (SIGSTOP) for 1"),
    ],
)
def test_a_run_whose_ray_is_lost(
    tmp_path: Path, model: Path, undisturbed: Ended, part: str, number: signal.Signals, said: str
) -> None:
    push = "roll_like.inference.weight_transfer.sync.WeightSync.push"
    run = restarted(tmp_path, model, [(push, 3, "wait"), (push, 3, f"of_ray({part!r}, {number:d})")], RETRY)
    assert run.weights == undisturbed.weights
    assert run.series == undisturbed.series
    assert f"{part} of this run's Ray {said}" in run.output
    assert "the run ends, and --resume continues it" in run.output
    ends = [event for event in read_lines(tmp_path / "runs" / "tiny" / "events.jsonl") if event["kind"] == "end"]
    assert [event["status"] for event in ends] == ["failed", "finished"]
    assert said in ends[0]["why"]


def restarted(folder: Path, model: Path, faults: Sequence[tuple[str, int, str]], code: int) -> Ended:
    """Run with `--restart` and faults, of which the first attempt ends with an exit code; return the finished run."""
    config = rlvr(folder, model)
    listed = ", ".join(f"({path!r}, {call}, {who})" for path, call, who in faults)
    (folder / "ending.py").write_text(PROGRAM.replace("FAULTS", f"[{listed}]"))
    with nothing_left():
        process = start_run(config, "--restart", "1", program="ending")
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert len(list(folder.glob("*.once"))) == len(faults)
    attempts: list[dict[str, Any]] = read_lines(folder / "runs" / "tiny" / "attempts.jsonl")
    assert [one["exit"] for one in attempts] == [code, 0]
    return Ended(folder / "runs" / "tiny", output)
