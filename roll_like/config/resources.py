"""The section `resources`: what hardware a run takes, and where the workers of each role are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidatorFunctionWrapHandler,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from roll_like.config.base import ConfigModel, PositiveFloat, PositiveInt, Violation
from roll_like.config.gpus import GPU_KINDS, GPUName

_SPAN = re.compile(r"(\d+)(?:-(\d+))?")
#: `host:port`, also of IPv6, and what Ray itself looks for.
_ADDRESS = re.compile(r"auto|(?:\[[0-9A-Fa-f:.%]+\]|[\w.-]+):\d+")


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


class DeviceMappingConfig(ConfigModel):
    """Which devices each role has. Equal device ranges are colocated (time-shared), disjoint ones run side by side."""

    training: DeviceRange | None = Field(default=None, description="Devices of the training engine.")
    inference: DeviceRange | None = Field(default=None, description="Devices of the inference engines.")
    reference: DeviceRange | None = Field(
        default=None, description="Devices of the reference model; default: `training`."
    )
    judge: DeviceRange | None = Field(default=None, description="Devices of the judge model; default: `inference`.")
    critic: DeviceRange | None = Field(default=None, description="Devices of the critic; default: `training`.")

    @model_serializer
    def _written(self) -> dict[str, str]:
        return {role: str(devices) for role, devices in self if devices is not None}


#: Whose devices a role shares that has none of its own. What is not named here has to have some.
_SHARED_WITH = {"reference": "training", "critic": "training", "judge": "inference"}


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


class ResourcesConfig(ConfigModel):
    """What hardware the run takes and how roles divide it. A device is a GPU, or a core with `device: cpu`."""

    common: ClassVar[tuple[str, ...]] = ("nodes",)

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

    device_mapping: DeviceMappingConfig = Field(
        default_factory=DeviceMappingConfig, description="Devices of each role."
    )

    @property
    def gpu_memory(self) -> int | None:
        """Memory of one GPU in bytes, where it is configured."""
        kind = None if self.gpu is None else GPU_KINDS[self.gpu].memory_gib
        gib = self.gpu_memory_gib or kind
        return None if gib is None else int(gib * 2**30)

    def own_devices(self, role: str) -> DeviceRange | None:
        """Return the devices that `device_mapping` gives a role; None where it shares those of another."""
        mapping = self.device_mapping
        return {
            "training": mapping.training,
            "inference": mapping.inference,
            "reference": mapping.reference,
            "judge": mapping.judge,
            "critic": mapping.critic,
        }[role]

    def devices_of(self, role: str) -> DeviceRange:
        """Return the devices of a role of `device_mapping`: its own, or those that it shares."""
        return self.own_devices(role) or self.devices_of(_SHARED_WITH[role])

    def role(
        self,
        name: str,
        workers: int,
        workers_key: str,
        devices: DeviceRange | None = None,
        devices_key: tuple[str, ...] | None = None,
    ) -> RolePlan:
        """Return where the workers of a role are; without `devices` and their key it is one of `device_mapping`."""
        return RolePlan(
            name=name,
            workers=workers,
            workers_key=workers_key,
            devices=devices or self.devices_of(name),
            devices_per_node=self.devices_per_node,
            devices_key=devices_key or ("resources", "device_mapping", name),
        )

    def violations(self, roles: Sequence[RolePlan]) -> Iterator[Violation]:
        """Yield device ranges of a run's roles that do not fit the hardware or each other, and settings in vain."""
        if self.nodes > 1 and self.address is None:
            yield Violation(
                ("resources", "address"),
                f"a run on {self.nodes} nodes joins a Ray cluster that is already there; set it to `auto` "
                "(on a node of that cluster) or to host:port",
            )
        if self.address is not None and not _ADDRESS.fullmatch(self.address):
            client = " (Ray Client's and the dashboard's addresses reach no workers)" if "://" in self.address else ""
            yield Violation(
                ("resources", "address"),
                f"found {self.address!r}; expected `auto` on a node of the cluster, or the head's host:port, such as "
                f"10.0.0.1:6379{client}. From elsewhere, hand the run to the cluster with `ray job submit`",
            )
        for key in self.changed("gpu", "gpu_memory_gib", "cpus_per_device") if self.device == "cpu" else ():
            yield Violation(("resources", key), "resources.device is cpu, so this has no effect; remove it")
        for index, role in enumerate(roles):
            yield from self._role_fits(role)
            for other in roles[:index]:
                if role.devices != other.devices and role.devices.overlaps(other.devices):
                    yield Violation(
                        role.devices_key,
                        f"{role.devices} overlaps {other.name}'s {other.devices} only in part. Equal ranges take "
                        "turns, disjoint ranges run side by side; in part, some devices would wait for others. Make "
                        "them equal or disjoint",
                    )

    def _role_fits(self, role: RolePlan) -> Iterator[Violation]:
        size, per_node, total = len(role.devices), self.devices_per_node, self.nodes * self.devices_per_node
        if role.devices.stop > total:
            yield Violation(
                role.devices_key,
                f"{role.devices} ends after the last device: nodes × devices_per_node = {self.nodes} × "
                f"{per_node} = {total}, so devices are 0-{total - 1}",
            )
            return
        if self.device == "cuda" and role.name not in ("inference", "judge") and size != role.workers:
            yield Violation(
                role.devices_key,
                f"{role.devices} has {size} GPUs for {role.workers} {role.name} workers, and each takes exactly one; "
                f"set {role.workers_key}: {size}, or a device range of {role.workers}",
            )
            return
        if size % role.workers:
            yield Violation(
                role.devices_key,
                f"{role.devices} has {size} devices, which cannot be divided evenly among {role.workers} "
                f"({role.workers_key}); change either",
            )
            return
        for worker in range(role.workers):
            devices = role.devices_of(worker)
            if devices[0] // per_node != devices[-1] // per_node:
                yield Violation(
                    role.devices_key,
                    f"worker {worker} of {role.name} would have devices {devices[0]}-{devices[-1]}, across the border "
                    f"between nodes (each has {per_node}); a worker stays within one node: change the device range or "
                    f"{role.workers_key} so that {per_node} is a multiple of the devices of one worker",
                )
                return


