from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from config_files import RecordingPipeline
from own_modules import own_modules

from roll_like.cluster.progress import PROGRESS, Work
from roll_like.registry import PIPELINES


@pytest.fixture(autouse=True)
def _own_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget modules that a test wrote: the next one may write others of the same names."""
    with own_modules(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Work]]:
    """What the page of this process shows from now on: (`begin` or `tick`, phase, kind of work)."""
    seen: list[tuple[str, str, Work]] = []
    show, tick = PROGRESS._show, PROGRESS.tick

    def showing() -> None:
        show()
        if PROGRESS._active:
            work, phase = PROGRESS._active[-1]
            seen.append(("begin", phase, work))

    def ticking() -> None:
        tick()
        work, phase = PROGRESS._active[-1] if PROGRESS._active else (Work.NONE, "")
        seen.append(("tick", phase, work))

    monkeypatch.setattr(PROGRESS, "_active", [])
    monkeypatch.setattr(PROGRESS, "_show", showing)
    monkeypatch.setattr(PROGRESS, "tick", ticking)
    return seen


@pytest.fixture
def recording_pipeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[RecordingPipeline]]:
    """The pipelines record what they are asked to do; Python's path is restored afterwards."""
    for name in PIPELINES.names():
        monkeypatch.setattr(PIPELINES.get(name), "implementation", "config_files:RecordingPipeline")
    monkeypatch.setattr(sys, "path", list(sys.path))
    RecordingPipeline.calls.clear()
    yield RecordingPipeline
    RecordingPipeline.calls.clear()
