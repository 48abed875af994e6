"""The `inference` and `judge` sections: the keys that every engine has, and what an engine says of itself.

An engine adds its own keys by deriving from `EngineConfig`, and is registered in `INFERENCE_ENGINES` by its folder
under `roll_like/inference/` or by a user's module. Nothing outside that folder depends on which engine it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from roll_like.config.base import PluginConfig, PluginSetting, PositiveFloat, PositiveInt, Violation
from roll_like.config.model import Precision
from roll_like.config.resources import ResourcesConfig
from roll_like.config.training import LoRAConfig
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
    works: Callable[[ResourcesConfig], bool]


def _same_gpus(resources: ResourcesConfig) -> bool:
    return resources.devices_of("training").overlaps(resources.devices_of("inference"))


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
        top_logprobs: How many of the likeliest tokens it tells at each position, of samples and of given tokens.
        weight_changes: Whether it keeps what it was sent, so that changes are enough (`InferenceEngine.held_weights`).
        float32_head: Whether it can compute the output layer's products in float32, of a model in another precision.
    """

    weight_transports: tuple[WeightTransport, ...] = (SHARED_MEMORY,)
    tensor_parallel: bool = False
    sleep: bool = False
    pause: bool = False
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    weight_changes: bool = False
    float32_head: bool = False


class EngineConfig(PluginConfig):
    """What every engine has."""

    common: ClassVar[tuple[str, ...]] = ("replicas", "max_running")

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities()
    #: Its key that most lowers the host memory of a run on CPU, for messages.
    memory_key: ClassVar[str] = "max_running"
    #: Its key that most changes the memory of its GPUs.
    gpu_memory_key: ClassVar[str] = "max_running"
    #: Whether CUDA graphs are in the engine's share of a GPU's memory (`gpu_share`), or beside it.
    graphs_in_share: ClassVar[bool] = False

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
        "float32, 0.05 in float16, 0.1 in bfloat16, 0.3 of engines with 8-bit weights, keys or values.",
    )

    weight_sync: Literal["auto", "full", "delta"] = Field(
        default="auto",
        description="What is sent to engines on other machines, through Ray: all weights (`full`), or only changed "
        "values (`delta`), which keeps a copy of the weights in host memory on both sides. `auto` measures both and "
        "goes on with the faster one. In shared memory, between GPUs, and of adapters everything is sent.",
    )
    full_sync_every: PositiveInt = Field(
        default=20,
        description="Every so many weight syncs, one is full. So is the first after an engine or the trainer started.",
    )

    @property
    def sends_adapters(self) -> bool | None:
        """Whether a run with `training.lora` sends the adapters alone; None wherever the engine can serve them."""
        return False

    def reserved_rank(self, rank: int) -> int:
        """Return the rank that an engine reserves room for, for adapters of a rank."""
        return rank

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

    @property
    def wants_seeds(self) -> bool:
        """Whether settings make one seed give one sample whatever else is in the batch, which needs seeds."""
        return False

    @property
    def quantizes(self) -> str | None:
        """What the engine quantises the weights to that it is sent; None if it computes with them as they are."""
        return None

    @property
    def approximates(self) -> str | None:
        """What the engine computes with in fewer bits than the trainer, for messages; None if nothing."""
        return f"weights in {self.quantizes}" if self.quantizes else None

    @property
    def tokens_per_pass(self) -> int:
        """Most tokens of one request in a decoding pass: the one that was sampled last, and those that are guessed."""
        return 1

    @property
    def captures_graphs(self) -> bool:
        """Whether it holds CUDA graphs on GPUs, which stay there while it sleeps."""
        return False

    @property
    def draft_model(self) -> str | None:
        """Directory of a smaller model that the engine holds beside the policy to guess tokens; None without."""
        return None

    @property
    def guesses_by_itself(self) -> bool:
        """Whether the model's own layers that predict further tokens guess."""
        return False

    def sampling_violations(self, min_p: Mapping[str, float]) -> Iterator[Violation]:
        """Yield ways to sample that the engine does not have with these settings.

        Args:
            min_p: Of each section that samples.
        """
        del min_p
        yield from ()

    def violations(self, resources: ResourcesConfig) -> Iterator[Violation]:
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
    """A model that judges, served in a cluster of its own; rewards reach it with `url: judge`."""

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


def weight_backend(engine: EngineConfig, resources: ResourcesConfig, *, adapters: bool = False) -> str | None:
    """Return the name of the engine's fastest transport that works on a run's hardware; None where none does.

    Args:
        engine: The `inference` section.
        adapters: Whether adapters are sent alone. They are small, and go through host memory also between GPUs.
    """
    transports = (SHARED_MEMORY, OBJECT_STORE) if adapters else engine.capabilities.weight_transports
    return next((transport.name for transport in transports if transport.works(resources)), None)


def engines_share_gpus(resources: ResourcesConfig) -> bool:
    """Return whether other models compute on the engines' GPUs, so that they take turns; never on CPU."""
    engines, models = resources.devices_of("inference"), ("training", "reference", "critic")
    return resources.device != "cpu" and any(resources.devices_of(model).overlaps(engines) for model in models)


