"""A run is killed, told to stop, interrupted, and its checkpoint damaged: nothing is lost, nothing is left."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from faults import at
from hygiene import nothing_left
from ray.util import placement_group_table
from run_config import kill_run, read_lines, run_here, start_run, wait_for, write_episodes_run, write_run, write_sft_run
from safetensors.torch import load_file, save_file
from tiny_model import make_tiny_model

from roll_like.errors import WRONG_CONFIG
from roll_like.run.checkpoint import newest_step
from roll_like.run.folder import locked
from roll_like.run.state import RunState

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("warm_ray")]

#: Figures that do not depend on how fast the machine is.
SERIES = ("rollout/reward/mean", "rollout/tokens", "train/loss", "train/grad_norm", "train/lr", "mismatch/kl")


def series(run: Path) -> list[dict[str, float]]:
    return [
        {"step": line["step"], **{name: line[name] for name in SERIES if name in line}}
        for line in read_lines(run / "metrics.jsonl")
    ]


def same(left: list[dict[str, float]], right: list[dict[str, float]]) -> None:
    """Steps and tokens are equal; other figures up to what threads do to the order of a sum."""
    assert [(line["step"], line["rollout/tokens"]) for line in left] == [
        (line["step"], line["rollout/tokens"]) for line in right
    ]
    for mine, other in zip(left, right, strict=True):
        assert mine == pytest.approx(other, rel=1e-3, abs=1e-6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), dtype="float32")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[dict[str, float]]:
    """The series of a run that nothing happens to."""
    directory = tmp_path_factory.mktemp("undisturbed")
    code, output = run_here(write_run(directory, model))
    assert code == 0, output
    return series(directory / "runs" / "tiny")


def test_kill_9_and_resume_give_the_same_series(
    tmp_path: Path, model: Path, undisturbed: list[dict[str, float]]
) -> None:
    # no checkpoint is due before the end: what is resumed was in memory when the driver was killed
    config = write_run(tmp_path, model, checkpoint={"every": 0, "export": False})
    with nothing_left():
        kill_run(config, "step 2/4")
        with locked(run := tmp_path / "runs" / "tiny"):
            assert newest_step(run / "checkpoints") in {1, 2}
            assert read_lines(run / "events.jsonl")[-1]["status"] == "killed"
    code, output = run_here(config, "--resume")
    assert code == 0, output
    same(series(run), undisturbed)
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert {line["staleness/max"] for line in read_lines(run / "metrics.jsonl")} == {0}
    # the first push comes before the first step; after a resumption its number goes on
    for step in range(1, 5):
        rows = read_lines(run / "rollouts" / f"step_{step:06}.jsonl")
        assert {row["policy_version"] for row in rows} == {step}, f"of step {step}"


@pytest.mark.slow
def test_a_killed_run_starts_again_by_itself(tmp_path: Path, model: Path, undisturbed: list[dict[str, float]]) -> None:
    config = write_run(tmp_path, model)
    run = tmp_path / "runs" / "tiny"
    with nothing_left():
        process = start_run(config, "--restart", "2")
        wait_for(process, "step 2/4")
        (child,) = (one for one in psutil.Process(process.pid).children() if "auto" in one.cmdline())
        child.kill()
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "attempt 1 was killed by SIGKILL; attempt 2 of 3 goes on from the checkpoint of step" in output
    same(series(run), undisturbed)
    attempts = [(one["attempt"], one["exit"]) for one in read_lines(run / "attempts.jsonl")]
    assert attempts == [(1, -signal.SIGKILL), (2, 0)]


def everything(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Signal a process and all that it has started, as Slurm does to end a job."""
    root = psutil.Process(process.pid)
    for one in [root, *root.children(recursive=True)]:
        one.send_signal(number)


@pytest.mark.parametrize(
    ("to", "number"),
    [
        pytest.param(subprocess.Popen.send_signal, signal.SIGTERM, id="the driver", marks=pytest.mark.slow),
        pytest.param(lambda process, number: os.killpg(process.pid, number), signal.SIGTERM, id="its process group"),
        pytest.param(everything, signal.SIGUSR1, id="all processes", marks=pytest.mark.slow),
    ],
)
def test_sigterm_writes_a_checkpoint_and_exits_0(
    to: Callable[[subprocess.Popen[str], signal.Signals], None],
    number: signal.Signals,
    tmp_path: Path,
    model: Path,
    undisturbed: list[dict[str, float]],
) -> None:
    # no checkpoint is due before the end: the one that the signal asks for is the only one
    config = write_run(tmp_path, model, checkpoint={"every": 0, "export": False})
    with nothing_left():
        process = start_run(config, start_new_session=True)
        wait_for(process, "step 1/4")
        to(process, number)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        assert "--resume tiny" in output
    run = tmp_path / "runs" / "tiny"
    assert read_lines(run / "events.jsonl")[-1]["status"] == "stopped"
    assert json.loads((run / "summary.json").read_text())["steps"] < 4
    code, output = run_here(config, "--resume", "tiny")
    assert code == 0, output
    same(series(run), undisturbed)


