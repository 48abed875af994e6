"""The adapter of SandboxFusion's HTTP interface, with a server of its shape in this process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from roll_like.errors import ConfigError
from roll_like.sandbox.box import CallFailed, Ended, Program, SandboxUnavailable
from roll_like.sandbox.remote import RemoteBox, report_of
from roll_like.sandbox.types import Limits

LIMITS = Limits(wall_seconds=5)


class Server(ThreadingHTTPServer):
    """Runs the (honest) programs of these tests in plain processes and answers as SandboxFusion does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.reply: bytes | None = None
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append({**request, "path": self.path})
        body = self.server.reply if self.server.reply is not None else json.dumps(run(request)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def run(request: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-I", "-S", "-c", request["code"]]
    try:
        ran = subprocess.run(
            command, input=request["stdin"], capture_output=True, text=True, timeout=request["run_timeout"], check=False
        )
    except subprocess.TimeoutExpired:
        return {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "stdout": "", "stderr": ""}}
    result = {"status": "Finished", "execution_time": 0.1, "return_code": ran.returncode}
    result |= {"stdout": ran.stdout, "stderr": ran.stderr}
    return {"status": "Failed" if ran.returncode else "Success", "compile_result": None, "run_result": result}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def box(server: Server) -> Iterator[RemoteBox]:
    box = RemoteBox(server.url + "/", workers=2)
    yield box
    box._threads.shutdown(wait=True)


async def test_a_program_runs_there(box, server):
    limits = Limits(wall_seconds=5, memory_bytes=100 << 20)
    report = await box.run(Program("print(int(input()) + 1)"), "4\n", limits)
    assert (report.ended, report.exit_code, report.stdout, report.cpu_seconds) == (Ended.EXITED, 0, b"5\n", 0.1)
    (request,) = server.requests
    assert request.pop("compile_timeout") > 0
    assert request == {
        "path": "/run_code",
        "code": "print(int(input()) + 1)",
        "language": "python",
        "stdin": "4\n",
        "run_timeout": 5,
        "memory_limit_MB": 100,
    }


@pytest.mark.parametrize(
    ("source", "ended"),
    [
        ("1 / 0", Ended.ERROR),
        ("raise SystemExit(3)", Ended.ERROR),
        ("import time; time.sleep(9)", Ended.TIMEOUT),
        ("print('x' * 2000)", Ended.OUTPUT),
        ("raise MemoryError", Ended.MEMORY),
    ],
)
async def test_how_a_program_ends(box, source: str, ended: Ended):
    report = await box.run(Program(source), "", Limits(wall_seconds=3, output_bytes=1000))
    assert report.ended is ended, report
    assert len(report.stdout) <= 1000


@pytest.mark.parametrize(
    ("reply", "ended"),
    [
        ({"status": "SandboxError", "message": "no pod"}, Ended.BROKEN),
        ({"status": "Perfect"}, Ended.BROKEN),
        ({}, Ended.BROKEN),
        ({"status": "Success"}, Ended.BROKEN),
        ({"status": "Success", "run_result": {"status": "Error", "return_code": 0}}, Ended.BROKEN),
        ({"status": "Success", "run_result": {"status": "Finished", "return_code": None}}, Ended.BROKEN),
        ({"status": "Success", "run_result": {"status": "Finished", "return_code": 0}}, Ended.EXITED),
        ({"status": "Failed", "compile_result": {"status": "Finished", "return_code": 1}}, Ended.COMPILE_ERROR),
        ({"status": "Failed", "compile_result": {"status": "TimeLimitExceeded"}}, Ended.COMPILE_ERROR),
    ],
)
def test_what_a_reply_means(reply: dict[str, Any], ended: Ended):
    assert report_of(reply, LIMITS).ended is ended


async def test_languages_have_the_servers_names(box, server):
    server.reply = json.dumps({"status": "Success", "run_result": {"status": "Finished", "return_code": 0}}).encode()
    for language in ("cpp", "javascript"):
        await box.run(Program("", language), "", LIMITS)
    assert [request["language"] for request in server.requests] == ["cpp", "nodejs"]
    with pytest.raises(SandboxUnavailable, match="no sandbox runs 'cobol'"):
        await box.run(Program("", "cobol"), "", LIMITS)


async def test_calls_are_executions_of_their_own(box, server):
    source = """
count = 0
def counted(by=1):
    global count
    count += by
    print('noise', count)
    return [count, {'é': (1,)}]
class Solution:
    def twice(self, x): return 2 * x
def fails(): raise ValueError('on purpose\\nand more')
def leaves(): raise SystemExit(0)
def exits():
    import os
    os._exit(0)
"""
    session = await box.open(Program(source), LIMITS)
    for _ in range(2):  # no state in between
        assert await session.call("counted", (), {"by": 3}) == [3, {"é": (1,)}]
    assert await session.call("Solution.twice", (4,), {}) == 8
    with pytest.raises(CallFailed, match="ValueError: on purpose\nand more"):
        await session.call("fails", (), {})
    assert (await session.close()).ended is Ended.EXITED
    with pytest.raises(CallFailed) as caught:
        await session.call("exits", (), {})
    assert caught.value.kind is Ended.ERROR
    assert (await session.close()).ended is Ended.ERROR


async def test_a_program_that_fails_at_once_cannot_be_called(box):
    for source in ("1 / 0", "raise SystemExit(0)", "def ("):
        with pytest.raises(CallFailed) as caught:
            await box.open(Program(source), LIMITS)
        assert caught.value.kind is Ended.ERROR


async def test_a_server_that_is_away_or_is_something_else(box, server):
    server.reply = b"<html>welcome</html>"
    with pytest.raises(SandboxUnavailable, match="does not speak SandboxFusion"):
        await box.run(Program("print(1)"), "", LIMITS)
    gone = RemoteBox("http://127.0.0.1:9", workers=1)
    with pytest.raises(SandboxUnavailable, match="does not answer"):
        await gone.run(Program("print(1)"), "", LIMITS)
    await gone.close()
    with pytest.raises(ConfigError, match="should begin with http"):
        RemoteBox("sandbox:8080")
