"""Keep libraries from drawing on the console, which belongs to the run's own view."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


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
