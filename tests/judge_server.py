"""A server on loopback that speaks as much of the OpenAI chat API as a judge needs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = str | int | float
"""Text of the answer; an int is an HTTP status instead; a float is a wait in seconds before an empty answer."""


@dataclass
class JudgeServer:
    """What arrived, and what to say."""

    url: str = ""
    answer: Callable[[dict[str, Any]], Reply] = lambda body: '{"reasoning": "", "score": 10}'
    finish_reason: str = "stop"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    """Serve until the end of the block."""
    judge = JudgeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with judge.lock:
                judge.bodies.append(body)
                judge.headers.append(dict(self.headers))
                judge.running += 1
                judge.most = max(judge.most, judge.running)
            try:
                said = judge.answer(body)
            finally:
                with judge.lock:  # before the answer is sent: the client's next request may come right after it
                    judge.running -= 1
            self.reply(said)

        def reply(self, said: Reply) -> None:
            if isinstance(said, float):
                time.sleep(said)
                said = ""
            status, text = (said, "no") if isinstance(said, int) else (200, self.completion(said))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            try:
                self.wfile.write(text.encode())
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the other side gave up

        @staticmethod
        def completion(text: str) -> str:
            message = {"role": "assistant", "content": text}
            return json.dumps({"choices": [{"message": message, "finish_reason": judge.finish_reason}]})

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # with 5, a burst of connections waits a second for its second attempt

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    judge.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
