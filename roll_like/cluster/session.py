"""A Ray cluster for the length of a run: started and removed, or joined and left."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import Any, Self

import psutil
import ray
from ray.exceptions import RayError

from roll_like.cluster import guardian
from roll_like.cluster.limits import available_memory
from roll_like.cluster.orphans import hold_session
from roll_like.cluster.resources import INSTALL_FOR_GPUS, torch_without_gpus
from roll_like.config.resources import ResourcesConfig
from roll_like.errors import STOPPING, ResourceError

SHARED_MEMORY = Path("/dev/shm")
#: Ray's variable that says whether processes of a cluster show each other a token.
AUTH_MODE = "RAY_AUTH_MODE"
_LOCAL_STORE_BYTES = 2 * 2**30
#: Length of the longest path for temporary files: vLLM and `multiprocessing` add up to 37 characters for their sockets,
#: which may have 107.
LONGEST_TEMPORARY = 70
#: How often a local Ray is started that does not answer in the time that Ray gives itself, half a minute.
STARTS = 3
#: What Ray says then.
_SLOW_START = "timed out during startup"
#: How long what clears up may be waited for; it ends by itself too. Seconds.
CLEAR_UP_SECONDS = 300.0
#: How long a cluster may take to accept a connection, before it is left to Ray to say that there is none. Seconds.
CONNECT_SECONDS = 5.0
#: How long Ray may take to end; then its processes are killed. It would wait for a stopped raylet without a limit.
SHUTDOWN_SECONDS = 60.0
#: How long a process of a joined cluster may be away: a head may be started again meanwhile. Seconds.
LOST_SECONDS = 60


def use_short_temporary_paths() -> None:
    """Let temporary files be in `/tmp` where `TMPDIR` is too long for sockets in it."""
    if len(os.environ.get("TMPDIR", "")) > LONGEST_TEMPORARY:
        os.environ["TMPDIR"] = "/tmp"
        tempfile.tempdir = None


@contextmanager
def spared() -> Iterator[None]:
    """Have the processes that the block starts ignore the signals that end a run, as all that they start does.

    `timeout`, a terminal and the schedulers of clusters signal a whole process group, or all processes of a job. Only
    the driver is to act on it: it needs Ray and the workers for the step under way and the checkpoint after it. They
    inherit the mask of signals; Ray does the same with SIGINT.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class RaySession:
    """Starts Ray on this machine, or joins the cluster at `resources.address`.

    A local cluster keeps its files in a folder of its own, which goes when the run ends; after a
    failure the workers' logs are kept in `log_dir` first.

    Args:
        config: The `resources` section.
        log_dir: Where workers' logs go after a failure.
        checkpoints: Where the newest of `snapshots` goes when this process is killed; None for nowhere.
        lock: A file whose lock is held until all is cleared up, also after this process was killed.
        events: The run's events, which get its end when this process is killed.
        metrics: Whether a Ray that is started here serves its own metrics, where it can (`metrics_addresses`).
    """

    def __init__(
        self,
        config: ResourcesConfig,
        log_dir: Path,
        *,
        checkpoints: Path | None = None,
        lock: int | None = None,
        events: Path | None = None,
        metrics: bool = False,
    ) -> None:
        self._config = config
        self._log_dir = log_dir
        self._metrics = metrics
        self._checkpoints = checkpoints
        self._lock = lock
        self._events = events
        self._directory: Path | None = None
        self._guardian: subprocess.Popen[bytes] | None = None
        self._held: int | None = None
        self._chosen: list[str] = []

    def __enter__(self) -> Self:
        use_short_temporary_paths()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # what Ray would keep of each call, for a dashboard that is not there: 47 KiB a step of a small run
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        # every worker has an environment of its own, so none would ever be taken from those started ahead
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        # Ray would let everything else on the machine go first
        os.environ.setdefault("RAY_worker_niceness", "0")
        for attempt in range(1, STARTS + 1):
            # Ray's metrics agent takes a core at start and prints about a missing exporter
            self._choose("RAY_enable_metrics_collection", "1" if self._metrics and _exports_metrics() else "0")
            try:
                if self._config.address is None:
                    self._start()
                else:
                    if not use_token(self._config.address):
                        self._chosen.append(AUTH_MODE)
                    # Ray would end this process with exit code 1; the watchdog does so with one for another attempt
                    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(5 * LOST_SECONDS))
                    ray.init(address=self._config.address, log_to_driver=False, logging_level="ERROR")
            except ResourceError:
                self._remove()
                raise
            except Exception as error:  # Ray raises just that of a node that was slow
                self._remove()
                if _SLOW_START in str(error) and attempt < STARTS:
                    continue
                raise self._explained(error) from error
            except BaseException:
                self._remove()
                raise
            break
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            self._keep_logs()
        self._remove()

    @property
    def memory(self) -> Path | None:
        """Where a folder in memory goes that is to be removed with the local cluster; None where one was joined."""
        return None if self._directory is None else SHARED_MEMORY / self._directory.name

    @property
    def snapshots(self) -> Path | None:
        """Where whole checkpoints go that are kept in memory; None where not all workers are on this machine."""
        return None if self._directory is None else SHARED_MEMORY / f"{self._directory.name}-states"

    def _choose(self, name: str, value: str) -> None:
        """Set a variable until this session is closed, unless the user has set it."""
        if name not in os.environ:
            os.environ[name] = value
            self._chosen.append(name)

    def _explained(self, error: Exception) -> ResourceError:
        """Return the error of a Ray that did not start or cannot be joined."""
        fix = "set resources.address to a running cluster (`ray status` shows it), or leave it out to start one"
        if self._config.address is not None:
            fix += "; if that cluster asks for a token, copy ~/.ray/auth_token from one of its nodes"
            return ResourceError(f"Ray did not join {self._config.address}: {error}", fix=fix)
        if _SLOW_START in str(error):
            fix = f"free the machine of other work, or {fix.partition(',')[0]}"
            return ResourceError(f"Ray did not start in {STARTS} attempts of 30 s: {error}", fix=fix)
        return ResourceError(f"Ray did not start: {error}", fix=fix)

    def _start(self) -> None:
        # Unix socket paths are limited to 107 characters, so a short folder
        self._directory = Path("/tmp", f"roll-{secrets.token_hex(5)}")
        self._directory.mkdir(mode=0o700)
        with spared():
            self._guard(self._directory)  # first: a signal may interrupt this at any point
        cpus = self._config.devices_per_node
        if self._config.device == "cuda":
            _require_gpus(self._config.devices_per_node)
            cpus = max(psutil.cpu_count() or 1, round(cpus * self._config.cpus_per_device))
        elif cpus > (psutil.cpu_count() or 1):
            raise ResourceError(
                f"resources.devices_per_node is {cpus}, and this machine has {psutil.cpu_count()} cores",
                fix=f"set resources.devices_per_node to at most {psutil.cpu_count()} and fit "
                "resources.device_mapping to it",
            )
        # a process group of gloo, and vLLM's processes
        self._choose("GLOO_SOCKET_IFNAME", "lo")
        self._choose("VLLM_HOST_IP", "127.0.0.1")
        with spared(), _loopback():
            ray.init(
                address="local",  # whatever RAY_ADDRESS says
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=min(_LOCAL_STORE_BYTES, available_memory() // 4),
                _temp_dir=str(self._directory),
            )

    def _keep_logs(self) -> None:
        if self._directory is None:
            return
        for path in self._directory.glob("session_2*/logs/worker-*"):
            if path.suffix in {".out", ".err"} and path.stat().st_size:
                self._log_dir.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, self._log_dir / path.name)

    def _guard(self, directory: Path) -> None:
        """Start the process that clears up after this one, even after `kill -9`."""
        rescue = [] if self._checkpoints is None else ["--rescue", self.snapshots, self._checkpoints.absolute()]
        events = [] if self._events is None else ["--events", self._events.absolute()]
        run = [*map(str, [*events, *rescue])]
        whole = [*map(str, [directory.name, directory, self.memory, self.snapshots])]
        self._held = hold_session(directory, whole, run, self._lock)
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, *run, *whole],
            stdin=subprocess.PIPE,
            pass_fds=[self._held] if self._lock is None else [self._held, self._lock],
            start_new_session=True,  # a terminal's Ctrl-C is not for it
        )
        os.environ[guardian.MARKER] = directory.name

    def _remove(self) -> None:
        end = Timer(SHUTDOWN_SECONDS, self._end)
        end.daemon = True
        end.start()
        self._leave()
        end.cancel()
        os.environ.pop(guardian.MARKER, None)
        while self._chosen:  # the next session may need another value, and a process of this one would keep it
            os.environ.pop(self._chosen.pop(), None)
        self._end()
        if self._guardian is not None:
            with suppress(subprocess.TimeoutExpired):  # it goes on by itself
                self._guardian.wait(CLEAR_UP_SECONDS)
            self._guardian = None
        elif self._directory is not None:  # interrupted before there was one
            guardian.remove_folder(self._directory)
        if self._held is not None:
            os.close(self._held)
            self._held = None
        self._directory = None

    def _leave(self) -> None:
        """Leave Ray. Its own processes are killed: it would ask each by SIGTERM first, and wait a second."""
        from ray._private import worker

        node = worker._global_node
        if self._directory is not None and node is not None:
            worker.disconnect()
            node.kill_all_processes(check_alive=False, allow_graceful=False)
        ray.shutdown()

    def _end(self) -> None:
        """Have what is left of the local cluster cleared up."""
        pipe = None if self._guardian is None else self._guardian.stdin
        if pipe is not None and not pipe.closed:
            with suppress(BrokenPipeError), pipe:
                pipe.write(guardian.DONE)


