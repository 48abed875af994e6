"""The plan of a run: batch arithmetic, who sits on which device, and what it will take.

Everything here follows from the configuration alone; no device is counted and nothing is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table

from roll_like.config.resources import DeviceRange, RolePlan
from roll_like.config.run import RunConfig
from roll_like.config.sampling import SamplingRunConfig
from roll_like.config.training import QUANTIZED_BYTES, StateBytes, StateSizes, TrainerConfig
from roll_like.models.shape import ModelShape
from roll_like.models.stages import layers_of_stage
from roll_like.registry import TRAINING_BACKENDS

GIB = 2**30
PlacementMode: TypeAlias = Literal["colocated", "disaggregated", "trainer only"]
#: Name of the sizes of a model that guesses tokens in engines; no role of its own.
DRAFT = "draft"
#: What it takes of an engine's memory.
DRAFT_WEIGHTS = "draft's weights"
#: Part of a trainer's memory: models that it does not work on.
ASIDE = "other models"
#: Part of a trainer's memory: what a reference or a teacher has that follows the policy.
COPIES = "copies of the policy"
_BYTES = {"auto": 2, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """Estimated memory of one worker of a role, in bytes, by part."""

    role: str
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """Sum of the parts, in bytes."""
        return sum(size for _, size in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will do and what it takes.

    Attributes:
        name: Name of the run.
        steps: Steps to train.
        groups_per_step: Groups of one step.
        samples_per_group: Samples of one group.
        units: What groups and samples are called: prompts and samples, or groups and episodes.
        updates_per_step: Optimizer steps over one step's samples.
        max_sample_tokens: Longest sequence, its prompt included.
        roles: Who sits where.
        processes: Worker processes without a device of their own: what they are, and how many.
        placement: `colocated` roles take turns on equal devices, `disaggregated` ones run side by side;
            `trainer only` where nothing is sampled.
        device: `cpu` or `cuda`.
        devices: Devices of the run on all nodes.
        memory: Estimated memory of one worker of each role whose model's sizes are known; empty on GPUs, which have a
            plan of their own (`check/gpu_memory.py`).
    """

    name: str
    steps: int
    groups_per_step: int
    samples_per_group: int
    units: tuple[str, str]
    updates_per_step: int
    max_sample_tokens: int
    roles: tuple[RolePlan, ...]
    processes: tuple[tuple[str, int], ...]
    placement: PlacementMode
    device: Literal["cpu", "cuda"]
    devices: int
    memory: tuple[MemoryLine, ...]

    @property
    def samples_per_step(self) -> int:
        """Samples that one step trains on."""
        return self.groups_per_step * self.samples_per_group

    @property
    def samples_per_update(self) -> int:
        """Samples of one optimizer step."""
        return self.samples_per_step // self.updates_per_step

    @property
    def updates(self) -> int:
        """Optimizer steps in all."""
        return self.steps * self.updates_per_step

    @property
    def max_tokens_per_step(self) -> int:
        """Upper bound of one step's tokens, prompts counted once a sequence."""
        return self.samples_per_step * self.sequences_per_sample * self.max_sample_tokens

    @property
    def sequences_per_sample(self) -> int:
        """Two of a pair, else one."""
        return 2 if self.units[1] == "pairs" else 1

    @property
    def idle_devices(self) -> tuple[int, ...]:
        """Devices of the run that no role uses."""
        used = {device for role in self.roles for worker in range(role.workers) for device in role.devices_of(worker)}
        return tuple(device for device in range(self.devices) if device not in used)

    def render(self) -> RenderableType:
        """Return tables for `rich.console.Console.print`."""
        return Group(self._figures(), self._workers(), *([self._memory()] if self.memory else []))

    def _figures(self) -> Table:
        table = Table(title=f"Plan of {self.name}", show_header=False, title_justify="left", title_style="bold")
        groups, samples = self.units
        product = f"{self.groups_per_step} {groups} × {self.samples_per_group} = " if groups != samples else ""
        sequences = f"{self.sequences_per_sample} × " if self.sequences_per_sample > 1 else ""
        rows = {
            f"{samples} per step": f"{product}{self.samples_per_step:,}",
            f"{samples} per update": f"{self.samples_per_step:,} / {self.updates_per_step} = "
            f"{self.samples_per_update:,}",
            "steps": f"{self.steps:,}",
            "optimizer updates": f"{self.steps:,} × {self.updates_per_step} = {self.updates:,}",
            "tokens per step": f"at most {self.samples_per_step:,} × {sequences}{self.max_sample_tokens:,} = "
            f"{self.max_tokens_per_step:,}",
            "placement": f"{self.placement} on {self.devices} {_unit(self.device, self.devices)}",
            **{label: str(count) for label, count in self.processes},
        }
        for label, value in rows.items():
            table.add_row(label, value)
        return table

    def _workers(self) -> Table:
        unit = "threads" if self.device == "cpu" else "GPUs"
        table = Table(title="Workers", title_justify="left", title_style="bold")
        for column in ("role", "node", "worker ids", "devices", f"{unit} of each"):
            table.add_column(column, justify="left" if column == "role" else "right")
        for role in self.roles:
            for node in sorted({role.node_of(worker) for worker in range(role.workers)}):
                workers = [worker for worker in range(role.workers) if role.node_of(worker) == node]
                devices = _range(role.devices_of(workers[0])[0], role.devices_of(workers[-1])[-1])
                table.add_row(
                    role.name, str(node), _range(workers[0], workers[-1]), devices, str(role.devices_per_worker)
                )
        return table

    def _memory(self) -> Table:
        table = Table(
            "role", "parts", title="Memory of one worker, estimated", title_justify="left", title_style="bold"
        )
        table.add_column("GiB", justify="right")
        for line in self.memory:
            parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in line.parts)
            table.add_row(line.role, parts, f"{line.total / GIB:.2f}")
        return table


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _unit(device: str, count: int) -> str:
    return {"cpu": "CPU core", "cuda": "GPU"}[device] + ("" if count == 1 else "s")


