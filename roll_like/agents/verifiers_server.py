"""Plays episodes of one verifiers environment for a run, in a process of its own.

The run starts this file with the interpreter that has verifiers, whose dependencies the run's own environment does not
share; so it needs verifiers and the standard library only. Both sides write one JSON object a line to a socket, whose
descriptor is the file's only argument. The environment may print what it likes.

    {"id": 1, "do": "open", "config": {…}, "seats": {…}, "serve": true}
    {"id": 2, "do": "count", "select": {…}}
    {"id": 2, "do": "tasks", "select": {…}, "first": 0, "count": 8}
    {"id": 3, "do": "play", "select": {…}, "position": 5, "base_url": …, "model": …, "sampling": {…}}
    {"id": 4, "do": "cancel", "play": 3}
    {"id": 5, "do": "ping"}

Each is answered by `{"id": …, "result": {…}}` or `{"id": …, "error": {"type": …, "message": …, "problems": […]}}`.
Before an agent of an episode asks the model for the first time, its trace is announced: `{"id": 3, "trace": …, "agent":
…}`. Its requests to the model have the trace's id in `X-Session-ID`, and the key in the variable
`ROLL_LIKE_VERIFIERS_KEY` in `Authorization`. When the socket is closed, the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import itertools
import json
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

#: The version of verifiers that this was tested with.
TESTED = "0.4.0"
#: The variable of the key that requests to the model are sent with.
KEY_VARIABLE = "ROLL_LIKE_VERIFIERS_KEY"
#: Most characters of a message, a prompt or a traceback that are sent.
MOST_CHARACTERS = 4000
#: Longest line. Bytes.
MOST_BYTES = 64 * 2**20


class WrongVersion(ImportError):
    """There is no verifiers, or one of another interface."""


class ReadOnce(Iterable[Any]):
    """What an iterable yields, for several readers, one thread at a time; each item is made once.

    >>> numbers = ReadOnce(print("made") or iter([1, 2, 3]))
    made
    >>> list(numbers), list(numbers)
    ([1, 2, 3], [1, 2, 3])
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = iter(source)
        self._made: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        for place in itertools.count():
            if place == len(self._made):
                try:
                    self._made.append(next(self._source))
                except StopIteration:
                    return
            yield self._made[place]


