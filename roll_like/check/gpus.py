"""Runs that the GPUs they got cannot compute or hold, before anything is loaded on them."""

from __future__ import annotations

from collections.abc import Sequence

from roll_like.check.gpu_memory import gpu_plans
from roll_like.check.gpu_plan import GPUReport, check_gpus
from roll_like.check.model import check_model, role_shapes
from roll_like.check.plan import GIB
from roll_like.cluster.resources import Gpu
from roll_like.config.gpus import gpu_named
from roll_like.config.run import RunConfig
from roll_like.config.sampling import SamplingRunConfig
from roll_like.errors import ResourceError
from roll_like.models.precision import precision_of
from roll_like.registry import INFERENCE_ENGINES

#: Oldest compute capability that computes in bfloat16, and that flash attention and Triton support: A100.
AMPERE = (8, 0)
#: Share of a GPU's stated memory that drivers may keep for themselves.
RESERVED = 0.05


def require_capable(config: RunConfig, gpus: Sequence[Gpu]) -> None:
    """Raise if a GPU lacks what the precision or the attention of its roles needs, or is smaller than stated.

    Args:
        gpus: The run's GPUs in the order of its devices; none on CPU.

    Raises:
        ResourceError: Names the GPU, what it is, and the keys to change.
    """
    if not gpus:
        return
    _require_stated_memory(config, gpus)
    for role in config.roles:
        for number in range(role.devices.start, role.devices.stop):
            _require_precision(config, role.name, number, gpus[number])
            _require_attention(config, role.name, number, gpus[number])
            if role.name == "inference" and isinstance(config, SamplingRunConfig):
                _require_engine(config, number, gpus[number])


def require_room(config: RunConfig, gpus: Sequence[Gpu]) -> None:
    """Raise if a run whose configuration does not state the memory of its GPUs does not fit on the smallest of them.

    Args:
        gpus: The run's GPUs in the order of its devices; none on CPU.

    Raises:
        ResourceError: Names the GPU, what does not fit, and the keys to change.
    """
    if not gpus or config.resources.gpu_memory is not None:
        return  # what is stated was planned with
    number, gpu = _smallest(gpus)
    _, shape = check_model(config, [])
    plans = gpu_plans(config, role_shapes(config, shape), gpu.memory_bytes)
    report = GPUReport(plans=plans, memory=gpu.memory_bytes, floor=None)
    errors = [f"{found.key}: {found.message}" for found in check_gpus(config, report) if found.level == "error"]
    if errors:
        size = f"{gpu.memory_bytes / GIB:.1f}"
        raise ResourceError(
            f"device {number} is a {gpu.name} with {size} GiB, and the run does not fit: {'; '.join(errors)}",
            fix=f"change a key that is named, or use larger GPUs; --check with resources.gpu_memory_gib={size} shows "
            "what they would hold",
        )


def _require_stated_memory(config: RunConfig, gpus: Sequence[Gpu]) -> None:
    resources = config.resources
    number, gpu = _smallest(gpus)
    if resources.gpu_memory is None or gpu.memory_bytes >= (1 - RESERVED) * resources.gpu_memory:
        return
    key, value = "gpu_memory_gib", f"{gpu.memory_bytes / GIB:.1f}"
    stated = f"resources.gpu: {resources.gpu}" if resources.gpu_memory_gib is None else f"resources.{key}"
    kind = gpu_named(gpu.name)
    if resources.gpu_memory_gib is None and kind is not None:
        key, value = "gpu", kind
    raise ResourceError(
        f"device {number} is a {gpu.name} with {gpu.memory_bytes / GIB:.1f} GiB, and {stated} states "
        f"{resources.gpu_memory / GIB:.1f} GiB, with which the run was planned",
        fix=f"set resources.{key}: {value}, so that the plan is made for these GPUs, or use others",
    )


def _smallest(gpus: Sequence[Gpu]) -> tuple[int, Gpu]:
    return min(enumerate(gpus), key=lambda numbered: numbered[1].memory_bytes)


def _require_precision(config: RunConfig, role: str, number: int, gpu: Gpu) -> None:
    key, stated, dtype = "model.dtype", config.model.dtype, precision_of(config)
    judge = getattr(config, "judge", None)
    if role == "judge" and judge is not None:
        key, stated, dtype = "judge.dtype", judge.dtype, judge.dtype
    if dtype == "bfloat16" and gpu.capability < AMPERE and not role.startswith("rewards "):
        raise ResourceError(
            f"{key}: {stated} computes in bfloat16, and {_named(number, gpu)}; bfloat16 needs 8.0 or newer",
            fix=f"set {key}: float16 or float32, or use other GPUs",
        )


def _require_attention(config: RunConfig, role: str, number: int, gpu: Gpu) -> None:
    """Raise if a GPU lacks the kernels of a model that is trained, or that scores with the trainer's attention."""
    section = "training" if role in config.frozen else role
    settings = config.trained.get(section)
    if settings is None:
        return
    key, attention = f"{section}.attention", settings.attention
    # auto chooses such kernels by the model's heads, in 16 bits alone
    kernels = attention == "flex" or (attention != "dense" and precision_of(config) == "float16")
    if kernels and gpu.capability < AMPERE:
        raise ResourceError(
            f"{key}: {attention} needs flash or Triton kernels, and {_named(number, gpu)}; they need 8.0 or newer",
            fix=f"set {key}: dense, {'' if attention == 'flex' else 'or model.dtype: float32, '}or use other GPUs",
        )
    if attention == "flex" and not gpu.triton:
        raise ResourceError(
            f"{key}: flex is compiled with Triton, and the machine of device {number} has none",
            fix=f"install there what docs/gpu.md names, or set {key}: auto",
        )


def _require_engine(config: SamplingRunConfig, number: int, gpu: Gpu) -> None:
    plugin, head_dtype = INFERENCE_ENGINES.get(config.inference.type), config.model.head_dtype
    if (obstacle := plugin.gpu_obstacle(config.inference, head_dtype, gpu.capability)) is not None:
        raise ResourceError(
            f"{_named(number, gpu)}: {obstacle}",
            fix="remove one of the two keys, use inference.type: hf, or use other GPUs",
        )


def _named(number: int, gpu: Gpu) -> str:
    return f"device {number} is a {gpu.name} of compute capability {'.'.join(map(str, gpu.capability))}"
