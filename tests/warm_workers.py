"""A Ray for the whole test session, and workers on it that are used again.

Starting a run takes half a minute on two cores, and nearly all of that is imports: of Ray, torch, transformers and
DeepSpeed, in each process. `warm_ray` starts Ray once; runs inside the test process join it. The processes of training
ranks and of the transformers engine, which a `Cluster` would start anew, are taken from hosts that import once and then
host one worker after another. All else of a run is its own. Tests that start `roll-like` itself get fresh processes.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from hygiene import TEST_MARKER
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from roll_like.cluster import Cluster, RaySession, thread_environment
from roll_like.cluster.cluster import python_path
from roll_like.cluster.node_watch import page_prefix
from roll_like.cluster.progress import PROGRESS, VARIABLE
from roll_like.config.resources import ResourcesConfig
from roll_like.inference.hf.engine import HFEngine
from roll_like.models.imports import quick_imports
from roll_like.training.deepspeed import without
from roll_like.training.rank import TrainingRank

RESOURCES = ResourcesConfig(
    device="cpu",
    devices_per_node=2,
    device_mapping={"training": "0-1", "inference": "0-1"},
    start_timeout_seconds=60,
)
ENVIRONMENT = {**thread_environment(1), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def _settle(path: list[str], environment: Mapping[str, str]) -> None:
    """See what the driver sees now: modules of users, and variables that a worker reads when it starts."""
    os.environ.pop(VARIABLE, None)
    sys.path += [entry for entry in path if entry not in sys.path]
    os.environ.update(environment)
    PROGRESS.__init__()  # type: ignore[misc] - the page of this worker, where workers are watched
    PROGRESS.open()


class RankHost(TrainingRank):
    """Hosts one training rank after another."""

    def __init__(self) -> None:
        with quick_imports(), without("mlflow"):
            import torch
            from deepspeed.comm import comm
            from deepspeed.utils import groups

        self._linear = torch.nn.functional.linear
        self._unset = [
            (module, name, type(value))
            for module in (comm, groups)
            for name, value in vars(module).items()
            if not name.startswith("__") and (value is None or value == {})
        ]
        self._own = list(vars(self))

    def begin(self, arguments: tuple[Any, ...], path: list[str], environment: Mapping[str, str]) -> None:
        """Be this rank from now on."""
        _settle(path, environment)
        TrainingRank.__init__(self, *arguments)

    def end(self) -> None:
        """Forget the rank, and what it left behind in DeepSpeed."""
        import torch
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
        from deepspeed.runtime.zero.partition_parameters import Init

        for name in vars(self).keys() - {"_own", *self._own}:
            delattr(self, name)
        gc.collect()
        assert not torch.distributed.is_initialized()
        for module, name, kind in self._unset:  # process groups
            setattr(module, name, kind())
        # ZeRO 3 numbers modules and parameters, the same on all ranks, and puts another function in this one's place
        (counter,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
        counter[0] = Init.param_id = 0
        torch.nn.functional.linear = self._linear


class EngineHost(HFEngine):
    """Hosts one engine of transformers after another."""

    def __init__(self) -> None:
        with quick_imports():
            from transformers import AutoModelForCausalLM

        assert AutoModelForCausalLM

    async def begin(self, arguments: tuple[Any, ...], path: list[str], environment: Mapping[str, str]) -> None:
        """Be this engine from now on."""
        _settle(path, environment)
        HFEngine.__init__(self, *arguments)

    async def sampled(self) -> dict[str, int]:
        """Return how many tokens each unfinished request has."""
        return {name: len(sample.tokens) for name, sample in self._samples.items()}

    async def end(self) -> None:
        """Forget it."""
        vars(self).clear()
        gc.collect()


#: What hosts the workers of a class.
HOSTS: dict[type[Any], type[Any]] = {TrainingRank: RankHost, HFEngine: EngineHost}


class WarmWorkers:
    """The hosts of a test session. A host keeps its rank: PyTorch caches how tensors of a rank are sharded.

    It also keeps to Megatron-Core, if that trained in it: what names CUDA has other answers there from then on.
    """

    #: Whether a run's watchdog sees what its workers do.
    watched = False

    def __init__(self) -> None:
        self._idle: dict[tuple[type[Any], int, bool], list[Any]] = defaultdict(list)
        self._lent: dict[Any, tuple[type[Any], int, bool]] = {}

    def start(self, cluster: Cluster[Any], rank: int) -> Any:
        """Return a host that is the cluster's worker from now on, or None if the cluster is of other workers."""
        kind = HOSTS.get(cluster._class)
        if kind is None:
            return None
        arguments = cluster._arguments(rank)
        megatron = kind is RankHost and arguments[0].objective.settings.backend == "megatron"
        idle = self._idle[kind, rank, megatron]
        host = idle.pop() if idle else self._new(kind)
        self._lent[host] = kind, rank, megatron
        path, environment = python_path().split(os.pathsep), dict(cluster._environment(rank))
        if self.watched and cluster.pages is not None:
            environment[VARIABLE] = page_prefix(cluster.pages, cluster.name, rank)
        begun = host.begin.remote(arguments, path, environment)
        if kind is EngineHost:  # Ray runs calls of asynchronous actors in any order
            ray.get(begun)
        return host

    def _new(self, kind: type[Any]) -> Any:
        environment = {**ENVIRONMENT, "PYTHONPATH": python_path()}
        options: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": environment}}
        if kind is EngineHost:
            options["max_concurrency"] = 64
        return ray.remote(kind).options(**options).remote()

    def take_back(self, cluster: Cluster[Any], method: Callable[[Any], Any] | None, timeout: float) -> None:
        """Let a cluster's hosts clean up, and take them out of it; those that do not clean up are ended."""
        ours = [host for host in cluster._actors if host in self._lent]
        calls = {host: [] if method is None else [getattr(host, method.__name__).remote()] for host in ours}
        for host in ours:
            try:
                ray.get(calls[host], timeout=timeout)  # Ray runs calls of asynchronous actors in any order
                ray.get(host.end.remote(), timeout=timeout)
            except (RayActorError, RayTaskError, GetTimeoutError) as error:
                print(f"{cluster.name}: error while closing: {error}")
                ray.kill(host)
            else:
                self._idle[self._lent[host]].append(host)
            del self._lent[host]
        cluster._actors = [actor for actor in cluster._actors if actor not in ours]

    def close(self) -> None:
        """End all hosts."""
        for host in (*(host for hosts in self._idle.values() for host in hosts), *self._lent):
            ray.kill(host)


@contextmanager
def warm_ray(log_dir: Path) -> Iterator[None]:
    """Start a Ray that runs inside this process join instead of starting one, with warm workers on it."""
    warm = WarmWorkers()
    start, close = Cluster._start, Cluster.close

    def start_warm(self: Cluster[Any], rank: int) -> Any:
        return warm.start(self, rank) or start(self, rank)

    def close_warm(
        self: Cluster[Any], method: Callable[[Any], Any] | None = None, *, timeout_seconds: float = 20.0
    ) -> None:
        warm.take_back(self, method, timeout_seconds)
        close(self, method, timeout_seconds=timeout_seconds)

    assert not ray.is_initialized()
    with pytest.MonkeyPatch.context() as marking, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns of its own coming changes
        marking.setenv(TEST_MARKER, str(os.getpid()))
        with RaySession(RESOURCES, log_dir), pytest.MonkeyPatch.context() as patch:
            marking.delenv(TEST_MARKER)
            patch.setattr(RaySession, "_start", lambda session: None)
            patch.setattr(RaySession, "_remove", lambda session: None)
            patch.setattr(Cluster, "_start", start_warm)
            patch.setattr(Cluster, "close", close_warm)
            yield
            warm.close()
