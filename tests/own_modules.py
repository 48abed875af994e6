"""What a test imports from files that it wrote is its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def own_modules(folder: Path) -> Iterator[None]:
    """Forget the modules in a folder that are imported meanwhile, and restore Python's path."""
    path, before = list(sys.path), list(sys.modules)
    yield
    sys.path[:] = path
    now = list(sys.modules)
    # the newest come last, unless others were removed; there are twelve thousand, and as many tests
    added = now[len(before) :] if now[: len(before)] == before else set(now) - set(before)
    for name in added:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
            del sys.modules[name]
