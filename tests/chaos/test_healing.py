"""Workers die in the middle of a run, which replaces them and ends with the weights of an undisturbed one, bit by bit.

The transformers engine samples each request independently of its company, and every role computes with one thread: so
an undisturbed run is the same to the bit each time.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
import torch
from dying_runs import run_and_die
from engine_options import OPTIONS
from faults import at, die_at_next_call, kill, kill_engine_core
from hygiene import nothing_left
from run_config import read_lines, run_here, write_run, write_sft_run
from safetensors import safe_open
from tiny_model import make_tiny_model

from roll_like.cluster import RaySession
from roll_like.inference.weight_transfer.sync import SyncReport, WeightSync
from roll_like.policy_gradient.workers import Workers
from roll_like.rollout.engine_pool import EnginePool
from roll_like.rollout.evaluate import Evaluator
from roll_like.run.state import RunState
from roll_like.training import engine as training_engine
from roll_like.training.engine import TrainingEngine

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("warm_ray")]

#: Figures of a step that depend on what was computed, and not on how long it took.
SERIES = ("rollout/reward/mean", "rollout/tokens", "train/loss", "train/grad_norm", "train/lr", "mismatch/kl")
APART = {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0", "inference": "1"}}
TWO_RANKS = {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0-1", "inference": "0-1"}}


@dataclass
class Ended:
    """What a run left in its folder."""

    folder: Path
    output: str

    @property
    def weights(self) -> dict[str, bytes]:
        with safe_open(self.folder / "model" / "model.safetensors", "pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name).view(torch.uint8).numpy().tobytes() for name in names}

    @property
    def lines(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "metrics.jsonl")

    @property
    def series(self) -> list[dict[str, float]]:
        return [{"step": line["step"], **{name: line[name] for name in SERIES if name in line}} for line in self.lines]

    def total(self, name: str) -> float:
        return sum(line.get(name, 0.0) for line in self.lines)


def ended(config: Path, *arguments: str, code: int = 0) -> Ended:
    with nothing_left():
        found, output = run_here(config, *arguments)
    assert found == code, output
    return Ended(config.parent / "runs" / "tiny", output)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), dtype="float32")


def rlvr(directory: Path, model: Path, **changes: Any) -> Path:
    return write_run(
        directory,
        model,
        **{
            "resources": APART,
            "checkpoint": {"every": 2, "export": True},
            "evaluation": {"sources": [{"path": str(directory / "eval.jsonl")}], "every": 2, "samples_per_prompt": 1},
            **changes,
        },
    )


def sft(directory: Path, model: Path) -> Path:
    return write_sft_run(directory, model, checkpoint={"every": 3, "export": True})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Ended:
    """A run that nothing happens to."""
    return ended(rlvr(tmp_path_factory.mktemp("undisturbed"), model))


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[EnginePool]:
    """The engines of the run, once it has started."""
    found: list[EnginePool] = []
    at(monkeypatch, EnginePool, "__init__", 1, found.append)
    return found


def nightly(phase: str) -> Any:
    return pytest.param(phase, marks=pytest.mark.slow)


ENGINE_PHASES = {
    "generating": (Workers, "generating", 2),
    "training": (TrainingEngine, "train_step", 2),
    "syncing": (WeightSync, "push", 3),
    "checking": (WeightSync, "_check", 3),
    "evaluating": (Evaluator, "evaluate", 2),
}


@pytest.mark.parametrize("phase", [phase if phase == "generating" else nightly(phase) for phase in ENGINE_PHASES])
def test_an_engine_that_dies_is_replaced(
    tmp_path: Path,
    model: Path,
    undisturbed: Ended,
    pools: list[EnginePool],
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
) -> None:
    at(monkeypatch, *ENGINE_PHASES[phase], lambda _: kill(pools[0].cluster._actors[0]))
    run = ended(rlvr(tmp_path, model))
    assert run.weights == undisturbed.weights
    assert run.series == undisturbed.series
    assert run.total("health/restarts/inference") == 1
    assert "engine 0 was replaced in" in run.output
    assert any("engine 0 was replaced" in line.get("text", "") for line in read_lines(run.folder / "events.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.exact])
def test_killed_engines_and_drivers_change_no_weight_whatever_is_sampled_and_trained_with(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, model: Path, name: str
) -> None:
    expected = ended(OPTIONS[name].put_into(rlvr(tmp_path_factory.mktemp("expected"), model), model))
    config = OPTIONS[name].put_into(rlvr(tmp_path, model), model)
    with nothing_left():
        run_and_die(config, engine=2, driver=4)
    run = ended(config, "--resume")
    assert run.weights == expected.weights
    assert run.series == expected.series


TRAINER_PHASES = {
    "generating": (Workers, "generating", 4),
    "training": (TrainingEngine, "forward_backward", 4),
    "syncing": (WeightSync, "push", 4),
    "saving": (TrainingEngine, "save", 2),
    "evaluating": (RunState, "evaluate", 4),
    "exporting": (TrainingEngine, "export", 1),
}


@pytest.mark.slow  # by day it goes on from a state in memory, and from a checkpoint where rollouts are asynchronous
@pytest.mark.parametrize("phase", TRAINER_PHASES)
def test_a_trainer_that_dies_is_started_again(
    tmp_path: Path, model: Path, undisturbed: Ended, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    trainers: list[TrainingEngine[Any]] = []
    at(monkeypatch, TrainingEngine, "__init__", 1, trainers.append)
    at(monkeypatch, *TRAINER_PHASES[phase], lambda _: kill(trainers[0].cluster._actors[0]))
    run = ended(rlvr(tmp_path, model))
    assert run.weights == undisturbed.weights
    assert run.series == undisturbed.series
    assert "every rank of the trained models was replaced in" in run.output
    if phase not in {"saving", "exporting"}:  # no step is logged afterwards
        assert run.total("health/restarts/training") == 1


@pytest.mark.slow
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_two_ranks_a_reference_and_a_critic(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, model: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    changes: dict[str, Any] = {
        "resources": TWO_RANKS,
        "steps": 3,
        "checkpoint": {"every": 2, "export": True},
        "training": {"workers": 2, "zero_stage": 3, "max_tokens_per_micro_batch": 512, "optimizer": {"lr": 1.0e-3}},
        "critic": {"workers": 2, "zero_stage": 1, "max_tokens_per_micro_batch": 512},
        "reference": {"workers": 1},
        "algorithm": {"advantage": "gae", "kl": {"use": "loss", "coefficient": 0.01}},
        "evaluation": None,
    }
    expected = ended(rlvr(tmp_path_factory.mktemp("expected"), model, **changes))

    def kill_rank_1(workers: Workers) -> None:
        engine: Any = workers.actor if role == "actor" else workers.saved_engines[1]
        kill(engine.cluster._actors[1])

    with monkeypatch.context() as patch:
        at(patch, Workers, "training", 3, kill_rank_1)
        run = ended(rlvr(tmp_path, model, **changes))
    assert run.weights == expected.weights
    assert "every rank of the trained models was replaced" in run.output
    assert "from the checkpoint of step 2" in run.output


def kill_rank_1(engine: TrainingEngine[Any]) -> None:
    kill(engine.cluster._actors[1])


def die_after_joining(cluster: Any) -> None:
    """Let rank 1 end when it has met the others, whose collectives then fail."""
    die_at_next_call(cluster._actors[1], "take")


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["saving", "loading", "starting"])
def test_a_rank_that_dies_is_the_cause_of_what_the_others_raise(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, model: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    changes: dict[str, Any] = {
        "steps": 3,
        "checkpoint": {"every": 1, "export": True},
        "evaluation": None,
        "training": {
            "backend": "fsdp2",
            "workers": 2,
            "zero_stage": 3,
            "optimizer": {"lr": 3.0e-3},
            "max_tokens_per_micro_batch": 256,
        },
    }
    expected = ended(write_sft_run(tmp_path_factory.mktemp("expected"), model, **changes))
    with monkeypatch.context() as patch:
        if phase == "saving":
            at(patch, TrainingEngine, "save", 2, kill_rank_1)
        else:
            at(patch, TrainingEngine, "forward_backward", 2, kill_rank_1)
        if phase == "loading":
            at(patch, TrainingEngine, "load", 1, kill_rank_1)
        if phase == "starting":
            at(patch, training_engine, "meet", 1, die_after_joining)
        run = ended(write_sft_run(tmp_path, model, **changes))
    assert run.weights == expected.weights
    assert run.series == expected.series
    assert re.search(
        r"training worker 1 in \w+: its process is gone; every rank of the trained models was replaced in", run.output
    )


@pytest.mark.slow
def test_a_reference_that_dies_is_asked_again(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {
        "steps": 2,
        "reference": {},
        "algorithm": {"kl": {"use": "loss", "coefficient": 0.01}},
        "evaluation": None,
        "checkpoint": {"every": 0, "export": True},
    }
    expected = ended(rlvr(tmp_path_factory.mktemp("expected"), model, **changes))
    with monkeypatch.context() as patch:
        at(patch, Workers, "training", 2, lambda workers: kill(workers.kl_reference.cluster._actors[0]))
        run = ended(rlvr(tmp_path, model, **changes))
    assert run.weights == expected.weights
    assert run.total("health/restarts/reference") == 1
    assert "reference worker 0 in forward: its process is gone; every rank of reference was replaced" in run.output


def test_given_data_is_trained_on_again_where_there_is_no_checkpoint(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ended(sft(tmp_path_factory.mktemp("expected"), model))
    with monkeypatch.context() as patch:
        at(patch, TrainingEngine, "forward_backward", 3, lambda engine: kill(engine.cluster._actors[0]))
        run = ended(sft(tmp_path, model))
    assert run.weights == expected.weights
    assert run.series == expected.series
    assert "steps 1 to 2 are computed again from the beginning" in run.output


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in memory for the states of runs here, whatever they cost: on a warm Ray runs have none."""
    with TemporaryDirectory(dir="/dev/shm", prefix="test-healing-") as folder:
        monkeypatch.setattr(RaySession, "snapshots", Path(folder) / "snapshots")
        monkeypatch.setattr("roll_like.run.checkpoint.STALL_SHARE", 1e9)
        yield Path(folder)