class Server:
    """One environment and the episodes that are played in it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._stack = contextlib.AsyncExitStack()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._views: dict[str, ReadOnce] = {}
        self._reading = asyncio.Lock()
        self._env: Any = None

    async def run(self) -> None:
        """Answer requests until the socket is closed."""
        async with self._stack:
            try:
                while line := await self._reader.readline():
                    request = json.loads(line)
                    task = asyncio.ensure_future(self._answer(request))
                    self._running[request["id"]] = task
                    task.add_done_callback(partial(self._finished, request["id"]))
            finally:
                running = list(self._running.values())
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    def _finished(self, number: int, task: asyncio.Task[None]) -> None:
        del task
        self._running.pop(number, None)

    async def _answer(self, request: dict[str, Any]) -> None:
        number = request["id"]
        try:
            result = await getattr(self, f"_{request['do']}")(request)
        except asyncio.CancelledError:
            self._send({"id": number, "error": {"type": "Cancelled", "message": "the episode was cancelled"}})
            raise
        except BaseException as error:  # noqa: BLE001 - a plugin that exits must not end the episodes of others
            self._send({"id": number, "error": error_as_data(error)})
        else:
            self._send({"id": number, "result": result})

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message, default=str).encode() + b"\n")

    async def _ping(self, request: dict[str, Any]) -> dict[str, Any]:
        del request
        return {}

    async def _open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make the environment and the servers that its episodes share."""
        try:
            import verifiers
            from verifiers.v1.configs.agent import agent_config_fields
            from verifiers.v1.runtimes import subprocess
            from verifiers.v1.utils.loaders import load_environment, resolve_env_config
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "verifiers":
                raise  # a package that it needs
            raise WrongVersion(
                f"{sys.executable} has {_installed()}; this was tested with verifiers {TESTED}: install that there, or "
                "name another interpreter"
            ) from error

        # where episodes work: in the server's temporary folder, which goes with a server that is killed
        subprocess.CACHE_DIR = Path(tempfile.gettempdir())
        sections = await asyncio.to_thread(with_seats, request["config"], request["seats"])
        config = await asyncio.to_thread(resolve_env_config, sections)
        self._env = await asyncio.to_thread(load_environment, config)
        loaded = ReadOnce(_called_once(self._env.taskset.load))
        self._env.taskset.load = lambda: loaded  # every selection reads the same tasks
        if request["serve"]:
            await self._stack.enter_async_context(self._env.serving())
        agents, harnesses = agent_config_fields(config), config.agent_harnesses()
        return {
            "verifiers": verifiers.__version__,
            "id": config.env_id,
            "bounded": self._env.taskset.bounded,
            "agents": {name: _about(spec, harnesses[name], self._env) for name, spec in agents.items()},
        }

    async def _tasks(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what is known of some tasks of a selection."""
        first, last = request["first"], request["first"] + request["count"]
        tasks = await self._selected(request["select"], first, last)
        return {
            "tasks": [
                {
                    "key": task.with_data(idx=None).hash,  # the same for a task that is there twice
                    "name": task.data.name,
                    "prompt": task.data.prompt_text[:MOST_CHARACTERS],
                }
                for task in tasks
            ],
        }

    async def _count(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return how many tasks a selection has; null where it has no end."""
        from verifiers.v1.configs.select import SelectConfig

        if not self._env.taskset.select(SelectConfig.model_validate(request["select"])).bounded:
            return {"count": None}
        return {"count": len(await self._selected(request["select"], 0, None))}

    async def _selected(self, select: dict[str, Any], first: int, last: int | None) -> list[Any]:
        """Return the tasks of a selection from a place to another or to its end, fewer where it has no more."""
        from verifiers.v1.configs.select import SelectConfig

        key = json.dumps(select, sort_keys=True)
        async with self._reading:
            if key not in self._views:
                self._views[key] = ReadOnce(self._env.taskset.select(SelectConfig.model_validate(select)))
            return await asyncio.to_thread(lambda: list(itertools.islice(self._views[key], first, last)))

    async def _play(self, request: dict[str, Any]) -> dict[str, Any]:
        """Play one episode and return what became of it."""
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig
        from verifiers.v1.types import SamplingConfig

        number, position = request["id"], request["position"]
        tasks = await self._selected(request["select"], position, position + 1)
        if not tasks:
            raise IndexError(f"the selection has no task number {position}")
        context = ModelContext(
            model=request["model"],
            client=EvalClientConfig(base_url=request["base_url"], api_key_var=KEY_VARIABLE),
            sampling=SamplingConfig.model_validate(request["sampling"]),
        )
        (slot,) = self._env.slots(tasks[0])
        episode = await self._env.run_slot(
            slot,
            context,
            on_trace=lambda trace: self._send({"id": number, "trace": trace.id, "agent": trace.agent.name}),
        )
        return {
            "ok": episode.ok,
            "timeout": episode.is_timeout,
            "errors": [_error(error) for error in episode.errors],
            "traces": [_outcome(trace) for trace in episode.traces],
        }

    async def _cancel(self, request: dict[str, Any]) -> dict[str, Any]:
        """Stop an episode, and come back when nothing of it runs."""
        task = self._running.get(request["play"])
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        return {}


def with_seats(sections: dict[str, Any], seats: dict[str, Any]) -> dict[str, Any]:
    """Return an environment's configuration in which every agent has a harness and a runtime.

    Args:
        sections: verifiers' `env` section.
        seats: What agents get for which neither it nor the environment says anything.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type

    kind = env_config_type(sections["taskset"].get("id", ""), sections.get("id") or "")
    filled = dict(sections)
    for name, field in kind.model_fields.items():
        if isinstance(field.default, AgentConfig):
            stated = field.default.model_fields_set
            missing = {key: value for key, value in seats.items() if key not in stated}
            filled[name] = {**missing, **(filled.get(name) or {})}
    return filled


def _installed() -> str:
    """Return which verifiers there is, in words."""
    try:
        return f"verifiers {importlib.metadata.version('verifiers')}"
    except importlib.metadata.PackageNotFoundError:
        return "no verifiers"


def _called_once(load: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Yield what a taskset loads, when the first task is asked for."""
    yield from load()


def _about(spec: Any, harness: Any, env: Any) -> dict[str, Any]:
    """Return of an agent's configuration what decides where it plays."""
    from verifiers.v1.utils.loaders import harness_class

    kind = harness_class(harness.id)
    return {
        "harness": harness.id,
        "runtime": spec.runtime.type,
        "needs_container": kind.NEEDS_CONTAINER or type(env.taskset).task_type().NEEDS_CONTAINER,
    }


def _outcome(trace: Any) -> dict[str, Any]:
    """Return what a finished trace says, without its messages."""
    return {
        "id": trace.id,
        "agent": trace.agent.name,
        "trainable": trace.agent.trainable,
        "ok": trace.ok,
        "reward": trace.reward,
        "rewards": {name: None if one is None else one.value for name, one in trace.rewards.items()},
        "metrics": trace.metrics,
        "stop": trace.stop_condition,
        "truncated": trace.is_truncated,
        "timeout": trace.is_timeout,
        "errors": [_error(error) for error in trace.errors],
        "calls": len(trace.calls),
        # what a server of NeMo Gym says where its reward is no measure of the policy
        "unmeasured": (trace.info.get("nemo_gym") or {}).get("failure_reason"),
    }


def _error(error: Any) -> dict[str, Any]:
    return {"type": error.type, "message": error.message[:MOST_CHARACTERS]}


def error_as_data(error: BaseException) -> dict[str, Any]:
    """Return an exception as data; `problems` are those of a validation, with the keys that they speak of."""
    problems: list[dict[str, Any]] = []
    if type(error).__name__ == "ValidationError" and type(error).__module__.startswith("pydantic"):
        listed: Any = error  # pydantic is not imported: what is told may be that nothing can be
        problems = [{"key": list(each["loc"]), "message": each["msg"]} for each in listed.errors()]
    return {
        "type": type(error).__name__,
        "message": str(error)[:MOST_CHARACTERS],
        "problems": problems,
        "traceback": "".join(traceback.format_exception(error))[-MOST_CHARACTERS:],
    }


async def serve_run(descriptor: int) -> None:
    """Serve one run over an inherited socket."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor), limit=MOST_BYTES)
    try:
        await Server(reader, writer).run()
    finally:
        writer.close()


if __name__ == "__main__":
    sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "verifiers_harnesses"))
    os.set_inheritable(int(sys.argv[1]), False)
    asyncio.run(serve_run(int(sys.argv[1])))
