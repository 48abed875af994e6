"""The least seconds that a step can take on GPUs of a documented kind.

Every phase is divided by the rate that bounds it, at 100 %: matrix products by the peak rate, what is read by the
bandwidth of memory or links. Real runs take longer: 40 % of the peak is good for training. Samples are taken to have
their full length, and prompts as long as allowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roll_like.check.plan import Plan, bytes_per_value, trained_parameters
from roll_like.config.gpus import GPU_KINDS, GPUKind, GPUName
from roll_like.config.inference import engines_share_gpus
from roll_like.config.run import RunConfig
from roll_like.config.sampling import SamplingRunConfig
from roll_like.models.flops import ForwardPass
from roll_like.models.precision import precision_of
from roll_like.models.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFloor:
    """Least seconds of a step's phases, and what bounds them.

    Attributes:
        generate: Of sampling; None where nothing is sampled.
        train: Of forward and backward passes.
        sync: Of handing the weights to the engines; None where there are none.
        move: Of moving states between GPU and host memory; 0 where nothing moves.
    """

    generate: float | None
    train: float
    sync: float | None
    move: float


def step_floor(config: RunConfig, made: Plan, shape: ModelShape, moved: int, gpu: GPUName | None) -> StepFloor | None:
    """Return the floor of a run on GPUs of a kind; None where that is not known.

    Args:
        moved: What one GPU's roles have in host memory while others have the GPU, in bytes.
    """
    if gpu is None:
        return None
    kind = GPU_KINDS[gpu]
    sampling = config if isinstance(config, SamplingRunConfig) and config.replay is None else None
    return StepFloor(
        generate=None if sampling is None else generation_seconds(sampling, shape, kind),
        train=training_seconds(config, made, shape, kind),
        sync=None if sampling is None else sync_seconds(sampling, shape, kind),
        move=2 * moved / (kind.host_gb_per_second * 1e9),  # there and back
    )


def generation_seconds(config: SamplingRunConfig, shape: ModelShape, kind: GPUKind) -> float:
    """Return the least seconds of sampling: each decoding step reads the weights and the cache of what is running."""
    gpus = len(config.resources.devices_of("inference")) // config.inference.replicas
    samples = math.ceil(config.rollout.groups * config.rollout.samples_per_group / config.inference.replicas)
    running = min(config.inference.max_running, samples)
    response = config.rollout.max_response_tokens
    prompt = max(config.longest_sample - response, 0)
    cache = running * (prompt + response / 2) * shape.kv_bytes_per_token(bytes_per_value(config))
    read = (shape.active_parameters * bytes_per_value(config) + cache) / (kind.memory_gb_per_second * 1e9)
    one = ForwardPass(tokens=running, pairs=running * (prompt + response // 2), targets=running).flops(shape)
    step = max(read, one / kind.peak(precision_of(config))) / gpus
    return response * math.ceil(samples / running) * step


def training_seconds(config: RunConfig, made: Plan, shape: ModelShape, kind: GPUKind) -> float:
    """Return the least seconds of training on a step's samples; with checkpointing forward passes count twice."""
    length = made.max_sample_tokens
    response = getattr(getattr(config, "rollout", None), "max_response_tokens", length - 1)
    prompt = max(length - response, 1)
    shared = config.training.share_prompts and made.samples_per_group > 1
    prompts = made.groups_per_step * (1 if shared else made.samples_per_group)
    tokens = prompts * prompt + made.samples_per_step * (response - 1)
    pairs = prompts * prompt * prompt // 2 + made.samples_per_step * response * (prompt + response // 2)
    needed = ForwardPass(tokens=tokens, pairs=pairs, targets=made.samples_per_step * response)
    adapters = None if config.training.lora is None else trained_parameters(config, shape)
    flops = needed.training_flops(shape, adapters)
    if config.training.gradient_checkpointing:
        flops += needed.flops(shape)
    return flops / (config.training.workers * kind.peak(precision_of(config)))


def sync_seconds(config: SamplingRunConfig, shape: ModelShape, kind: GPUKind) -> float:
    """Return the least seconds of a weight update: within a GPU each weight is read and written, else it is sent.

    Adapters alone go through host memory.
    """
    if config.may_send_adapters:
        adapters = trained_parameters(config, shape) * bytes_per_value(config)
        return adapters / (kind.host_gb_per_second * 1e9)
    size = shape.parameters * bytes_per_value(config)
    if engines_share_gpus(config.resources):
        gpus = len(config.resources.devices_of("inference")) // config.inference.replicas
        return 2 * size / gpus / (kind.memory_gb_per_second * 1e9)
    return size / (kind.link_gb_per_second * 1e9)