class DeviceRoles:
    """Annotation of a field with a ResourcesConfig: the roles that have devices in runs of this kind.

    Files may name these in `device_mapping`, and must name those that share no other role's. What is read is a plain
    ResourcesConfig.
    """

    def __init__(self, *roles: str) -> None:
        fields = {name: info for name, info in DeviceMappingConfig.model_fields.items() if name in roles}
        mapping = create_model(  # type: ignore[call-overload]
            DeviceMappingConfig.__name__,
            __base__=ConfigModel,
            __doc__=DeviceMappingConfig.__doc__,
            **{
                name: (info.annotation, info)
                if name in _SHARED_WITH
                else (DeviceRange, Field(description=info.description))
                for name, info in fields.items()
            },
        )
        self._section: type[ResourcesConfig] = create_model(
            ResourcesConfig.__name__,
            __base__=ResourcesConfig,
            __doc__=ResourcesConfig.__doc__,
            device_mapping=(mapping, Field(description=ResourcesConfig.model_fields["device_mapping"].description)),
        )

    def config_of(self, value: Any) -> type[ResourcesConfig]:
        """Return the class that the section is validated against."""
        del value
        return self._section

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            self._validate,
            handler.generate_schema(self._section),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value.model_dump(mode="json")),
        )

    def _validate(self, value: Any, section: ValidatorFunctionWrapHandler) -> ResourcesConfig:
        """Return the section, with errors where it does not have the roles of such runs."""
        written = value.model_dump(exclude_unset=True) if isinstance(value, ResourcesConfig) else value
        return ResourcesConfig.from_values(section(written).model_dump(exclude_unset=True))


#: The section `resources` of runs that train a model alone.
TrainerResources = Annotated[ResourcesConfig, DeviceRoles("training")]
#: Of runs that train with a reference model.
ReferencedResources = Annotated[ResourcesConfig, DeviceRoles("training", "reference")]
#: Of runs whose policy samples.
SamplingResources = Annotated[ResourcesConfig, DeviceRoles("training", "inference", "reference", "judge")]
#: Of runs whose policy samples, and that may train a critic.
CriticResources = Annotated[ResourcesConfig, DeviceRoles("training", "inference", "reference", "judge", "critic")]
