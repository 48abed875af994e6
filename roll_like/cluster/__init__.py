"""Ray: placement groups and typed groups of workers."""

from roll_like.cluster.cluster import Cluster, ClusterHandle, thread_environment
from roll_like.cluster.resources import Placement, ResourceManager
from roll_like.cluster.session import RaySession
from roll_like.cluster.watchdog import Hang, watching
from roll_like.cluster.worker_restarts import WorkerDied

__all__ = [
    "Cluster",
    "ClusterHandle",
    "Hang",
    "Placement",
    "RaySession",
    "ResourceManager",
    "WorkerDied",
    "thread_environment",
    "watching",
]
