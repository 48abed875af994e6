"""A local Ray that is slow to start, or does not start: what is tried again, what is said, and that nothing is left."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import psutil
import pytest
from ray._private import worker

from roll_like.cluster import RaySession, guardian, metrics_addresses, session
from roll_like.cluster.session import AUTH_MODE, STARTS, RayProcesses
from roll_like.config.resources import ResourcesConfig
from roll_like.errors import STOPPING, ResourceError
from roll_like.metrics import files

SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


class StrayingRay:
    """Starts a process, then fails as often as it is told to."""

    def __init__(self, failures: int, message: str) -> None:
        self.failures = failures
        self.message = message
        self.waits = False
        self.processes: list[subprocess.Popen[bytes]] = []
        self.folders: list[Path] = []

    def init(self, *, _temp_dir: str | None = None, **options: object) -> None:
        if _temp_dir is not None:
            self.folders.append(Path(_temp_dir))
            self.processes.append(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]))
        if self.failures:
            self.failures -= 1
            raise Exception(self.message)

    def shutdown(self) -> None:
        """Knows nothing of what was started half; waits for what was stopped."""
        if self.waits:
            self.processes[-1].wait(60)


def hardware(address: str | None = None) -> ResourcesConfig:
    return ResourcesConfig.model_validate({"device": "cpu", "devices_per_node": 1, "address": address})


@pytest.fixture
def straying(monkeypatch: pytest.MonkeyPatch) -> Iterator[StrayingRay]:
    monkeypatch.delenv(guardian.MARKER, raising=False)
    ray = StrayingRay(0, SLOW)
    monkeypatch.setattr("roll_like.cluster.session.ray", ray)
    yield ray
    for process in ray.processes:
        process.kill()
        process.wait()


def test_a_ray_that_was_slow_is_started_anew(straying: StrayingRay, tmp_path: Path) -> None:
    straying.failures = STARTS - 1
    with RaySession(hardware(), tmp_path):
        *before, last = straying.processes
        assert len(before) == STARTS - 1
        assert [process.wait(10) for process in before] == [-9] * len(before)  # what had started was killed
        assert [folder.is_dir() for folder in straying.folders] == [False] * len(before) + [True]
        assert last.poll() is None
    assert last.wait(10) == -9
    assert not straying.folders[-1].exists()


def test_a_ray_that_stays_slow_is_an_error_that_says_so(straying: StrayingRay, tmp_path: Path) -> None:
    straying.failures = 100
    with (
        pytest.raises(ResourceError, match="Ray did not start in 3 attempts of 30 s: The current") as caught,
        RaySession(hardware(), tmp_path),
    ):
        pass
    assert "free the machine of other work" in str(caught.value.fix)
    assert len(straying.processes) == STARTS
    assert not any(folder.exists() for folder in straying.folders)


def test_a_ray_that_hangs_at_the_end_is_killed(
    straying: StrayingRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a raylet that is stopped: Ray itself would wait for it without a limit."""
    monkeypatch.setattr("roll_like.cluster.session.SHUTDOWN_SECONDS", 0.1)
    straying.waits = True
    with RaySession(hardware(), tmp_path):
        (process,) = straying.processes
        process.send_signal(signal.SIGSTOP)
    assert process.poll() == -signal.SIGKILL
    assert not straying.folders[-1].exists()


