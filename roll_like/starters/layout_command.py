"""`roll-like plan`: its options, the layout that it proposes, and why others do not fit.

Nothing heavy is imported here: `roll-like --help` reads this file too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.config.gpus import GPU_KINDS
from roll_like.errors import FAILED, OK, ConfigError
from roll_like.metrics.commands import Add, number_within

if TYPE_CHECKING:
    from roll_like.check.layouts import GPULayout, Layouts, Machines
    from roll_like.config.run import RunConfig
    from roll_like.models.shape import ModelShape

#: Layouts that are shown beside the first, and that miss.
_SHOWN = 5
_GIB = 2**30


def add_plan(add: Add) -> None:
    """Add the command `plan`."""
    plan = add("plan", _plan, "propose how GPUs divide a model, from its config.json alone")
    plan.add_argument("model", metavar="MODEL", help="folder with its config.json, a published model, or a hub id")
    plan.add_argument("--gpus", type=number_within(int, 1, 4096), required=True, metavar="N", help="GPUs in all")
    plan.add_argument("--gpu", choices=tuple(GPU_KINDS), required=True, metavar="KIND", help=", ".join(GPU_KINDS))
    plan.add_argument(
        "--gpus-per-node", type=number_within(int, 1), default=8, metavar="N", help="of each machine (default: 8)"
    )
    plan.add_argument(
        "--length", type=number_within(int, 2), default=8192, metavar="N", help="longest sample (default: 8192 tokens)"
    )
    plan.add_argument(
        "--pipeline",
        choices=("rlvr", "sft"),
        default="rlvr",
        help="rlvr: trainer and engines take turns on all GPUs; sft: a trainer alone (default: rlvr)",
    )


def _plan(arguments: argparse.Namespace) -> int:
    from roll_like.check.layouts import Machines, enough_gpus, find_layouts
    from roll_like.models.shape import load_model_shape

    machines = Machines(
        gpus=arguments.gpus,
        gpu=arguments.gpu,
        per_node=min(arguments.gpus_per_node, arguments.gpus),
        length=arguments.length,
    )
    if machines.gpus % machines.per_node:
        raise ConfigError(
            f"{machines.gpus} GPUs are no whole number of machines with {machines.per_node}",
            fix="set --gpus to a multiple of --gpus-per-node",
        )
    folder = _folder(arguments.model)
    config = base_config(arguments.model, arguments.pipeline, machines)
    shape = load_model_shape(folder, weights=False)
    found = find_layouts(config, folder, machines)
    print("\n".join(_about(arguments.model, shape, machines)))
    if found.engine is not None:
        print(f"\nno engine: {found.engine}. Trainers alone:")
    if found.fitting:
        print("\n".join(_proposal(arguments, found, machines)))
    else:
        more = enough_gpus(
            lambda more: base_config(arguments.model, arguments.pipeline, more),
            folder,
            machines,
            arguments.gpus_per_node,
        )
        enough = "of up to 1,024 GPUs none is enough" if more is None else f"{more} GPUs are enough"
        print(f"\nnothing fits; {enough}, and shorter samples (--length) take less")
    print("\n".join(_others(found, machines)))
    return OK if found.fitting and found.engine is None else FAILED


def _folder(model: str) -> Path:
    """Return the folder with a model's config.json: given, of a published model, or in the hub's cache."""
    from roll_like.config.model import ModelConfig
    from roll_like.models.load import cached_copy
    from roll_like.models.shape import PUBLISHED

    given = Path(model).expanduser()
    if (given / "config.json").is_file():
        return given
    known = sorted(each.name for each in PUBLISHED.iterdir() if each.is_dir())
    if model.rpartition("/")[2] in known:
        return PUBLISHED / model.rpartition("/")[2]
    cached = None if given.exists() else cached_copy(ModelConfig(path=model)).path
    if cached is not None:
        return cached
    raise ConfigError(
        f"{model} is no folder with a config.json, no published model that is known here ({', '.join(known)}), and not "
        "in the hub's cache",
        fix=f"download it (`hf download {model} config.json`), or give the path of a folder with a config.json",
    )


def base_config(model: str, pipeline: str, machines: Machines) -> RunConfig:
    """Return a run on these machines, with the keys that layouts leave as they are."""
    from roll_like.check.layouts import ENGINE_SHARE
    from roll_like.registry import PIPELINES

    last = f"0-{machines.gpus - 1}"
    resources: dict[str, Any] = {
        "device": "cuda",
        "nodes": machines.nodes,
        "devices_per_node": machines.per_node,
        "gpu": machines.gpu,
        "device_mapping": {"training": last},
        **({"address": "auto"} if machines.nodes > 1 else {}),
    }
    common = {"model": {"path": model, "dtype": "bfloat16"}, "resources": resources}
    training = {
        "backend": "fsdp2",
        "zero_stage": 3,
        "workers": machines.gpus,
        "max_tokens_per_micro_batch": machines.length,
    }
    sources, samples = [{"path": "data.jsonl"}], max(machines.samples, 8 * machines.gpus)
    if pipeline == "sft":
        data = {"sources": sources, "samples_per_step": samples, "max_tokens": machines.length}
        sft = PIPELINES.get("sft").model_validate({**common, "epochs": 1, "data": data, "training": training})
        found: RunConfig = sft
        return found
    prompt = max(machines.length // 8, 1)
    resources["device_mapping"]["inference"] = last
    rlvr = PIPELINES.get("rlvr").model_validate(
        {
            **common,
            "steps": 1,
            "data": {"sources": sources, "max_prompt_tokens": prompt},
            "rollout": {
                "prompts_per_step": samples // 8,
                "samples_per_prompt": 8,
                "max_response_tokens": machines.length - prompt,
            },
            "rewards": {"use": [{"type": "math"}]},
            "training": training,
            "inference": {"type": "vllm", "replicas": machines.gpus, "gpu_memory_utilization": ENGINE_SHARE},
        }
    )
    run: RunConfig = rlvr
    return run


def _about(model: str, shape: ModelShape, machines: Machines) -> Iterator[str]:
    active = f", {shape.active_parameters / 1e9:.1f}B of them for a token" if shape.experts else ""
    yield f"{model}: {shape.parameters / 1e9:.1f}B parameters{active}; {shape.layers} layers"
    nodes = f"{machines.nodes} × {machines.per_node}" if machines.nodes > 1 else str(machines.gpus)
    yield f"{nodes} {machines.gpu} of {machines.kind.memory_gib} GiB; samples of {machines.length:,} tokens"


def _proposal(arguments: argparse.Namespace, found: Layouts, machines: Machines) -> Iterator[str]:
    from roll_like.check.layouts import distinct

    best, *others = distinct(found.fitting, _SHOWN + 1)
    yield f"\nproposed: {_described(best)}"
    yield f"  {_held(best, machines)}"
    if best.engine_gpus:
        yield (
            f"  engines of {best.engine_gpus} GPUs, whose cache holds {best.cached} sequences of full length; "
            f"{best.host * machines.per_node / _GIB:,.0f} GiB of each machine's memory meanwhile"
        )
    yield ""
    yield from yaml_lines(arguments.model, best, machines)
    if others:
        yield "\nnext best, with the estimate of an update that orders them (the first: 1):"
        for layout in others:
            yield f"  {layout.seconds / best.seconds:5.2f}  {_described(layout)}: {layout.phase.total / _GIB:.1f} GiB"


def _described(layout: GPULayout) -> str:
    again = ", layers computed again" if layout.training.gradient_checkpointing else ""
    alike = layout.training.data_ranks
    return f"{layout.label}, {alike} data-parallel{again}"


def _held(layout: GPULayout, machines: Machines) -> str:
    parts = ", ".join(
        f"{'' if role == 'training' else 'engine '}{part} {size / _GIB:.1f}"
        for (role, part), size in layout.phase.largest(count=4)
    )
    stage = f" on stage {layout.stage[0] + 1} of {layout.stage[1]}" if layout.stage[1] > 1 else ""
    return (
        f"{layout.phase.total / _GIB:.1f} of {machines.kind.memory_gib} GiB in phase {layout.phase.name!r}{stage}: "
        f"{parts}"
    )


def yaml_lines(model: str, layout: GPULayout, machines: Machines) -> Iterator[str]:
    """Yield what a configuration needs for a layout."""
    settings = layout.training
    keys = ("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "expert_parallel", "sequence_parallel")
    last = f"0-{machines.gpus - 1}" if machines.gpus > 1 else "0"
    yield "model:"
    yield f"  path: {model}"
    yield "  dtype: bfloat16"
    yield "training:"
    yield f"  backend: {settings.backend}"
    yield f"  zero_stage: {settings.zero_stage}"
    yield f"  workers: {settings.workers}"
    yield from (f"  {key}: {getattr(settings, key)}" for key in keys if getattr(settings, key) > 1)
    yield f"  max_tokens_per_micro_batch: {settings.max_tokens_per_micro_batch}"
    if settings.gradient_checkpointing:
        yield "  gradient_checkpointing: true"
    if layout.engine_gpus:
        from roll_like.check.layouts import ENGINE_SHARE

        yield "inference:"
        yield "  type: vllm"
        yield f"  replicas: {machines.gpus // layout.engine_gpus}"
        yield f"  gpu_memory_utilization: {ENGINE_SHARE}"
    yield "resources:"
    yield "  device: cuda"
    yield f"  nodes: {machines.nodes}"
    yield f"  devices_per_node: {machines.per_node}"
    yield f"  gpu: {machines.gpu}"
    if machines.nodes > 1:
        yield "  address: auto"
    yield "  device_mapping:"
    yield f"    training: {last}"
    if layout.engine_gpus:
        yield f"    inference: {last}"


def _others(found: Layouts, machines: Machines) -> Iterator[str]:
    from roll_like.check.layouts import distinct

    if found.too_large:
        yield f"\n{len(found.too_large)} layouts are too large; these miss least:"
        for layout in distinct(found.too_large, _SHOWN):
            yield f"  {_described(layout)}"
            yield f"    {_held(layout, machines)}"
    if found.refused:
        yield "\nsizes that cannot divide the model:"
        for message in sorted(found.refused, key=lambda each: -found.refused[each])[:_SHOWN]:
            yield f"  {message}"
