"""Ray: placement groups and typed groups of workers.

A name is imported when it is first used: what needs no Ray here, such as `worker_restarts`, does not load it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll_like.cluster.cluster import Cluster as Cluster
    from roll_like.cluster.cluster import ClusterHandle as ClusterHandle
    from roll_like.cluster.cluster import thread_environment as thread_environment
    from roll_like.cluster.resources import Placement as Placement
    from roll_like.cluster.resources import ResourceManager as ResourceManager
    from roll_like.cluster.session import RaySession as RaySession
    from roll_like.cluster.session import metrics_addresses as metrics_addresses
    from roll_like.cluster.watchdog import Hang as Hang
    from roll_like.cluster.watchdog import watching as watching
    from roll_like.cluster.worker_restarts import WorkerDied as WorkerDied

_MODULES = {
    "Cluster": "cluster",
    "ClusterHandle": "cluster",
    "Hang": "watchdog",
    "Placement": "resources",
    "RaySession": "session",
    "ResourceManager": "resources",
    "WorkerDied": "worker_restarts",
    "metrics_addresses": "session",
    "thread_environment": "cluster",
    "watching": "watchdog",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
