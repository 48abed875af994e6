"""Runs coroutines in virtual time, by the event loop of the benchmarks."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

_NAMES = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "virtual_loop.py"))

run_virtually: Callable[..., Any] = _NAMES["run_virtually"]
Deadlock: type[RuntimeError] = _NAMES["Deadlock"]


def in_virtual_time(test: Callable[..., Any]) -> Callable[[], None]:
    """Run an asynchronous test in virtual time."""

    @wraps(test)
    def run() -> None:
        run_virtually(test())

    return run
