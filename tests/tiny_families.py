"""Random models of a few hundred kilobytes of the families that users train, in float32, in their checkpoint format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_model import VOCABULARY, make_tiny_tokenizer

#: Shorter than the sequences of the tests, so that it matters.
WINDOW = 24
#: What all families have; a head size that vLLM's CPU attention has.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
ALTERNATING = ["sliding_attention", "full_attention"]
#: A layer with a state, and one that attends.
HYBRID = {"hidden_size": 128, "layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_chunk_size": 8}
#: Family → (model class, configuration class, settings of its own).
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"hidden_size": 128}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "qwen3_moe_padded": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**EXPERTS, "num_local_experts": 4}),
    "mistral_window": ("MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW}),
    "gemma2_window": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_window": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
        },
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", {"hidden_size": 128, "tie_word_embeddings": True}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {"hidden_size": 128, "logits_scaling": 8.0}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {"hidden_size": 128}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {"hidden_size": 128}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **EXPERTS,
            "num_local_experts": 4,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "rope_parameters": YARN,
        },
    ),
}
#: Those whose layers have a state.
HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **HYBRID,
            **EXPERTS,
            "num_experts": 4,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "granite_hybrid": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **HYBRID,
            **EXPERTS,
            **MAMBA,
            "num_local_experts": 4,
            "shared_intermediate_size": 64,
            "position_embedding_type": "rope",
            "logits_scaling": 8.0,
        },
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {**MAMBA, "hidden_size": 128, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "layers_block_type": ["linear_attention", "full_attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 32,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {
            "hidden_size": 128,
            "layer_types": ["conv", "full_attention"],
            "tie_word_embeddings": True,  # released models are so, and vLLM takes all for such
            "block_auto_adjust_ff_dim": False,
            "block_dim": 128,  # released models have these two, and vLLM reads them
            "conv_dim": 128,
        },
    ),
}
#: What only trainers are tested with.
TRAINED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "head_dim": 16,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 32,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {
            **EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {
            **EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "llama_biased": ("LlamaForCausalLM", "LlamaConfig", {"attention_bias": True}),
    "qwen3_moe_mixed": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            **EXPERTS,
            "num_experts": 4,
            "moe_intermediate_size": 64,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
}


#: Bounded attention scores and attention sinks, which torch's scaled-dot-product attention leaves out.
EAGER = ("gemma2_window", "gpt_oss")


def load_family(name: str, directory: Path) -> Any:
    """Return a family's model in float32, with an attention that computes all of it."""
    from transformers import AutoModelForCausalLM

    from roll_like.models.modules import load_causal_lm

    if name in EAGER:
        return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    return load_causal_lm(directory, "float32").eval()


def make_family(name: str, directory: Path, *, seed: int = 0, layers: int = 2, **changes: Any) -> Path:
    """Write a random model of a family and the tiny tokenizer as a Hugging Face directory and return its path."""
    import torch
    import transformers

    model_class, config_class, own = (FAMILIES | HYBRIDS | TRAINED)[name]
    tokenizer = make_tiny_tokenizer()
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    config = getattr(transformers, config_class)(**{**COMMON, **ids, "num_hidden_layers": layers, **own, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config)
        chosen_by = [each for key, each in model.named_buffers() if key.endswith("e_score_correction_bias")]
        for tensor in (*model.parameters(), *chosen_by):
            # norms are born as ones, biases and sinks as zeros: nothing would notice that they are missing
            tensor.data.add_(0.05 * torch.randn_like(tensor))
    model.float().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
