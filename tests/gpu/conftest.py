"""Tests that only a GPU can run. `make gpu-check` runs them; without a GPU they are skipped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of libraries' GPU code fail no test."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    assert item.get_closest_marker("gpu"), f"{item.nodeid} is not marked gpu"
    if not torch.cuda.is_available():
        pytest.skip(f"needs a GPU: torch {torch.__version__} sees no CUDA device")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell `make gpu-check` what a test recorded as soon as it has ended: a later one may hang."""
    if "GPU_CHECK_RUN" in os.environ and (report.when == "call" or report.outcome != "passed"):
        told = {"test": report.nodeid.rpartition("::")[2], "outcome": report.outcome, **dict(report.user_properties)}
        if report.skipped and isinstance(report.longrepr, tuple):
            told["skipped_because"] = report.longrepr[2]
        print(f"\n{json.dumps(told, default=str)}", flush=True)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """The next test measures memory."""
    yield
    torch.cuda.empty_cache()
