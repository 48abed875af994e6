"""Figures for Prometheus: the newest value of each, at an address that Prometheus reads.

What the engines count of themselves is read when Prometheus reads, and is at the same address. Ray's nodes serve their
own. All addresses are in `runs/NAME/prometheus.json`, in the form of Prometheus's `file_sd_configs`, so that
`files: [runs/*/prometheus.json]` finds every run.
"""

from __future__ import annotations

import json
import re
import threading
import time
import zlib
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError as FutureCancelledError
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from roll_like.config.base import PluginConfig
from roll_like.errors import ConfigError, RollLikeError
from roll_like.metrics.files import replace_text
from roll_like.metrics.names import metric_info
from roll_like.metrics.trackers import Status, optional_module
from roll_like.registry import TRACKERS

#: The file that says where a run is read.
TARGETS = "prometheus.json"
#: How often Ray is asked which nodes there are: that is a call to its head. Seconds.
NODES_SECONDS = 30.0
#: Hosts that mean every address of the machine.
_EVERYWHERE = ("", "0.0.0.0", "::")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]+")


class PrometheusConfig(PluginConfig):
    """An endpoint that Prometheus reads."""

    type: Literal["prometheus"] = "prometheus"
    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on; `0.0.0.0` for a Prometheus on another machine, which then finds this node's "
        "own address in `prometheus.json`.",
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=9464, description="TCP port to listen on; 0: a free one, which is in the run's `prometheus.json`."
    )


def prometheus_name(name: str) -> str:
    """Return a metric's name as Prometheus has it.

    >>> prometheus_name("eval/pass@4")
    'roll_like_eval_pass_4'
    """
    return f"roll_like_{_NOT_IN_NAMES.sub('_', name).strip('_')}"


class _Newest:
    """The newest figures of a run and of its engines, as `prometheus_client` collects them."""

    def __init__(self, run: str) -> None:
        #: Returns what engines tell in Prometheus's text format, by rank.
        self.engines: Callable[[], Mapping[int, str]] = dict
        self._run = run
        self._values: dict[str, float] = {}
        self._names: dict[str, str] = {}
        self._lock = threading.Lock()

    def take(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the values of a step in the place of older ones."""
        with self._lock:
            self._values |= {**values, "step": float(step)}

    def collect(self) -> Iterator[Any]:
        """Yield a gauge for each figure, then what engines tell."""
        yield from self._gauges()
        yield from self._of_engines()

    def _of_engines(self) -> Iterator[Any]:
        """Yield the engines' own metrics with the labels `run` and `replica`; each name once."""
        from prometheus_client.parser import text_string_to_metric_families

        families: dict[str, Any] = {}
        told: Mapping[int, str] = {}
        with suppress(RuntimeError, RollLikeError, CancelledError, FutureCancelledError):  # the run is ending
            told = self.engines()
        for rank, text in told.items():
            own = {"run": self._run, "replica": str(rank)}
            found: list[Any] = []
            with suppress(ValueError):  # another format of a user's engine: the run's own figures are shown still
                found = list(text_string_to_metric_families(text))
            for family in found:
                samples = [sample._replace(labels={**sample.labels, **own}) for sample in family.samples]
                known = families.setdefault(family.name, family)
                known.samples = samples if known is family else known.samples + samples
        yield from families.values()

    def _gauges(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            values = dict(self._values)
        for name, value in values.items():
            meaning = "Finished steps." if name == "step" else metric_info(name).description
            gauge = GaugeMetricFamily(self._name(name), meaning, labels=["run"])
            gauge.add_metric([self._run], value)
            yield gauge

    def _name(self, name: str) -> str:
        """Return the name of a figure; of two that would be one, the later one has a hash."""
        if name not in self._names:
            wanted = prometheus_name(name)
            taken = wanted in self._names.values()
            self._names[name] = f"{wanted}_{zlib.crc32(name.encode()):08x}" if taken else wanted
        return self._names[name]


@TRACKERS.register("prometheus")
class PrometheusTracker:
    """Serves the newest figures of the run and of its engines while it goes on; history is Prometheus's."""

    Config = PrometheusConfig

    def __init__(self, config: PrometheusConfig) -> None:
        self._config = config
        self._server: Any = None
        self._newest: _Newest
        self._targets: Path
        self._labels: dict[str, str]
        self._written: Any = None
        self._cluster: Callable[[], Sequence[str]] = list
        self._looked: float

    def start(
        self,
        *,
        run_dir: Path,
        run_name: str,
        params: Mapping[str, Any],
        resume_id: str | None,
        resume_step: int | None,  # noqa: ARG002 - the newest value is all that there is
    ) -> str:
        """Listen, and write the address.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        client = optional_module("prometheus_client", "prometheus")
        host, port = self._config.host, self._config.port
        self._newest = _Newest(run_name)
        registry = client.CollectorRegistry()
        registry.register(self._newest)
        try:
            self._server, _ = client.start_http_server(port, addr=host, registry=registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"it cannot listen at {host}:{port}: {error}",
                fix="set its `port` to one that is free, or to 0 for any; several runs on a machine need one each",
            ) from error
        self._labels = {"run": run_name, "pipeline": str(params.get("pipeline", ""))}
        self._targets = run_dir / TARGETS
        self._write_targets()
        return resume_id or run_name

    @property
    def address(self) -> str:
        """Where the figures are read: `host:port`."""
        host = self._config.host
        if host in _EVERYWHERE:
            from roll_like.cluster.address import machine_address

            host = machine_address()
        return f"[{host}]:{self._server.server_port}" if ":" in host else f"{host}:{self._server.server_port}"

    def watch(
        self,
        *,
        engines: Callable[[], Mapping[int, str]] | None = None,
        cluster: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """Ask these from now on. See `SystemTracker.watch`."""
        self._newest.engines = engines or self._newest.engines
        if cluster is not None:
            self._cluster = cluster
            self._write_targets()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the figures of one step, and look now and then whether there are other nodes."""
        self._newest.take(step, values)
        if time.monotonic() - self._looked >= NODES_SECONDS:
            self._write_targets()

    def _write_targets(self) -> None:
        """Write where the run and Ray's nodes are read, at once: Prometheus may read the file at any time."""
        targets: list[dict[str, Any]] = [{"targets": [self.address], "labels": self._labels}]
        self._looked = time.monotonic()
        if nodes := list(self._cluster()):
            targets.append({"targets": nodes, "labels": {**self._labels, "job": "ray"}})
        if targets == self._written:
            return
        replace_text(self._targets, json.dumps(targets) + "\n")
        self._written = targets

    def artifact(self, path: Path) -> None:
        """Files are not Prometheus's."""

    def close(self, status: Status) -> None:  # noqa: ARG002 - that a run has ended shows by its address being gone
        """End the server."""
        self._targets.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
