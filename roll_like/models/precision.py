"""What `model.dtype: auto` means on the hardware of a run."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from roll_like.config.run import RunConfig
from roll_like.config.sections import Precision

RunConfigT = TypeVar("RunConfigT", bound=RunConfig)

#: Flags of CPUs whose products in bfloat16 are at least as fast as in float32: AVX-512, AMX, AVX-NE-CONVERT; Arm's.
_BFLOAT16_FLAGS = frozenset({"avx512bw", "avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})


@lru_cache(maxsize=1)
def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this CPU computes in bfloat16 itself; true where the flags are unknown.

    Without such instructions PyTorch emulates them, and products take about ten times as long as in float32.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return True
    flags = next(
        (line.split(":", 1)[1].split() for line in lines if line.lower().startswith(("flags", "features"))), []
    )
    return not flags or bool(_BFLOAT16_FLAGS & set(flags))


def precision_of(config: RunConfig) -> Precision:
    """Return the precision of a run's forward passes."""
    dtype = config.model.dtype
    if dtype != "auto":
        return dtype
    return "bfloat16" if config.resources.device == "cuda" or cpu_has_bfloat16() else "float32"


def settled(config: RunConfigT) -> RunConfigT:
    """Return the configuration with the precision that it has here, instead of `auto`."""
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": precision_of(config)})})
