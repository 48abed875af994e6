from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from config_files import (
    RecordingAgenticPipeline,
    RecordingDPOPipeline,
    RecordingPipeline,
    RecordingSFTPipeline,
)

from roll_like.registry import PIPELINES


@pytest.fixture
def recording_pipeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[RecordingPipeline]]:
    """The pipelines record what they are asked to do; Python's path is restored afterwards."""
    pipelines = {
        "rlvr": RecordingPipeline,
        "agentic": RecordingAgenticPipeline,
        "sft": RecordingSFTPipeline,
        "dpo": RecordingDPOPipeline,
    }
    monkeypatch.setattr(PIPELINES, "_plugins", pipelines)
    monkeypatch.setattr(PIPELINES, "_loaded", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    RecordingPipeline.calls.clear()
    yield RecordingPipeline
    RecordingPipeline.calls.clear()
