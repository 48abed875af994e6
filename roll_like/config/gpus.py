"""Kinds of GPUs whose sizes and peak rates are published: what plans and model FLOPs utilisation compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

GPUName: TypeAlias = Literal[
    "A10", "A100-40GB", "A100-80GB", "H100", "H100-PCIe", "H20", "H200", "L4", "L40S", "RTX-4090"
]


@dataclass(frozen=True, slots=True)
class GPUKind:
    """What a kind of GPU has.

    Attributes:
        memory_gib: Memory as nvidia-smi reports it, which is less than the name says. GiB.
        tflops: Peak rate of dense 16-bit matrix products that are summed in float32. 10¹² FLOP/s.
        float32_tflops: Peak rate of float32 products, which torch does not round to TF32 by default. 10¹² FLOP/s.
        memory_gb_per_second: Bandwidth of its memory. 10⁹ bytes/s.
        link_gb_per_second: Bandwidth to other GPUs of its machine, in one direction (NVLink, else PCIe). 10⁹ bytes/s.
        host_gb_per_second: Bandwidth to host memory, in one direction (PCIe). 10⁹ bytes/s.
        device_names: What `torch.cuda.get_device_name` and nvidia-smi call it.
    """

    memory_gib: float
    tflops: float
    float32_tflops: float
    memory_gb_per_second: float
    link_gb_per_second: float
    host_gb_per_second: float
    device_names: tuple[str, ...]

    def peak(self, dtype: str) -> float:
        """Return the peak rate of dense matrix products in a precision, in FLOP/s."""
        return (self.float32_tflops if dtype == "float32" else self.tflops) * 1e12


#: Sources: NVIDIA's data sheets of the A100 80GB, H100 SXM, H200 SXM and L40S, and its white paper of the Ada
#: architecture for the RTX 4090. Where one gives rates with sparsity only, this is half of them. PCIe 4.0 and 5.0 with
#: 16 lanes have 31.5 and 63 GB/s in each direction. Memory is what nvidia-smi prints.
#: Not compared with a data sheet: all float32 rates, and every figure of the A10, A100 40GB, H100 PCIe, H20 and L4.
GPU_KINDS: dict[GPUName, GPUKind] = {
    # memory, 16 bits, float32, bandwidths of memory, links and host
    "A10": GPUKind(22.5, 125, 31.2, 600, 31.5, 31.5, ("NVIDIA A10",)),
    "A100-40GB": GPUKind(40.0, 312, 19.5, 1555, 300, 31.5, ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB")),
    "A100-80GB": GPUKind(80.0, 312, 19.5, 2039, 300, 31.5, ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe")),
    "H100": GPUKind(79.6, 989.5, 67, 3350, 450, 63, ("NVIDIA H100 80GB HBM3",)),
    "H100-PCIe": GPUKind(79.6, 756.5, 51, 2000, 300, 63, ("NVIDIA H100 PCIe",)),
    "H20": GPUKind(95.6, 148, 44, 4000, 450, 63, ("NVIDIA H20",)),
    "H200": GPUKind(140.4, 989.5, 67, 4800, 450, 63, ("NVIDIA H200",)),
    "L4": GPUKind(22.5, 121, 30.3, 300, 31.5, 31.5, ("NVIDIA L4",)),
    "L40S": GPUKind(45.0, 362, 91.6, 864, 31.5, 31.5, ("NVIDIA L40S",)),
    "RTX-4090": GPUKind(24.0, 165.2, 82.6, 1008, 31.5, 31.5, ("NVIDIA GeForce RTX 4090",)),
}


def gpu_named(device_name: str) -> GPUName | None:
    """Return the kind of a GPU by what torch or nvidia-smi call it; None if its rates are not in the table.

    >>> gpu_named("NVIDIA H100 80GB HBM3")
    'H100'
    """
    return next((name for name, kind in GPU_KINDS.items() if device_name in kind.device_names), None)