def engine_violations(engine: EngineConfig, resources: ResourcesConfig) -> Iterator[Violation]:
    """Yield what an engine cannot do on a run's hardware, and settings of it that have no effect."""
    per_engine = len(resources.devices_of("inference")) // engine.replicas
    if resources.device == "cuda" and per_engine > 1 and not engine.capabilities.tensor_parallel:
        yield Violation(
            ("inference", "replicas"),
            f"the engine {engine.type!r} cannot divide a model among GPUs, and each replica would have {per_engine}; "
            f"set it to {len(resources.devices_of('inference'))}, or use inference.type: {DEFAULT_ENGINE}",
        )
    if weight_backend(engine, resources) is None:
        here = [transport.name for transport in WEIGHT_TRANSPORTS if transport.works(resources)]
        taken = sorted(transport.name for transport in engine.capabilities.weight_transports)
        yield Violation(
            ("inference", "type"),
            f"weights would travel to the engines by {' or '.join(here)} here, and the engine "
            f"{engine.type!r} takes them by {', '.join(taken)}; use inference.type: {DEFAULT_ENGINE}, or one node",
        )
    yield from _delta_violations(engine, weight_backend(engine, resources))
    if not engine.capabilities.prompt_logprobs:
        for key in engine.changed("probe_every", "probe_tolerance"):
            yield Violation(
                ("inference", key),
                f"the engine {engine.type!r} does not tell the log-probabilities of given tokens, so nothing is "
                f"probed and this has no effect; remove it, or use inference.type: {DEFAULT_ENGINE}",
            )
    yield from engine.violations(resources)


def _delta_violations(engine: EngineConfig, backend: str | None) -> Iterator[Violation]:
    """Yield `weight_sync` where all weights are sent, and the key beside it that has no effect then."""
    obstacle = None
    if backend != OBJECT_STORE.name:
        obstacle = (
            f"weights travel by {backend} here, where the trainer's tensors are read as they are and leaving out what "
            "did not change saves nothing (docs/benchmarks.md)"
        )
    elif not engine.capabilities.weight_changes:
        obstacle = f"the engine {engine.type!r} keeps no copy of what it was sent"
    if obstacle is not None and engine.weight_sync == "delta":
        yield Violation(("inference", "weight_sync"), f"{obstacle}; set it to auto or full")
    elif (obstacle is not None or engine.weight_sync == "full") and engine.changed("full_sync_every"):
        obstacle = obstacle or "inference.weight_sync is full"
        yield Violation(("inference", "full_sync_every"), f"{obstacle}, so every sync is full; remove the key")


def head_violations(engine: EngineConfig, head_dtype: str | None) -> Iterator[Violation]:
    """Yield an output layer in float32 that the engine would compute in the model's precision."""
    if head_dtype is not None and not engine.capabilities.float32_head:
        yield Violation(
            ("model", "head_dtype"),
            f"the engine {engine.type!r} computes its output layer in the model's precision only, and trainer and "
            f"engine would differ more than without it; remove it, or use inference.type: {DEFAULT_ENGINE}",
        )


def adapter_violations(
    engine: EngineConfig, lora: LoRAConfig | None, keys: Sequence[str], *, alone: bool
) -> Iterator[Violation]:
    """Yield what asks for adapters, or for the base model beside them, of engines that have merged weights.

    Args:
        engine: The `inference` section.
        lora: `training.lora`.
        keys: Keys that need the base model beside the policy's adapter.
        alone: Whether adapters may be sent alone.
    """
    if engine.sends_adapters and lora is None:
        yield Violation(
            ("inference", "lora"),
            "true sends adapters, and the trainer has none; add `training.lora: {}`, or remove the key",
        )
    elif engine.sends_adapters and not alone:
        yield Violation(
            ("inference", "lora"),
            "true sends adapters alone, to engines that load the base unquantised, and the trainer computes with it in "
            "4 bits (training.lora.quantization), so log-probabilities would differ; set it to false, which sends the "
            "dequantised base with adapters merged, or remove the key",
        )
    for key in () if alone else keys:
        path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
        if lora is None:
            yield Violation(
                path,
                "engines have the base model beside the policy only where adapters are trained; add "
                "`training.lora: {}`, or change this (`roll-like eval --model` measures other models)",
            )
        else:
            way_out = "use inference.type: vllm without `lora: false`"
            if lora.quantization is not None:
                way_out = "remove training.lora.quantization"
            yield Violation(
                path,
                "adapters are merged into the weights of these engines, which have no base model then; "
                f"{way_out}, or change this",
            )


def window_violations(window: int | None, longest: int, terms: str, what: str) -> Iterator[Violation]:
    """Yield a window (`inference.max_model_len`) that is shorter than the longest sample of a kind.

    Args:
        window: In tokens; None where it follows from the samples.
        longest: In tokens.
        what: What is meant: `sample`.
    """
    if window is not None and window < longest:
        yield Violation(
            ("inference", "max_model_len"),
            f"{window} tokens cannot hold the longest {what} ({terms}); set it to {longest} or more, or leave it out",
        )


def pause_violations(engine: EngineConfig, resources: ResourcesConfig) -> Iterator[Violation]:
    """Yield an engine that cannot freeze requests while the trainer works on its devices, as `async` asks for."""
    devices = resources.devices_of("inference")
    if resources.devices_of("training").overlaps(devices) and not engine.capabilities.pause:
        yield Violation(
            ("rollout", "schedule", "type"),
            f"trainer and engines share the devices {devices}, so requests under way have to pause while it "
            f"trains, and the engine {engine.type!r} cannot; give resources.device_mapping.inference devices "
            "of its own, or set type: sync",
        )
    elif engines_share_gpus(resources) and not engine.sleeps(shares_gpus=True):
        able = engine.capabilities.sleep
        awake = "inference.sleep: false" if able else f"the engine {engine.type!r} cannot free it"
        yield Violation(
            ("rollout", "schedule", "type"),
            f"engines share the GPUs {devices} with models, and keep their memory and requests there while "
            f"these compute ({awake}); give resources.device_mapping.inference GPUs of its "
            "own, or set type: sync",
        )
