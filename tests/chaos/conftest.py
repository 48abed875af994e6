"""What every test shares that breaks something."""

from __future__ import annotations

from collections.abc import Iterator

import faults
import pytest


@pytest.fixture(autouse=True)
def every_fault_comes() -> Iterator[None]:
    """Fail where a fault was asked for at a call that never came: a run that nothing has disturbed shows nothing."""
    faults.waiting.clear()
    yield
    assert not faults.waiting, "these calls were never made, so nothing broke"