@pytest.mark.parametrize("phase", ["training", nightly("saving"), nightly("syncing")])
def test_no_step_is_computed_again_that_is_in_memory(
    tmp_path: Path, model: Path, undisturbed: Ended, monkeypatch: pytest.MonkeyPatch, memory: Path, phase: str
) -> None:
    trainers: list[TrainingEngine[Any]] = []
    at(monkeypatch, TrainingEngine, "__init__", 1, trainers.append)
    at(monkeypatch, *TRAINER_PHASES[phase], lambda _: kill(trainers[0].cluster._actors[0]))
    run = ended(rlvr(tmp_path, model, checkpoint={"every": 0, "every_minutes": 0, "export": True}))
    assert run.weights == undisturbed.weights
    assert run.series == undisturbed.series
    finished = {"training": 3, "saving": 1, "syncing": 2}[phase]
    assert re.search(rf"replaced in \d+ s, and .*from the state of step {finished} in memory\b", run.output)
    assert run.total("health/steps_replayed") == (phase == "saving")
    assert list(memory.iterdir()) == []


def test_an_error_that_comes_again_ends_the_run(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_step = TrainingEngine.train_step

    def dying(engine: TrainingEngine[Any], step: Any) -> Any:
        kill(engine.cluster._actors[0])
        return train_step(engine, step)

    monkeypatch.setattr(TrainingEngine, "train_step", dying)
    run = ended(sft(tmp_path, model), code=75)
    assert "training worker 0 in forward_backward: its process is gone" in run.output
    assert "step 1 ended like this twice" in run.output


@pytest.mark.slow
@pytest.mark.parametrize("fault", [kill, kill_engine_core])
@pytest.mark.parametrize("phase", ["generating", "syncing"])
def test_vllm_is_replaced_and_gets_the_version_that_was_current(
    tmp_path: Path, model: Path, pools: list[EnginePool], monkeypatch: pytest.MonkeyPatch, phase: str, fault: Any
) -> None:
    at(monkeypatch, *ENGINE_PHASES[phase], lambda _: fault(pools[0].cluster._actors[0]))
    engine = {"type": "vllm", "kv_cache_gib": 0.1, "max_running": 8}
    run = ended(rlvr(tmp_path, model, inference=engine, evaluation=None))
    assert run.total("health/restarts/inference") == 1
    assert [line["step"] for line in run.lines] == [1, 2, 3, 4]
    assert {line["staleness/max"] for line in run.lines} == {0}
    assert max(line["mismatch/kl"] for line in run.lines) < 1e-3, "sampled with other weights"


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["generating", "syncing"])
def test_vllm_with_adapters_is_replaced_and_the_run_resumes(
    tmp_path: Path, model: Path, pools: list[EnginePool], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """A new engine has the newest adapter, and what it holds is compared, the base model included."""
    reports: list[tuple[bool, SyncReport]] = []
    push = WeightSync.push

    def recorded(sync: WeightSync, *arguments: Any, again: bool = False) -> SyncReport:
        reports.append((again, push(sync, *arguments, again=again)))
        return reports[-1][1]

    monkeypatch.setattr(WeightSync, "push", recorded)
    at(monkeypatch, *ENGINE_PHASES[phase], lambda _: kill_engine_core(pools[0].cluster._actors[0]))
    config = rlvr(
        tmp_path,
        model,
        steps=4,
        inference={"type": "vllm", "kv_cache_gib": 0.1, "max_running": 8, "lora": True},
        training={"lora": {"rank": 8}, "optimizer": {"lr": 2.0e-2}},
        checkpoint={"every": 2, "export": False},
        evaluation=None,
    )
    run = ended(config)
    assert run.total("health/restarts/inference") == 1
    adapters = 2 * 7 * 2
    with safe_open(model / "model.safetensors", "pt") as file:
        everything = adapters + len(list(file.keys()))
    # the first push and that to the new engine compare the base model too
    assert [report.checked for _, report in reports].count(everything) == 2
    assert {report.checked for _, report in reports} == {adapters, everything}
    assert all(report.unchecked == () for _, report in reports)
    before = len(reports)
    code, output = run_here(config, "--resume", "steps=6")
    assert code == 0, output
    resumed = [report for _, report in reports[before:]]
    assert [report.checked for report in resumed] == [everything, adapters, adapters]
    lines = run.lines
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {line["staleness/max"] for line in lines} == {0}
    assert max(line["mismatch/kl"] for line in lines) < 1e-3, "sampled with other adapters"


@pytest.mark.slow
def test_a_trainer_that_dies_while_vllm_takes_its_weights(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers: list[TrainingEngine[Any]] = []
    at(monkeypatch, TrainingEngine, "__init__", 1, trainers.append)
    at(monkeypatch, WeightSync, "push", 3, lambda _: kill(trainers[0].cluster._actors[0]))
    engine = {"type": "vllm", "kv_cache_gib": 0.1, "max_running": 8}
    run = ended(rlvr(tmp_path, model, inference=engine, evaluation=None))
    assert run.total("health/restarts/training") == 1
    assert [line["step"] for line in run.lines] == [1, 2, 3, 4]
    assert {line["staleness/max"] for line in run.lines} == {0}
    assert max(line["mismatch/kl"] for line in run.lines) < 1e-3, "sampled with other weights"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_judge_that_is_lost_answers_again_at_its_address(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def kill_server(_: Workers) -> None:
        ours = psutil.Process().children(recursive=True)
        (server,) = (
            one for one in ours if "roll_like.inference.vllm.server" in (one.as_dict(["cmdline"])["cmdline"] or ())
        )
        server.send_signal(number)

    rewards = {
        "use": [
            {
                "type": "llm_judge",
                "judges": [{"url": "judge", "model": "judge", "max_tokens": 256}],
                "rubric": "Is it good?",
                "template": "$prompt $response $rubric $lowest $highest",
            }
        ]
    }
    monkeypatch.setattr("roll_like.cluster.watchdog.STOPPED_SECONDS", 2.0)
    at(monkeypatch, Workers, "generating", 2, kill_server)
    run = ended(
        rlvr(
            tmp_path,
            model,
            steps=2,
            rollout={"prompts_per_step": 2, "samples_per_prompt": 2, "max_response_tokens": 8},
            judge={"path": str(model), "dtype": "float32", "kv_cache_gib": 0.2, "max_model_len": 1024},
            rewards=rewards,
            checkpoint={"at_end": False, "export": False},
            evaluation=None,
        )
    )
    assert [line["rollout/failures"] for line in run.lines] == [0, 0]
    assert run.total("health/restarts/judge") == 1
    gone = "judge worker 0 in ended: its process is gone"  # the watchdog ends the worker with its server
    assert (
        f"{gone if number == signal.SIGSTOP else 'the server of judge 0 ended'}; judge 0 was replaced in" in run.output
    )
    assert ("judge 0 was stopped" in run.output) == (number == signal.SIGSTOP)
