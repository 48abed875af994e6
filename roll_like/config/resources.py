"""The section `resources`: what hardware a run takes, and where the workers of each role are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler, model_serializer, model_validator
from pydantic_core import CoreSchema

from roll_like.config.base import ConfigModel, PositiveFloat, PositiveInt
from roll_like.config.gpus import GPU_KINDS, GPUName

_SPAN = re.compile(r"(\d+)(?:-(\d+))?")


class DeviceRange(ConfigModel):
    """Devices `[start, stop)`, counted through all nodes. Written `"0-3"` (inclusive) or `"5"` in YAML."""

    start: Annotated[int, Field(ge=0)] = Field(description="First device.")
    stop: PositiveInt = Field(description="The device after the last one.")

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, list | float):
            raise ValueError(f'expected a device range like "0-3" or "5", found {value!r}')
        if not isinstance(value, str):
            return value
        match = _SPAN.fullmatch(value.strip())
        if match is None:
            raise ValueError(f'expected a device range like "0-3" or "5", found {value!r}')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the device range {value!r} ends before it starts")
        return {"start": first, "stop": last + 1}

    @model_serializer
    def _written(self) -> str:
        return str(self)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {
            "description": "Devices counted through all nodes from 0, ends included: `0-3`, or one: `5`.",
            "anyOf": [{"type": "string", "pattern": r"^\s*\d+(-\d+)?\s*$"}, {"type": "integer", "minimum": 0}],
        }

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return str(self.start) if len(self) == 1 else f"{self.start}-{self.stop - 1}"

    def overlaps(self, other: DeviceRange) -> bool:
        """Return whether the two share a device."""
        return self.start < other.stop and other.start < self.stop


class TrainerDeviceMappingConfig(ConfigModel):
    """Which devices the trainer has."""

    training: DeviceRange = Field(description="Devices of the training engine.")


class SamplingDeviceMappingConfig(TrainerDeviceMappingConfig):
    """Which devices each role has. Equal device ranges are colocated (time-shared), disjoint ones run side by side."""

    inference: DeviceRange = Field(description="Devices of the inference engines.")
    reference: DeviceRange | None = Field(
        default=None, description="Devices of the reference model; default: `training`."
    )
    judge: DeviceRange | None = Field(default=None, description="Devices of the judge model; default: `inference`.")

    @property
    def models(self) -> tuple[DeviceRange, ...]:
        """Devices of the models that are trained, and of the one that they are compared with."""
        return (self.training, self.reference or self.training)


class DeviceMappingConfig(SamplingDeviceMappingConfig):
    """Which devices each role has. Equal device ranges are colocated (time-shared), disjoint ones run side by side."""

    critic: DeviceRange | None = Field(default=None, description="Devices of the critic; default: `training`.")

    @property
    def models(self) -> tuple[DeviceRange, ...]:
        """Devices of the models that are trained, and of the one that they are compared with."""
        return (*super().models, self.critic or self.training)


class HardwareConfig(ConfigModel):
    """What hardware the run takes. A device is a GPU, or a core with `device: cpu`."""

    device: Literal["cpu", "cuda"] = Field(description="What a device is: a CPU core or a GPU.")
    nodes: PositiveInt = Field(default=1, description="Machines.")
    devices_per_node: PositiveInt = Field(description="Cores or GPUs to take on each machine.")
    gpu: GPUName | None = Field(
        default=None,
        description="Kind of the GPUs, for the plan of `--check`: their memory, and rates for the least seconds of a "
        "step. Default: those of this machine's GPUs, if it has some. A run on GPUs with less memory is refused.",
    )
    gpu_memory_gib: PositiveFloat | None = Field(
        default=None,
        description="Memory of one GPU, for the plan of `--check`, if it differs from that of `gpu`. GiB.",
    )
    cpus_per_device: PositiveFloat = Field(default=4.0, description="CPU cores reserved beside each GPU.")
    address: str | None = Field(
        default=None, description="Ray cluster to join (`auto` or `host:port`); default: start one on this machine."
    )
    start_timeout_seconds: PositiveFloat = Field(
        default=600.0,
        description="How long each role's workers may take to start: load a model, build rewards. Afterwards, how long "
        "work may stand still whose duration is not known yet.",
    )

    @property
    def gpu_memory(self) -> int | None:
        """Memory of one GPU in bytes, where it is configured."""
        kind = None if self.gpu is None else GPU_KINDS[self.gpu].memory_gib
        gib = self.gpu_memory_gib or kind
        return None if gib is None else int(gib * 2**30)


class TrainerResourcesConfig(HardwareConfig):
    """What hardware the run takes. A device is a GPU, or a core with `device: cpu`."""

    device_mapping: TrainerDeviceMappingConfig = Field(description="Devices of each role.")


class SamplingResourcesConfig(TrainerResourcesConfig):
    """What hardware the run takes and how roles divide it. A device is a GPU, or a core with `device: cpu`."""

    device_mapping: SamplingDeviceMappingConfig = Field(description="Devices of each role.")


class ResourcesConfig(SamplingResourcesConfig):
    """What hardware the run takes and how roles divide it. A device is a GPU, or a core with `device: cpu`."""

    device_mapping: DeviceMappingConfig = Field(description="Devices of each role.")


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
