"""Tests that only a GPU can run. `make gpu-check` runs them; without a GPU they are skipped."""

from __future__ import annotations

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


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """The next test measures memory."""
    yield
    torch.cuda.empty_cache()
