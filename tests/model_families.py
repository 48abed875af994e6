"""Tiny random models of many families, with windows that are shorter than the rows of tests."""

from __future__ import annotations

from typing import Any

WINDOW = 4
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
#: Chunks of a scan are shorter than samples.
_CHUNK = 4
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": _CHUNK}
_LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 0, **_LAYERS},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, **_EXPERTS},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": None, "query_pre_attn_scalar": 8, **_LAYERS},
    "gemma3_text": {"query_pre_attn_scalar": 8, **_LAYERS},
    "olmo2": {},
    "olmo3": {**_LAYERS},
    "phi3": {"sliding_window": WINDOW},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **_LAYERS},
    "qwen3_next": {
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        **_DELTA,
        **_EXPERTS,
    },
    "qwen3_5_text": _DELTA,
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_experts": 4,
        "num_key_value_heads": 4,
        **_LATENT,
        **_EXPERTS,
    },
    "bamba": {"attn_layer_indices": [1], **_MAMBA},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 32, "mamba_n_heads": 4},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        **_MAMBA,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "moe"],
        "num_hidden_layers": 3,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": _CHUNK,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 24,
        **_EXPERTS,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts": 4, **_EXPERTS},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "block_size": _CHUNK},
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm4": {},
    "vaultgemma": {"attn_logit_softcapping": None, "query_pre_attn_scalar": 8, **_LAYERS},
    "nanochat": {"final_logit_softcapping": None},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0, **_LAYERS},
    "granite": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        **_LATENT,
        **_EXPERTS,
    },
    "hyperclovax": {},
    "minicpm3": {
        "dim_model_base": 32,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        **_LATENT,
    },
    "llama4_text": {"attention_chunk_size": WINDOW, "intermediate_size_mlp": 48, "num_local_experts": 2},
}
#: Families that scale or bound their logits, or may, and what makes them.
CHANGED_LOGITS: dict[str, dict[str, float]] = {
    "gemma2": {"final_logit_softcapping": 3.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "vaultgemma": {"final_logit_softcapping": 2.0},
    "nanochat": {"final_logit_softcapping": 1.0},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 3.0},
    "granite": {"logits_scaling": 8.0},
    "granitemoe": {"logits_scaling": 4.0},
    "hyperclovax": {"logits_scaling": 0.25},
    "minicpm3": {"dim_model_base": 16},
}
#: Families whose layers see all of a sample, or a window of it.
ATTENDING = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "olmo3",
    "phi3",
    "gpt_oss",
)
#: Those of them with windows.
WINDOWED = tuple(name for name in ATTENDING if "sliding_window" in _FAMILIES[name])
#: Those of them that bound their scores or have attention sinks.
CAPPED = ("gemma2", "gpt_oss")
#: Families with layers that have a state, which compute each sample of a row by itself.
RECURRENT = (
    *("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear"),
    *("bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h"),
    *("lfm2", "lfm2_moe"),
)
#: One with a state that runs through all of a row.
UNDIVIDED = "minimax"


def make_family(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """Return a causal language model of a family as transformers makes it, float32, in evaluation mode.

    Two layers, four heads of 8 with two key heads; windows have 4 tokens. Weights are large enough that each token
    matters to those that see it.

    Args:
        name: The family: transformers' `model_type`.
        seed: Of the weights.
        changes: To its configuration.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[name](**{**_SIZES, **_FAMILIES[name], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
