"""Large libraries: imported without looking for garbage meanwhile, and kept from drawing on the run's console."""

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


@contextlib.contextmanager
def quiet(*, warnings: bool = True) -> Iterator[None]:
    """Keep transformers from drawing progress bars, and from logging warnings with `warnings=False`."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    if not warnings:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()
        logging.set_verbosity(verbosity)
