"""The vLLM engine's registration. Imports neither torch nor vLLM."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.config.base import Finding
from roll_like.config.inference import IPC, NCCL, EngineConfig, JudgeConfig
from roll_like.config.resources import ResourcesConfig
from roll_like.errors import ConfigError
from roll_like.inference.plugin import DRAFT_KEY, SEEDS_KEY, EnginePlugin
from roll_like.inference.settings import unknown_arguments
from roll_like.inference.vllm.arguments import DOCUMENTED, known_arguments, vllm_environment
from roll_like.inference.vllm.config import (
    ADAPTER_RANKS,
    SpeculationConfig,
    VLLMConfig,
    VLLMJudgeConfig,
    VLLMSettings,
)
from roll_like.inference.vllm.images import torchvision_missing
from roll_like.inference.vllm.served import adapter_layers, guessing_models, knows
from roll_like.models.attention import keeps_states
from roll_like.models.stored import stated_json, stored_tensors
from roll_like.registry import INFERENCE_ENGINES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from roll_like.cluster import ClusterHandle
    from roll_like.inference.interface import AdapterSpec, EngineSpec, InferenceEngine, JudgeServer
    from roll_like.inference.weight_transfer.interface import WeightTransfer

#: Widths of heads that vLLM's attention on CPU is compiled for (0.32).
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
#: The same of its gated delta layers.
CPU_DELTA = 128
#: `model_type`s whose output layer is the embedding in vLLM (0.32), whatever config.json says.
ALWAYS_TIED = ("lfm2", "lfm2_moe")
#: `model_type`s with layers of a state that vLLM does not compute on a CPU, and what is missing.
CPU_MISSING = {
    "jamba": "no kernel of Mamba 1's scan",
    "kimi_linear": "no gated delta layers without Triton",
    "olmo_hybrid": "no gated delta layers without Triton",
}


@INFERENCE_ENGINES.register("vllm")
class VLLMPlugin(EnginePlugin):
    """vLLM."""

    Config = VLLMConfig
    Judge = VLLMJudgeConfig

    @classmethod
    def engine(cls) -> type[InferenceEngine]:
        """Import the engine; vLLM itself is imported when it starts."""
        from roll_like.inference.vllm.engine import VLLMEngine

        return VLLMEngine

    @classmethod
    def judge_server(cls) -> type[JudgeServer]:
        """Import what starts vLLM's server."""
        from roll_like.inference.vllm.server import VLLMServer

        return VLLMServer

    @classmethod
    def environment(cls, config: EngineConfig | JudgeConfig, spec: EngineSpec) -> dict[str, str]:
        """Return the variables that vLLM reads while it is imported."""
        assert isinstance(config, VLLMSettings)
        return vllm_environment(config, spec.threads, spec.device)

    @classmethod
    def weight_transfer(
        cls,
        backend: str,
        engines: ClusterHandle[InferenceEngine],
        gpus_per_engine: int,
        trainer_address: Callable[[], tuple[str, int]],
    ) -> WeightTransfer:
        """Return vLLM's own transfer between GPUs; on CPU the one through shared memory."""
        if backend not in (IPC.name, NCCL.name):
            return super().weight_transfer(backend, engines, gpus_per_engine, trainer_address)
        from roll_like.inference.vllm.weight_transfer import VLLMTransfer

        address, port = trainer_address()
        return VLLMTransfer(
            engines=engines, backend=backend, gpus_per_engine=gpus_per_engine, address=address, port=port
        )

    @classmethod
    def adapter_obstacle(cls, architecture: str, adapter: AdapterSpec, *, device: str, experts: bool) -> str | None:
        """Return what the installed vLLM lacks for an adapter."""
        if adapter.rank > ADAPTER_RANKS[-1]:
            return f"the rank is {adapter.rank}, and vLLM takes adapters up to rank {ADAPTER_RANKS[-1]}"
        if experts and device == "cpu":
            return "beside adapters vLLM computes mixtures of experts with Triton, which it has no CPU version of"
        layers = adapter_layers(architecture)
        if layers is None:
            return f"the installed vLLM takes no adapters for {architecture}"
        unserved = [name for name in adapter.modules if name not in layers]
        if unserved:
            return f"vLLM's model takes no adapter in the layers {', '.join(unserved)}"
        return None

    @classmethod
    def vision_obstacle(cls, *, here: bool) -> str | None:
        """Return that torchvision is missing, where it is."""
        return torchvision_missing() if here else None

    @classmethod
    def length_obstacle(cls, model_type: str, window: int | None, tokens: int) -> str | None:
        """Return that windows of Cohere 2 are not those of training: in vLLM 0.32 they reach one token further."""
        if model_type != "cohere2" or window is None or tokens <= window:
            return None
        return f"vLLM lets windows of {model_type} reach one token further than training does"

    @classmethod
    def heads_obstacle(cls, head_dim: int, *, device: str) -> str | None:
        """Return that vLLM's attention on CPU is made for some widths of heads only, where this is no such."""
        if device != "cpu" or head_dim in CPU_HEADS:
            return None
        return f"vLLM's attention on CPU computes heads of {', '.join(map(str, CPU_HEADS))} numbers"

    @classmethod
    def states_findings(
        cls, config: EngineConfig, model: PretrainedConfig, *, dtype: str, device: str
    ) -> Iterator[Finding]:
        """Yield what of such layers vLLM does not have: a model, a kernel on CPU, or one that goes back."""
        assert isinstance(config, VLLMConfig)
        family = model.get_text_config().model_type
        if config.deterministic:
            yield Finding.error(
                SEEDS_KEY,
                f"vLLM has no batch-invariant kernels for recurrent layers, which {family} has; remove "
                "inference.deterministic",
            )
        if config.speculates:
            yield Finding.error(
                "inference.speculative",
                f"vLLM cannot roll back recurrent states ({family}) after rejected draft tokens, so samples would not "
                "follow the policy; remove inference.speculative",
            )
        obstacle = states_obstacle(model, dtype) if device == "cpu" else None
        if family in ALWAYS_TIED and not model.tie_word_embeddings:
            obstacle = (
                f"vLLM computes the output layer of {family} with the embedding, and this model has one of its own "
                "(tie_word_embeddings: false); set inference.type: hf"
            )
        limit = getattr(model.get_text_config(), "time_step_limit", None)
        if limit is not None and tuple(map(float, limit)) != (0.0, math.inf):
            obstacle = (
                f"vLLM bounds no time steps of Mamba layers, and config.json has time_step_limit: {list(limit)}; set "
                "inference.type: hf"
            )
        unknown = [name for name in model.architectures or () if knows(name) is False]
        if unknown:
            obstacle = f"the installed vLLM has no {unknown[0]}; set inference.type: hf"
        if obstacle is not None:
            yield Finding.error("inference.type", obstacle)

    @classmethod
    def further_layers_obstacle(cls, model: Path) -> str | None:
        """Return that vLLM has no such layers of the model's architecture."""
        stated = stated_json(model / "config.json")
        names = {stated.get("model_type"), *(stated.get("architectures") or ())}
        known = guessing_models()
        if not known or known & names:
            return None
        return f"the installed vLLM has no layers that predict further tokens of {stated.get('model_type')}"

    @classmethod
    def gpu_obstacle(cls, config: EngineConfig, head_dtype: str | None, capability: tuple[int, int]) -> str | None:
        """Return that on Ampere and Ada batch invariance leaves out the output layer in float32.

        There vLLM 0.32 replaces torch's kernels, but not this one (`aten::mm.dtype`); newer GPUs keep torch's, which
        are set up not to depend on the batch.
        """
        assert isinstance(config, VLLMConfig)
        if not config.deterministic or head_dtype != "float32" or capability[0] != 8:
            return None
        return (
            "with model.head_dtype: float32 vLLM's output layer depends on the batch there, so inference.deterministic "
            "would not give one sample for one seed"
        )

    @classmethod
    def routes_obstacle(cls, config: EngineConfig, *, device: str) -> str | None:
        """Return that vLLM tells them with its second model runner only: on GPUs, and not with `method: suffix`."""
        assert isinstance(config, VLLMConfig)
        runner = "vLLM tells them with its second model runner, which"
        if config.speculative is not None and config.speculative.method == "suffix":
            return f"{runner} has no inference.speculative.method: suffix"
        return f"{runner} has no CPU version" if device == "cpu" else None

    @classmethod
    def kept_obstacle(cls, config: EngineConfig, unbounded: Sequence[str], *, device: str) -> str | None:
        """Return that vLLM needs a bound for each request on GPUs, and does not tell them of guessed tokens."""
        assert isinstance(config, VLLMConfig)
        if config.speculates:
            return "vLLM does not tell them of guessed tokens; remove inference.speculative"
        if device == "cpu" or not unbounded:
            return None
        return (
            "vLLM tells them on GPUs only where every request is greedy or has a top_k, which is missing: "
            f"{', '.join(unbounded)}"
        )

    @classmethod
    def check(cls, config: EngineConfig, resources: ResourcesConfig) -> Iterator[Finding]:
        """Yield names in `engine_args` that vLLM does not know, and a `sleep` without effect."""
        assert isinstance(config, VLLMConfig)
        known = known_arguments() if config.engine_args else ()
        if config.engine_args and not known:
            yield Finding.note("inference.engine_args", "not checked: vLLM is not installed here")
        else:
            for name, hint in unknown_arguments(config.engine_args, known, DOCUMENTED).items():
                yield Finding.error(f"inference.engine_args.{name}", f"vLLM has no such engine argument; {hint}")
        if config.speculative is not None:
            yield from _guessing_findings(config.speculative)
            yield from _crowded_passes(config)
        yield from config.without_effect(resources)
        unused, used = "kv_cache_gib", "gpu_memory_utilization"
        if resources.device == "cpu":
            unused, used = used, unused
        if getattr(config, unused) != VLLMConfig.model_fields[unused].default:
            yield Finding.warning(
                f"inference.{unused}",
                f"has no effect: on {resources.device} the cache is sized by inference.{used}; remove the key",
            )