def plan(config: SamplingRunConfig, shapes: Mapping[str, ModelShape] = MappingProxyType({})) -> Plan:
    """Return the plan of a run.

    Args:
        shapes: Sizes of the models, by role, and of `DRAFT`; the memory of a role without is not estimated.
    """
    devices = {role.name: role.devices for role in config.roles}
    return Plan(
        name=config.name,
        steps=config.steps,
        groups_per_step=config.rollout.groups,
        samples_per_group=config.rollout.samples_per_group,
        units=(config.rollout.groups_key.removesuffix("_per_step"), config.rollout.samples_key.partition("_")[0]),
        updates_per_step=config.updates_per_step,
        max_sample_tokens=config.longest_sample,
        roles=config.roles,
        processes=tuple(config.processes.items()),
        placement=_placement(devices["training"], devices.get("inference")),
        device=config.resources.device,
        devices=config.resources.nodes * config.resources.devices_per_node,
        memory=memory_lines(config, shapes),
    )


def memory_lines(config: RunConfig, shapes: Mapping[str, ModelShape]) -> tuple[MemoryLine, ...]:
    """Return the estimated memory of one worker of each role whose model's sizes are known; none on GPUs."""
    if config.resources.device != "cpu":
        return ()
    return tuple(_memory(config, role, shapes) for role in config.roles if role.name in shapes)


def _placement(trainer: DeviceRange, engines: DeviceRange | None) -> PlacementMode:
    if engines is None:
        return "trainer only"
    return "colocated" if trainer == engines else "disaggregated"


def bytes_per_value(config: RunConfig) -> int:
    """Return the size of one value in the precision that models compute in; `auto` counts as 16 bits. Bytes."""
    return _BYTES[config.model.dtype]


def trained_parameters(config: RunConfig, model: ModelShape, role: str = "training") -> int:
    """Return how many parameters are trained of a model: all, or its adapters.

    Args:
        role: `training` or `critic`.
    """
    lora = config.trained[role].lora
    width = model.adapted_width if role == "training" else model.critic_adapted_width
    return model.parameters if lora is None else lora.rank * width


def adapter_room(config: SamplingRunConfig, model: ModelShape) -> int:
    """Return what an engine reserves on its device for adapters that are sent alone, in bytes."""
    lora = config.training.lora
    if lora is None or not config.may_send_adapters:
        return 0
    of_one = config.inference.reserved_rank(lora.rank) * model.adapted_width * bytes_per_value(config)
    return config.engine_adapters * of_one


def aside_bytes(config: RunConfig, states: StateBytes) -> int:
    """Return what a rank holds of other models than the one that it works on, in bytes.

    All have a gradient, at most. While the weights of another one are sent to the engines, those of the present one are
    put aside too. What is trained takes as much as its gradient (`TrainingBackend.switches_models`).
    """
    aside = config.models_aside if isinstance(config, SamplingRunConfig) else None
    return 0 if aside is None else aside * (2 * states.gradients + states.optimizer) + states.gradients


def copies_bytes(config: RunConfig, model: ModelShape, states: StateBytes) -> int:
    """Return the host memory of one rank's copies of what is trained, each with room for the policy meanwhile.

    Args:
        states: Of the rank.
    """
    backend, trained = TRAINING_BACKENDS.get(config.training.backend), trained_parameters(config, model)
    width = 4 if backend.trains_in_float32 else bytes_per_value(config)
    share = trained // (config.training.workers if "weights" in backend.divided(config.training) else 1)
    if trained == model.parameters and states.weights:  # as the backend itself divides them
        share = states.weights // width
    kept = (4 if section.mixup_alpha < 1.0 else width for section in config.copies.values())
    return sum(share * (each + width) for each in kept)


