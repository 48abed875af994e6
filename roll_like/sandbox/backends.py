"""Which boxes there are, and the choice among them. Nothing is chosen that has not passed the self-test."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from roll_like.errors import ConfigError
from roll_like.sandbox.box import Box, SandboxUnavailable
from roll_like.sandbox.bwrap import HELP
from roll_like.sandbox.selftest import Report, probe

#: Names that `backend` may have.
BACKENDS = ("auto", "bwrap", "landlock", "remote:URL")

_passed: dict[str, Report] = {}


def make_box(backend: str = "auto", *, workers: int = 2) -> Box:
    """Return a box that nobody has tested yet; programs should go to one of `open_box`.

    Args:
        backend: "auto" is "bwrap": Python in zygotes, C++ and JavaScript each in a sandbox of its own.
            "landlock" is weaker and never chosen by itself. "remote:http://host:port" is a SandboxFusion server.
        workers: Executions at a time.

    Raises:
        ConfigError: There is no such backend.
        SandboxUnavailable: What it needs is missing.
    """
    if backend in {"auto", "bwrap"}:
        from roll_like.sandbox.oneshot import EveryLanguageBox

        return EveryLanguageBox(workers=workers)
    if backend == "landlock":
        from roll_like.sandbox.landlock import LandlockBox

        return LandlockBox(workers=workers)
    if backend.startswith("remote:"):
        from roll_like.sandbox.remote import RemoteBox

        return RemoteBox(backend.removeprefix("remote:"), workers=workers)
    raise ConfigError(f"no sandbox backend is called {backend!r}; there are {', '.join(BACKENDS)}")


async def open_box(backend: str = "auto", *, workers: int = 2) -> Box:
    """Return a box of a backend that has passed the self-test in this process.

    Raises:
        ConfigError: There is no such backend.
        SandboxUnavailable: It cannot be had, or a probe failed: the message says which, and what to install.
    """
    await tested(backend)
    return make_box(backend, workers=workers)


async def tested(backend: str) -> Report:
    """Return the report of a backend's self-test, which runs once in a process.

    Raises:
        ConfigError: There is no such backend.
        SandboxUnavailable: It cannot be had, or a probe failed.
    """
    if backend not in _passed:
        box = make_box(backend)
        try:
            report = await probe(box)
        finally:
            await box.close()
        if not report.passed:
            raise SandboxUnavailable(f"the sandbox {box.name} does not isolate here:\n{report.failures()}", fix=HELP)
        _passed[backend] = report
    return _passed[backend]


def self_test(backend: str = "auto") -> Report:
    """Probe a backend and return what was found.

    Raises:
        ConfigError: There is no such backend.
        SandboxUnavailable: It cannot be had, or does not isolate; the message says why.
    """
    with ThreadPoolExecutor(1) as thread:  # an event loop may be running in this one
        return thread.submit(asyncio.run, tested(backend)).result()


def examine(backend: str = "auto") -> Report:
    """Probe a backend and return what was found, failures included."""

    async def probe_it() -> Report:
        box = make_box(backend, workers=2)
        try:
            return await probe(box)
        finally:
            await box.close()

    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, probe_it()).result()
    except SandboxUnavailable as error:
        return Report(backend, (), str(error))
