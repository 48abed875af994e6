"""A run with an engine, a policy, a critic and a reference model: each of them dies in each phase, also two at once.

Whatever dies, the weights end equal to those of an undisturbed run, to the bit, and each step is logged once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from faults import at, kill, raise_once
from run_config import write_run
from test_healing import APART, Ended, ended
from tiny_model import make_tiny_model

from roll_like.cluster import Cluster
from roll_like.inference.weight_transfer.sync import WeightSync
from roll_like.policy_gradient.residency import Residency
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
    batches = {"max_tokens_per_micro_batch": 512}
    return write_run(
        directory,
        model,
        resources=APART,
        steps=3,
        training={**batches, "optimizer": {"lr": 1.0e-3}},
        critic=batches,
        reference={},
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
        assert "replaced in" in run.output or "all ranks were started again in" in run.output


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
    at(monkeypatch, Residency, "_catch_up", 1, lambda _: kill(workers["inference"]._actors[0]))
    same(ended(all_roles(tmp_path, model)), undisturbed)


@pytest.mark.parametrize(
    ("role", "phase", "method"),
    [
        ("inference", "generating", "_advance"),
        ("training", "updating", "_backend.forward_backward"),
        ("training", "updating", "_backend.optimizer_step"),
        ("training", "saving", "_backend.save"),
        ("training", "exporting", "_parameters"),
        ("critic", "updating", "_backend.forward_backward"),
        ("critic", "saving", "_backend.save"),
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
        assert "all ranks were started again in" in run.output
