"""A hub on this machine: as much of its API as an upload uses."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_of_a_test"
ACCOUNT = "ada"


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)


class FakeHub(ThreadingHTTPServer):
    """Answers at `url`; `repositories` is what it holds."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.fail_with: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    thread = Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer(404, {"error": "Not Found"})  # no .gitignore in a repository

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.fail_with is not None:
            self._answer(self.server.fail_with, {"error": "out of order"})
        elif self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials in Authorization header"})
        elif self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            self._answer(200, {"files": [{**file, "shouldIgnore": False} for file in files]})
        else:
            self._commit(self.path.removeprefix("/api/models/").removesuffix("/commit/main"), body)

    def _create(self, wanted: dict[str, Any]) -> None:
        repo = f"{wanted.get('organization') or ACCOUNT}/{wanted['name']}"
        known = repo in self.server.repositories
        if not known:
            self.server.repositories[repo] = Repository(wanted["visibility"] == "private")
        self._answer(409 if known else 200, {"url": f"{self.server.url}/{repo}"})

    def _commit(self, repo: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                value = line["value"]
                self.server.repositories[repo].files[value["path"]] = base64.b64decode(value["content"])
        answer = {"success": True, "commitOid": "1", "commitUrl": f"{self.server.url}/{repo}/commit/1"}
        self._answer(200, answer)

    def _answer(self, status: int, value: dict[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
