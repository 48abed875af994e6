"""vLLM's OpenAI-compatible server in a process of its own: the judge model that rewards send requests to.

The policy's engine is not used for this: it takes new weights, sleeps and is aborted. A judge's weights
do not change in a run, so vLLM's own server is enough.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any

from roll_like.cluster.address import free_port, node_address
from roll_like.cluster.guardian import name_semaphores
from roll_like.cluster.progress import PROGRESS
from roll_like.errors import EngineError
from roll_like.inference.interface import EngineSpec, JudgeServer
from roll_like.inference.vllm.arguments import STRUCTURED_OUTPUTS, model_arguments
from roll_like.inference.vllm.config import VLLMJudgeConfig

#: Name under which the server knows its model.
SERVED_NAME = "judge"
POLL_SECONDS = 0.5
LAST_LINES = 15
_PR_SET_PDEATHSIG = 1


class VLLMServer(JudgeServer):
    """Starts and ends vLLM's server for one replica of a judge.

    Args:
        config: The `judge` section.
        address: The `url` to answer at; None for a free port of this machine.
    """

    def __init__(
        self, config: VLLMJudgeConfig, spec: EngineSpec, timeout_seconds: float, address: str | None = None
    ) -> None:
        self._config = config
        self._spec = spec
        self._timeout_seconds = timeout_seconds
        if address is None:
            self._host = node_address()
            self._port = free_port(self._host)
        else:
            self._host, _, port = address.removeprefix("http://").removesuffix("/v1").rpartition(":")
            self._port = int(port)
        self._process: subprocess.Popen[bytes] | None = None
        # without a name: it goes with this process, however that ends
        self._log = tempfile.TemporaryFile()  # noqa: SIM115

    async def url(self) -> str:
        return f"http://{self._host}:{self._port}/v1"

    async def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            EngineError: It ended or did not answer in time; shows the end of what it printed.
        """
        command = [sys.executable, "-m", "roll_like.inference.vllm.server", *server_arguments(self._config, self._spec)]
        command += ["--host", self._host, "--port", str(self._port)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT)
        started = time.monotonic()
        while not await asyncio.to_thread(self._answers):
            if self._process.poll() is not None:
                raise EngineError(
                    f"the judge's server ended with code {self._process.returncode}:\n{self._last_lines()}",
                    fix="check judge.path and judge.engine_args",
                )
            if time.monotonic() - started > self._timeout_seconds:
                raise EngineError(
                    f"the judge's server did not answer within {self._timeout_seconds:g} s:\n{self._last_lines()}",
                    fix="raise resources.start_timeout_seconds",
                )
            await asyncio.sleep(POLL_SECONDS)

    async def ended(self) -> None:
        """Wait for the server's end."""
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)

    async def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._host}:{self._port}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    def _last_lines(self) -> str:
        descriptor = self._log.fileno()
        # from the start, without moving to it: the server writes at the same position
        printed = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        return "\n".join(printed.decode(errors="replace").splitlines()[-LAST_LINES:])


def server_arguments(config: VLLMJudgeConfig, spec: EngineSpec) -> list[str]:
    """Return the command line of vLLM's server.

    Raises:
        ConfigError: `judge.engine_args` has a name that vLLM does not know.
    """
    values = {
        **model_arguments(config, spec, "judge"),
        "served_model_name": SERVED_NAME,
        "structured_outputs_config": STRUCTURED_OUTPUTS,
        **config.engine_args,
    }
    return [word for name, value in values.items() for word in _flag(name, value)]


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]


def _serve() -> None:
    """Become vLLM's server, which the kernel kills when the actor that started it ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # the actor ended in between
        sys.exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # vLLM ends its own processes by it
    PROGRESS.open()
    name_semaphores()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    _serve()