def states_obstacle(model: PretrainedConfig, dtype: str) -> str | None:
    """Return what keeps vLLM on a CPU from computing a model whose layers have a state, with a way out."""
    text: Any = model.get_text_config()
    missing = CPU_MISSING.get(text.model_type)
    if text.model_type == "nemotron_h" and "moe" in (text.layer_types or ()):
        missing = "no experts without a gate"
    if missing is not None:
        return f"vLLM on a CPU has {missing}, which {text.model_type} needs; set inference.type: hf, or use a GPU"
    widths = {getattr(text, name, CPU_DELTA) for name in ("linear_key_head_dim", "linear_value_head_dim")}
    if hasattr(text, "linear_num_value_heads") and (dtype != "bfloat16" or widths != {CPU_DELTA}):
        return (
            f"vLLM computes gated delta layers on CPU in bfloat16 and with heads of {CPU_DELTA} numbers only, and "
            f"found {dtype} and {', '.join(map(str, sorted(widths)))}; set model.dtype: bfloat16 for a model with "
            "such heads, or inference.type: hf"
        )
    return None


def _guessing_findings(speculation: SpeculationConfig) -> Iterator[Finding]:
    """Yield what guesses need and this machine does not have."""
    if speculation.model is not None and not (Path(speculation.model) / "config.json").is_file():
        yield Finding.error(
            DRAFT_KEY,
            f"{speculation.model} has no config.json; write the local directory of a model",
        )
    elif speculation.model is not None and _has_states(Path(speculation.model)):
        yield Finding.error(
            DRAFT_KEY,
            f"{speculation.model} has layers with a state, and vLLM guesses with other models only; use one without "
            "such layers, or method: ngram",
        )
    if speculation.model is not None:
        yield from _other_guesser(speculation.method, Path(speculation.model))
    if speculation.method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        yield Finding.error(
            "inference.speculative.method",
            "suffix needs the package arctic-inference, which is not installed here; install it (pip install "
            "--no-deps arctic-inference), or use ngram",
        )


