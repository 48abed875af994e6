"""The `inference` and `judge` sections: the keys that every engine has, and what an engine says of itself.

An engine adds its own keys by deriving from `EngineConfig`, and is registered in `INFERENCE_ENGINES` by its folder
under `roll_like/inference/` or by a user's module. Nothing outside that folder depends on which engine it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from roll_like.config.base import PluginConfig, PluginSetting
from roll_like.config.sections import PositiveInt, Precision, SamplingResourcesConfig
from roll_like.config.violations import Violation
from roll_like.registry import INFERENCE_ENGINES

#: The engine of a section without `type`.
DEFAULT_ENGINE = "vllm"
#: How weights travel from trainer to engine.
WeightBackend: TypeAlias = Literal["shared_memory", "ipc", "nccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do.

    Attributes:
        weight_backends: How it can take weights: `shared_memory` from a trainer on the same machine, `ipc` from a
            trainer on the same GPUs, `nccl` from a trainer on other GPUs.
        tensor_parallel: Whether one replica can divide the model among several GPUs.
        sleep: Whether it can free GPU memory while a trainer works on the same GPUs.
    """

    weight_backends: frozenset[WeightBackend] = frozenset({"shared_memory"})
    tensor_parallel: bool = False
    sleep: bool = False


class EngineConfig(PluginConfig):
    """What every engine has."""

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities()
    #: Its key that most lowers the host memory of a run on CPU, for messages.
    memory_key: ClassVar[str] = "max_running"

    replicas: PositiveInt = Field(default=1, description="Engines. A device range is divided evenly among them.")
    max_model_len: PositiveInt | None = Field(
        default=None, description="Context window. Tokens; default: longest prompt plus longest response."
    )
    max_running: PositiveInt = Field(default=32, description="Sequences that one engine decodes at a time.")

    def kv_cache_bytes(self, device: str) -> int | None:
        """Return the size of one engine's key-value cache where these settings fix it, else None.

        Args:
            device: `cpu` or `cuda`.
        """
        del device
        return None

    def violations(self, resources: SamplingResourcesConfig) -> Iterator[Violation]:
        """Yield what cannot work on a run's hardware."""
        del resources
        yield from ()


class JudgeConfig(PluginConfig):
    """A model that judges, served in a cluster of its own; `llm_judge` reaches it with `url: judge`."""

    path: str = Field(description="The judge: a local directory or a hub id; GGUF and `package://` as `model.path`.")
    dtype: Precision = Field(default="bfloat16", description="Its precision.")
    replicas: PositiveInt = Field(default=1, description="Servers. A device range is divided evenly among them.")
    max_model_len: PositiveInt = Field(default=4096, description="Longest prompt plus answer of the judge. Tokens.")


#: The type of a field that holds an engine's section, and of one that holds a judge's.
InferenceConfig = Annotated[EngineConfig, PluginSetting(INFERENCE_ENGINES, default=DEFAULT_ENGINE)]
JudgeServerConfig = Annotated[JudgeConfig, PluginSetting(INFERENCE_ENGINES, default=DEFAULT_ENGINE, section="Judge")]


def default_engine() -> EngineConfig:
    """Return the section of a run that does not set it."""
    config: EngineConfig = INFERENCE_ENGINES.get(DEFAULT_ENGINE).Config()
    return config


def weight_backends(resources: SamplingResourcesConfig) -> tuple[WeightBackend, ...]:
    """Return how weights can travel on a run's hardware, the fastest first."""
    if resources.device == "cpu":
        return ("shared_memory",)
    shared = resources.device_mapping.training.overlaps(resources.device_mapping.inference)
    fastest: WeightBackend = "ipc" if shared else "nccl"
    return (fastest, "shared_memory") if resources.nodes == 1 else (fastest,)


def weight_backend(engine: EngineConfig, resources: SamplingResourcesConfig) -> WeightBackend | None:
    """Return the fastest way for weights to travel that the engine can take; None where there is none."""
    possible = engine.capabilities.weight_backends
    return next((backend for backend in weight_backends(resources) if backend in possible), None)


def engines_share_gpus(resources: SamplingResourcesConfig) -> bool:
    """Return whether something is trained on the engines' GPUs, so that they take turns; never on CPU."""
    mapping = resources.device_mapping
    return resources.device != "cpu" and any(devices.overlaps(mapping.inference) for devices in mapping.trained)
