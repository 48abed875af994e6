"""Which layouts of trainer and engines fit a model on so many GPUs, from its config.json alone.

Every combination of parallel sizes that divides the GPUs is counted with the plan of `--check` (`gpu_memory.py`). Those
that fit are ordered by an estimate of an update's seconds: matrix products at 40 % of the peak on the stage that has
most of them, the idle time of a pipeline, (p − 1) / (v · m) of m micro-batches (Narayanan et al. 2021,
arXiv:2104.04473), and all that ranks send, one after the other. It ranks layouts; it does not tell how long an update
takes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from roll_like.check.gpu_memory import FRAGMENTATION, GPUPhase, gpu_plans
from roll_like.check.plan import GIB
from roll_like.config.gpus import GPU_KINDS, GPUKind, GPUName
from roll_like.config.run import RunConfig
from roll_like.config.sampling import SamplingRunConfig
from roll_like.config.training import PARALLEL_SIZES, TrainingConfig
from roll_like.errors import ConfigError
from roll_like.models.flops import ForwardPass
from roll_like.models.megatron_plan import CONVERTED, refuse_no_converter
from roll_like.models.shape import ModelShape, load_model_shape
from roll_like.models.stages import stage_layers
from roll_like.models.tensor_plan import FAMILIES, refuse_undivided_matrices

#: Share of the peak rate that matrix products of large models reach in training.
EFFICIENCY = 0.4
#: Between machines, one network card of 400 Gbit/s for each GPU. Bytes per second.
NETWORK = 50e9
#: Share of a GPU that an engine has while trainers are in host memory.
ENGINE_SHARE = 0.85
#: Sequences of full length that an engine's cache should hold at a time.
CACHED = 16
#: Tokens of a micro-batch, if samples are not longer.
LEAST_TOKENS = 8192
BYTES = 2
_MOST = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """What layouts are for.

    Attributes:
        gpus: How many in all.
        gpu: Their kind.
        per_node: How many a machine has.
        length: Longest sample, in tokens.
        samples: Of one update, for the order of layouts.
    """

    gpus: int
    gpu: GPUName
    per_node: int = 8
    length: int = 8192
    samples: int = 512

    @property
    def kind(self) -> GPUKind:
        """Rates and memory of a GPU."""
        return GPU_KINDS[self.gpu]

    @property
    def memory(self) -> int:
        """Of a GPU, in bytes."""
        return int(self.kind.memory_gib * GIB)

    @property
    def nodes(self) -> int:
        """Machines."""
        return -(-self.gpus // self.per_node)

    def sends(self, ranks: int) -> float:
        """Return at which rate neighbouring ranks send to each other, in bytes per second."""
        return self.kind.link_gb_per_second * 1e9 if ranks <= min(self.per_node, self.gpus) else NETWORK


@dataclass(frozen=True, slots=True, kw_only=True)
class GPULayout:
    """Sizes of a trainer and of engines on the same GPUs.

    Attributes:
        training: The trainer's section.
        engine_gpus: GPUs of each engine; 0 where nothing is sampled.
        phase: The phase in which a GPU holds most; while engines sample they have their share.
        stage: Which stage of the pipeline holds that, and of how many.
        cached: Sequences of full length that an engine's cache holds.
        host: What a GPU's roles have in host memory meanwhile, in bytes.
        seconds: Estimate that orders layouts.
    """

    training: TrainingConfig
    engine_gpus: int
    phase: GPUPhase
    stage: tuple[int, int]
    cached: int | None
    host: int
    seconds: float

    @property
    def label(self) -> str:
        """Backend and sizes above 1, such as `megatron TP 4 · PP 8 · EP 4`."""
        names = ("TP", "PP", "VPP", "EP", "ETP", "CP")
        sizes = {name: getattr(self.training, key) for name, key in zip(names, PARALLEL_SIZES, strict=True)}
        shown = " · ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        return f"{self.training.backend} {shown}".rstrip()


@dataclass(slots=True, kw_only=True)
class Layouts:
    """What a search found.

    Attributes:
        fitting: The best first.
        too_large: What does not fit, that which misses least first.
        refused: Why sizes cannot divide the model: message → how many layouts.
        engine: Why there is no engine, if there is none.
    """

    fitting: list[GPULayout] = field(default_factory=list)
    too_large: list[GPULayout] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    engine: str | None = None


class StatedModel(SimpleNamespace):
    """What a config.json states, with the defaults that rules read: transformers takes seconds to import."""

    def __getattr__(self, name: str) -> None:
        """Return nothing for what is not stated."""
        if name.startswith("__"):
            raise AttributeError(name)

    def get_text_config(self) -> StatedModel:
        """Return the configuration of the language model: itself."""
        return self

    @classmethod
    def read(cls, folder: Path) -> StatedModel:
        """Return what `folder/config.json` states of the language model."""
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stated = raw.get("text_config", raw)
        scaling = stated.get("rope_parameters") or stated.get("rope_scaling") or {}
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        defaults = {
            "num_key_value_heads": stated.get("num_attention_heads"),
            "hidden_act": "silu",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            **stated,
            "rope_parameters": {**scaling, "rope_type": kind},
        }
        if defaults.get("use_sliding_window") is False:
            defaults["sliding_window"] = None
        return cls(**defaults)


def find_layouts(config: RunConfig, folder: Path, machines: Machines) -> Layouts:
    """Return the layouts of a run's model that fit, and why others do not.

    Args:
        config: A run of the pipeline with the lengths that matter, and with this model.
    """
    shape, stated = load_model_shape(folder, weights=False), StatedModel.read(folder)
    found = Layouts()
    engines = _engines(config, shape, machines, found)
    for settings in _candidates(stated, shape, machines):
        try:
            _refuse(stated, shape, settings)
        except ConfigError as error:
            message = error.message
            found.refused[message] = found.refused.get(message, 0) + 1
            continue
        if settings.data_ranks > machines.samples:
            continue
        layout = count_layout(config, shape, settings, engines[0], machines)
        if layout.phase.name == "weight update" and not _fits(layout, machines):  # smaller parts of engines may
            layout = min(
                (count_layout(config, shape, settings, gpus, machines) for gpus in engines),
                key=lambda layout: layout.phase.total,
            )
        (found.fitting if _fits(layout, machines) else found.too_large).append(layout)
    found.fitting.sort(key=lambda layout: (layout.seconds, layout.phase.total, layout.label))
    found.too_large.sort(key=lambda layout: (layout.phase.total, layout.label))
    return found


def enough_gpus(
    make_config: Callable[[Machines], RunConfig], folder: Path, machines: Machines, per_node: int
) -> int | None:
    """Return from how many GPUs on a layout fits, of twice as many, four times as many …; None if none does.

    Args:
        make_config: Makes the run on so many GPUs.
        machines: GPUs that are not enough.
        per_node: How many GPUs a machine has; `machines` may be a part of one.
    """
    gpus = 2 * machines.gpus
    while gpus <= _MOST:
        if gpus > per_node:
            gpus = -(-gpus // per_node) * per_node
        more = replace(machines, gpus=gpus, per_node=min(per_node, gpus))
        if find_layouts(make_config(more), folder, more).fitting:
            return gpus
        gpus *= 2
    return None


def _fits(layout: GPULayout, machines: Machines) -> bool:
    """Return whether a GPU has room, with what allocators lose."""
    return layout.phase.total <= (1 - FRAGMENTATION) * machines.memory


def _divisors(number: int, most: int) -> list[int]:
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]


def _candidates(stated: StatedModel, shape: ModelShape, machines: Machines) -> Iterator[TrainingConfig]:
    """Yield every combination of sizes that divides the GPUs."""
    gpus, experts = machines.gpus, _experts(shape)
    base = TrainingConfig(workers=gpus)
    tensors = [each for each in _divisors(gpus, machines.per_node) if not each & (each - 1)]
    for backend, stages in (("megatron", _divisors(gpus, shape.layers)), ("fsdp2", [1])):
        if backend == "megatron" and stated.model_type not in CONVERTED:
            continue
        for pipeline in stages:
            for tensor in tensors if backend == "megatron" or stated.model_type in FAMILIES else [1]:
                for sequence in [each for each in (1, 2, 4, 8) if gpus % (pipeline * tensor * each) == 0]:
                    if backend == "fsdp2" and tensor > 1 < sequence:
                        continue
                    for expert in [each for each in _divisors(gpus // pipeline, experts) if experts % each == 0]:
                        sizes = {
                            "backend": backend,
                            "zero_stage": 1 if backend == "megatron" else 3,
                            "tensor_parallel": tensor,
                            "pipeline_parallel": pipeline,
                            "expert_parallel": expert,
                            "sequence_parallel": sequence,
                            "max_tokens_per_micro_batch": -(-max(machines.length, LEAST_TOKENS) // sequence),
                        }
                        yield base.model_copy(update={**sizes, "gradient_checkpointing": False})
                        yield base.model_copy(update={**sizes, "gradient_checkpointing": True})
                        if pipeline > 1 and shape.layers % (2 * pipeline) == 0:
                            yield base.model_copy(
                                update={**sizes, "virtual_pipeline": 2, "gradient_checkpointing": True}
                            )


def _experts(shape: ModelShape) -> int:
    """Return how many experts a layer's router chooses from; 1 without."""
    return max(shape.expert_parameters // (3 * shape.hidden_size * shape.intermediate_size), 1)


def _refuse(stated: StatedModel, shape: ModelShape, settings: TrainingConfig) -> None:
    """Raise a ConfigError for sizes that cannot divide the model."""
    if settings.backend == "megatron":
        refuse_no_converter(stated, settings)
        return
    refuse_undivided_matrices(stated, settings.tensor_parallel)
    if shape.heads % settings.sequence_parallel:
        raise ConfigError(
            f"sequence_parallel: {settings.sequence_parallel} does not divide {shape.heads} heads", fix="lower it"
        )


def _engines(config: RunConfig, shape: ModelShape, machines: Machines, found: Layouts) -> list[int]:
    """Return how many GPUs an engine may have, the best first: the fewest whose cache holds enough sequences."""
    if not isinstance(config, SamplingRunConfig):
        return [0]
    sizes = [each for each in _divisors(machines.gpus, machines.per_node) if shape.heads % each == 0]
    trainer = TrainingConfig(workers=machines.gpus, zero_stage=3, backend="fsdp2")
    caches = {each: count_layout(config, shape, trainer, each, machines).cached or 0 for each in sizes}
    able = [each for each in sizes if caches[each] >= 1]
    if not able:
        most = sizes[-1]
        found.engine = (
            f"an engine stays within a machine, and each of {most} GPUs would hold "
            f"{shape.parameters * BYTES / most / GIB:.1f} GiB of weights and may have "
            f"{ENGINE_SHARE * machines.memory / GIB:.1f}"
        )
        return [0]
    return sorted(able, key=lambda each: (caches[each] < CACHED, each if caches[each] >= CACHED else -caches[each]))


def count_layout(
    config: RunConfig, shape: ModelShape, settings: TrainingConfig, engine_gpus: int, machines: Machines
) -> GPULayout:
    """Return what one layout holds: a trainer's section, and engines on the same GPUs (0: none)."""
    changes: dict[str, Any] = {"training": settings}
    shapes = {"training": shape}
    if engine_gpus:
        assert isinstance(config, SamplingRunConfig)
        changes["inference"] = config.inference.model_copy(update={"replicas": machines.gpus // engine_gpus})
        shapes["inference"] = shape
    (made,) = gpu_plans(config.model_copy(update=changes), shapes, machines.memory)
    needed = machines.length * (made.cache_per_token or 1)
    return GPULayout(
        training=settings,
        engine_gpus=engine_gpus,
        phase=max((each for each in made.phases if each.name != "sampling"), key=lambda phase: phase.total),
        stage=made.stages.get("training", (0, 1)),
        cached=None if made.cache is None else made.cache // needed,
        host=made.host,
        seconds=update_seconds(shape, settings, machines),
    )


def update_seconds(shape: ModelShape, settings: TrainingConfig, machines: Machines) -> float:
    """Return an estimate of one update's seconds, which orders layouts."""
    tokens = machines.samples * machines.length
    needed = ForwardPass(tokens=tokens, pairs=tokens * machines.length // 2, targets=tokens)
    again = settings.gradient_checkpointing
    flops = needed.training_flops(shape) + (needed.flops(shape) if again else 0)
    computing = flops / (machines.gpus * machines.kind.tflops * 1e12 * EFFICIENCY)
    of_a_pass = settings.max_tokens_per_micro_batch * settings.sequence_parallel
    passes = math.ceil(tokens / settings.data_ranks / of_a_pass)
    computing *= _largest_stage(shape, settings)
    idle = (settings.pipeline_parallel - 1) / (settings.virtual_pipeline * passes)
    sending = passes * _pass_seconds(shape, settings, machines) + _step_seconds(shape, settings, machines)
    return (computing + sending) * (1 + idle)


def _largest_stage(shape: ModelShape, settings: TrainingConfig) -> float:
    """Return how much more than the mean the stage computes that computes most: the output layer is on the last one."""
    counts = stage_layers(shape.layers, settings.pipeline_parallel, settings.virtual_pipeline)
    assert counts is not None, "a rule refuses layers that cannot be divided"
    ends = shape.embedding_parameters * (1 if shape.tied_embeddings else 2)
    layer, head = (shape.active_parameters - ends) / shape.layers, shape.embedding_parameters
    costs = [count * layer for count in counts]
    costs[-1] += head
    return max(costs) * len(costs) / sum(costs)


def _pass_seconds(shape: ModelShape, settings: TrainingConfig, machines: Machines) -> float:
    """Return how long a rank sends for one micro-batch, without what FSDP2 gathers."""
    tensor, expert, sequence = settings.tensor_parallel, settings.expert_parallel, settings.sequence_parallel
    tokens, hidden = settings.max_tokens_per_micro_batch, shape.hidden_size
    counts = stage_layers(shape.layers, settings.pipeline_parallel, settings.virtual_pipeline)
    layers = max(counts or (shape.layers,))
    times = 3 if settings.gradient_checkpointing else 2  # forward, backward, and forward again
    # attention, and a feed-forward layer that is no mixture: gathered before, added up and scattered behind
    gathers = (times + 1) * (2 if shape.experts else 4) * tokens * hidden * BYTES * (tensor - 1) / tensor
    travelling = times * 2 * tokens / tensor * max(shape.experts, 1) * hidden * BYTES * (expert - 1) / expert
    heads = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    exchanged = times * tokens / tensor * heads * BYTES * (sequence - 1) / sequence
    passed_on = 2 * settings.virtual_pipeline * tokens / tensor * hidden * BYTES
    return (
        layers * gathers / machines.sends(tensor)
        + layers * travelling / machines.sends(expert)
        + layers * exchanged / machines.sends(tensor * sequence)
        + (passed_on / machines.sends(machines.gpus) if settings.pipeline_parallel > 1 else 0)
        + (_gathered_bytes(shape, settings) / machines.sends(machines.gpus) if settings.backend == "fsdp2" else 0)
    )


def _gathered_bytes(shape: ModelShape, settings: TrainingConfig) -> float:
    """Return what FSDP2 gathers and reduces for a micro-batch: weights twice, and gradients in float32."""
    routed = (shape.layers - shape.dense_layers) * shape.expert_parameters
    held = (shape.parameters - routed) / settings.tensor_parallel + routed / settings.expert_parallel
    alike = settings.workers // max(settings.tensor_parallel, settings.expert_parallel)
    return (2 * BYTES + 4) * held * (alike - 1) / alike


def _step_seconds(shape: ModelShape, settings: TrainingConfig, machines: Machines) -> float:
    """Return how long data-parallel ranks of Megatron-Core exchange gradients and weights, once an update."""
    if settings.backend != "megatron":
        return 0.0
    routed = (shape.layers - shape.dense_layers) * shape.expert_parameters
    stages, experts = settings.pipeline_parallel, settings.expert_parallel * settings.expert_tensor_parallel
    held = (shape.parameters - routed) / stages / settings.tensor_parallel + routed / stages / experts
    alike = settings.workers // stages // settings.tensor_parallel
    return (4 + BYTES) * held * (alike - 1) / alike / machines.sends(machines.gpus)


def distinct(layouts: Sequence[GPULayout], count: int) -> list[GPULayout]:
    """Return the first of the layouts with the same backend, tensor and pipeline sizes, of so many of these."""
    seen: dict[tuple[str, int, int], GPULayout] = {}
    for layout in layouts:
        settings = layout.training
        seen.setdefault((settings.backend, settings.tensor_parallel, settings.pipeline_parallel), layout)
    return list(seen.values())[:count]