def test_an_interruption_at_any_line_of_the_start_leaves_nothing(
    straying: StrayingRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Path(f"/tmp/roll-interrupted-{os.getpid()}")
    monkeypatch.setattr("secrets.token_hex", lambda _: folder.name.removeprefix("roll-"))
    functions = {RaySession._start.__code__, RaySession._guard.__code__}
    left = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code not in functions:
            return None
        left -= event == "line"
        if left == 0:
            raise KeyboardInterrupt
        return trace

    for line in itertools.count(1):
        left, before = line, sys.gettrace()
        sys.settrace(trace)
        try:
            with RaySession(hardware(), tmp_path):
                assert folder.is_dir()
            break
        except KeyboardInterrupt:
            assert not folder.exists(), f"line {line} of the start"
            assert not guardian.marked(folder.name)
        finally:
            sys.settrace(before)
    assert line > 10


def ended(events: Path, said: bytes) -> list[dict[str, Any]]:
    """Return the events after the driver has said something and closed its pipe."""
    command = [sys.executable, "-I", "-S", guardian.__file__, "--events", str(events), "test-session-none"]
    subprocess.run(command, input=said, check=True, timeout=20)
    return files.read_jsonl(events)


STEP = {"kind": "warning", "step": 7, "time": 1.0, "elapsed": 3.5, "text": "slow"}


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ([], []),
        ([STEP], [STEP]),
        ([STEP, {**STEP, "kind": "end", "status": "stopped"}], [STEP, {**STEP, "kind": "end", "status": "stopped"}]),
    ],
    ids=["nothing happened", "something did", "an earlier attempt ended"],
)
@pytest.mark.parametrize("half", [b"", b'{"kind": "warn'], ids=["whole", "half a line"])
def test_the_end_of_a_killed_run_is_in_its_events(
    before: list[dict[str, Any]], kept: list[dict[str, Any]], half: bytes, tmp_path: Path
) -> None:
    events = tmp_path / "events.jsonl"
    files.append(events, before)
    with events.open("ab") as file:
        file.write(half)
    *found, last = ended(events, b"")
    assert found == kept
    assert (last["kind"], last["status"], last["step"]) == ("end", "killed", 7 if before else 0)
    assert ended(tmp_path / "none", b"")[-1]["status"] == "killed"


def test_an_end_that_is_noted_is_not_noted_again(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    assert ended(events, guardian.DONE) == []  # the run itself writes it, later
    lost = {**STEP, "kind": "end", "status": "failed", "time": time.time() + 60}
    files.append(events, [lost])
    assert ended(events, b"") == [lost]


def test_what_a_run_starts_ignores_the_signals_that_end_it(straying: StrayingRay, tmp_path: Path) -> None:
    with RaySession(hardware(), tmp_path):
        for number in STOPPING:
            straying.processes[-1].send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            straying.processes[-1].wait(0.5)
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(STOPPING)  # the driver does not


def test_processes_of_ray_are_missed_when_they_are_gone_and_when_they_are_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes = {
        name: subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        for name in ("raylet", "gcs_server", "log_monitor")
    }
    node = SimpleNamespace(
        all_processes={name: [SimpleNamespace(process=process)] for name, process in processes.items()},
        dead_processes=lambda: [(name, process) for name, process in processes.items() if process.poll() is not None],
    )
    monkeypatch.setattr(worker, "_global_node", node)
    watched = RayProcesses()
    try:
        processes["raylet"].send_signal(signal.SIGSTOP)
        wait_until(processes["raylet"].pid, stopped=True)
        assert watched.failure(10.0, 15.0) is None
        processes["raylet"].send_signal(signal.SIGCONT)
        wait_until(processes["raylet"].pid, stopped=False)
        assert watched.failure(10.0, 15.0) is None  # it has gone on: that time does not count
        processes["raylet"].send_signal(signal.SIGSTOP)
        wait_until(processes["raylet"].pid, stopped=True)
        assert [watched.failure(10.0, 15.0) for _ in range(2)] == [
            None,
            "raylet of this run's Ray was stopped (SIGSTOP) for 20 s",
        ]
        processes["raylet"].send_signal(signal.SIGCONT)
        wait_until(processes["raylet"].pid, stopped=False)
        for name, found in (
            ("log_monitor", None),  # no call needs it
            ("gcs_server", "gcs_server of this run's Ray is gone (killed, or it failed)"),
        ):
            processes[name].kill()
            processes[name].wait()
            assert watched.failure(2.0, 15.0) == found
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    monkeypatch.setattr(worker, "_global_node", None)
    assert watched.failure(2.0, 15.0) is None


def wait_until(pid: int, *, stopped: bool) -> None:
    """Wait until a process is stopped, or goes on."""
    while (psutil.Process(pid).status() == psutil.STATUS_STOPPED) != stopped:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (None, "Ray did not start: no port is free"),
        ("10.0.0.1:6379", "Ray did not join 10.0.0.1:6379: no port is free"),
    ],
)
def test_any_other_error_is_not_tried_again(
    straying: StrayingRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | None, said: str
) -> None:
    straying.failures, straying.message = 100, "no port is free"
    monkeypatch.setattr("roll_like.cluster.session._asks_for_token", lambda address: True)
    with (
        pytest.raises(ResourceError, match=said) as caught,
        RaySession(hardware(address), tmp_path),
    ):
        pass
    assert "resources.address" in str(caught.value.fix)
    assert ("~/.ray/auth_token" in str(caught.value.fix)) == (address is not None)
    assert straying.failures == 99


