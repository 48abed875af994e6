"""Ray starts while the driver does something else, and is gone when that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from roll_like.cluster import RaySession
from roll_like.config.sections import HardwareConfig
from roll_like.errors import ResourceError


class FakeRay:
    """Stands for Ray's processes: starting ends when `may_start` is set, in an error if there is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.may_start = threading.Event()
        self.running = False
        self._error = error
        monkeypatch.setattr(RaySession, "_start", lambda session: self.start())
        monkeypatch.setattr(RaySession, "_remove", lambda session: self.stop())

    def start(self) -> None:
        assert self.may_start.wait(timeout=20)
        if self._error is not None:
            raise self._error
        self.running = True

    def stop(self) -> None:
        self.running = False


def session(tmp_path: Path) -> RaySession:
    return RaySession(HardwareConfig(device="cpu", devices_per_node=1), tmp_path)


def run(tmp_path: Path, body: Callable[[], object]) -> None:
    with RaySession(HardwareConfig(device="cpu", devices_per_node=1), tmp_path).starting():
        body()


def test_the_body_runs_while_ray_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch)
    run(tmp_path, ray.may_start.set)  # before Ray has started, which waits for it
    assert ray.running


def test_a_failing_body_leaves_nothing_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch)

    def fail() -> None:
        ray.may_start.set()
        raise ValueError("no tracker")

    with pytest.raises(ValueError, match="no tracker"):
        run(tmp_path, fail)
    assert not ray.running


def test_an_error_of_ray_is_raised_after_the_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch, ConnectionError("no route"))
    with pytest.raises(ResourceError, match=r"Ray did not start: no route"):
        run(tmp_path, ray.may_start.set)
    assert not ray.running
