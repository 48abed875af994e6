"""What a run makes of Ray's errors."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, RayActorError, RayError, WorkerCrashedError

from roll_like.cluster import Cluster, WorkerDied
from roll_like.cluster.cluster import python_path
from roll_like.errors import WorkerError


class Worker:
    def close(self) -> None:
        """Nothing."""


class FakeActor:
    """An actor that no call reaches any more."""

    def __init__(self) -> None:
        self.close = self

    def remote(self) -> Any:
        return self


@pytest.fixture
def cluster() -> Cluster[Worker]:
    cluster = Cluster.__new__(Cluster)
    cluster.name, cluster._actors, cluster._ranks = "training", [FakeActor()], [0]
    return cluster


@pytest.mark.parametrize("error", [OutOfMemoryError("short of memory"), NodeDiedError("no node"), ActorDiedError()])
def test_a_worker_that_ray_has_ended_is_gone(cluster: Cluster[Worker], error: RayError) -> None:
    explained = cluster._explain(error, 0, Worker.close)
    assert isinstance(explained, WorkerDied)
    assert "training worker 0 in close: its process is gone" in explained.message


def test_other_errors_are_told_by_name(cluster: Cluster[Worker]) -> None:
    explained = cluster._explain(WorkerCrashedError(), 0, Worker.close)
    assert type(explained) is WorkerError
    assert "WorkerCrashedError" in explained.message


@pytest.mark.parametrize("error", [OutOfMemoryError("short of memory"), ActorDiedError()])
def test_a_worker_that_is_gone_does_not_keep_others_from_closing(
    cluster: Cluster[Worker], error: RayError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(ref: Any, timeout: float) -> None:
        raise error

    killed: list[Any] = []
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", killed.append)
    (actor,) = cluster._actors
    cluster.close(Worker.close)
    assert killed == [actor]


def test_workers_import_what_the_driver_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder whose name only begins like the environment's is not within it."""
    beside = tmp_path / "environment-of-mine"
    (within := tmp_path / "environment" / "lib").mkdir(parents=True)
    beside.mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setattr(sys, "path", [str(within), str(beside), str(tmp_path / "missing")])
    own, *others = python_path().split(os.pathsep)
    assert (Path(own) / "roll_like").is_dir()
    assert others == [str(beside)]


@pytest.mark.parametrize("error", ["mod.SampleLost: the file is away\n  fix: do so\n  and so", "KeyError: 'x'"])
def test_an_error_of_any_name_is_told_whole(cluster: Cluster[Worker], error: str) -> None:
    text = f'died of ray::W.__init__()\n  File "w.py", line 4, in __init__\n    self.a = b()\n    ^^^\n{error}'
    explained = cluster._explain(RayActorError("7", text, actor_init_failed=True), 0, Worker.close)
    assert explained.message == f"training worker 0 in close: it could not start: {error}"


def test_a_worker_that_could_not_be_made_says_why(cluster: Cluster[Worker]) -> None:
    """Not that its process is gone, with the first 600 characters of two tracebacks."""
    text = (
        "The actor died because of an error raised in its creation task, ray::RewardWorker.__init__() (pid=8, ip=1)\n"
        '  File "futures/_base.py", line 449, in result\n    return self.__get_result()\n'
        "KeyError: 'an earlier one'\n\nDuring handling of the above exception, another exception occurred:\n\n"
        '  File "worker.py", line 46, in __init__\n    self._scorer = Scorer()\n'
        "roll_like.errors.PluginError: unknown reward 'letters'\n  fix: correct the name"
    )
    explained = cluster._explain(RayActorError("7", text, actor_init_failed=True), 0, Worker.close)
    assert isinstance(explained, WorkerDied)
    assert explained.fix is None
    assert explained.message == (
        "training worker 0 in close: it could not start: roll_like.errors.PluginError: unknown reward 'letters'\n"
        "  fix: correct the name"
    )
