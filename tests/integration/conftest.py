"""One small Ray cluster for all integration tests of a session."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import ray

from roll_like.cluster import RaySession, ResourceManager
from roll_like.config.sections import ResourcesConfig

RESOURCES = ResourcesConfig(
    device="cpu",
    devices_per_node=2,
    device_mapping={"training": "0-1", "inference": "0-1"},
    start_timeout_seconds=60,
)


@pytest.fixture(scope="module")
def resources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ResourceManager]:
    """A started Ray with two cores, reserved."""
    assert not ray.is_initialized()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns of its own coming changes
        with RaySession(RESOURCES, tmp_path_factory.mktemp("logs")), ResourceManager(RESOURCES) as manager:
            manager.allocate()
            yield manager
