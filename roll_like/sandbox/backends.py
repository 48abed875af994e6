"""Which boxes there are, and the choice among them. Nothing is chosen that has not passed the self-test."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from roll_like.errors import ConfigError
from roll_like.sandbox.box import Box, SandboxUnavailable
from roll_like.sandbox.bwrap import HELP
from roll_like.sandbox.selftest import SelfTestReport, run_probes

#: Names that `backend` may have.
BACKENDS = ("auto", "bwrap", "landlock", "remote:URL")

_passed: dict[tuple[str, bool], SelfTestReport] = {}


def make_box(backend: str = "auto", *, workers: int = 2, numpy: bool = False) -> Box:
    """Return a box that has not been tested; programs should go to one of `open_box`.

    Args:
        backend: "auto" is "bwrap": Python in zygotes, C++ and JavaScript each in a sandbox of its own.
            "landlock" is weaker and never chosen by itself. "remote:http://host:port" is a SandboxFusion server.
        workers: Executions at a time.
        numpy: Whether programs may import NumPy; a server's programs may import what it has.

    Raises:
        ConfigError: There is no such backend.
        SandboxUnavailable: What it needs is missing.
    """
    if backend in {"auto", "bwrap"}:
        from roll_like.sandbox.oneshot import EveryLanguageBox

        return EveryLanguageBox(workers=workers, numpy=numpy)
    if backend == "landlock":
        from roll_like.sandbox.landlock import LandlockBox

        return LandlockBox(workers=workers, numpy=numpy)
    if backend.startswith("remote:"):
        from roll_like.sandbox.remote import RemoteBox

        return RemoteBox(backend.removeprefix("remote:"), workers=workers)
    raise ConfigError(f"no sandbox backend is called {backend!r}; there are {', '.join(BACKENDS)}")


async def open_box(backend: str = "auto", *, workers: int = 2, numpy: bool = False) -> Box:
    """Return a box of a backend that has passed the self-test in this process.

    Raises:
        ConfigError: There is no such backend.
        SandboxUnavailable: It cannot be had, or a probe failed: the message says which, and what to install.
    """
    await _tested(backend, numpy)
    return make_box(backend, workers=workers, numpy=numpy)


def self_test(backend: str = "auto", *, numpy: bool = False) -> SelfTestReport:
    """Probe a backend, once in a process, and return what was found.

    Raises:
        ConfigError: There is no such backend.
        SandboxUnavailable: It cannot be had, or does not isolate; the message says why.
    """
    return _in_a_thread(_tested(backend, numpy))


def examine(backend: str = "auto") -> SelfTestReport:
    """Probe a backend and return what was found, failures included."""
    try:
        return _in_a_thread(_probed(backend, numpy=False))
    except SandboxUnavailable as error:
        return SelfTestReport(backend, (), str(error))


async def _tested(backend: str, numpy: bool) -> SelfTestReport:
    if (backend, numpy) not in _passed:
        report = await _probed(backend, numpy)
        if not report.passed:
            raise SandboxUnavailable(
                f"the sandbox {report.backend} does not isolate here:\n{report.failures()}", fix=HELP
            )
        _passed[backend, numpy] = report
    return _passed[backend, numpy]


async def _probed(backend: str, numpy: bool) -> SelfTestReport:
    box = make_box(backend, numpy=numpy)
    try:
        return await run_probes(box)
    finally:
        await box.close()


def _in_a_thread(work: Coroutine[Any, Any, SelfTestReport]) -> SelfTestReport:
    with ThreadPoolExecutor(1) as thread:  # an event loop may be running in this one
        return thread.submit(asyncio.run, work).result()
