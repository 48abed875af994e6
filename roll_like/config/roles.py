"""Where the workers of each role sit."""

from __future__ import annotations

from dataclasses import dataclass

from roll_like.config.sections import DeviceRange, HardwareConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """Where the workers of one role sit.

    A device range is divided evenly: with devices 4-7 and two workers, worker 0 has (4, 5) and worker 1 has (6, 7).

    Attributes:
        name: `training`, `inference`, `reference`, `critic` or `judge`.
        workers: Number of worker processes.
        workers_key: The key that sets `workers`.
        devices: The role's devices, counted through all nodes.
        devices_per_node: Devices that the run takes on each node.
        devices_key: The key that sets `devices`.
    """

    name: str
    workers: int
    workers_key: str
    devices: DeviceRange
    devices_per_node: int
    devices_key: tuple[str, ...]

    @property
    def devices_per_worker(self) -> int:
        """Devices of each worker: tensor-parallel GPUs, or CPU threads."""
        return len(self.devices) // self.workers

    def devices_of(self, worker: int) -> tuple[int, ...]:
        """Return the devices of `worker`, counted through all nodes.

        Raises:
            IndexError: There is no such worker.
        """
        if not 0 <= worker < self.workers:
            raise IndexError(f"{self.name} has workers 0-{self.workers - 1}, not {worker}")
        first = self.devices.start + worker * self.devices_per_worker
        return tuple(range(first, first + self.devices_per_worker))

    def node_of(self, worker: int) -> int:
        """Return the node on which `worker` sits, 0-based."""
        return self.devices_of(worker)[0] // self.devices_per_node


def model_role(
    resources: HardwareConfig,
    name: str,
    workers: int,
    workers_key: str,
    devices: DeviceRange,
    devices_key: tuple[str, ...] | None = None,
) -> RolePlan:
    """Return where the workers of a role are; `devices_key` is by default its name in `resources.device_mapping`."""
    return RolePlan(
        name=name,
        workers=workers,
        workers_key=workers_key,
        devices=devices,
        devices_per_node=resources.devices_per_node,
        devices_key=devices_key or ("resources", "device_mapping", name),
    )