@pytest.mark.parametrize(
    ("token", "mode", "asks", "shown"),
    [
        ("a" * 32, None, True, "1 True token"),
        ("a" * 32, None, False, "0 False disabled"),
        (None, None, True, "0 True None"),
        ("a" * 32, "disabled", True, "0 True disabled"),
    ],
)
def test_a_token_that_is_there_is_shown_to_a_cluster_that_asks_for_it(
    tmp_path: Path, token: str | None, mode: str | None, asks: bool, shown: str
) -> None:
    if token is not None:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text(token)
    code = (
        "import os, socket\n"
        "import ray._raylet\n"
        "from ray.exceptions import AuthenticationError\n"
        "from ray._raylet import AuthenticationMode, get_authentication_mode\n"
        "from roll_like.cluster.session import use_token\n"
        "def connect(*, address):\n"
        f"    if {asks}: raise AuthenticationError('no token')\n"
        "ray._raylet.GcsClient = connect\n"
        "with socket.create_server(('', 0)) as cluster:\n"
        "    used = use_token(f'127.0.0.1:{cluster.getsockname()[1]}')\n"
        "print(int(get_authentication_mode() == AuthenticationMode.TOKEN), used, os.environ.get('RAY_AUTH_MODE'))"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    set_mode = {} if mode is None else {"RAY_AUTH_MODE": mode}
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **set_mode, "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    assert said.stdout.strip() == shown


def test_what_is_set_for_a_cluster_without_token_is_not_for_the_next(
    straying: StrayingRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(AUTH_MODE, raising=False)
    monkeypatch.setattr("roll_like.cluster.session._asks_for_token", lambda address: False)
    with RaySession(hardware("10.0.0.1:6379"), tmp_path):
        assert os.environ[AUTH_MODE] == "disabled"
    assert AUTH_MODE not in os.environ


COLLECTS = "RAY_enable_metrics_collection"


def test_ray_counts_where_it_is_shown_and_can_be_served(
    straying: StrayingRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(COLLECTS, raising=False)
    monkeypatch.setenv(AUTH_MODE, "disabled")
    joined, served = hardware("10.0.0.1:6379"), True  # nothing is started
    monkeypatch.setattr(session, "_exports_metrics", lambda: served)
    chosen = []
    for metrics in (False, True, False):
        with RaySession(joined, tmp_path, metrics=metrics):
            chosen.append(os.environ[COLLECTS])
        assert COLLECTS not in os.environ  # or a process that is started next takes it for the user's choice
    assert chosen == ["0", "1", "0"]
    straying.failures = 1
    with RaySession(joined, tmp_path):  # the second attempt has it, too
        assert os.environ[COLLECTS] == "0"
    straying.failures = STARTS
    with pytest.raises(ResourceError), RaySession(joined, tmp_path):
        pass
    assert COLLECTS not in os.environ
    served = False
    with RaySession(joined, tmp_path, metrics=True):
        assert os.environ[COLLECTS] == "0"
    monkeypatch.setenv(COLLECTS, "true")  # the user's choice stays
    with RaySession(joined, tmp_path):
        assert os.environ[COLLECTS] == "true"
    assert os.environ[COLLECTS] == "true"


def test_addresses_are_of_nodes_that_serve_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    def node(host: str, port: int, *, alive: bool = True) -> dict[str, Any]:
        return {"NodeManagerAddress": host, "MetricsExportPort": port, "alive": alive}

    nodes = [node("10.0.0.1", 8080), node("10.0.0.2", -1), node("10.0.0.3", 8080, alive=False), node("fe80::1", 81)]
    monkeypatch.setattr(session.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(session.ray, "nodes", lambda: nodes)
    assert metrics_addresses() == ["10.0.0.1:8080", "[fe80::1]:81"]
    monkeypatch.setattr(session.ray, "is_initialized", lambda: False)
    assert metrics_addresses() == []


def test_a_process_that_is_not_seen_once_is_killed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is just being started: its environment cannot be read yet."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    seen = iter([[], [process.pid], [process.pid]])
    monkeypatch.setattr(guardian, "marked", lambda value, name: next(seen, []))
    try:
        guardian.sweep("none", patience=0.15)
        assert process.wait(10) == -9
    finally:
        process.kill()
        process.wait()
