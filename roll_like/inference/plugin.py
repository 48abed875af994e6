"""The registration of an inference engine: its settings, and what is needed before its process starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from roll_like.config.base import Finding
from roll_like.config.inference import OBJECT_STORE, SHARED_MEMORY, EngineConfig, JudgeConfig
from roll_like.config.resources import ResourcesConfig
from roll_like.errors import ConfigError, PluginError
from roll_like.models.vision import is_vision_model
from roll_like.registry import INFERENCE_ENGINES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from roll_like.cluster import ClusterHandle
    from roll_like.inference.interface import AdapterSpec, EngineSpec, InferenceEngine, JudgeServer
    from roll_like.inference.weight_transfer.interface import WeightTransfer

#: Keys of some engines' sections that findings beside an engine's own name.
ADAPTERS_KEY, SEEDS_KEY = "inference.lora", "inference.deterministic"
SPECULATIVE_KEY = "inference.speculative"
DRAFT_KEY = f"{SPECULATIVE_KEY}.model"


class EnginePlugin:
    """Base of what is registered in `INFERENCE_ENGINES`. Its module imports neither torch nor the engine.

    `Config.capabilities` declares what the engine can do. Configuration rules, the planner and the start-up use
    these declarations and never the engine's name.
    """

    #: Class of the `inference` section with this engine's `type`.
    Config: ClassVar[type[EngineConfig]]
    #: Class of the `judge` section, for an engine that comes with an OpenAI-compatible server.
    Judge: ClassVar[type[JudgeConfig] | None] = None

    @classmethod
    def engine(cls) -> type[InferenceEngine]:
        """Import and return the engine's class. A Ray actor of a replica makes it as `engine(config, spec)`."""
        raise NotImplementedError

    @classmethod
    def judge_server(cls) -> type[JudgeServer]:
        """Import and return the server's class, for an engine with a `Judge` section."""
        raise NotImplementedError

    @classmethod
    def environment(cls, config: EngineConfig | JudgeConfig, spec: EngineSpec) -> dict[str, str]:
        """Return environment variables that the process of an engine or of a server needs from its first moment."""
        del config, spec
        return {}

    @classmethod
    def weight_transfer(
        cls,
        backend: str,
        engines: ClusterHandle[InferenceEngine],
        gpus_per_engine: int,
        trainer_address: Callable[[], tuple[str, int]],
    ) -> WeightTransfer:
        """Return the trainer's side of a transfer; an engine with others than shared memory overrides this.

        Args:
            backend: How weights travel in this run: the name of one of `Config.capabilities.weight_transports`.
            engines: The replicas.
            gpus_per_engine: GPUs of each.
            trainer_address: Returns host and a free port of the trainer's rank 0.

        Raises:
            PluginError: The engine declares a transport that its plugin does not have.
        """
        del gpus_per_engine, trainer_address
        if backend not in (SHARED_MEMORY.name, OBJECT_STORE.name):
            raise PluginError(
                f"{cls.__qualname__} declares the weight transport {backend!r} and has no transfer for it; "
                f"without one of its own it has {SHARED_MEMORY.name!r} and {OBJECT_STORE.name!r} only",
                fix=f"override {cls.__qualname__}.weight_transfer, or remove it from capabilities.weight_transports",
            )
        from roll_like.inference.weight_transfer.shared_memory import SharedMemoryTransfer

        return SharedMemoryTransfer(engines, by_value=backend == OBJECT_STORE.name)

    @classmethod
    def adapter_obstacle(cls, architecture: str, adapter: AdapterSpec, *, device: str, experts: bool) -> str | None:
        """Return what keeps the engine from being sent an adapter alone; None where it can be.

        An engine that can is given `EngineSpec.adapter`, and `update_weights` brings the adapter's tensors: of each
        layer A, and B times its scale, named `….lora_A.weight` and `….lora_B.weight` after the layer.

        Args:
            architecture: Of the model, as in its config.json.
            adapter: The adapter.
            device: `cpu` or `cuda`.
            experts: Whether the model is a mixture of experts.
        """
        del architecture, adapter, device, experts
        return "the engine takes whole weights only"

    @classmethod
    def vision_obstacle(cls, *, here: bool) -> str | None:
        """Return what keeps the engine from serving vision-language models; None where it can.

        An engine that can is given `GenerateRequest.images`.

        Args:
            here: It runs with the packages that are installed here. False where a run for GPUs is checked.
        """
        del here
        return "this engine takes no images"

    @classmethod
    def further_layers_obstacle(cls, model: Path) -> str | None:
        """Return what keeps a model's own layers from guessing tokens, which its files hold; None where they can.

        Args:
            model: Its directory.
        """
        del model
        return "the engine guesses no tokens"

    @classmethod
    def length_obstacle(cls, model_type: str, window: int | None, tokens: int) -> str | None:
        """Return what makes the engine compute samples of a length in another way than training does; None if nothing.

        Args:
            model_type: Of the language model, as in its config.json.
            window: Its sliding window, where some layers have one. Tokens.
            tokens: The length of the longest sample.
        """
        del model_type, window, tokens
        return None

    @classmethod
    def heads_obstacle(cls, head_dim: int, *, device: str) -> str | None:
        """Return that the engine computes no attention heads of a width; None where it does.

        Args:
            head_dim: Numbers of a query head.
            device: `cpu` or `cuda`.
        """
        del head_dim, device
        return None

    @classmethod
    def states_findings(
        cls, config: EngineConfig, model: PretrainedConfig, *, dtype: str, device: str
    ) -> Iterator[Finding]:
        """Yield what keeps the engine from computing layers with a state (gated delta, Mamba, …).

        Args:
            config: The `inference` section.
            model: Configuration of a model with such layers.
            dtype: Precision of the model.
            device: `cpu` or `cuda`.
        """
        del config, model, dtype, device
        yield from ()

    @classmethod
    def gpu_obstacle(cls, config: EngineConfig, head_dtype: str | None, capability: tuple[int, int]) -> str | None:
        """Return what keeps the engine from computing on a GPU what its settings promise; None if nothing.

        Args:
            config: The `inference` section.
            head_dtype: `model.head_dtype`.
            capability: CUDA compute capability, major and minor.
        """
        del config, head_dtype, capability
        return None

    @classmethod
    def routes_obstacle(cls, config: EngineConfig, *, device: str) -> str | None:
        """Return what keeps the engine from telling the experts of its tokens; None where it can.

        An engine that can is given `EngineSpec.returns_routes`.

        Args:
            config: The `inference` section.
            device: `cpu` or `cuda`.
        """
        del config, device
        return "this engine does not tell them"

    @classmethod
    def kept_obstacle(cls, config: EngineConfig, unbounded: Sequence[str], *, device: str) -> str | None:
        """Return what keeps the engine from telling what tokens `top_p`, `top_k` and `min_p` kept; None where it can.

        An engine that can is given `EngineSpec.returns_kept`.

        Args:
            config: The `inference` section.
            unbounded: Keys to change of what is sampled at random without a `top_k`.
            device: `cpu` or `cuda`.
        """
        del config, unbounded, device
        return "this engine does not tell them"

    @classmethod
    def check(cls, config: EngineConfig, resources: ResourcesConfig) -> Iterator[Finding]:
        """Yield for `--check` what is wrong with the settings on this machine, or has no effect."""
        del config, resources
        yield from ()


def refuse_unserved_images(kind: str, model: Path, *, here: bool = True) -> None:
    """Raise a ConfigError for a vision-language model that an engine cannot serve.

    Args:
        kind: `inference.type`.
        here: The engine runs with the packages that are installed here.
    """
    if not is_vision_model(model):
        return
    plugin: type[EnginePlugin] = INFERENCE_ENGINES.get(kind)
    obstacle = plugin.vision_obstacle(here=here)
    if obstacle is not None:
        raise ConfigError(
            f"inference.type: {kind} cannot serve the vision-language model {model}: {obstacle}",
            fix="set inference.type: hf (docs/vision.md)",
        )
