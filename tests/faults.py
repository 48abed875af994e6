"""Faults in the middle of a run that is started in the test's own process."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import ray


def at(patch: pytest.MonkeyPatch, owner: type[Any], name: str, call: int, action: Callable[[Any], None]) -> None:
    """Do something when the driver calls a method for the n-th time."""
    method, calls = getattr(owner, name), itertools.count(1)

    def calling(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if next(calls) == call:
            action(self)
        return method(self, *arguments, **keywords)

    patch.setattr(owner, name, calling)


def pid_of(worker: Any) -> int:
    pid: int = ray.get(worker.__ray_call__.remote(lambda _: os.getpid()))
    return pid


def kill(worker: Any) -> None:
    os.kill(pid_of(worker), signal.SIGKILL)


def kill_engine_core(worker: Any) -> None:
    (core,) = (one for one in psutil.Process(pid_of(worker)).children(recursive=True) if "EngineCore" in one.name())
    core.send_signal(signal.SIGKILL)
