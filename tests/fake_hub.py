"""A hub on this machine: as much of its API as an upload of a model and a download of a dataset use."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_of_a_test"
ACCOUNT = "ada"


#: The one revision of every dataset, beside its branch `main`.
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    gated: bool = False


class FakeHub(ThreadingHTTPServer):
    """Answers at `url`; `repositories` is what it holds of models, `datasets` of datasets."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.datasets: dict[str, Repository] = {}
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
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(match[1], match[2], match[3])
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self._info(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", path):
            self._tree(match[1], match[2], match[3] or "")
        else:
            self._answer(404, {"error": "Not Found"})  # no .gitignore in a repository

    do_HEAD = do_GET

    def _dataset(self, name: str, revision: str) -> Repository | None:
        """Return a dataset that may be read; else answer as the hub does."""
        found = self.server.datasets.get(name)
        if found is None:
            self._answer(401, {"error": "Invalid username or password."}, "RepoNotFound")
        elif found.gated:
            self._answer(403, {"error": f"Access to dataset {name} is restricted."}, "GatedRepo")
        elif revision not in ("main", COMMIT):
            self._answer(404, {"error": f"Invalid rev id: {revision}"}, "RevisionNotFound")
        else:
            return found
        return None

    def _file(self, name: str, revision: str, file: str) -> None:
        dataset = self._dataset(name, revision)
        if dataset is None:
            return
        if file not in dataset.files:
            self._answer(404, {"error": "Entry not found"}, "EntryNotFound")
            return
        content = dataset.files[file]
        begin, end = 0, len(content) - 1
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, end = int(asked[1]), min(int(asked[2] or end), end)
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(end + 1 - begin))
        self.send_header("Content-Range", f"bytes {begin}-{end}/{len(content)}")
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[begin : end + 1])

    def _info(self, name: str, revision: str) -> None:
        if (dataset := self._dataset(name, revision)) is not None:
            files = [{"rfilename": file} for file in dataset.files]
            self._answer(200, {"id": name, "sha": COMMIT, "siblings": files, "private": False, "tags": []})

    def _tree(self, name: str, revision: str, folder: str) -> None:
        dataset = self._dataset(name, revision)
        if dataset is None:
            return
        recursive = "recursive=true" in self.path.lower()
        begin = f"{folder}/" if folder else ""
        files = {file for file in dataset.files if file.startswith(begin)}
        folders = {
            "/".join(file.split("/")[:depth])
            for file in files
            for depth in range(begin.count("/") + 1, file.count("/") + 1)
        }
        found = [entry for entry in sorted(files | folders) if recursive or "/" not in entry.removeprefix(begin)]
        if found or not folder:
            self._answer(200, [_entry(dataset, each) for each in found])
        else:
            self._answer(404, {"error": "Entry not found"}, "EntryNotFound")

    def _paths(self, name: str, revision: str, body: bytes) -> None:
        dataset = self._dataset(name, revision)
        if dataset is None:
            return
        form = self.headers.get("Content-Type", "").startswith("application/x-www-form-urlencoded")
        asked = parse_qs(body.decode())["paths"] if form else json.loads(body)["paths"]
        known = [path for path in asked if any(f"{file}/".startswith(f"{path}/") for file in dataset.files)]
        self._answer(200, [_entry(dataset, path) for path in known])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.fail_with is not None:
            self._answer(self.server.fail_with, {"error": "out of order"})
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/paths-info/([^/]+)", unquote(self.path)):
            self._paths(match[1], match[2], body)
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

    def _answer(self, status: int, value: Any, code: str | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", value["error"])
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entry(dataset: Repository, path: str) -> dict[str, Any]:
    if path not in dataset.files:
        return {"type": "directory", "path": path, "oid": "0", "size": 0}
    content = dataset.files[path]
    return {"type": "file", "path": path, "oid": hashlib.sha1(content).hexdigest(), "size": len(content)}
