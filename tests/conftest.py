"""What every test shares: an environment without network, and a tiny model."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal

# a shell that starts the tests in the background has SIGINT ignored, nohup has SIGHUP, and so would what they start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    RAY_USAGE_STATS_ENABLED="0",
    VLLM_NO_USAGE_STATS="1",
    # thousands of tiny tensors: threads would only wait for each other
    OMP_NUM_THREADS="1",
)

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.logging import catching_logs
from hypothesis import settings
from tiny_model import make_tiny_model

# a busy machine is not a wrong result
settings.register_profile("all", deadline=None)
settings.register_profile("fewer", deadline=None, max_examples=15)


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples where slow tests are left out; wait for no disk, as no test cuts the power."""
    os.fsync = lambda _: None
    settings.load_profile("fewer" if "not slow" in config.option.markexpr else "all")


def pytest_collection() -> None:
    """Pause the garbage collector: what imports make stays, and would be looked through again and again."""
    gc.disable()
    atexit.register(gc.freeze)


def pytest_collection_finish() -> None:
    """Collect garbage from now on, of what the tests themselves make; let all that is logged reach the root logger.

    Pytest would look at each of some thousand loggers six times a test, for those that do not pass on.
    """
    gc.freeze()
    gc.enable()
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    catching_logs.__enter__ = _catch_at_the_root  # type: ignore[method-assign]


def _catch_at_the_root(catching: catching_logs[Any]) -> logging.Handler:
    """Do as the method that this is in the place of, but for loggers that do not pass on: there are none."""
    root = logging.getLogger()
    root.addHandler(catching.handler)
    catching.attached_loggers.append(root)
    if catching.level is not None:
        catching.handler.setLevel(catching.level)
        catching.orig_level = root.level
        root.setLevel(min(root.level, catching.level))
    return catching.handler


@pytest.fixture
def plain_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a run draws `curves.png`, a third of a second; the summary's own tests look at it."""
    monkeypatch.setattr("roll_like.metrics.summary.draw_curves", lambda path, *_: path.write_bytes(b""))


@pytest.fixture(scope="session")
def warm_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One small Ray for all tests of a session that need one, with workers that are used again."""
    from warm_workers import warm_ray

    with warm_ray(tmp_path_factory.mktemp("logs")):
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random two-layer Llama, its tokenizer and a chat template; bfloat16."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))