def _other_guesser(method: str, model: Path) -> Iterator[Finding]:
    """Yield a head where a model was named, or the other way round; it would be found when engines start."""
    with suppress(ConfigError):  # of files that cannot be read, others say so
        names = stored_tensors(model).keys()
        head = "fc.weight" in names
        if names and method == "eagle3" and not head:
            yield Finding.error(DRAFT_KEY, f"{model} holds no EAGLE-3 head (fc.weight); use method: draft for a model")
        if head and method == "draft":
            yield Finding.error(DRAFT_KEY, f"{model} holds an EAGLE-3 head; use method: eagle3")


def _has_states(draft: Path) -> bool:
    with suppress(ConfigError):  # of files that cannot be read, others say so
        return keeps_states(draft, trust_remote_code=False)
    return False


def _crowded_passes(config: VLLMConfig) -> Iterator[Finding]:
    """Yield a forward pass that was made too small for the guesses of all requests that run."""
    name, each = "max_num_batched_tokens", config.tokens_per_pass
    given, room = config.engine_args.get(name), config.max_running * each
    if isinstance(given, int) and given < room:
        yield Finding.warning(
            f"inference.engine_args.{name}",
            f"{given} tokens hold {given // each} requests with their guesses ({each} tokens each), and "
            f"inference.max_running lets {config.max_running} run: others wait; remove the key (it is {room} then), "
            "or lower inference.max_running or inference.speculative.num_speculative_tokens",
        )
