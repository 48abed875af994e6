"""Tools against what they talk to: a real MCP server, over stdio and over HTTP, and the sandbox."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from forked_python import forked_python
from hygiene import ended

from roll_like.builtin.envs.tools import SHARED
from roll_like.cluster.address import free_port
from roll_like.envs import make_env, tools_of
from roll_like.errors import ConfigError, EnvError
from roll_like.sandbox import SandboxUnavailable
from roll_like.tools import SharedTools, Toolbox, ToolCall, ToolError
from roll_like.tools.config import McpConfig, PythonConfig
from roll_like.tools.mcp_server import McpServer
from roll_like.tools.python_runner import python_tool

SERVER = Path(__file__).resolve().parents[1] / "mcp_demo_server.py"
TOOLS = ["add", "divide", "variable", "sleep", "leave"]
#: What servers are started with.
PYTHON = {"python": sys.executable}


@pytest.fixture(scope="module", autouse=True)
def _python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers are forked from one process that has imported what they import."""
    modules = ["mcp.server", "mcp.server.stdio", "mcp.server.streamable_http_manager", "uvicorn"]
    with (
        forked_python(Path(sys.executable), modules, tmp_path_factory.mktemp("python")) as program,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setitem(PYTHON, "python", str(program))
        yield


def stdio(*args: str, **changes: object) -> McpConfig:
    words = args or ("stdio",)
    return McpConfig.model_validate(
        {"name": "demo", "command": PYTHON["python"], "args": [str(SERVER), *words], **changes}
    )


@pytest.fixture(autouse=True)
async def _servers_are_reaped() -> AsyncIterator[None]:
    """Wait for servers that mcp gave up waiting for: on a busy machine, one that was killed may take seconds to end."""
    yield
    until = time.monotonic() + 60
    while any(thread.name.startswith("asyncio-waitpid") for thread in threading.enumerate()):
        assert time.monotonic() < until, "a server is not ended"
        await asyncio.sleep(0.02)
    await asyncio.sleep(0)  # the loop takes the exit code
    with warnings.catch_warnings():
        # that of a server whose loop was closed meanwhile is taken by nobody: subprocess then takes it to be running
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@contextmanager
def http_server() -> Iterator[str]:
    port = free_port("127.0.0.1")
    process = subprocess.Popen(
        [PYTHON["python"], str(SERVER), "http", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < until, "the server does not listen"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.wait(timeout=20)


async def check(config: McpConfig) -> None:
    async with McpServer(config) as server:
        assert [tool.name for tool in server.tools] == TOOLS
        tools = {tool.name: tool for tool in server.tools}
        assert tools["add"].description.startswith("Add two numbers.")
        assert tools["add"].schema["function"]["parameters"]["required"] == ["a", "b"]
        assert await tools["add"].call(a=2, b=40) == "42"
        with pytest.raises(ToolError, match="b should not be 0"):
            await tools["divide"].call(a=1, b=0)
        box = Toolbox(server.tools)
        assert (await box.run(ToolCall("add", {"a": 2, "b": "x"}))).failed
        assert (await box.run(ToolCall("divide", {"a": 1, "b": 4}))).text == "0.25"


async def test_tools_of_a_server_over_stdio() -> None:
    await check(stdio())


async def test_tools_of_a_server_over_http() -> None:
    with http_server() as url:
        await check(McpConfig(name="demo", url=url))


async def test_what_is_configured_reaches_the_server() -> None:
    config = stdio(env={"DEMO": "yes"}, tools=["variable"], prefix="demo_")
    async with McpServer(config) as server:
        assert [tool.name for tool in server.tools] == ["demo_variable"]
        assert await server.tools[0].call(name="DEMO") == "yes"


async def test_a_server_that_does_not_start_is_named_with_its_standard_error() -> None:
    with pytest.raises(EnvError, match=r"'demo' did not start.*\n.*cannot open /etc/demo.conf: no such file"):
        async with McpServer(stdio("broken")):
            pass
    with pytest.raises(EnvError, match=r"'demo' did not start.*no-such-program"):
        async with McpServer(McpConfig(name="demo", command="no-such-program")):
            pass


async def test_a_server_that_does_not_answer_is_given_up_and_ended() -> None:
    began = time.monotonic()
    with pytest.raises(EnvError, match="'demo' did not answer within 1 s"):
        async with McpServer(stdio("silent", start_seconds=1)):
            pass
    assert time.monotonic() - began < 50
    assert ended(*silent_servers())


def silent_servers() -> Iterator[int]:
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "silent" in child.cmdline():
                yield child.pid


async def test_a_server_that_is_not_there_is_named_with_its_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/mcp"
    with pytest.raises(EnvError, match=f"'demo' cannot be reached at {url}"):
        async with McpServer(McpConfig(name="demo", url=url)):
            pass


async def test_a_server_that_is_lost_is_no_fault_of_the_policy() -> None:
    async with McpServer(stdio()) as server:
        with pytest.raises(EnvError, match=r"'demo' failed in 'leave'.*\n.*leaving on request"):
            await server.call("leave", {})
        with pytest.raises(EnvError, match="'demo' failed in 'add'"):
            await server.call("add", {"a": 1, "b": 2})


async def test_a_call_that_takes_too_long_is_no_fault_of_the_policy() -> None:
    slow = stdio(call_seconds=1)
    # to start takes longer than that, and may
    command = f"sleep 1.5; exec {slow.command} {' '.join(slow.args)}"
    slow = slow.model_copy(update={"command": "sh", "args": ("-c", command)})
    async with McpServer(slow) as server:
        with pytest.raises(EnvError, match="'demo' failed in 'sleep'"):
            await server.call("sleep", {"seconds": 30})


async def test_a_tool_that_the_server_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no tool 'subtract'; it has: add, divide"):
        async with McpServer(stdio(tools=["subtract"])):
            pass


@pytest.mark.parametrize("given", [{}, {"command": "x", "url": "http://x"}])
def test_a_server_has_a_command_or_an_address(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="either a `command` or a `url`"):
        McpConfig.model_validate({"name": "demo", **given})


def test_a_lost_server_is_started_again_for_the_next_episode() -> None:
    shared = SharedTools()
    first = shared.take([stdio()])
    second = shared.take([stdio()])
    try:
        assert first is second
        with pytest.raises(EnvError, match="'demo' failed in 'leave'"):
            first.run([ToolCall("leave", {})])
        third = shared.take([stdio()])
        assert third is not first
        assert [each.text for each in third.run([ToolCall("add", {"a": 1, "b": 2})])] == ["3"]
        shared.give_back(first)
        shared.give_back(second)
        with pytest.raises(EnvError, match="closed"):
            first.run([ToolCall("add", {"a": 1, "b": 2})])
    finally:
        shared.close()


def test_an_environment_is_played_with_the_tools_of_a_server(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "What is 2 + 40?", "answer": "42"}')
    try:
        env = make_env("roll_like/Tools-v0", path=str(tasks), tools=[stdio(tools=["add", "leave"]).model_dump()])
        assert [tool["function"]["name"] for tool in tools_of(env)] == ["add", "leave"]
        env.reset(seed=0)
        observation, *_ = env.step('<tool_call>{"name": "add", "arguments": {"a": 2, "b": 40}}</tool_call>')
        assert observation == "42"
        with pytest.raises(EnvError, match="leaving on request"):
            env.step('<tool_call>{"name": "leave", "arguments": {}}</tool_call>')
        env.reset(seed=0)
        env.step('<tool_call>{"name": "add", "arguments": {"a": 2, "b": 40}}</tool_call>')
        assert env.step("<answer>42</answer>")[4]["success"]
        env.close()
    finally:
        SHARED.close()


@pytest.mark.parametrize(
    ("code", "text", "failed"),
    [
        ("x = 3\nprint('a')\nx ** 2  # squared", "a\n9", False),
        ("def f():\n    return 1 / 0\n\nf()", "ZeroDivisionError: division by zero", True),
        ("def f(:", "SyntaxError: invalid syntax", True),
        ("import sys; sys.exit(3)", "exit status 3", True),
        ("open('/etc/passwd', 'w')", "Error", True),
    ],
)
async def test_programs_run_in_the_sandbox(code: str, text: str, failed: bool) -> None:
    try:
        async with python_tool(PythonConfig()) as tool:
            outcome = await Toolbox([tool]).run(ToolCall("python", {"code": code}))
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox isolates on this machine: {error.message}")
    assert outcome.failed is failed
    assert text in outcome.text
    assert "_run" not in outcome.text, "a traceback shows the policy's own program alone"