def trainer_memory(config: RunConfig, model: ModelShape) -> MemoryLine:
    """Return the estimated memory of one rank of the trainer, without activations."""
    trained = trained_parameters(config, model)
    width = bytes_per_value(config)
    states = training_states(config.training, model, trained, width, model.quantized_parameters)
    aside = aside_bytes(config, states)
    further = {ASIDE: aside, COPIES: copies_bytes(config, model, states)}
    parts = (*_parts(states), *((part, size) for part, size in further.items() if size))
    if config.task != "text-generation":  # one output in place of a vocabulary
        return MemoryLine(role="training", parts=parts)
    chunk = config.training.logprob_chunk_tokens * config.training.logprob_chunk_vocab * _BYTES["float32"]
    return MemoryLine(role="training", parts=(*parts, ("logits of a chunk", chunk)))


def _memory(config: RunConfig, role: RolePlan, shapes: Mapping[str, ModelShape]) -> MemoryLine:
    model, width = shapes[role.name], bytes_per_value(config)
    if role.name == "training":
        return trainer_memory(config, model)
    if role.name == "inference":
        assert isinstance(config, SamplingRunConfig)
        return _engine_memory(config, model, shapes.get(DRAFT))
    if role.name in config.trained:
        trained = trained_parameters(config, model, role.name)
        quantized = model.critic_quantized_parameters
        states = training_states(config.trained[role.name], model, trained, width, quantized)
        return MemoryLine(role=role.name, parts=_parts(states))
    frozen = config.training.frozen(workers=role.workers, max_tokens_per_micro_batch=1)
    states = training_states(frozen, model, 0, width)
    return MemoryLine(role=role.name, parts=(("weights", states.weights),))


def _engine_memory(config: SamplingRunConfig, model: ModelShape, draft: ModelShape | None) -> MemoryLine:
    width = bytes_per_value(config)
    parts = {"weights": model.parameters * width}
    if draft is not None:
        parts[DRAFT_WEIGHTS] = draft.parameters * width
    if adapters := adapter_room(config, model):
        parts["adapters"] = 2 * adapters  # a copy is kept beside what is computed with
    cache = config.inference.kv_cache_bytes(config.resources.device)
    if cache is None:
        running = min(config.inference.max_running, config.rollout.max_in_flight)
        per_token = sum(each.kv_bytes_per_token(width) for each in (model, draft) if each is not None)
        cache = running * config.longest_sample * per_token
    return MemoryLine(role="inference", parts=(*parts.items(), ("KV cache at most", cache)))


def _parts(states: StateBytes) -> tuple[tuple[str, int], ...]:
    return (("weights", states.weights), ("gradients", states.gradients), ("optimizer", states.optimizer))


def training_states(
    settings: TrainerConfig, model: ModelShape, trained: int, width: int, quantized: int = 0, *, stage: int = 0
) -> StateBytes:
    """Return the memory of one rank of a model in training, without activations.

    Args:
        trained: How many parameters are trained: all, none, or those of adapters beside the model's own.
        width: Bytes of a weight.
        quantized: How many weights are in 4 bits; no backend divides them (`rules`).
        stage: Which of the stages that divide the layers the rank has.
    """
    whole = trained == model.parameters
    layers = layers_of_stage(model.layers, settings.pipeline_parallel, settings.virtual_pipeline, stage)
    dense = sum(layer < model.dense_layers for layer in layers)
    parameters = model.parameters
    if settings.pipeline_parallel > 1:
        ends = (stage == 0) + (stage == settings.pipeline_parallel - 1)  # tied embeddings are at both
        parameters = (
            (len(layers) - dense) * model.layer_parameters
            + dense * model.dense_layer_parameters
            + ends * model.embedding_parameters
        )
    sizes = StateSizes(
        parameters=parameters + (0 if whole else trained),
        trained=parameters if whole else trained,
        largest=model.embedding_parameters,
        layer=model.layer_parameters,
        experts=model.expert_parameters,
        outside=model.parameters
        - (model.layers - model.dense_layers) * model.layer_parameters
        - model.dense_layers * model.dense_layer_parameters,
        width=width,
        # norms and biases of layers are few; adapters are matrices
        matrices=model.layers * model.layer_parameters if whole else trained,
        routed=(len(layers) - dense) * model.expert_parameters,
        undivided=len(layers) * model.undivided_parameters,
    )
    states: StateBytes = TRAINING_BACKENDS.get(settings.backend).state_bytes(settings, sizes)
    if not quantized:
        return states
    # one matrix at a time is dequantised, which takes less than a layer
    return replace(
        states,
        weights=states.weights - int(quantized * (width - QUANTIZED_BYTES)),
        buffers=states.buffers + model.layer_parameters * width,
    )
