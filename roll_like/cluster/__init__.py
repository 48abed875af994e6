"""Ray: placement groups and typed groups of workers."""

from roll_like.cluster.cluster import Cluster, ClusterHandle, WorkerDied, thread_environment
from roll_like.cluster.resources import Placement, ResourceManager
from roll_like.cluster.session import RaySession

__all__ = ["Cluster", "ClusterHandle", "Placement", "RaySession", "ResourceManager", "WorkerDied", "thread_environment"]
