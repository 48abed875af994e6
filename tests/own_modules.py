"""What a test imports from files that it wrote is its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path


@contextmanager
def own_modules(folder: Path) -> Iterator[None]:
    """Forget the modules in a folder that are imported meanwhile, and restore Python's path."""
    # there are twelve thousand modules, and as many tests: the newest come last, unless others were removed
    path, newest, count = list(sys.path), next(reversed(sys.modules)), len(sys.modules)
    yield
    sys.path[:] = path
    added = list(takewhile(lambda name: name != newest, reversed(sys.modules)))
    for name in added if len(added) == len(sys.modules) - count else list(sys.modules):
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
            del sys.modules[name]
