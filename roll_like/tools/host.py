"""Tools for callers without an event loop: environments step synchronously, tools answer asynchronously."""

from __future__ import annotations

import asyncio
import atexit
import importlib
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack
from typing import Any

from pydantic import TypeAdapter, ValidationError

from roll_like.errors import ConfigError, EnvError, RollLikeError
from roll_like.tools.base import AnyCall, Tool, Toolbox, ToolOutcome
from roll_like.tools.calculator import calculator
from roll_like.tools.config import CalculatorConfig, FunctionConfig, McpConfig, PythonConfig, SearchConfig, ToolConfig
from roll_like.tools.functions import tool_from_function
from roll_like.tools.search import SearchIndex, read_corpus, search_tool

#: A function that still runs in a thread cannot be ended; after so long it is left to the end of the process.
_END_SECONDS = 15.0
_CONFIGS: TypeAdapter[tuple[ToolConfig, ...]] = TypeAdapter(tuple[ToolConfig, ...])


async def open_tools(configs: Sequence[ToolConfig], stack: AsyncExitStack) -> list[Tool]:
    """Return the tools that a configuration names; servers and sandboxes end with `stack`.

    Raises:
        ConfigError: A function or a tool's schema is wrong.
        DataError: A corpus cannot be read.
        EnvError: An MCP server does not start.
        SandboxError: No sandbox isolates on this machine.
    """
    tools: list[Tool] = []
    for config in configs:
        match config:
            case CalculatorConfig():
                tools.append(calculator())
            case SearchConfig():
                index = SearchIndex(await asyncio.to_thread(read_corpus, config.corpus))
                tools.append(search_tool(index, results=config.results, max_characters=config.max_characters))
            case FunctionConfig():
                tools.append(_function(config))
            case PythonConfig():
                from roll_like.tools.python_runner import python_tool

                tools.append(await stack.enter_async_context(python_tool(config)))
            case McpConfig():
                from roll_like.tools.mcp_server import McpServer

                tools += (await stack.enter_async_context(McpServer(config))).tools
    return tools


def _function(config: FunctionConfig) -> Tool:
    module, _, name = config.target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the tool {config.target!r} cannot be imported: {error}",
            fix="correct `target`: package.module:function, importable where the run is started",
        ) from error
    return tool_from_function(function, name=config.name)


class ToolHost:
    """Runs tools in a thread of its own; usable from any other thread, by any number of episodes.

    Args:
        timeout: Longest call. Seconds.
        max_characters: Longer answers are cut.

    Attributes:
        failed: True once a tool has failed by no fault of the policy's: a lost server stays lost, so take a new host.
    """

    def __init__(self, configs: Sequence[ToolConfig], *, timeout: float = 30.0, max_characters: int = 4000) -> None:
        self._configs = tuple(configs)
        self._timeout = timeout
        self._max_characters = max_characters
        self._lock = threading.Lock()
        self._ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, Toolbox]] = Future()
        self._thread: threading.Thread | None = None
        self.failed = False

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return self._ready.result()[2].schemas

    def start(self) -> None:
        """Start servers and sandboxes, or wait until they are there; may be called again.

        Raises:
            ConfigError, DataError, EnvError, SandboxError: As `open_tools`.
        """
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="tools", daemon=True)
                self._thread.start()
        self._ready.result()

    def run(self, calls: Sequence[AnyCall]) -> list[ToolOutcome]:
        """Carry out calls, one after the other.

        Raises:
            EnvError: A tool failed, or the host is closed.
        """
        loop, _, toolbox = self._ready.result()

        async def run() -> list[ToolOutcome]:
            return [await toolbox.run(call) for call in calls]

        running = run()
        try:
            future = asyncio.run_coroutine_threadsafe(running, loop)
        except RuntimeError as error:  # its loop is closed
            running.close()
            raise EnvError("the tools have been closed; no call can be carried out") from error
        try:
            # every call has a limit of its own; the rest is for a host that is closed meanwhile
            return future.result(timeout=len(calls) * self._timeout + 10)
        except (CancelledError, TimeoutError) as error:
            self.failed = True
            raise EnvError("the tools were closed during a call") from error
        except RollLikeError:
            self.failed = True
            raise

    def close(self) -> None:
        """End servers and sandboxes; a second call does nothing."""
        thread = self._thread
        if thread is None or not thread.is_alive() or self._ready.exception() is not None:
            return
        loop, stop, _ = self._ready.result()
        loop.call_soon_threadsafe(stop.set)
        thread.join(_END_SECONDS)

    def _serve(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _main(self) -> None:
        # servers are entered and left by this one task, as their connections demand
        async with AsyncExitStack() as stack:
            tools = await open_tools(self._configs, stack)
            toolbox = Toolbox(tools, timeout=self._timeout, max_characters=self._max_characters)
            stop = asyncio.Event()
            self._ready.set_result((asyncio.get_running_loop(), stop, toolbox))
            await stop.wait()


class SharedTools:
    """Hosts that environments of one process share: a thousand episodes need one search index and one server.

    A host stays, in case that another environment comes, until `close` or the end of the process. One that
    has failed ends when the last environment has given it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hosts: dict[str, ToolHost] = {}
        self._users: dict[ToolHost, int] = {}
        atexit.register(self.close)

    def take(self, configs: Sequence[ToolConfig], *, timeout: float = 30.0, max_characters: int = 4000) -> ToolHost:
        """Return a started host of these tools, a new one where the last has failed.

        Raises:
            ConfigError, DataError, EnvError, SandboxError: As `open_tools`.
        """
        key = f"{timeout} {max_characters} {_CONFIGS.dump_json(tuple(configs)).decode()}"
        with self._lock:
            host = self._hosts.get(key)
            if host is None or host.failed:
                self._hosts[key] = host = ToolHost(configs, timeout=timeout, max_characters=max_characters)
            self._users[host] = self._users.get(host, 0) + 1
        try:
            host.start()
        except RollLikeError:
            with self._lock:
                self._forget(host)
            raise
        return host

    def give_back(self, host: ToolHost) -> None:
        """Say that an environment needs the host no more."""
        with self._lock:
            if host not in self._users:
                return
            self._users[host] -= 1
            if self._users[host] or not host.failed:
                return
            self._forget(host)
        host.close()

    def close(self) -> None:
        """End every host."""
        with self._lock:
            hosts = list(self._users)
            for host in hosts:
                self._forget(host)
        for host in hosts:
            host.close()

    def _forget(self, host: ToolHost) -> None:
        self._users.pop(host, None)
        for key in [key for key, known in self._hosts.items() if known is host]:
            del self._hosts[key]


def read_tool_configs(entries: Sequence[Any], key: str = "tools") -> tuple[ToolConfig, ...]:
    """Return the configuration of tools as YAML gives it: `[{type: calculator}, …]`, or names alone.

    Raises:
        ConfigError: An entry is wrong; names its place under `key`.
    """
    given = [{"type": entry} if isinstance(entry, str) else entry for entry in entries]
    try:
        return _CONFIGS.validate_python(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
        raise ConfigError(f"{key}{place}: {first['msg']}", fix=f"correct {key}; see docs/tools.md") from error
