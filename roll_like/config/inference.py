"""The `inference` and `judge` sections: the keys that every engine has, and what an engine says of itself.

An engine adds its own keys by deriving from `EngineConfig`, and is registered in `INFERENCE_ENGINES` by its folder
under `roll_like/inference/` or by a user's module. Nothing outside that folder depends on which engine it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from roll_like.config.base import PluginConfig, PluginSetting, PositiveFloat, PositiveInt, Violation
from roll_like.config.model import Precision
from roll_like.config.resources import SamplingResourcesConfig
from roll_like.registry import INFERENCE_ENGINES

#: What a request is computed with: the model in training, or what its adapter is beside, without any adapter. Other
#: adapters have names of their own.
POLICY, BASE = "policy", "base"
#: Size of a bucket in which weights travel between GPUs. A larger tensor travels whole. Bytes.
GPU_BUCKET_BYTES = 256 << 20
#: The engine of a section without `type`.
DEFAULT_ENGINE = "vllm"


@dataclass(frozen=True, slots=True)
class WeightTransport:
    """A way for weights to travel from trainer to engine.

    Attributes:
        name: What `EnginePlugin.weight_transfer` is asked for.
        works: Returns whether it can be used on a run's hardware.
    """

    name: str
    works: Callable[[SamplingResourcesConfig], bool]


def _same_gpus(resources: SamplingResourcesConfig) -> bool:
    return resources.device_mapping.training.overlaps(resources.device_mapping.inference)


#: From a trainer on the same GPUs.
IPC = WeightTransport("ipc", lambda resources: resources.device != "cpu" and _same_gpus(resources))
#: From a trainer on other GPUs.
NCCL = WeightTransport("nccl", lambda resources: resources.device != "cpu" and not _same_gpus(resources))
#: From a trainer on the same machine.
SHARED_MEMORY = WeightTransport("shared_memory", lambda resources: resources.nodes == 1)
#: From a trainer anywhere, through Ray: over TCP between machines.
OBJECT_STORE = WeightTransport("object_store", lambda resources: True)
#: Those that built-in engines use, the fastest first.
WEIGHT_TRANSPORTS = (IPC, NCCL, SHARED_MEMORY, OBJECT_STORE)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do.

    Attributes:
        weight_transports: How it can take weights, the fastest first: any of `WEIGHT_TRANSPORTS`, or its own.
        tensor_parallel: Whether one replica can divide the model among several GPUs.
        sleep: Whether it can free GPU memory while a trainer works on the same GPUs.
        pause: Whether its `sleep` freezes requests that are under way.
        prompt_logprobs: Whether it tells the log-probabilities of given tokens. With them, what engines and trainer
            compute is compared after weight syncs.
    """

    weight_transports: tuple[WeightTransport, ...] = (SHARED_MEMORY,)
    tensor_parallel: bool = False
    sleep: bool = False
    pause: bool = False
    prompt_logprobs: bool = False


class EngineConfig(PluginConfig):
    """What every engine has."""

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities()
    #: Its key that most lowers the host memory of a run on CPU, for messages.
    memory_key: ClassVar[str] = "max_running"
    #: Its key that most changes the memory of its GPUs.
    gpu_memory_key: ClassVar[str] = "max_running"

    replicas: PositiveInt = Field(default=1, description="Engines. A device range is divided evenly among them.")
    max_model_len: PositiveInt | None = Field(
        default=None, description="Context window. Tokens; default: longest prompt plus longest response."
    )
    max_running: PositiveInt = Field(default=32, description="Sequences that one engine decodes at a time.")
    probe_every: Annotated[int, Field(ge=0)] = Field(
        default=10,
        description="Weight syncs between two probes, which compare the log-probabilities that engines and trainer "
        "compute for the same tokens; the first two syncs are always probed, and with 0 no others.",
    )
    probe_tolerance: PositiveFloat | None = Field(
        default=None,
        description="Largest mean difference that a probe accepts; a larger one ends the run. Nats; default: 0.01 in "
        "float32, 0.05 in float16, 0.1 in bfloat16.",
    )

    @property
    def sends_adapters(self) -> bool | None:
        """Whether a run with `training.lora` sends the adapters alone; None wherever the engine can serve them."""
        return False

    @property
    def gpu_share(self) -> float | None:
        """Share of a GPU's memory that an engine takes, weights included; None where it grows with the work."""
        return None

    def sleeps(self, *, shares_gpus: bool) -> bool:
        """Return whether the engine frees its GPU memory while the trainer works."""
        return shares_gpus and self.capabilities.sleep

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

    def model_violations(self, *, experts: bool) -> Iterator[Violation]:
        """Yield what cannot work with a run's model.

        Args:
            experts: Whether it is a mixture.
        """
        del experts
        yield from ()


class JudgeConfig(PluginConfig):
    """A model that judges, served in a cluster of its own; `llm_judge` reaches it with `url: judge`."""

    #: Its key that most changes the memory of its GPUs.
    gpu_memory_key: ClassVar[str] = "max_model_len"

    path: str = Field(description="The judge: a local directory or a hub id; GGUF and `package://` as `model.path`.")
    dtype: Precision = Field(default="bfloat16", description="Its precision.")
    replicas: PositiveInt = Field(default=1, description="Servers. A device range is divided evenly among them.")
    max_model_len: PositiveInt = Field(default=4096, description="Longest prompt plus answer of the judge. Tokens.")

    @property
    def gpu_share(self) -> float | None:
        """Share of a GPU's memory that a server takes, weights included; None where it grows with the work."""
        return None


#: The type of a field that holds an engine's section, and of one that holds a judge's.
InferenceConfig = Annotated[EngineConfig, PluginSetting(INFERENCE_ENGINES, default=DEFAULT_ENGINE)]
JudgeServerConfig = Annotated[JudgeConfig, PluginSetting(INFERENCE_ENGINES, default=DEFAULT_ENGINE, section="Judge")]


def default_engine() -> EngineConfig:
    """Return the section of a run that does not set it."""
    config: EngineConfig = INFERENCE_ENGINES.get(DEFAULT_ENGINE).Config()
    return config


def weight_backend(engine: EngineConfig, resources: SamplingResourcesConfig, *, adapters: bool = False) -> str | None:
    """Return the name of the engine's fastest transport that works on a run's hardware; None where none does.

    Args:
        engine: The `inference` section.
        resources: The run's hardware.
        adapters: Whether adapters are sent alone. They are small, and go through host memory also between GPUs.
    """
    transports = (SHARED_MEMORY, OBJECT_STORE) if adapters else engine.capabilities.weight_transports
    return next((transport.name for transport in transports if transport.works(resources)), None)


def engines_share_gpus(resources: SamplingResourcesConfig) -> bool:
    """Return whether other models compute on the engines' GPUs, so that they take turns; never on CPU."""
    mapping = resources.device_mapping
    return resources.device != "cpu" and any(devices.overlaps(mapping.inference) for devices in mapping.models)
