"""A run with an engine, a policy, a critic and a reference model: each dies, hangs, raises or is slow; so do others.

Whatever happens, the weights end equal to those of an undisturbed run, to the bit, and each step is logged once.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import warm_workers
from faults import at, kill, raise_once, slow_down, stop
from megatron_installed import FOLDER, INSTALLED
from run_config import read_lines, write_episodes_run, write_on_policy_distill_run, write_run
from test_healing import APART, TWO_RANKS, Ended, ended
from tiny_families import make_family
from tiny_model import make_tiny_model

from roll_like.builtin.pipelines.on_policy_distill.teacher_scoring import TeacherScorer
from roll_like.cluster import Cluster, watchdog
from roll_like.errors import RETRY
from roll_like.inference.weight_transfer.sync import WeightSync
from roll_like.policy_gradient.gpu_sharing import GPUSharing
from roll_like.policy_gradient.workers import Workers
from roll_like.run.state import RunState
from roll_like.training.engine import TrainingEngine

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.usefixtures("warm_ray")]

#: A method that the driver calls in the phase, and in which of its calls something happens.
PHASES: dict[str, tuple[type[Any], str, int]] = {
    "generating": (Workers, "generating", 3),
    "training": (Workers, "training", 3),
    "updating": (TrainingEngine, "train_step", 5),  # policy and critic take turns
    "syncing": (WeightSync, "push", 3),
    "saving": (TrainingEngine, "save", 1),
    "evaluating": (RunState, "evaluate", 3),
    "exporting": (TrainingEngine, "export", 1),
}
ROLES = ("inference", "training", "critic", "reference")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), dtype="float32")


def all_roles(directory: Path, model: Path) -> Path:
    batches = {"max_tokens_per_micro_batch": 128}  # several micro-batches an update
    return write_run(
        directory,
        model,
        resources=APART,
        steps=3,
        training={**batches, "optimizer": {"lr": 1.0e-3}},
        critic=batches,
        reference=batches,
        algorithm={"advantage": "gae", "kl": {"use": "loss", "coefficient": 0.01}},
        checkpoint={"every": 2, "export": True},
        evaluation={"sources": [{"path": str(directory / "eval.jsonl")}], "every": 2, "samples_per_prompt": 1},
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Ended:
    return ended(all_roles(tmp_path_factory.mktemp("undisturbed"), model))


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Cluster[Any]]:
    """The run's clusters of workers by their names, once they have started."""
    found: dict[str, Cluster[Any]] = {}
    start = Cluster.__init__

    def noted(cluster: Cluster[Any], name: str, *arguments: Any, **keywords: Any) -> None:
        found[name] = cluster
        start(cluster, name, *arguments, **keywords)

    monkeypatch.setattr(Cluster, "__init__", noted)
    return found


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watchdog that knows the processes of warm workers, and is quick."""
    monkeypatch.setattr(warm_workers.WarmWorkers, "watched", True)
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.3)
    monkeypatch.setattr(watchdog, "STOPPED_SECONDS", 2.0)


def same(run: Ended, undisturbed: Ended) -> None:
    assert run.weights == undisturbed.weights
    assert run.series == undisturbed.series


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("role", ROLES)
def test_one_dies(
    tmp_path: Path,
    model: Path,
    undisturbed: Ended,
    workers: dict[str, Cluster[Any]],
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    phase: str,
) -> None:
    at(monkeypatch, *PHASES[phase], lambda _: kill(workers[role]._actors[0]))
    run = ended(all_roles(tmp_path, model))
    same(run, undisturbed)
    # nobody but the policy is asked for anything after the last step
    if phase != "exporting" or role == "training":
        assert "was replaced in" in run.output


@pytest.mark.parametrize("pair", [("inference", "training"), ("training", "critic"), ("reference", "inference")])
def test_two_die_at_once(
    tmp_path: Path,
    model: Path,
    undisturbed: Ended,
    workers: dict[str, Cluster[Any]],
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[str, str],
) -> None:
    at(monkeypatch, *PHASES["training"], lambda _: [kill(workers[role]._actors[0]) for role in pair])
    same(ended(all_roles(tmp_path, model)), undisturbed)


def test_one_of_two_engines_dies(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    workers: dict[str, Cluster[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def two_engines(directory: Path) -> Path:
        batches = {"max_tokens_per_micro_batch": 512}
        return write_run(
            directory,
            model,
            resources=TWO_RANKS,
            steps=3,
            training={**batches, "workers": 2, "optimizer": {"lr": 1.0e-3}},
            inference={"type": "hf", "replicas": 2},
            checkpoint={"every": 2, "export": True},
        )

    undisturbed = ended(two_engines(tmp_path_factory.mktemp("two-engines")))
    at(monkeypatch, *PHASES["generating"], lambda _: kill(workers["inference"]._actors[1]))
    run = ended(two_engines(tmp_path))
    same(run, undisturbed)
    assert "engine 1 was replaced in" in run.output


#: How two ranks divide a model.
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2, matrices": {"backend": "fsdp2", "zero_stage": 3, "tensor_parallel": 2},
    "megatron, matrices": {"backend": "megatron", "zero_stage": 1, "tensor_parallel": 2},
    "megatron, layers": {"backend": "megatron", "zero_stage": 1, "pipeline_parallel": 2},
    "megatron, experts": {"backend": "megatron", "zero_stage": 1, "expert_parallel": 2},
}


def divided(directory: Path, model: Path, layout: str) -> Path:
    """A run whose two ranks divide the model."""
    training = {
        "max_tokens_per_micro_batch": 128,
        "workers": 2,
        "optimizer": {"lr": 1.0e-3},
        **LAYOUTS[layout],
    }
    return write_run(
        directory,
        model,
        resources=TWO_RANKS,
        steps=3,
        training=training,
        checkpoint={"every": 2, "export": True},
    )


@dataclass(frozen=True)
class DividedModel:
    """A model, how ranks divide it, and a run with it that nothing happens to."""

    path: Path
    layout: str
    undisturbed: Ended


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=INSTALLED if "megatron" in name else ()) for name in LAYOUTS]
)
def divided_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[DividedModel]:
    layout, under = request.param, tmp_path_factory.mktemp("divided")
    if "experts" in layout:
        model = make_family("qwen3_moe", under / "model")
    with pytest.MonkeyPatch.context() as patch:
        if "megatron" in layout:
            patch.setattr(sys, "path", [*sys.path, str(FOLDER)])
        yield DividedModel(model, layout, ended(divided(under, model, layout)))


@pytest.mark.parametrize(
    ("rank", "owner", "method", "call"),
    [
        (0, TrainingEngine, "forward_backward", 2),
        (1, TrainingEngine, "forward_backward", 3),
        (1, WeightSync, "push", 3),
        (1, TrainingEngine, "save", 1),
    ],
)
def test_any_rank_of_those_that_divide_a_model_dies(
    tmp_path: Path,
    divided_model: DividedModel,
    workers: dict[str, Cluster[Any]],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    owner: type[Any],
    method: str,
    call: int,
) -> None:
    at(monkeypatch, owner, method, call, lambda _: kill(workers["training"]._actors[rank]))
    run = ended(divided(tmp_path, divided_model.path, divided_model.layout))
    same(run, divided_model.undisturbed)
    assert f"training worker {rank} in" in run.output
    assert "every rank of the trained models was replaced in" in run.output


def test_a_trainer_that_dies_while_the_only_engine_waits_for_its_weights(
    tmp_path: Path, model: Path, undisturbed: Ended, workers: dict[str, Cluster[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    at(monkeypatch, *PHASES["generating"], lambda _: kill(workers["inference"]._actors[0]))
    at(monkeypatch, GPUSharing, "_catch_up", 1, lambda _: kill(workers["training"]._actors[0]))
    run = ended(all_roles(tmp_path, model))
    same(run, undisturbed)
    assert "engine 0 was replaced in" in run.output
    assert "every rank of the trained models was replaced in" in run.output


def test_a_trainer_that_dies_while_it_is_brought_back(
    tmp_path: Path, model: Path, undisturbed: Ended, workers: dict[str, Cluster[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    at(monkeypatch, *PHASES["training"], lambda _: kill(workers["training"]._actors[0]))
    at(monkeypatch, TrainingEngine, "load", 1, lambda _: kill(workers["critic"]._actors[0]))
    run = ended(all_roles(tmp_path, model))
    same(run, undisturbed)


def test_an_engine_that_dies_again_before_it_serves(
    tmp_path: Path, model: Path, undisturbed: Ended, workers: dict[str, Cluster[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    at(monkeypatch, *PHASES["generating"], lambda _: kill(workers["inference"]._actors[0]))
    at(monkeypatch, GPUSharing, "_catch_up", 1, lambda _: kill(workers["inference"]._actors[0]))
    same(ended(all_roles(tmp_path, model)), undisturbed)


@pytest.mark.parametrize(
    ("role", "phase", "method"),
    [
        ("inference", "generating", "_advance"),
        ("training", "updating", "_backend.forward_backward"),
        ("training", "updating", "_backend.optimizer_step"),
        ("training", "exporting", "_parameters"),
        ("critic", "updating", "_backend.forward_backward"),
        ("reference", "generating", "_objective.forward"),
    ],
)
def test_one_raises_once(
    tmp_path: Path,
    model: Path,
    undisturbed: Ended,
    workers: dict[str, Cluster[Any]],
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    phase: str,
    method: str,
) -> None:
    at(monkeypatch, *PHASES[phase], lambda _: raise_once(workers[role]._actors[0], method))
    run = ended(all_roles(tmp_path, model))
    same(run, undisturbed)
    if role != "inference":  # its request is asked again
        assert "; every rank of " in run.output


@pytest.mark.parametrize(
    ("role", "phase"),
    [
        *(("inference", phase) for phase in ("generating", "syncing", "evaluating")),
        *(("training", phase) for phase in ("training", "updating", "syncing", "saving")),
        *(("critic", phase) for phase in ("updating", "saving")),
        ("reference", "training"),
    ],
)
def test_one_is_stopped(
    tmp_path: Path,
    model: Path,
    undisturbed: Ended,
    workers: dict[str, Cluster[Any]],
    monkeypatch: pytest.MonkeyPatch,
    watched: None,
    role: str,
    phase: str,
) -> None:
    at(monkeypatch, *PHASES[phase], lambda _: stop(workers[role]._actors[0]))
    run = ended(all_roles(tmp_path, model))
    same(run, undisturbed)
    assert f"{role} 0 was stopped" in run.output
    assert "was replaced in" in run.output
    (stacks,) = (run.folder / "stacks").iterdir()
    assert f"-{role}-0.txt" in stacks.name
    assert "state T" in stacks.read_text()


@pytest.mark.parametrize(
    ("role", "phase", "method", "seconds"),
    [
        ("inference", "generating", "_advance", 0.05),  # of each token
        ("training", "updating", "_objective.loss", 3.0),
        ("critic", "updating", "_objective.loss", 3.0),
        ("reference", "training", "_objective.forward", 3.0),
    ],
)
def test_nobody_is_replaced_who_is_slow(
    tmp_path: Path,
    model: Path,
    undisturbed: Ended,
    workers: dict[str, Cluster[Any]],
    monkeypatch: pytest.MonkeyPatch,
    watched: None,
    role: str,
    phase: str,
    method: str,
    seconds: float,
) -> None:
    limit = 5.0
    slow = {"generate", "forward_backward", "forward"}
    monkeypatch.setattr(watchdog.Deadlines, "of", lambda _, role, phase: limit if phase in slow else 600.0)
    at(monkeypatch, *PHASES[phase], lambda _: slow_down(workers[role]._actors[0], method, seconds))
    run = ended(all_roles(tmp_path, model))
    same(run, undisturbed)
    assert not (run.folder / "stacks").exists()
    assert run.total(f"health/hangs/{role}") == run.total(f"health/restarts/{role}") == 0
    seconds_of = {line["step"]: line["time/step"] for line in run.lines}
    assert seconds_of[3] > seconds_of[2] + limit, "it was not slow enough to tell"


@pytest.mark.parametrize("fault", [kill, stop])
@pytest.mark.parametrize("phase", ["generating", "evaluating"])
def test_a_reward_worker_is_lost(
    tmp_path: Path,
    model: Path,
    undisturbed: Ended,
    workers: dict[str, Cluster[Any]],
    monkeypatch: pytest.MonkeyPatch,
    watched: None,
    phase: str,
    fault: Any,
) -> None:
    at(monkeypatch, *PHASES[phase], lambda _: fault(workers["rewards"]._actors[0]))
    run = ended(all_roles(tmp_path, model))
    same(run, undisturbed)
    assert [line["rollout/failures"] for line in run.lines] == [0, 0, 0]
    assert ("rewards 0 was stopped" in run.output) == (fault is stop)
    assert re.search(r"rewards worker 0 in score: .*; rewards 0 was replaced in \d+ s, and its groups are", run.output)
    assert replaced(run) == ["rewards"]


def replaced(run: Ended) -> list[str]:
    """Return the roles of which a worker was replaced, as events say."""
    return [line["role"] for line in read_lines(run.folder / "events.jsonl") if line["kind"] == "recovery"]


@pytest.mark.parametrize("fault", [kill, stop])
def test_an_environment_worker_is_lost(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    workers: dict[str, Cluster[Any]],
    monkeypatch: pytest.MonkeyPatch,
    watched: None,
    fault: Any,
) -> None:
    def episodes(directory: Path) -> Path:
        checkpoint = {"every": 0, "export": True}
        return write_episodes_run(directory, model, resources=APART, steps=3, checkpoint=checkpoint)

    undisturbed = ended(episodes(tmp_path_factory.mktemp("episodes")))
    at(monkeypatch, *PHASES["generating"], lambda _: fault(workers["environments"]._actors[0]))
    run = ended(episodes(tmp_path))
    same(run, undisturbed)
    assert ("environments 0 was stopped" in run.output) == (fault is stop)
    assert re.search(
        r"environments worker 0 in .*; environments 0 was replaced in \d+ s, and its episodes are", run.output
    )
    assert replaced(run) == ["environments"]


def raise_in_forward(worker: Any) -> None:
    raise_once(worker, "_objective.forward")


def follows_teacher(directory: Path, model: Path, teacher: Path) -> Path:
    return write_on_policy_distill_run(
        directory,
        model,
        teacher,
        resources=APART,
        steps=3,
        training={"max_tokens_per_micro_batch": 128, "optimizer": {"lr": 1.0e-3}},
        checkpoint={"every": 2, "export": True},
        evaluation={"sources": [{"path": str(directory / "eval.jsonl")}], "every": 2, "samples_per_prompt": 1},
    )


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("teacher"), dtype="float32", seed=1)


@pytest.fixture(scope="module")
def with_teacher(tmp_path_factory: pytest.TempPathFactory, model: Path, teacher: Path) -> Ended:
    return ended(follows_teacher(tmp_path_factory.mktemp("with-teacher"), model, teacher))


@pytest.mark.parametrize("fault", [kill, stop, raise_in_forward])
@pytest.mark.parametrize(("phase", "call"), [("training", 3), ("evaluating", 4)])  # the first is of an evaluation
def test_a_teacher_is_lost(
    tmp_path: Path,
    model: Path,
    teacher: Path,
    with_teacher: Ended,
    workers: dict[str, Cluster[Any]],
    monkeypatch: pytest.MonkeyPatch,
    watched: None,
    phase: str,
    call: int,
    fault: Any,
) -> None:
    at(monkeypatch, TeacherScorer, "_told", call, lambda _: fault(workers["teacher tiny"]._actors[0]))
    run = ended(follows_teacher(tmp_path, model, teacher))
    same(run, with_teacher)
    assert [line["distill/reverse_kl"] for line in run.lines] == [
        line["distill/reverse_kl"] for line in with_teacher.lines
    ]
    assert ("teacher tiny 0 was stopped" in run.output) == (fault is stop)
    assert "every rank of teacher tiny was replaced in" in run.output
    assert run.total("health/restarts/teacher tiny") == 1
    assert replaced(run) == ["teacher tiny"]


@pytest.mark.parametrize("role", ["training", "critic"])
def test_a_disk_without_room_costs_a_warning(
    tmp_path: Path,
    model: Path,
    undisturbed: Ended,
    workers: dict[str, Cluster[Any]],
    monkeypatch: pytest.MonkeyPatch,
    role: str,
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    at(monkeypatch, *PHASES["saving"], lambda _: raise_once(workers[role]._actors[0], "_backend.save", full))
    run = ended(all_roles(tmp_path, model))
    same(run, undisturbed)
    assert "No space left on device; the run goes on, and tries again when the next checkpoint is due" in run.output
    assert [path.name for path in (run.folder / "checkpoints").glob("step_*")] == ["step_000003"]


@pytest.mark.parametrize(
    ("role", "deaths", "said"),
    [
        # in steps 2 and 3: after the first death step 1 is computed again
        ("training", (2, 5), "every rank of the trained models was lost too often and is not replaced again"),
        ("inference", (2, 3), "engine 0 was lost too often and is not replaced again"),
    ],
)
def test_a_budget_that_is_spent_ends_the_run_and_says_why(
    tmp_path: Path,
    model: Path,
    workers: dict[str, Cluster[Any]],
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    deaths: tuple[int, int],
    said: str,
) -> None:
    monkeypatch.setattr("roll_like.cluster.worker_restarts.PAUSES", (0.0,))
    for call in deaths:
        at(monkeypatch, Workers, "generating", call, lambda _: kill(workers[role]._actors[0]))
    run = ended(all_roles(tmp_path, model), code=RETRY)
    assert said in run.output
    assert f"{role} worker 0 in " in run.output


@pytest.mark.parametrize(
    ("role", "code"),
    [("inference", RETRY), ("training", RETRY), ("critic", RETRY), ("reference", RETRY), ("rewards", RETRY)],
)
@pytest.mark.parametrize("fault", [kill, stop])
def test_one_that_is_lost_while_it_starts_ends_the_attempt(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, watched: None, role: str, code: int, fault: Any
) -> None:
    start = Cluster.__init__

    def faulty(cluster: Cluster[Any], name: str, *arguments: Any, **keywords: Any) -> None:
        start(cluster, name, *arguments, **keywords)
        if name == role:
            fault(cluster._actors[0])

    monkeypatch.setattr(Cluster, "__init__", faulty)
    run = ended(all_roles(tmp_path, model), code=code)
    assert f"{role} worker 0 in " in run.output
    assert "its process is gone" in run.output
    assert ("was stopped" in run.output) == (fault is stop)
