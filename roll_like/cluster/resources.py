"""From the `resources` section to Ray placement groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll_like.cluster.address import node_address
from roll_like.cluster.worker_restarts import RestartCallback, to_stderr
from roll_like.config.resources import DeviceRange, ResourcesConfig
from roll_like.errors import ResourceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU, as torch sees it on its node.

    Attributes:
        accelerator_id: What the node calls it.
        name: Its model.
        capability: CUDA compute capability, major and minor.
        memory_bytes: All of its memory that programs may use.
        triton: Whether its node has Triton.
    """

    accelerator_id: str
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    triton: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one worker sits, and how long it may take to start.

    Attributes:
        devices: The run's device numbers it has (through all nodes).
        accelerator_ids: What those GPUs are called on the node; empty on CPU.
        group: Ray placement group of the node.
        bundle: Bundle of its first device.
        start_timeout_seconds: From its creation to its first answer.
    """

    devices: tuple[int, ...]
    accelerator_ids: tuple[str, ...]
    group: PlacementGroup
    bundle: int
    start_timeout_seconds: float

    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Return what Ray's `scheduling_strategy` option takes."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self.group,
            placement_group_bundle_index=self.bundle,
            placement_group_capture_child_tasks=False,
        )


#: What to do where torch has no GPU.
INSTALL_FOR_GPUS = "install there what docs/gpu.md names, with a driver new enough, or set resources.device: cpu"


class ResourceManager:
    """Holds one placement group a node, one bundle a device, and cuts device ranges out of them.

    Roles share devices by holding the same bundles: Ray reserves the hardware once for the run, and
    which roles may be busy together is the pipeline's business.

    Args:
        config: The `resources` section.
    """

    def __init__(self, config: ResourcesConfig) -> None:
        self.config = config
        self._groups: list[PlacementGroup] = []
        #: The GPUs of the run in the order of its devices, once they are allocated; none on CPU.
        self.gpus: tuple[Gpu, ...] = ()
        #: Told about workers that were replaced.
        self.report: RestartCallback = to_stderr

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def allocate(self) -> None:
        """Reserve every node's devices, and ask what GPUs they are.

        Raises:
            ResourceError: The cluster cannot hold them, or torch cannot use them there; says what it has and what was
                asked.
        """
        bundle = self._bundle()
        self._refuse_what_cannot_fit(bundle)
        for _ in range(self.config.nodes):
            group = placement_group([bundle] * self.config.devices_per_node, strategy="STRICT_PACK")
            self._groups.append(group)
        for index, group in enumerate(self._groups):
            if not group.wait(self.config.start_timeout_seconds):
                self.release()
                raise ResourceError(
                    f"Ray did not find room for node {index} ({self.config.devices_per_node} × {bundle}) within "
                    f"{self.config.start_timeout_seconds:.0f} s; free: {_readable(ray.available_resources())}",
                    fix="stop what holds the devices, or lower resources.nodes or resources.devices_per_node",
                )
        if self.config.device == "cuda":
            self.gpus = self._look_at_gpus()

    def place(self, devices: DeviceRange, workers: int, role: str) -> list[Placement]:
        """Divide a device range evenly among workers, in order.

        Raises:
            ResourceError: The device range does not divide, or a worker would straddle two nodes.
        """
        per_node = self.config.devices_per_node
        if devices.stop > per_node * self.config.nodes or len(devices) % workers:
            raise ResourceError(
                f"{role}: {workers} workers on devices {devices} of {per_node * self.config.nodes}",
                fix=f"make resources.device_mapping.{role} a multiple of its workers, inside nodes × devices_per_node",
            )
        share = len(devices) // workers
        placements = []
        for worker in range(workers):
            first = devices.start + worker * share
            node, local = divmod(first, per_node)
            if local + share > per_node:
                raise ResourceError(
                    f"{role}: worker {worker} would need devices {first}-{first + share - 1}, which are on two nodes "
                    f"of {per_node}",
                    fix=f"choose resources.device_mapping.{role} so that each worker's {share} devices are on one node",
                )
            ids = [gpu.accelerator_id for gpu in self.gpus[first : first + share]]
            placements.append(
                Placement(
                    devices=tuple(range(first, first + share)),
                    accelerator_ids=tuple(ids),
                    group=self._groups[node],
                    bundle=local,
                    start_timeout_seconds=self.config.start_timeout_seconds,
                )
            )
        return placements

    def beside(self, workers: int) -> list[Placement]:
        """Place workers that need no device of their own, round robin over the nodes."""
        per_node = self.config.devices_per_node
        return [
            Placement(
                devices=(),
                accelerator_ids=(),
                group=self._groups[worker % self.config.nodes],
                bundle=(worker // self.config.nodes) % per_node,
                start_timeout_seconds=self.config.start_timeout_seconds,
            )
            for worker in range(workers)
        ]

    def release(self) -> None:
        """Give everything back to Ray."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups = []

    def _bundle(self) -> dict[str, float]:
        if self.config.device == "cpu":
            return {"CPU": 1.0}
        return {"GPU": 1.0, "CPU": self.config.cpus_per_device}

    def _refuse_what_cannot_fit(self, bundle: Mapping[str, float]) -> None:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        needed = {kind: amount * self.config.devices_per_node for kind, amount in bundle.items()}
        fitting = [node for node in nodes if all(node.get(kind, 0) >= amount for kind, amount in needed.items())]
        if len(fitting) >= self.config.nodes:
            return
        raise ResourceError(
            f"the run asks for {self.config.nodes} node(s) with {_readable(needed)} each; the Ray cluster has "
            f"{len(nodes)}: {'; '.join(_readable(node) for node in nodes)}",
            fix="lower resources.nodes, resources.devices_per_node or resources.cpus_per_device, or add machines "
            "to the cluster",
        )

    def _look_at_gpus(self) -> tuple[Gpu, ...]:
        # a process that has looked at a GPU keeps memory of it: each ends afterwards
        probe = ray.remote(num_cpus=0, num_gpus=1, max_calls=1)(_own_gpu)
        refs = [
            probe.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            ).remote()
            for group in self._groups
            for bundle in range(self.config.devices_per_node)
        ]
        limit = self.config.start_timeout_seconds
        try:
            found: Sequence[Gpu | str] = ray.get(refs, timeout=limit)
        except GetTimeoutError:
            self.release()
            raise ResourceError(
                f"not every GPU could be asked what it is within {limit:g} s",
                fix="see whether `nvidia-smi` answers on each machine, or raise resources.start_timeout_seconds",
            ) from None
        for number, gpu in enumerate(found):
            if isinstance(gpu, str):
                node, local = divmod(number, self.config.devices_per_node)
                self.release()
                raise ResourceError(f"GPU {local} of node {node} cannot be used: {gpu}", fix=INSTALL_FOR_GPUS)
        return tuple(gpu for gpu in found if isinstance(gpu, Gpu))


