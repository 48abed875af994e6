"""Which models the training backend `megatron` converts, and how its ranks can divide them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll_like.errors import ConfigError
from roll_like.models.shape import layers_with_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from roll_like.config.training import TrainerConfig

#: Families (`model_type`) that `roll_like.training.megatron_weights` converts.
CONVERTED = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
)
#: Those whose queries, keys and values come out of narrow states (multi-head latent attention).
LATENT = ("deepseek_v2", "deepseek_v3")
#: Those whose mixtures choose by sigmoids with a bias that is not trained, in groups of experts.
_SIGMOID = ("deepseek_v3", "glm4_moe")
#: Rotary embeddings whose frequencies do not depend on a row's length.
_ROTARY = ("default", "linear", "llama3", "yarn")
_ELSEWHERE = "use training.backend: fsdp2"


def head_width(config: Any) -> int:
    """Return the width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def window_of(config: Any, layer: int) -> int | None:
    """Return how many tokens a layer sees, itself included; None for all before it."""
    types: list[str] | None = getattr(config, "layer_types", None)
    window: int | None = getattr(config, "sliding_window", None)
    return window or None if types is None or types[layer] == "sliding_attention" else None


def output_bias(config: Any) -> bool:
    """Return whether what attention puts out is projected with a bias."""
    return bool(getattr(config, "attention_bias", False)) and config.model_type not in ("qwen2", "glm4_moe")


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Return how many layers each stage of a pipeline has.

        61 layers, 8 stages  →  7 8 8 8 8 8 7 7

    Where they are not divided evenly, stages in the middle have one more: the first embeds, the last one projects.
    """
    each, more = divmod(layers, stages)
    start = (stages - more) // 2
    return [each + (start <= stage < start + more) for stage in range(stages)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of a model.

    Attributes:
        experts: How many a layer chooses from.
        active: How many it takes for a token.
        width: Inner units of an expert.
        shared: Inner units of what every token goes through beside them.
        layers: Which layers have experts.
        sigmoid: Whether scores are sigmoids, with a bias in the choice; else a softmax.
        normalised: Whether the scores of the chosen ones add up to 1.
        factor: What they are multiplied with.
        groups: Groups of experts, of which `best` are chosen first; 0 for none.
        best: See `groups`.
    """

    experts: int
    active: int
    width: int
    layers: tuple[bool, ...]
    shared: int = 0
    sigmoid: bool = False
    normalised: bool = True
    factor: float = 1.0
    groups: int = 0
    best: int = 0

    @classmethod
    def of(cls, config: Any) -> Mixture | None:
        """Return what the configuration of a converted family says; None without experts, or if no layer has any."""
        kind, layers = config.model_type, layers_with_experts(config)
        if not any(layers):
            return None
        if kind in ("mixtral", "gpt_oss"):
            return cls(
                experts=config.num_local_experts,
                active=config.num_experts_per_tok,
                width=config.intermediate_size,
                layers=layers,
            )
        if kind == "qwen3_moe":
            return cls(
                experts=config.num_experts,
                active=config.num_experts_per_tok,
                width=config.moe_intermediate_size,
                layers=layers,
                normalised=config.norm_topk_prob,
            )
        if kind not in LATENT + _SIGMOID:
            return None
        groups = (config.n_group or 0) if kind in _SIGMOID else 0
        return cls(
            experts=config.n_routed_experts,
            active=config.num_experts_per_tok,
            width=config.moe_intermediate_size,
            layers=layers,
            shared=config.moe_intermediate_size * (config.n_shared_experts or 0),
            sigmoid=kind in _SIGMOID,
            normalised=kind in _SIGMOID,
            factor=config.routed_scaling_factor,
            groups=groups if groups > 1 else 0,
            best=config.topk_group if groups > 1 else 0,
        )


