"""Whether a run fits on its GPUs, and what its steps take at least: findings, and tables of `--check`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

from roll_like.check.gpu_memory import FRAGMENTATION, GPUPhase, GPUPlan, gpu_plans
from roll_like.check.plan import ASIDE, DRAFT_WEIGHTS, GIB, Plan
from roll_like.check.step_floor import StepFloor, step_floor
from roll_like.cluster.limits import usable_memory
from roll_like.config.base import Finding
from roll_like.config.gpus import gpu_named
from roll_like.config.inference import engines_share_gpus
from roll_like.config.run import RunConfig
from roll_like.config.sampling import SamplingRunConfig
from roll_like.config.training import TrainerConfig
from roll_like.inference.plugin import SPECULATIVE_KEY
from roll_like.metrics.progress import format_number
from roll_like.models.shape import ModelShape
from roll_like.registry import TRAINING_BACKENDS

#: What a machine has where a driver of NVIDIA's GPUs is loaded: on Linux, and in Windows' subsystem for it.
DRIVER = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")
#: Least ZeRO stage that divides a part of the state among ranks.
_NEEDED_STAGES = {"weights": 3, "gradients": 2, "optimizer": 2, "optimizer step": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUReport:
    """What the GPUs of a run hold and how long a step takes at least.

    Attributes:
        plans: Of each range of GPUs.
        memory: Memory of one GPU in bytes, None where it is not known.
        floor: Least seconds of a step; None where the kind of the GPUs is not known.
        host_memory: Memory of this machine in bytes, if it has the GPUs.
        awake: The most that one GPU would hold if neither engines nor the trainer made room for the other, in bytes;
            None where they do not, or keys say that they do, or the configuration would be refused.
    """

    plans: tuple[GPUPlan, ...]
    memory: int | None
    floor: StepFloor | None
    host_memory: int | None = None
    awake: int | None = None

    def render(self) -> RenderableType:
        """Return tables for `rich.console.Console.print`."""
        tables = [_memory_table(plan, self.memory) for plan in self.plans if plan.phases]
        return Group(*tables, *([] if self.floor is None else [_floor_table(self.floor)]))


def gpu_report(config: RunConfig, made: Plan, shapes: Mapping[str, ModelShape]) -> GPUReport | None:
    """Return what the GPUs of a run hold; None on CPU, and where the model's sizes are not known."""
    if config.resources.device == "cpu" or "training" not in shapes:
        return None
    measured = measured_gpus() if config.resources.address is None else []
    memory = config.resources.gpu_memory or min((memory for _, memory in measured), default=None)
    kinds = {gpu_named(name) for name, _ in measured}
    kind = config.resources.gpu or (kinds.pop() if len(kinds) == 1 else None)
    plans = gpu_plans(config, shapes, memory)
    moved = max((plan.host for plan in plans), default=0)
    return GPUReport(
        plans=plans,
        memory=memory,
        floor=step_floor(config, made, shapes["training"], moved, kind),
        host_memory=usable_memory() if measured else None,
        awake=None if memory is None else _awake(config, shapes, memory),
    )


def _awake(config: RunConfig, shapes: Mapping[str, ModelShape], memory: int) -> int | None:
    """Return `GPUReport.awake`."""
    if not isinstance(config, SamplingRunConfig) or not engines_share_gpus(config.resources):
        return None
    engine = config.inference
    chosen = (config.training.sleep, getattr(engine, "sleep", None))
    if set(config.trained) != {"training"} or not engine.capabilities.sleep or chosen != (None, None):
        return None
    together = {name: getattr(config, name).model_copy(update={"sleep": False}) for name in ("training", "inference")}
    both = config.model_copy(update=together)
    plans = gpu_plans(both, shapes, memory)
    if any(plan.left_out for plan in plans) or any(both.violations()):
        return None
    return max(phase.total for plan in plans for phase in plan.phases)


