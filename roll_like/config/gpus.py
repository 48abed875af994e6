"""Kinds of GPUs whose sizes and peak rates are published: what plans and model FLOPs utilisation compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

GPUName: TypeAlias = Literal[
    "A10",
    "A100-40GB",
    "A100-80GB",
    "H100",
    "H100-PCIe",
    "H20",
    "H200",
    "L4",
    "L40S",
    "RTX-4090",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUKind:
    """What a kind of GPU has.

    Attributes:
        device_names: What `torch.cuda.get_device_name` and nvidia-smi call it.
        memory_gib: Memory as nvidia-smi reports it, which is less than the name says. GiB.
        tflops: Peak rate of dense 16-bit matrix products that are summed in float32. 10¹² FLOP/s.
        float32_tflops: Peak rate of float32 products, which torch does not round to TF32 by default. 10¹² FLOP/s.
        memory_gb_per_second: Bandwidth of its memory. 10⁹ bytes/s.
        link_gb_per_second: Bandwidth to other GPUs of its machine, in one direction (NVLink, else PCIe). 10⁹ bytes/s.
        host_gb_per_second: Bandwidth to host memory, in one direction (PCIe). 10⁹ bytes/s.
    """

    device_names: tuple[str, ...]
    memory_gib: float
    tflops: float
    float32_tflops: float
    memory_gb_per_second: float
    link_gb_per_second: float
    host_gb_per_second: float

    def peak(self, dtype: str) -> float:
        """Return the peak rate of dense matrix products in a precision, in FLOP/s."""
        return (self.float32_tflops if dtype == "float32" else self.tflops) * 1e12


#: Sources: NVIDIA's data sheets of the A100 80GB, H100 SXM, H200 SXM and L40S, and its white paper of the Ada
#: architecture for the RTX 4090. Where one gives rates with sparsity only, this is half of them. PCIe 4.0 and 5.0 with
#: 16 lanes have 31.5 and 63 GB/s in each direction. Memory is what nvidia-smi prints.
#: Not compared with a data sheet: all float32 rates, and every figure of the A10, A100 40GB, H100 PCIe, H20 and L4.
GPU_KINDS: dict[GPUName, GPUKind] = {
    "A10": GPUKind(
        device_names=("NVIDIA A10",),
        memory_gib=22.5,
        tflops=125,
        float32_tflops=31.2,
        memory_gb_per_second=600,
        link_gb_per_second=31.5,
        host_gb_per_second=31.5,
    ),
    "A100-40GB": GPUKind(
        device_names=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        memory_gib=40.0,
        tflops=312,
        float32_tflops=19.5,
        memory_gb_per_second=1555,
        link_gb_per_second=300,
        host_gb_per_second=31.5,
    ),
    "A100-80GB": GPUKind(
        device_names=("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
        memory_gib=80.0,
        tflops=312,
        float32_tflops=19.5,
        memory_gb_per_second=2039,
        link_gb_per_second=300,
        host_gb_per_second=31.5,
    ),
    "H100": GPUKind(
        device_names=("NVIDIA H100 80GB HBM3",),
        memory_gib=79.6,
        tflops=989.5,
        float32_tflops=67,
        memory_gb_per_second=3350,
        link_gb_per_second=450,
        host_gb_per_second=63,
    ),
    "H100-PCIe": GPUKind(
        device_names=("NVIDIA H100 PCIe",),
        memory_gib=79.6,
        tflops=756.5,
        float32_tflops=51,
        memory_gb_per_second=2000,
        link_gb_per_second=300,
        host_gb_per_second=63,
    ),
    "H20": GPUKind(
        device_names=("NVIDIA H20",),
        memory_gib=95.6,
        tflops=148,
        float32_tflops=44,
        memory_gb_per_second=4000,
        link_gb_per_second=450,
        host_gb_per_second=63,
    ),
    "H200": GPUKind(
        device_names=("NVIDIA H200",),
        memory_gib=140.4,
        tflops=989.5,
        float32_tflops=67,
        memory_gb_per_second=4800,
        link_gb_per_second=450,
        host_gb_per_second=63,
    ),
    "L4": GPUKind(
        device_names=("NVIDIA L4",),
        memory_gib=22.5,
        tflops=121,
        float32_tflops=30.3,
        memory_gb_per_second=300,
        link_gb_per_second=31.5,
        host_gb_per_second=31.5,
    ),
    "L40S": GPUKind(
        device_names=("NVIDIA L40S",),
        memory_gib=45.0,
        tflops=362,
        float32_tflops=91.6,
        memory_gb_per_second=864,
        link_gb_per_second=31.5,
        host_gb_per_second=31.5,
    ),
    "RTX-4090": GPUKind(
        device_names=("NVIDIA GeForce RTX 4090",),
        memory_gib=24.0,
        tflops=165.2,
        float32_tflops=82.6,
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