def _exports_metrics() -> bool:
    """Return whether the packages are installed that Ray needs to serve metrics (`ray[default]`)."""
    return all(map(importlib.util.find_spec, ("aiohttp_cors", "opencensus", "prometheus_client")))


def metrics_addresses() -> list[str]:
    """Return where the nodes of the cluster serve Ray's own metrics, as `host:port`; empty where they do not."""
    if not ray.is_initialized():
        return []
    nodes = [(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in ray.nodes() if node["alive"]]
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in nodes if port > 0]


class RayProcesses:
    """Those processes of Ray that every call of this driver needs: the raylet of its node, and the head (GCS).

    A driver whose raylet has died, or is stopped, would wait for ever; one without its head Ray ends with exit code 1,
    after a minute, as if it had failed for good.
    """

    def __init__(self) -> None:
        self._silent: dict[str, float] = {}

    def failure(self, passed: float, patience: float) -> str | None:
        """Return what is wrong with one of them, None while they work.

        Args:
            passed: Seconds since the last call.
            patience: For how many seconds one may be stopped (SIGSTOP), where this process started Ray.
        """
        from ray._private import worker

        node = worker._global_node
        if node is None:
            return None
        if not node.all_processes:
            return self._failure_of_joined(node, passed)
        gone = [name for name, _ in node.dead_processes()]
        for name in ("raylet", "gcs_server"):
            if name in gone:
                return f"{name} of this run's Ray is gone (killed, or it failed)"
            statuses = [psutil.Process(each.process.pid).status() for each in node.all_processes.get(name, [])]
            stopped = psutil.STATUS_STOPPED in statuses
            if (seconds := self._count(name, passed, silent=stopped)) >= patience:
                return f"{name} of this run's Ray was stopped (SIGSTOP) for {seconds:.0f} s"
        return None

    def _failure_of_joined(self, node: Any, passed: float) -> str | None:
        head = node.gcs_address
        for name, address in (("this node's raylet", node.raylet_socket_name), (f"the head ({head})", head)):
            if (seconds := self._count(name, passed, silent=not _accepts(address))) >= LOST_SECONDS:
                return f"{name} of the Ray cluster has not answered for {seconds:.0f} s"
        return None

    def _count(self, name: str, passed: float, *, silent: bool) -> float:
        """Return for how many seconds a process has been silent."""
        self._silent[name] = self._silent.get(name, 0.0) + passed if silent else 0.0
        return self._silent[name]