def measured_gpus() -> list[tuple[str, int]]:
    """Return name and memory in bytes of each GPU of this machine that a run may use, from nvidia-smi.

    Nothing where there is none. Not from torch, whose first question makes a CUDA context: half a GiB of a GPU, for as
    long as the run lasts. `CUDA_VISIBLE_DEVICES` is read as if `CUDA_DEVICE_ORDER` were PCI_BUS_ID; once the run has
    its GPUs, it asks each of them.
    """
    command = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        rows = [line.split(", ") for line in done.stdout.splitlines()]
        found = [(index, uuid, (name, int(memory) * 2**20)) for index, uuid, name, memory in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [gpu for _, _, gpu in found]
    wanted = [each.strip() for each in visible.split(",")]
    # an identifier may be shortened
    return [
        gpu
        for index, uuid, gpu in found
        if any(each == index or (each.startswith("GPU-") and uuid.startswith(each)) for each in wanted)
    ]


def check_gpus(config: RunConfig, report: GPUReport) -> Iterator[Finding]:
    """Yield phases that need more than a GPU has, with what to change, and engines without room for one sample."""
    yield from _too_much_in_host(config, report)
    if report.memory is None and config.resources.address is None:
        return  # a finding of its own: this machine has no GPU
    if report.memory is None:
        yield Finding.note(
            "resources.gpu",
            "the memory of a GPU is not known here, so the plan is not compared with it; set resources.gpu, or "
            "resources.gpu_memory_gib",
        )
        return
    if report.awake is not None and report.awake <= (1 - FRAGMENTATION) * report.memory:
        yield Finding.note(
            "training.sleep",
            f"engines and the model that is trained fit on a GPU together, {report.awake / GIB:.1f} of "
            f"{report.memory / GIB:.1f} GiB: training.sleep: false and inference.sleep: false save what it takes to "
            "move them to host memory and back in every step",
        )
    for plan in report.plans:
        for phase in plan.phases:
            yield from _too_large(config, plan, phase, report.memory)
        yield from _small_cache(config, plan)
        if plan.left_out:
            yield Finding.note(
                "resources.device_mapping",
                f"the plan of GPUs {plan.devices} leaves out {', '.join(plan.left_out)}: the memory of these roles is "
                "not known",
            )


def no_gpu_here(config: RunConfig, report: GPUReport | None) -> Iterator[Finding]:
    """Yield that this machine has no GPU, where the configuration does not say which GPUs it is for: an error.

    A warning where a driver is there and nvidia-smi shows none: a container may lack it, and it does not list parts of
    a GPU (MIG) by the names that `CUDA_VISIBLE_DEVICES` has for them.

    Args:
        report: Of the GPUs, which has looked at this machine already; None where the model's sizes are not known.
    """
    resources = config.resources
    if resources.device == "cpu" or resources.address is not None or resources.gpu_memory is not None:
        return
    if not (measured_gpus() if report is None else report.memory):
        yield Finding(
            "warning" if any(Path(path).exists() for path in DRIVER) else "error",
            "resources.gpu",
            "resources.device is cuda, and this machine has no GPU that nvidia-smi shows; to plan here for another "
            "machine, set resources.gpu to the kind of its GPUs (such as H100), or resources.gpu_memory_gib; to run "
            "here, set resources.device: cpu",
        )


def _too_much_in_host(config: RunConfig, report: GPUReport) -> Iterator[Finding]:
    """Yield more that makes room on GPUs than this machine has memory for."""
    per_node = config.resources.devices_per_node
    moved = sum(plan.host * min(len(plan.devices), per_node) for plan in report.plans)
    if report.host_memory is not None and moved > report.host_memory:
        yield Finding.error(
            "training.sleep",
            f"{'offloaded states and copies of the policy' if config.copies else 'offloaded states'} need "
            f"{moved / GIB:.1f} GiB of host memory on each machine, and this one has "
            f"{report.host_memory / GIB:.1f} GiB; set training.sleep: false or inference.sleep: false where both fit "
            "on a GPU, or give engines and models GPUs of their own"
            + ("; training.zero_stage: 3 divides the copies among ranks" if config.copies else ""),
        )


def _too_large(config: RunConfig, plan: GPUPlan, phase: GPUPhase, memory: int) -> Iterator[Finding]:
    left = memory - phase.total
    # vLLM takes its share in one piece
    in_one = phase.name == "sampling" or {role for role, _ in phase.parts} == {"inference"}
    if left >= (0 if in_one else FRAGMENTATION * memory):
        return
    found = [
        advice for part, _ in phase.largest(count=len(phase.parts)) if (advice := _advice(config, *part)) is not None
    ]
    key, first = found[0] if found else ("resources", "use more GPUs, or a smaller model")
    further = list(dict.fromkeys(text for _, text in found[1:3] if text != first))
    parts = ", ".join(f"{role} {part} {size / GIB:.1f}" for (role, part), size in phase.largest(count=3))
    where = f"GPU {plan.devices}" if len(plan.devices) == 1 else f"each of the GPUs {plan.devices}"
    what = f"{where} would hold {phase.total / GIB:.1f} GiB in phase {phase.name!r} and has {memory / GIB:.1f} GiB"
    if left < 0:
        remedies = "; or ".join([first, *further])
        yield Finding.error(key, f"{what} (largest: {parts} GiB); {remedies}")
    else:
        yield Finding(
            "warning", key, f"{what}: less than {FRAGMENTATION:.0%} is left for what allocators lose; {first}"
        )


def _advice(config: RunConfig, role: str, part: str) -> tuple[str, str] | None:
    """Return the key that makes a part smaller, and what to do with it; None if nothing does."""
    if role in ("inference", "judge", "reference") or role.startswith("teacher "):
        return _less_of_others(config, role, part)
    settings = config.trained.get(role)
    if settings is None:
        return None
    if part == ASIDE and settings.lora is not None:
        return "max_loaded_models", "lower max_loaded_models"
    if part in _NEEDED_STAGES:
        return _less_state(role, settings, part)
    return _less_to_compute(config, role, settings, part)


def _less_of_others(config: RunConfig, role: str, part: str) -> tuple[str, str] | None:
    """Return the same of what is not trained."""
    if role == "inference" and isinstance(config, SamplingRunConfig):
        return _less_of_an_engine(config, part)
    judge = getattr(config, "judge", None)
    if judge is not None and (role, part) == ("judge", "server"):
        key = f"judge.{judge.gpu_memory_key}"
        return key, f"lower {key}, or give the judge GPUs of its own (resources.device_mapping.judge)"
    if part != "weights":
        return None
    key = "resources.device_mapping.reference"
    if role != "reference":
        key = f"teachers.{role.removeprefix('teacher ')}.devices"
    return key, f"give the {role} GPUs of its own ({key})"


def _less_of_an_engine(config: SamplingRunConfig, part: str) -> tuple[str, str] | None:
    if part == "weights":
        return "inference.replicas", "give each engine more GPUs with fewer inference.replicas"
    if part == DRAFT_WEIGHTS and config.inference.draft_model is None:
        return SPECULATIVE_KEY, "let engines guess no tokens, or with method: ngram"
    if part == DRAFT_WEIGHTS:
        return "inference", f"let engines guess tokens with a smaller model than {config.inference.draft_model}"
    if part == "adapters":
        key = "training.lora.rank" if config.models_aside is None else "max_loras"
        return key, f"lower {key}"
    if part == "activations":
        return "inference.max_running", "lower inference.max_running"
    key = f"inference.{config.inference.gpu_memory_key}"
    return None if part in ("CUDA", "transfer buffers", "tensor in transit") else (key, f"lower {key}")


def _less_state(role: str, settings: TrainerConfig, part: str) -> tuple[str, str]:
    divided = TRAINING_BACKENDS.get(settings.backend).divided(settings)
    if part not in divided and settings.workers > 1 and settings.zero_stage < _NEEDED_STAGES[part]:
        return f"{role}.zero_stage", f"set {role}.zero_stage: {_NEEDED_STAGES[part]}"
    lora = settings.lora
    if part == "weights" and part not in divided and lora is not None and lora.quantization is None:
        return f"{role}.lora.quantization", f"keep the frozen base in 4 bits ({role}.lora.quantization: nf4)"
    if settings.offload == "none" and part != "weights" and settings.zero_stage > 0:
        return f"{role}.offload", f"set {role}.offload: optimizer"
    if lora is None:
        return f"{role}.lora", f"train adapters ({role}.lora), or divide the model among more GPUs"
    return f"{role}.workers", f"divide the model among more GPUs ({role}.workers and its device range)"


def _less_to_compute(config: RunConfig, role: str, settings: TrainerConfig, part: str) -> tuple[str, str] | None:
    if part == "logits":
        return f"{role}.logprob_chunk_tokens", f"lower {role}.logprob_chunk_tokens or {role}.logprob_chunk_vocab"
    if part != "activations":
        return None
    if not settings.gradient_checkpointing:
        return f"{role}.gradient_checkpointing", f"set {role}.gradient_checkpointing: true"
    if settings.max_tokens_per_micro_batch * settings.sequence_parallel > config.longest_sample:
        return f"{role}.max_tokens_per_micro_batch", f"lower {role}.max_tokens_per_micro_batch"
    return f"{role}.sequence_parallel", f"divide rows among ranks ({role}.sequence_parallel), with a lower budget each"


def _small_cache(config: RunConfig, plan: GPUPlan) -> Iterator[Finding]:
    """Yield a cache that has no room for one sample; vLLM does not start with that."""
    if plan.cache is None or plan.cache_per_token is None or not isinstance(config, SamplingRunConfig):
        return
    needed = config.context_window * plan.cache_per_token
    if plan.cache < needed:
        yield Finding.error(
            f"inference.{config.inference.gpu_memory_key}",
            f"after weights and activations an engine has {plan.cache / GIB:.2f} GiB of each GPU for its key-value "
            f"cache, and one sequence of {config.context_window} tokens needs {needed / GIB:.2f} GiB; raise it, give "
            "each engine more GPUs with fewer inference.replicas, or lower inference.max_model_len",
        )


def _memory_table(plan: GPUPlan, memory: int | None) -> RenderableType:
    size = "" if memory is None else f" of {memory / GIB:.1f} GiB"
    count = "GPU" if len(plan.devices) == 1 else "each of the GPUs"
    table = Table(title=f"Memory of {count} {plan.devices}{size}, estimated", title_justify="left", title_style="bold")
    table.add_column("phase")
    table.add_column("held there, GiB", ratio=1)
    table.add_column("GiB", justify="right")
    for phase in plan.phases:
        table.add_row(phase.name, _held(phase), f"{phase.total / GIB:.1f}")
    notes = [
        f"{role}: stage {stage + 1} of {stages} of its pipeline is shown, which holds most"
        for role, (stage, stages) in plan.stages.items()
    ]
    if plan.host:
        notes.append(f"in host memory meanwhile: at most {plan.host / GIB:.1f} GiB of each GPU's roles")
    return Group(table, *notes)


def _held(phase: GPUPhase) -> str:
    by_role: dict[str, list[str]] = {}
    for (role, part), size in phase.parts.items():
        by_role.setdefault(role, []).append(f"{part} {size / GIB:.1f}")
    return "\n".join(f"{role}: {', '.join(parts)}" for role, parts in by_role.items())


def _floor_table(floor: StepFloor) -> Table:
    table = Table(title="Least seconds of a step, at full rates", title_justify="left", title_style="bold")
    table.add_column("phase")
    table.add_column("s", justify="right")
    rows: Sequence[tuple[str, float | None]] = (
        ("sampling, all responses of full length", floor.generate),
        ("training", floor.train),
        ("weight update", floor.sync),
        ("moves between GPU and host memory", floor.move or None),
    )
    for label, seconds in rows:
        if seconds is not None:
            table.add_row(label, format_number(seconds))
    return table
