"""Settings that the GPUs of a run cannot compute, before anything is loaded on them."""

from __future__ import annotations

from collections.abc import Sequence

from roll_like.cluster.resources import Gpu
from roll_like.config.run import RunConfig
from roll_like.errors import ResourceError
from roll_like.models.precision import precision_of

#: Oldest compute capability that computes in bfloat16, and that flash attention and Triton have kernels for: A100.
AMPERE = (8, 0)


def require_capable(config: RunConfig, gpus: Sequence[Gpu]) -> None:
    """Raise if a GPU lacks what the precision or the attention of the run needs.

    Args:
        config: The run's configuration.
        gpus: Its GPUs in the order of its devices; none on CPU.

    Raises:
        ResourceError: Names the GPU, what it is, and the keys to change.
    """
    old = next((number for number, gpu in enumerate(gpus) if gpu.capability < AMPERE), None)
    if old is None:
        return
    gpu, dtype = gpus[old], precision_of(config)
    found = f"device {old} is a {gpu.name} of compute capability {'.'.join(map(str, gpu.capability))}"
    if dtype == "bfloat16":
        raise ResourceError(
            f"model.dtype: {config.model.dtype} computes in bfloat16, and {found}; bfloat16 needs 8.0 or newer",
            fix="set model.dtype: float16 or float32, or use other GPUs",
        )
    for section, settings in config.trained.items():
        # auto chooses such kernels by the model's heads
        if dtype == "float16" and settings.attention != "dense":
            raise ResourceError(
                f"{section}.attention: {settings.attention} needs flash or Triton kernels, and {found}; "
                "they need 8.0 or newer",
                fix=f"set {section}.attention: dense, or model.dtype: float32, or use other GPUs",
            )