def test_a_terminal_that_is_closed_ends_a_run_after_its_step(tmp_path: Path, model: Path) -> None:
    config = write_run(tmp_path, model, checkpoint={"every": 0, "export": False}, metrics={"console": "plain"})
    run = tmp_path / "runs" / "tiny"
    main, terminal = os.openpty()
    with nothing_left():
        # its session's leader, and the terminal its own: Linux sends such a process SIGHUP when the terminal is closed
        process = start_run(
            config,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(terminal)
        output = b""
        while b"step 1/4" not in output:
            output += os.read(main, 65536)
        heard = {(one.name(), address.ip) for one in children(process) for address in listening(one)}
        os.close(main)
        assert process.wait(timeout=120) == 0
    # what a run starts is reached from this machine only
    assert {address for name, address in heard if "gcs_server" in name} == {"::ffff:127.0.0.1"}
    assert {name for name, address in heard if "127.0.0.1" not in address} == set()
    assert read_lines(run / "events.jsonl")[-1]["status"] == "stopped"
    assert newest_step(run / "checkpoints") in {1, 2, 3}


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def listening(process: psutil.Process) -> list[Any]:
    with suppress(psutil.NoSuchProcess):
        found = process.net_connections("inet")
        return [each.laddr for each in found if each.status == psutil.CONN_LISTEN]
    return []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize("phase", ["opening metrics", "starting Ray", "starting workers"])
def test_a_signal_while_a_run_starts_ends_it(tmp_path: Path, model: Path, phase: str, number: signal.Signals) -> None:
    config = write_run(tmp_path, model)
    with nothing_left():
        process = start_run(config, "--resume", "auto")
        wait_for(process, phase)
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 75, output
    assert f"stopped by {number.name} before the run had started" in output
    run = tmp_path / "runs" / "tiny"
    if phase != "opening metrics":  # there are none yet
        assert read_lines(run / "events.jsonl")[-1]["status"] == "stopped"
    assert not (run / "checkpoints").exists()


def test_ctrl_c_ends_a_run(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, RunState, "log", 2, lambda _: os.kill(os.getpid(), signal.SIGINT))
    code, output = run_here(write_run(tmp_path, model, steps=50))
    assert code == 130, output
    assert len(read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")) == 1
    assert {each["state"] for each in placement_group_table().values()} == {"REMOVED"}


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_running(tmp_path: Path, model: Path) -> None:
    config = write_run(tmp_path, model, steps=50)
    with nothing_left():
        process = start_run(config, start_new_session=True)
        wait_for(process, "step  1/50")
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, output


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, model: Path, undisturbed: list[dict[str, float]]) -> None:
    config = write_run(tmp_path, model)
    code, output = run_here(config, "steps=3")
    assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    damaged = max((run / "checkpoints").glob("step_*"))
    state = next((damaged / "engine").glob("states_*.pt"))
    state.write_bytes(state.read_bytes()[:-100])
    code, output = run_here(config, "--resume")
    assert code == 0, output
    assert f"{damaged.name}" in output
    assert "the checkpoint before it is used" in output
    same(series(run), undisturbed)


@pytest.mark.slow
def test_a_checkpoint_of_another_model_or_pipeline_is_refused(tmp_path: Path, model: Path) -> None:
    config = write_run(tmp_path, model, steps=1)
    code, output = run_here(config)
    assert code == 0, output
    checkpoint = tmp_path / "runs" / "tiny" / "checkpoints" / "step_000001"
    wider = make_tiny_model(tmp_path / "wider", dtype="float32", width=128)
    code, output = run_here(config, "--resume", f"model.path={wider}", "steps=2")
    assert code == 1
    assert "has the shape (512, 64) in the checkpoint, and (512, 128) in the model" in output
    assert "continue with the model, the adapters and the critic of the run" in output
    code, output = run_here(config, "--resume", "algorithm.advantage=gae", "critic={}", "steps=2")
    assert code == 1
    assert "cannot read its checkpoint" in output
    code, output = run_here(write_sft_run(tmp_path, model, steps=2), "--resume")
    assert code == 1
    assert f"{checkpoint} is of pipeline: rlvr, and this configuration is of pipeline: sft" in output
    assert f"continue with the configuration of the run ({checkpoint / 'config.yaml'})" in output


def test_a_reward_that_always_raises_ends_the_run_and_says_why(tmp_path: Path, model: Path) -> None:
    config = write_run(tmp_path, model, rewards={"use": [{"type": "broken"}]})
    with nothing_left():
        code, output = run_here(config)
    assert code == 1, output
    assert "this reward is broken on purpose" in output
    assert "rollout.max_failure_fraction" in output
    assert "train.jsonl:" in output


def test_a_model_that_no_engine_could_start_with_is_refused(tmp_path: Path, model: Path) -> None:
    config = write_run(tmp_path, model)
    broken = tmp_path / "broken-model"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    save_file({**weights, name: weights[name][:-1].clone()}, broken / "model.safetensors", metadata={"format": "pt"})
    with nothing_left():
        code, output = run_here(config, f"model.path={broken}")
    assert code == WRONG_CONFIG, output
    assert "or have another shape; first: model.layers.0.self_attn.q_proj.weight" in output
    assert not (tmp_path / "runs" / "tiny" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_killed_agentic_run_goes_on_with_the_same_episodes(tmp_path: Path, model: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
    environments = [{"id": "tiny/Letters-v0"}, {"id": "tiny/Letters-v0", "name": "long", "kwargs": {"turns": 3}}]
    code, output = run_here(write_episodes_run(whole, model, environments=environments))
    assert code == 0, output
    config = write_episodes_run(halves, model, environments=environments)
    with nothing_left():
        kill_run(config, "step 2/4")
    code, output = run_here(config, "--resume")
    assert code == 0, output
    same(series(halves / "runs" / "tiny"), series(whole / "runs" / "tiny"))
