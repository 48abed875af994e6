"""Importing large packages without looking for garbage meanwhile."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Pause Python's garbage collector, in the whole process.

    What an import makes stays, yet the collector looks through it again and again: for torch, transformers and
    DeepSpeed or vLLM that is a fifth of the seconds that they take.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
