"""Imports of the references: quiet, and without what they change for the whole process."""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch.distributions import Distribution

#: What importing the references warns of; everything else stays an error.
WARNINGS = (
    ("TRL currently supports vLLM versions", UserWarning),  # it imports vLLM where it is installed
    ("You are importing from 'trl.experimental'", UserWarning),
    (r"`torch.jit.script_method` is deprecated", DeprecationWarning),
)


@contextmanager
def references() -> Iterator[None]:
    """Import references within; skips the test module where they are not installed.

    verl adds a handler to the root logger; torchrl sets the start method of multiprocessing and turns
    the argument checks of distributions off; TRL and stable-baselines3 set environment variables.
    Tests that run later in the same process see none of that.
    """
    if importlib.util.find_spec("verl") is None:
        pytest.skip("the references are not installed; run `make oracle`", allow_module_level=True)
    environment, handlers = dict(os.environ), list(logging.root.handlers)
    start, checks = multiprocessing.get_start_method(allow_none=True), Distribution._validate_args
    try:
        with warnings.catch_warnings():
            for message, category in WARNINGS:
                warnings.filterwarnings("ignore", message, category)
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        logging.root.handlers[:] = handlers
        multiprocessing.set_start_method(start, force=True)
        Distribution.set_default_validate_args(checks)
