"""vLLM's settings: of an engine, and of a judge's server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from roll_like.config.base import ConfigModel, Fraction, PositiveFloat, PositiveInt, Violation
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
    "quantization": "inference.quantization",
    "quantization_config": "inference.quantization",
    "speculative_config": "inference.speculative",
    "per_request_spec_decode_metrics": "inference.speculative",
}
#: Ranks of adapters that vLLM reserves room for.
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
#: vLLM's arguments that cannot be changed, and why.
FIXED_ENGINE_ARGS = {
    "logprobs_mode": "log-probabilities are those of the sampling distribution, which training needs",
    "logits_processors": "the trainer does not follow what they do to the distribution that tokens are drawn from",
    "worker_extension_cls": "weight updates come in through it",
    "weight_transfer_config": "weights.push() uses it",
    "disable_log_stats": "it follows from metrics.trackers: prometheus reads vLLM's statistics",
    "skip_tokenizer_init": "responses are decoded with the tokenizer",
    "load_format": "weights are loaded from model.path",
    "trust_remote_code": "it is set by `model.trust_remote_code`",
}


#: Most tokens that vLLM checks at once for a request.
MOST_GUESSED = 128


class SpeculationConfig(ConfigModel):
    """Guess the next tokens and check them in one pass of the policy (vLLM's `speculative_config`)."""

    common: ClassVar[tuple[str, ...]] = ("method", "num_speculative_tokens")

    method: Literal["ngram", "suffix", "draft", "eagle3", "mtp"] = Field(
        default="ngram",
        description="ngram: what followed the last tokens before. suffix: that, and what earlier answers had, by "
        "frequency; needs arctic-inference. draft: what a smaller model finds likeliest. eagle3: what an EAGLE-3 "
        "head finds likeliest. mtp: what layers of the model itself find likeliest, which predict further tokens.",
    )
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MOST_GUESSED)] | None = Field(
        default=None, description="Tokens that are guessed at a time, at most. Default: 4; 16 with suffix, 1 with mtp."
    )
    prompt_lookup_min: PositiveInt = Field(
        default=2, description="With `ngram`: fewest last tokens that have to be the same."
    )
    prompt_lookup_max: PositiveInt = Field(default=4, description="With `ngram`: most last tokens that are compared.")
    model: str | None = Field(
        default=None,
        description="With `draft`: local directory of a model with the policy's vocabulary; with `eagle3`: that of a "
        "head made for the policy. It is not trained.",
    )

    @model_validator(mode="after")
    def _keys_are_the_methods(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min: {self.prompt_lookup_min} is more than prompt_lookup_max: "
                f"{self.prompt_lookup_max}, so nothing would ever be guessed; lower the first or raise the second"
            )
        beside = self.method in ("draft", "eagle3")
        if beside and self.model is None:
            raise ValueError(f"method: {self.method} needs a model that guesses; set model, or use method: ngram")
        others = [] if beside else self.changed("model")
        others += [] if self.method == "ngram" else self.changed("prompt_lookup_min", "prompt_lookup_max")
        if others:
            raise ValueError(f"{others[0]} is not read with method: {self.method}; remove it")
        return self

    @property
    def most_guessed(self) -> int:
        """Tokens that are guessed at a time, at most."""
        return self.num_speculative_tokens or {"suffix": 16, "mtp": 1}.get(self.method, 4)

    def engine_arguments(self) -> dict[str, Any]:
        """Return vLLM's `speculative_config`."""
        tokens = self.most_guessed
        if self.model is not None:
            method = "draft_model" if self.method == "draft" else self.method
            return {"method": method, "model": self.model, "num_speculative_tokens": tokens}
        arguments: dict[str, Any] = {"method": self.method, "num_speculative_tokens": tokens}
        if self.method == "ngram":
            arguments |= {"prompt_lookup_min": self.prompt_lookup_min, "prompt_lookup_max": self.prompt_lookup_max}
        return arguments


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
    enforce_eager: bool | None = Field(
        default=None,
        description="true: without CUDA graphs. false: as vLLM does by itself, compiled and with CUDA graphs, which "
        "takes a minute or more to start. Default: on GPUs passes that only decode run from CUDA graphs, which takes a "
        "few seconds, and nothing is compiled; `engine_args.compilation_config` says otherwise. On CPUs, and where "
        "layers guess (`speculative.method`: `draft`, `eagle3`, `mtp`), as true.",
    )
    engine_args: dict[str, Any] = Field(
        default={}, description="Further `vllm.AsyncEngineArgs`, passed through; names are checked."
    )

    @property
    def decodes_from_graphs(self) -> bool:
        """Whether, on GPUs, passes that only decode run from CUDA graphs, and nothing is compiled."""
        return self.enforce_eager is None

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
    graphs_in_share: ClassVar[bool] = True

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
    speculative: SpeculationConfig | None = Field(
        default=None,
        description="Guess the next tokens and check them in one pass of the policy: the same distribution and "
        "log-probabilities, and faster where much is accepted (docs/backends.md#guessed-tokens).",
    )

    quantization: Literal["int8", "fp8"] | None = Field(
        default=None,
        description="Sample with 8-bit weights, which the engine makes of the trainer's at each weight sync: `int8` on "
        "CPU, `fp8` on GPUs. The trainer's stay as they are (docs/backends.md#8-bit-weights).",
    )

    @property
    def quantizes(self) -> str | None:
        """How the engine quantises the weights that it is sent."""
        return self.quantization

    @property
    def speculates(self) -> bool:
        """Whether tokens are guessed."""
        return self.speculative is not None

    @property
    def tokens_per_pass(self) -> int:
        """One token, the guesses, and a place that a draft takes of a pass's budget."""
        if self.speculative is None:
            return 1
        return 1 + self.speculative.most_guessed + (self.speculative.method == "draft")

    @property
    def captures_graphs(self) -> bool:
        """Whether passes run from CUDA graphs on GPUs."""
        compilation = self.engine_args.get("compilation_config")
        mode = compilation.get("cudagraph_mode") if isinstance(compilation, Mapping) else None
        if isinstance(mode, str) and mode.upper() == "NONE":
            return False
        return self.decodes_from_graphs or self.enforce_eager is False

    @property
    def decodes_from_graphs(self) -> bool:
        """Not where layers guess: their graphs read memory that is not theirs (vllm#55013, after sleep)."""
        return super().decodes_from_graphs and self.draft_model is None and not self.guesses_by_itself

    @property
    def draft_model(self) -> str | None:
        """What guesses with `method: draft` or `eagle3`."""
        return None if self.speculative is None else self.speculative.model

    @property
    def guesses_by_itself(self) -> bool:
        return self.speculative is not None and self.speculative.method == "mtp"

    def sampling_violations(self, min_p: Mapping[str, float]) -> Iterator[Violation]:
        """Yield what guessed tokens are not checked by."""
        for section, value in min_p.items() if self.speculates else ():
            if value > 0:
                yield Violation(
                    (section, "min_p"),
                    "with inference.speculative vLLM does not check guessed tokens by min_p, and refuses requests that "
                    "have one; set it to 0, or remove inference.speculative",
                )

    @property
    def wants_seeds(self) -> bool:
        return self.deterministic

    def violations(self, resources: ResourcesConfig) -> Iterator[Violation]:
        """Yield batch invariance on CPU."""
        if self.deterministic and resources.device == "cpu":
            yield Violation(
                ("inference", "deterministic"),
                "vLLM has kernels that do not depend on the batch for GPUs only; use inference.type: hf, which "
                "computes each request by itself, or remove this",
            )
        if self.deterministic and self.speculates:
            yield Violation(
                ("inference", "speculative"),
                "what is guessed depends on the batch, and each guess draws random numbers, so one seed would not give "
                "one sample (inference.deterministic); remove one of the two",
            )
        wanted = "int8" if resources.device == "cpu" else "fp8"
        if self.quantization not in (None, wanted):
            yield Violation(
                ("inference", "quantization"),
                f"on resources.device: {resources.device} weights are quantised to {wanted}, and found "
                f"{self.quantization}; set it to {wanted}, or remove it",
            )
        if self.quantization is not None and self.lora:
            yield Violation(
                ("inference", "quantization"),
                "adapters that are sent alone are computed beside the base model's own weights, and the sync compares "
                "those unquantised; set inference.lora: false, which sends whole weights, or remove this",
            )
        yield from super().violations(resources)

    def model_violations(self, *, experts: bool) -> Iterator[Violation]:
        """Yield a mixture of experts whose weights were to be quantised on CPU."""
        if experts and self.quantization == "int8":
            yield Violation(
                ("inference", "quantization"),
                "experts are not quantised on CPU, and they are most of the model; remove it",
            )
        yield from super().model_violations(experts=experts)

    @property
    def sends_adapters(self) -> bool | None:
        """Whether a run with `training.lora` sends the adapters alone; never to an engine that quantises weights."""
        return False if self.quantization is not None and self.lora is None else self.lora

    def reserved_rank(self, rank: int) -> int:
        """Return the rank that vLLM reserves room for, and computes with, for adapters of a rank."""
        return next((each for each in ADAPTER_RANKS if each >= rank), rank)

    def kv_cache_bytes(self, device: str) -> int | None:
        """Return the cache's size on CPU; on GPUs it follows from the free memory."""
        return int(self.kv_cache_gib * 2**30) if device == "cpu" else None


class VLLMJudgeConfig(VLLMSettings, JudgeConfig):
    """A model that judges, served by vLLM in a cluster of its own; rewards reach it with `url: judge`."""

    type: Literal["vllm"] = Field(default="vllm", description="This server.")
