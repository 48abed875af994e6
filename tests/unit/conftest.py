from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from config_files import RecordingPipeline

from roll_like.registry import PIPELINES


@pytest.fixture
def recording_pipeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[RecordingPipeline]]:
    """The pipelines record what they are asked to do; Python's path is restored afterwards."""
    for name in PIPELINES.names():
        monkeypatch.setattr(PIPELINES.get(name), "implementation", "config_files:RecordingPipeline")
    monkeypatch.setattr(sys, "path", list(sys.path))
    RecordingPipeline.calls.clear()
    yield RecordingPipeline
    RecordingPipeline.calls.clear()
