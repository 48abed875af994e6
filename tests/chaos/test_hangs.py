"""Workers of a run are stopped, or get stuck: the run notices, keeps evidence, replaces them and goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hygiene import TEST_MARKER, nothing_left
from run_config import read_lines, start_run, write_run

from roll_like.errors import OK, RETRY

pytestmark = pytest.mark.chaos

STEPS = 5
SHORT: dict[str, Any] = {"steps": STEPS, "checkpoint": {"every": 1, "export": False}}
#: Importing this makes the trainer wait in its third micro-batch, in the first process that gets there.
STUCK = """
import os, time
from roll_like.training.deepspeed import DeepSpeedBackend

ONCE = __file__ + ".once"
calls, forward_backward = [], DeepSpeedBackend.forward_backward

def waits_for_nothing():
    time.sleep(3600)

def getting_stuck(backend, batches, loss_of):
    def loss(batch):
        calls.append(batch)
        if len(calls) == 3 and not os.path.exists(ONCE):
            open(ONCE, "w").close()
            waits_for_nothing()
        return loss_of(batch)

    forward_backward(backend, batches, loss)

DeepSpeedBackend.forward_backward = getting_stuck
"""
#: `roll-like` with a watchdog that gives a training step five seconds.
IMPATIENT = """
import sys
from roll_like.cli import main
from roll_like.cluster.watchdog import Deadlines

Deadlines.of = lambda deadlines, role, phase: 5.0 if phase == "forward_backward" else 600.0
sys.exit(main())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model"), dtype="float32")


def process_called(title: str) -> psutil.Process:
    """Return the process with this title that a run of this test session has started."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(TEST_MARKER) == str(os.getpid()) and process.cmdline()[0].startswith(title):
                return process
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess, IndexError):
            continue
    raise AssertionError(f"no process is called {title}")


def stop_in_step_2(process: subprocess.Popen[str], title: str) -> tuple[int, str, float]:
    """Send SIGSTOP to a process of a run; return exit code and output of the run, and seconds until its end."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if "step " in line:
            break
    process_called(title).send_signal(signal.SIGSTOP)
    began = time.monotonic()
    rest, _ = process.communicate(timeout=240)
    return process.returncode, seen + rest, time.monotonic() - began


def hangs(run: Path) -> list[tuple[str, list[int], str]]:
    lines = read_lines(run / "events.jsonl")
    return [(line["role"], line["ranks"], line["phase"]) for line in lines if line["kind"] == "hang"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_stopped_trainer_is_replaced(tmp_path: Path, model: Path, workers: int) -> None:
    config = write_run(tmp_path, model, **SHORT, training={"workers": workers, "max_tokens_per_micro_batch": 512})
    with nothing_left():
        code, output, seconds = stop_in_step_2(start_run(config), "ray::TrainingRank")
    assert code == 0, output
    found = re.search(r"training (\d) was stopped", output)
    assert found is not None, output
    assert f"training worker {found[1]} in" in output
    assert "its process is gone; every rank of the trained models was replaced in" in output
    assert seconds < 120
    run = tmp_path / "runs" / "tiny"
    assert len(read_lines(run / "metrics.jsonl")) == STEPS
    evidence = {path.name.partition("-")[2]: path.read_text() for path in (run / "stacks").iterdir()}
    assert evidence.keys() == {f"training-{rank}.txt" for rank in range(workers)}
    stopped = evidence.pop(f"training-{found[1]}.txt")
    assert "state T" in stopped
    assert all("most recent call first" in text for text in evidence.values())
    assert [(role, ranks) for role, ranks, _ in hangs(run)] == [("training", [int(found[1])])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inference", "title"),
    [
        ({"type": "hf", "max_running": 4}, "ray::HFEngine"),
        ({"type": "vllm", "kv_cache_gib": 0.2}, "VLLM::EngineCore"),
        ({"type": "vllm", "kv_cache_gib": 0.2}, "ray::VLLMEngine"),
    ],
)
def test_a_stopped_engine_is_replaced(tmp_path: Path, model: Path, inference: dict[str, Any], title: str) -> None:
    with nothing_left():
        run = start_run(write_run(tmp_path, model, **SHORT, inference=inference))
        code, output, seconds = stop_in_step_2(run, title)
    assert code == 0, output
    assert "inference 0 was stopped" in output
    assert "engine 0 was replaced in" in output
    assert seconds < 120
    (evidence,) = (tmp_path / "runs" / "tiny" / "stacks").iterdir()
    text = evidence.read_text()
    assert evidence.name.endswith("-inference-0.txt")
    assert "state T" in text
    if inference["type"] == "vllm":  # the other process of the engine could answer
        assert "most recent call first" in text


@pytest.mark.slow
def test_a_stuck_trainer_says_where(tmp_path: Path, model: Path) -> None:
    config = write_run(tmp_path, model, **SHORT, **{"import": ["tiny_rewards", "stuck"]})
    (tmp_path / "stuck.py").write_text(STUCK)
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    with nothing_left():
        process = start_run(config, program="impatient")
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "training 0 hung in forward_backward: no progress for " in output
    assert "every rank of the trained models was replaced in" in output
    run = tmp_path / "runs" / "tiny"
    (evidence,) = (run / "stacks").iterdir()
    assert "in waits_for_nothing" in evidence.read_text()
    assert hangs(run) == [("training", [0], "forward_backward")]
    assert evidence.name in {f"{step}-training-0.txt" for step in (1, 2, 3)}


@pytest.mark.slow
def test_an_evaluation_does_not_wait_for_ever(tmp_path: Path, model: Path) -> None:
    rows = {"sources": [{"path": str(tmp_path / "eval.jsonl")}], "samples_per_prompt": 64}
    config = write_run(tmp_path, model, evaluation=rows, inference={"type": "hf", "max_running": 1})
    command = [sys.executable, "-m", "roll_like.cli", "eval", "--config", str(config), "--model", str(model)]
    environment = {**os.environ, TEST_MARKER: str(os.getpid())}
    with nothing_left():
        process = subprocess.Popen(
            command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
        engine = wait_for_process("ray::HFEngine", process)
        time.sleep(3)  # it has opened its page, and loads or generates
        engine.send_signal(signal.SIGSTOP)
        output, _ = process.communicate(timeout=180)
    assert "inference 0 was stopped" in output
    assert process.returncode in (OK, RETRY), output  # replaced while it generated, or lost while it started
    (evidence,) = (tmp_path / "runs" / "evaluation-logs" / "stacks").iterdir()
    assert "state T" in evidence.read_text()


def wait_for_process(title: str, run: subprocess.Popen[str]) -> psutil.Process:
    while run.poll() is None:
        with suppress(AssertionError):
            return process_called(title)
        time.sleep(0.2)
    raise AssertionError(run.communicate()[0])
