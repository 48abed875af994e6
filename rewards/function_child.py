"""The process that calls a reward function of another library. Run as a script by `rewards.child_pool`.

Its argument is the file descriptor of a pipe. It reads its parent's `sys.path`, the path and the name of the function,
its interface, and further named arguments. It writes None once, when it is ready, or a `PluginError` where there is no
such function. It reads lists of completions, and answers with an outcome for each. It ends when the pipe is closed, and
when its parent is gone.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from roll_like import Completion, Outcome
from roll_like.builtin.rewards.interfaces import INTERFACES, Interface
from roll_like.config.load import search_working_directory
from roll_like.errors import FOREIGN_ERRORS, PluginError, RewardError, describe_error


def load_function(path: str, name: str) -> Callable[..., Any]:
    """Return a function of a file or a module; of a class, an instance. The working directory joins `sys.path`.

    Raises:
        PluginError: There is none.
    """
    search_working_directory()
    try:
        module = _from_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
        found = getattr(module, name)
        function = found() if isinstance(found, type) else found
    except FOREIGN_ERRORS as error:
        raise PluginError(
            f"{name!r} of {path} cannot be imported: {describe_error(error)}",
            fix="correct `path` (a Python file, or the name of a module) and `function`",
        ) from error
    if not callable(function):
        raise PluginError(f"{name!r} of {path} is no function: {function!r}", fix="correct `function`")
    return function  # type: ignore[no-any-return]


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"roll_like_function_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    return module


async def outcomes(interface: Interface, completions: Sequence[Completion]) -> list[Outcome]:
    """Return an outcome for each completion; an error where the function raised, or returned something else."""
    groups = [completions] if interface.whole_groups and completions else [[each] for each in completions]
    scored = await asyncio.gather(*(_score(interface, group) for group in groups))
    return [outcome for group in scored for outcome in group]


async def _score(interface: Interface, completions: Sequence[Completion]) -> Sequence[Outcome]:
    try:
        call = interface.call(completions)
        returned = interface.function(*call.arguments, **call.keywords)
        if inspect.isawaitable(returned):
            returned = await returned
        return call.read(returned)
    except FOREIGN_ERRORS as error:  # its samples become Failures
        known = isinstance(error, RewardError)
        return [RewardError(str(error) if known else describe_error(error))] * len(completions)


def call_function(connection: Connection, interface: Interface) -> None:
    """Answer requests until the other side closes the pipe."""
    # the pool decides when to stop; a terminal's Ctrl-C reaches the whole process group
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    connection.send(None)
    # one loop for all calls: sessions of HTTP clients belong to the loop that made them
    with asyncio.Runner() as runner:
        while True:
            try:
                completions = connection.recv()
            except EOFError:
                return
            connection.send(runner.run(outcomes(interface, completions)))


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    pipe = Connection(int(sys.argv[1]))
    sys.path[:], path, name, interface, arguments = pipe.recv()
    try:
        function = load_function(path, name)
    except PluginError as error:
        pipe.send(error)
        sys.exit(1)
    call_function(pipe, INTERFACES[interface](function, arguments))
