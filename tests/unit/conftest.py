from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from config_files import (
    RecordingAgenticPipeline,
    RecordingDistillPipeline,
    RecordingDPOPipeline,
    RecordingOnPolicyDistillPipeline,
    RecordingPipeline,
    RecordingRewardModelPipeline,
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
        "distill": RecordingDistillPipeline,
        "on_policy_distill": RecordingOnPolicyDistillPipeline,
        "reward_model": RecordingRewardModelPipeline,
    }
    monkeypatch.setattr(PIPELINES, "_plugins", pipelines)
    monkeypatch.setattr(PIPELINES, "_loaded", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    RecordingPipeline.calls.clear()
    yield RecordingPipeline
    RecordingPipeline.calls.clear()
