"""Programs that run in .tinker, with tinker's own client, and what tests tell them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".tinker" / "bin" / "python"
PROGRAMS = ROOT / "tests" / "tinker_client"
needs_client = pytest.mark.skipif(not PYTHON.exists(), reason="make tinker installs the client")


class ClientError(Exception):
    """What the client raised: the name of its exception, and the text."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Address:
    """A service, and a key of it."""

    url: str
    key: str

    @property
    def environment(self) -> dict[str, str]:
        own = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": self.key, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        return {**os.environ, **own}

    def run(self, program: str, *arguments: str, timeout: float = 300) -> str:
        """Run a program to its end, and return what it printed."""
        command = [str(PYTHON), str(PROGRAMS / program), *arguments]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout


@dataclass
class Console:
    """A client that does what it is told, in a process of its own."""

    process: subprocess.Popen[str]
    session: str = ""

    def do(self, verb: str, **values: Any) -> Any:
        """Return what a method of the client returned.

        Raises:
            ClientError: What it raised.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"verb": verb, **values}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the client ended"
        found = json.loads(line)
        if "error" in found:
            raise ClientError(found["error"], found["message"])
        return found["result"]


@contextmanager
def console(address: Address) -> Iterator[Console]:
    """A client with a session of its own."""
    command = [str(PYTHON), str(PROGRAMS / "console.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=address.environment, stdin=pipe, stdout=pipe, text=True) as process:
        made = Console(process)
        made.session = made._answer()
        yield made
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


def datum(tokens: list[int], **inputs: Any) -> Mapping[str, Any]:
    """A sequence whose targets are its own next tokens, unless they are given."""
    return {"tokens": tokens[:-1], "inputs": {"target_tokens": tokens[1:], **inputs}}
