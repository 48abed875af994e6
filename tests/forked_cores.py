"""vLLM's engine processes for engines in the tests' own process, forked from one that has imported vLLM.

That import takes eleven seconds of a core, and each engine would pay for it again. Engines in actors of Ray, as runs
have them, start as ever.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing.reduction import DupFd
from typing import Any

import pytest

from roll_like.inference.vllm.engine import VLLMEngine

#: What an engine's process imports.
MODULES = [
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
]


class ForkedCores:
    """As much of a context of `multiprocessing` as vLLM asks for where it starts an engine's process."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(MODULES)

    def Process(self, *, target: Callable[..., None], name: str, kwargs: Mapping[str, Any]) -> Any:
        """Return a process that also gets the variables and outputs of this one as they are then."""
        return self._context.Process(target=_run, name=name, args=(Here(), target, dict(kwargs)))


class Here:
    """Variables, standard output and error of a process; where it is unpickled they become those of another one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _become, (dict(os.environ), DupFd(1), DupFd(2))


def _become(environment: Mapping[str, str], output: Any, error: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, received in ((1, output), (2, error)):
        os.dup2(descriptor := received.detach(), number)
        os.close(descriptor)


def _run(_: None, target: Callable[..., None], keywords: Mapping[str, Any]) -> None:
    target(**keywords)


@cache
def _cores() -> ForkedCores:
    return ForkedCores()


def fork_core_of(engine: VLLMEngine) -> None:
    """Let an engine of this process start its own so. Its class stays as it is: actors of Ray are made of it."""
    build = engine._build

    async def build_so(arguments: dict[str, Any]) -> None:
        from vllm.v1.engine import utils

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(utils, "get_mp_context", _cores)
            await build(arguments)

    engine._build = build_so  # type: ignore[method-assign]