def _own_gpu() -> Gpu | str:
    """Return the GPU that Ray gave to this process, or why torch cannot use it."""
    accelerator_id = str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])
    import torch

    if not torch.cuda.is_available():
        return f"{torch_without_gpus()}, on {node_address()}"
    properties = torch.cuda.get_device_properties(0)
    capability, built_for = (properties.major, properties.minor), torch.cuda.get_arch_list()
    if not _has_kernels(built_for, capability):
        return (
            f"torch {torch.__version__} is built for {', '.join(built_for)}, and this {properties.name} on "
            f"{node_address()} has compute capability {properties.major}.{properties.minor}"
        )
    return Gpu(
        accelerator_id=accelerator_id,
        name=properties.name,
        capability=capability,
        memory_bytes=properties.total_memory,
        triton=find_spec("triton") is not None,
    )


def _has_kernels(built_for: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return whether a GPU can run a build of torch, by NVIDIA's rules of compatibility; true where nothing is known.

    Machine code (`sm_86`) runs on GPUs of its major version that are not older, intermediate code (`compute_90`) on all
    that are not older.
    """
    known = [(kind, int(code.rstrip("af"))) for kind, _, code in (each.partition("_") for each in built_for) if code]
    return not known or any(
        divmod(code, 10) <= capability and (kind == "compute" or code // 10 == capability[0]) for kind, code in known
    )


def torch_without_gpus() -> str:
    """Return why torch has no GPU in this process."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    return f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no GPU (`nvidia-smi` shows them)"


def _readable(resources: Mapping[str, Any]) -> str:
    kinds = [kind for kind in ("CPU", "GPU") if resources.get(kind)]
    return ", ".join(f"{resources[kind]:g} {kind}" for kind in kinds) or "nothing"
