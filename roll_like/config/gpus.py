"""Kinds of GPUs whose sizes and peak rates are published: what plans and model FLOPs utilisation compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

GPUName: TypeAlias = Literal["A100-80GB", "H100", "H200", "L40S", "RTX-4090"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUKind:
    """What a kind of GPU has, by its vendor's data sheet.

    Attributes:
        device_names: What `torch.cuda.get_device_name` and nvidia-smi call it.
        memory_gib: Memory as nvidia-smi reports it, which is less than the name says. GiB.
        tflops: Peak rate of dense 16-bit matrix products that are summed in float32. 10¹² FLOP/s.
        memory_gb_per_second: Bandwidth of its memory. 10⁹ bytes/s.
        link_gb_per_second: Bandwidth to other GPUs of its machine, in one direction (NVLink, else PCIe). 10⁹ bytes/s.
        host_gb_per_second: Bandwidth to host memory, in one direction (PCIe). 10⁹ bytes/s.
    """

    device_names: tuple[str, ...]
    memory_gib: float
    tflops: float
    memory_gb_per_second: float
    link_gb_per_second: float
    host_gb_per_second: float


#: Sources: NVIDIA's data sheets of the A100 80GB, H100 SXM, H200 SXM and L40S, and its white paper of the Ada
#: architecture for the RTX 4090. Where one gives rates with sparsity only, this is half of them. PCIe 4.0 and 5.0 with
#: 16 lanes have 31.5 and 63 GB/s in each direction.
GPU_KINDS: dict[GPUName, GPUKind] = {
    "A100-80GB": GPUKind(
        device_names=("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
        memory_gib=80.0,
        tflops=312,
        memory_gb_per_second=2039,
        link_gb_per_second=300,
        host_gb_per_second=31.5,
    ),
    "H100": GPUKind(
        device_names=("NVIDIA H100 80GB HBM3",),
        memory_gib=79.6,
        tflops=989.5,
        memory_gb_per_second=3350,
        link_gb_per_second=450,
        host_gb_per_second=63,
    ),
    "H200": GPUKind(
        device_names=("NVIDIA H200",),
        memory_gib=140.4,
        tflops=989.5,
        memory_gb_per_second=4800,
        link_gb_per_second=450,
        host_gb_per_second=63,
    ),
    "L40S": GPUKind(
        device_names=("NVIDIA L40S",),
        memory_gib=45.0,
        tflops=362,
        memory_gb_per_second=864,
        link_gb_per_second=31.5,
        host_gb_per_second=31.5,
    ),
    "RTX-4090": GPUKind(
        device_names=("NVIDIA GeForce RTX 4090",),
        memory_gib=24.0,
        tflops=165.2,
        memory_gb_per_second=1008,
        link_gb_per_second=31.5,
        host_gb_per_second=31.5,
    ),
}


def gpu_named(device_name: str) -> GPUName | None:
    """Return the kind of a GPU by what torch or nvidia-smi call it; None if its rates are not in the table.

    >>> gpu_named("NVIDIA H100 80GB HBM3")
    'H100'
    """
    return next((name for name, kind in GPU_KINDS.items() if device_name in kind.device_names), None)