def refuse_no_converter(config: PretrainedConfig, settings: TrainerConfig) -> None:
    """Raise a ConfigError for a model that Megatron-Core's layers do not compute here, or that ranks cannot divide."""
    text: Any = config
    if config.model_type not in CONVERTED:
        raise ConfigError(
            f"the training backend megatron has converters for {', '.join(CONVERTED)} models, and this one is "
            f"{config.model_type}",
            fix=_ELSEWHERE,
        )
    mixture = Mixture.of(text)
    for what in _not_computed(text, mixture):
        raise ConfigError(f"the training backend megatron does not compute {what} of this model", fix=_ELSEWHERE)
    for key, ranks in (
        ("expert_parallel", settings.expert_parallel),
        ("expert_tensor_parallel", settings.expert_tensor_parallel),
    ):
        if mixture is None and ranks > 1:
            raise ConfigError(
                f"{key}: {ranks} divides experts among {ranks} ranks, and no layer of the model has any",
                fix="remove the key",
            )
    if config.model_type == "gpt_oss" and settings.expert_tensor_parallel > 1:
        raise ConfigError(
            f"expert_tensor_parallel: {settings.expert_tensor_parallel} divides the matrices of experts, and "
            "Megatron-Core does not divide those that have biases",
            fix="remove the key, or divide the experts themselves: expert_parallel",
        )
    stages, layers = settings.pipeline_parallel * settings.virtual_pipeline, int(text.num_hidden_layers)
    if stages > layers:
        raise ConfigError(
            f"pipeline_parallel times virtual_pipeline: {stages} stages divide {layers} layers, and each needs one",
            fix=f"set them so that their product is at most {layers}",
        )
    for key, ranks, what, count in _divided(text, mixture, settings):
        if count % ranks:
            possible = ", ".join(str(n) for n in range(1, min(count, 64) + 1) if count % n == 0)
            raise ConfigError(
                f"{key}: {ranks} divides a model among {ranks} ranks, and this one has {count} {what}",
                fix=f"set it to one of {possible}",
            )


def _divided(config: Any, mixture: Mixture | None, settings: TrainerConfig) -> Iterator[tuple[str, int, str, int]]:
    """Yield keys, the ranks that they divide something among, its name, and how much there is of it."""
    tensor, heads = settings.tensor_parallel, int(config.num_attention_heads)
    if config.model_type not in LATENT:  # there, each head has keys of its own
        yield "tensor_parallel", tensor, "key heads", int(config.num_key_value_heads)
    yield "tensor_parallel times sequence_parallel", tensor * settings.sequence_parallel, "query heads", heads
    if mixture is None or not all(mixture.layers):
        yield "tensor_parallel", tensor, "inner units (intermediate_size)", int(config.intermediate_size)
    if mixture is None:
        return
    yield "expert_parallel", settings.expert_parallel, "experts in a layer", mixture.experts
    yield "expert_tensor_parallel", settings.expert_tensor_parallel, "inner units of an expert", mixture.width
    if mixture.shared:
        yield "tensor_parallel", tensor, "inner units of shared experts", mixture.shared


def _not_computed(config: Any, mixture: Mixture | None) -> Iterator[str]:
    """Yield what the converted layers lack of what the families can have."""
    if getattr(config, "attention_dropout", 0.0):
        yield "the dropout of attention weights (attention_dropout)"
    if config.model_type in LATENT and config.attention_bias:
        yield "the biases (attention_bias)"
    if getattr(config, "mlp_bias", False):
        yield "the biases (mlp_bias)"
    if config.hidden_act != "silu":
        yield f"the activation (hidden_act: {config.hidden_act})"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in _ROTARY:
        yield f"the rotary embeddings (rope_type: {kind})"
    if mixture is None:
        return
    if getattr(config, "router_jitter_noise", 0.0):
        yield "the noise of the choice of experts (router_jitter_noise)"
    if config.model_type == "deepseek_v2" and config.topk_method != "greedy":
        yield f"the choice of experts (topk_method: {config.topk_method})"
    if mixture.sigmoid and not config.norm_topk_prob:
        yield "scores of experts that are not normalised (norm_topk_prob: false)"
    if mixture.normalised and mixture.active == 1:
        yield "the normalised score of a single expert (num_experts_per_tok: 1)"
    if mixture.groups and mixture.active // mixture.best != 2:
        yield (
            f"the choice among {mixture.groups} groups of experts (n_group): Megatron-Core scores a group by its best "
            f"num_experts_per_tok // topk_group = {mixture.active // mixture.best}, and the model by its best 2"
        )