def _accepts(address: str) -> bool:
    """Return whether anything accepts connections at the path of a Unix socket, or at `host:port`."""
    try:
        if address.startswith("/"):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(1.0)
                connection.connect(address)
        else:
            _connect(address, 1.0)
    except OSError:
        return False
    return True


def _connect(address: str, seconds: float) -> None:
    """Connect to `host:port`, and leave again."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()


def use_token(address: str) -> bool:
    """Show a cluster that asks for it the token of this user or environment, unless RAY_AUTH_MODE says otherwise.

    Returns false, with RAY_AUTH_MODE set for this cluster, if it asks for none.

    `ray start --head` asks for a token where it finds one, and every cluster that `ray.init` starts leaves one in
    `~/.ray/auth_token`. Of clients, Ray uses it for those only that look for a cluster on this machine; others are
    refused without a word about a token. A process that uses a token wants it of its cluster, too: one that has none
    cannot call it, takes it for dead, and ends its workers. Ray reads its variables when it is imported, so setting one
    is too late.
    """
    from ray._private.authentication import authentication_token_setup

    if AUTH_MODE not in os.environ:
        if not _asks_for_token(address):
            os.environ[AUTH_MODE] = "disabled"  # or Ray would use one with `auto`
            return False
        logging.getLogger("ray").setLevel(logging.ERROR)  # as `ray.init` will set it; this says that there is a token
        authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    return True


def _asks_for_token(address: str) -> bool:
    """Return whether a cluster refuses calls without a token; true where none answers, which `ray.init` explains."""
    from ray._private.services import canonicalize_bootstrap_address_or_die
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        found = canonicalize_bootstrap_address_or_die(address)
        _connect(found, CONNECT_SECONDS)  # Ray tries for longer
        with _nothing_printed():
            GcsClient(address=found)
    except (RayError, OSError, ValueError):
        return True
    return False


@contextmanager
def _loopback() -> Iterator[None]:
    """Have a Ray that starts in the block use 127.0.0.1, as it does by itself on macOS and Windows.

    With the machine's address it would end when that changes (another network, a VPN), and it would be reachable from
    other machines. Ray takes `_node_ip_address="127.0.0.1"` for the machine's address.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _nothing_printed() -> Iterator[None]:
    """Keep what Ray's own code writes to file descriptor 2 from the user: that a token is missing."""
    sys.stderr.flush()
    original = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)


def _require_gpus(count: int) -> None:
    """Raise if this machine has fewer GPUs for this process; `CUDA_VISIBLE_DEVICES` may hide some."""
    import torch  # seconds; a run on GPUs waits for more than that

    found = torch.cuda.device_count()  # takes no memory of a GPU
    if found == 0:
        raise ResourceError(f"resources.device is cuda, and {torch_without_gpus()}", fix=INSTALL_FOR_GPUS)
    if found < count:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ResourceError(
            f"resources.devices_per_node is {count}, and this machine has {found} GPU{'s' * (found > 1)}"
            + ("" if hidden is None else f" for this process (CUDA_VISIBLE_DEVICES={hidden})"),
            fix=f"set resources.devices_per_node to at most {found}, and fit resources.device_mapping, workers and "
            "replicas to it",
        )
