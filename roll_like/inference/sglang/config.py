"""SGLang's settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from roll_like.config.base import Fraction, PositiveInt, Violation
from roll_like.config.inference import NCCL, OBJECT_STORE, SHARED_MEMORY, EngineCapabilities
from roll_like.config.resources import ResourcesConfig
from roll_like.inference.settings import PassedThrough, SleepingEngineConfig

#: SGLang's arguments that a key of ours sets.
OWNED_ENGINE_ARGS = {
    "model_path": "model.path",
    "tokenizer_path": "model.tokenizer",
    "dtype": "model.dtype",
    "context_length": "inference.max_model_len",
    "max_running_requests": "inference.max_running",
    "mem_fraction_static": "inference.mem_fraction_static",
    "disable_cuda_graph": "inference.cuda_graphs",
    "cuda_graph_backend_decode": "inference.cuda_graphs",
    "cuda_graph_backend_prefill": "inference.cuda_graphs",
    "enable_deterministic_inference": "inference.deterministic",
    "enable_return_routed_experts": "algorithm.router_replay",
    "enable_memory_saver": "inference.sleep",
    "enable_weights_cpu_backup": "inference.sleep",
    "tp_size": "resources.device_mapping.inference and inference.replicas",
    "ep_size": "inference.expert_parallel",
    "random_seed": "seed",
    "trust_remote_code": "model.trust_remote_code",
}
#: SGLang's arguments that cannot be changed, and why.
FIXED_ENGINE_ARGS = {
    "custom_weight_loader": "weight updates come in through it",
    "weight_version": "it counts the policy's versions",
    "load_format": "weights are loaded from model.path",
    "skip_tokenizer_init": "responses are decoded with the tokenizer, and stop strings need it",
    "incremental_streaming_output": "the engine reads whole responses",
    "sampling_defaults": "a request says everything of how it is sampled",
    "preferred_sampling_params": "a request says everything of how it is sampled",
    "dp_size": "weights reach one copy of the model; set inference.replicas instead",
    "pp_size": "weight updates have not been written for pipeline stages",
    "nnodes": "one engine runs on the GPUs of one node",
    "disaggregation_mode": "an engine that only computes prompts, or only decodes, cannot generate alone",
    "speculative_algorithm": "weights of a draft model are not updated",
    **dict.fromkeys(
        ("quantization", "modelopt_quant", "quantize_and_serve", "rl_quant_profile"),
        "8-bit weights are an option of inference.type: vllm (inference.quantization)",
    ),
    "tokenizer_worker_num": "the engine talks to one tokenizer process, its own",
    "enable_custom_logit_processor": "the trainer does not follow what one does to the distribution of tokens",
    "allow_auto_truncate": "a prompt that was cut would be trained as if it had not been",
    "device": "resources.device is cuda",
    "base_gpu_id": "Ray shows a replica its own GPUs only",
}


class SGLangConfig(PassedThrough, SleepingEngineConfig):
    """SGLang generates, on NVIDIA GPUs (extra `sglang`). Not yet run on a GPU: docs/backends.md."""

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities(
        weight_transports=(NCCL, SHARED_MEMORY, OBJECT_STORE),
        tensor_parallel=True,
        sleep=True,
        pause=True,
        prompt_logprobs=True,
        weight_changes=True,
        float32_head=True,
    )
    owned_engine_args: ClassVar[Mapping[str, str]] = OWNED_ENGINE_ARGS
    fixed_engine_args: ClassVar[Mapping[str, str]] = FIXED_ENGINE_ARGS
    gpu_memory_key: ClassVar[str] = "mem_fraction_static"

    type: Literal["sglang"] = Field(default="sglang", description="This engine.")
    max_running: PositiveInt = Field(default=128, description="Sequences that one engine decodes at a time.")
    mem_fraction_static: Fraction = Field(
        default=0.5, description="Share of a GPU's memory for one engine's weights and key-value cache."
    )
    cuda_graphs: bool = Field(default=False, description="Capture CUDA graphs: decodes faster, starts later.")
    deterministic: bool = Field(
        default=False,
        description="Kernels whose results do not depend on the batch. SGLang follows a request's seed only with them; "
        "without, two runs with one `seed` sample differently.",
    )
    engine_args: dict[str, Any] = Field(
        default={}, description="Further arguments of SGLang's `ServerArgs`, passed through; names are checked."
    )

    @property
    def gpu_share(self) -> float:
        """Share of a GPU's memory that SGLang takes, weights included."""
        return self.mem_fraction_static

    @property
    def captures_graphs(self) -> bool:
        """Whether decoding runs from CUDA graphs, which are beside its share of the memory."""
        return self.cuda_graphs

    @property
    def wants_seeds(self) -> bool:
        return self.deterministic

    def violations(self, resources: ResourcesConfig) -> Iterator[Violation]:
        """Yield a run on CPU, and an engine that stays awake and leaves a colocated trainer too little memory."""
        if resources.device == "cpu":
            yield Violation(
                ("inference", "type"),
                "SGLang's packages compute on NVIDIA GPUs only, and resources.device is cpu; set resources.device: "
                "cuda, or inference.type: vllm or hf",
            )
        yield from super().violations(resources)
