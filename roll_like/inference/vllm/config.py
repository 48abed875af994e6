"""vLLM's settings: of an engine, and of a judge's server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from roll_like.config.base import Fraction, PositiveFloat, PositiveInt, Violation
from roll_like.config.inference import WEIGHT_TRANSPORTS, EngineCapabilities, JudgeConfig
from roll_like.config.resources import ResourcesConfig
from roll_like.inference.settings import PassedThrough, SleepingEngineConfig

#: vLLM's arguments that a key of ours sets.
OWNED_ENGINE_ARGS = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "dtype": "model.dtype",
    "max_model_len": "inference.max_model_len",
    "max_num_seqs": "inference.max_running",
    "enforce_eager": "inference.enforce_eager",
    "gpu_memory_utilization": "inference.gpu_memory_utilization",
    "tensor_parallel_size": "resources.device_mapping.inference and inference.replicas",
    "seed": "seed",
    "enable_lora": "inference.lora",
    "max_loras": "inference.lora",
    "max_lora_rank": "training.lora.rank",
    "lora_target_modules": "training.lora.target_modules",
    "enable_return_routed_experts": "algorithm.router_replay",
    "return_sampling_mask": "rollout.top_p, rollout.top_k or rollout.min_p",
    "enable_expert_parallel": "inference.expert_parallel",
}
#: Ranks of adapters that vLLM reserves room for.
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
#: vLLM's arguments that cannot be changed, and why.
FIXED_ENGINE_ARGS = {
    "logprobs_mode": "log-probabilities are those of the sampling distribution, which training needs",
    "logits_processors": "the trainer does not follow what they do to the distribution that tokens are drawn from",
    "worker_extension_cls": "weight updates come in through it",
    "weight_transfer_config": "weights.push() uses it",
    "disable_log_stats": "nothing reads vLLM's statistics",
    "skip_tokenizer_init": "responses are decoded with the tokenizer",
    "load_format": "weights are loaded from model.path",
    "trust_remote_code": "it is set by `model.trust_remote_code`",
}


class VLLMSettings(PassedThrough):
    """What every model on vLLM has."""

    owned_engine_args: ClassVar[Mapping[str, str]] = OWNED_ENGINE_ARGS
    fixed_engine_args: ClassVar[Mapping[str, str]] = FIXED_ENGINE_ARGS
    gpu_memory_key: ClassVar[str] = "gpu_memory_utilization"

    max_running: PositiveInt = Field(default=128, description="Sequences that one engine decodes at a time.")
    kv_cache_gib: PositiveFloat = Field(default=1.0, description="Key-value cache of one engine on CPU. GiB.")
    gpu_memory_utilization: Fraction = Field(
        default=0.5, description="Share of a GPU's memory for one engine. No effect on CPU."
    )
    enforce_eager: bool = Field(default=True, description="Skip CUDA graphs and compilation: starts sooner.")
    engine_args: dict[str, Any] = Field(
        default={}, description="Further `vllm.AsyncEngineArgs`, passed through; names are checked."
    )

    @property
    def gpu_share(self) -> float:
        """Share of a GPU's memory that vLLM takes, weights included."""
        return self.gpu_memory_utilization


class VLLMConfig(VLLMSettings, SleepingEngineConfig):
    """vLLM generates (default)."""

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities(
        weight_transports=WEIGHT_TRANSPORTS,
        tensor_parallel=True,
        sleep=True,
        pause=True,
        prompt_logprobs=True,
        top_logprobs=20,  # of `max_logprobs`, as vLLM sets it
        weight_changes=True,
        float32_head=True,
    )

    memory_key: ClassVar[str] = "kv_cache_gib"

    type: Literal["vllm"] = Field(default="vllm", description="This engine.")
    lora: bool | None = Field(
        default=None,
        description="With `training.lora`: send the adapters alone after each step, beside the base model that the "
        "engine has loaded. `false` sends whole weights that adapters are merged into. Default: adapters alone, "
        "if vLLM takes adapters in all layers that have one; `--check` says what is sent.",
    )

    deterministic: bool = Field(
        default=False,
        description="Kernels whose results do not depend on the batch (vLLM's batch invariance): one seed gives one "
        "sample whatever else is under way. Slower; on GPUs only.",
    )

    @property
    def wants_seeds(self) -> bool:
        """Whether one seed is to give one sample."""
        return self.deterministic

    def violations(self, resources: ResourcesConfig) -> Iterator[Violation]:
        """Yield batch invariance on CPU."""
        if self.deterministic and resources.device == "cpu":
            yield Violation(
                ("inference", "deterministic"),
                "vLLM has kernels that do not depend on the batch for GPUs only; use inference.type: hf, which "
                "computes each request by itself, or remove this",
            )
        yield from super().violations(resources)

    @property
    def sends_adapters(self) -> bool | None:
        """Whether a run with `training.lora` sends the adapters alone."""
        return self.lora

    def reserved_rank(self, rank: int) -> int:
        """Return the rank that vLLM reserves room for, and computes with, for adapters of a rank."""
        return next((each for each in ADAPTER_RANKS if each >= rank), rank)

    def kv_cache_bytes(self, device: str) -> int | None:
        """Return the cache's size on CPU; on GPUs it follows from the free memory."""
        return int(self.kv_cache_gib * 2**30) if device == "cpu" else None


class VLLMJudgeConfig(VLLMSettings, JudgeConfig):
    """A model that judges, served by vLLM in a cluster of its own; rewards reach it with `url: judge`."""

    type: Literal["vllm"] = Field(default="vllm", description="This server.")
