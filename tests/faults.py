"""Faults in the middle of a run that is started in the test's own process."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import ray

#: Faults that were asked for and have not come yet.
waiting: list[str] = []


def at(patch: pytest.MonkeyPatch, owner: Any, name: str, call: int, action: Callable[[Any], None]) -> None:
    """Do something when the driver calls a method, or a function of a module, for the n-th time."""
    method, calls, fault = getattr(owner, name), itertools.count(1), f"call {call} of {owner.__name__}.{name}"
    waiting.append(fault)

    def calling(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if next(calls) == call:
            if fault in waiting:
                waiting.remove(fault)
            action(self)
        return method(self, *arguments, **keywords)

    patch.setattr(owner, name, calling)


def pid_of(worker: Any) -> int:
    pid: int = ray.get(worker.__ray_call__.remote(lambda _: os.getpid()))
    return pid


def kill(worker: Any) -> None:
    os.kill(pid_of(worker), signal.SIGKILL)


def stop(worker: Any) -> None:
    os.kill(pid_of(worker), signal.SIGSTOP)


def kill_engine_core(worker: Any) -> None:
    (core,) = (one for one in psutil.Process(pid_of(worker)).children(recursive=True) if "EngineCore" in one.name())
    core.send_signal(signal.SIGKILL)


def raise_once(worker: Any, path: str, error: Exception | None = None) -> None:
    """Let an object in a worker raise at its next call of a method, as a device or a network may, and then no more.

    Args:
        worker: The actor.
        path: The method, from the hosted object: `_backend.save`.
        error: What it raises.
    """
    raised = error or RuntimeError("a device was away for a moment")

    def raising(owner: Any, name: str, *arguments: Any, **keywords: Any) -> None:
        object.__delattr__(owner, name)
        raise raised

    _patch(worker, path, raising)


def die_at_next_call(worker: Any, path: str) -> None:
    """Let a worker's process end at the next call of a method of an object in it."""

    def dying(owner: Any, name: str, *arguments: Any, **keywords: Any) -> None:
        del owner, name, arguments, keywords
        os._exit(3)

    _patch(worker, path, dying)


def slow_down(worker: Any, path: str, seconds: float) -> None:
    """Let an object in a worker take so much longer for each call of a method from now on."""

    def slowly(owner: Any, name: str, *arguments: Any, **keywords: Any) -> Any:
        time.sleep(seconds)
        return getattr(type(owner), name)(owner, *arguments, **keywords)

    _patch(worker, path, slowly)


def _patch(worker: Any, path: str, replacement: Callable[..., Any]) -> None:
    """Put a function in the place of a method of an object in a worker; it is also given the object and the name."""
    *parts, name = path.split(".")

    def patch(host: Any) -> None:
        owner = functools.reduce(getattr, parts, host)
        object.__setattr__(owner, name, functools.partial(replacement, owner, name))

    ray.get(worker.__ray_call__.remote(patch))
