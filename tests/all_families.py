"""Every causal language model of transformers as a random one of some thousand parameters, made from its configuration.

Sizes are those of `_SIZES`, wherever a family's configuration has a number of that name, in its parts as well. What a
few families need beside is in `_OWN`, and those that cannot be made so are in `NOT_MADE`, with the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_model import VOCABULARY, make_tiny_tokenizer

_LAYERS = 2
_SIZES: dict[str, int] = {
    name: size
    for size, names in {
        VOCABULARY: "vocab_size decoder_vocab_size vocab_size_per_layer_input",
        _LAYERS: "num_hidden_layers n_layer n_layers decoder_layers encoder_layers num_layers num_decoder_layers "
        "num_encoder_layers num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups n_group "
        "num_global_key_value_heads num_experts_per_tok moe_topk moe_k num_experts_per_token",
        1: "first_k_dense_replace n_shared_experts topk_group",
        4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
        "attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads "
        "num_experts n_routed_experts "
        "num_local_experts moe_num_experts zero_expert_num linear_num_key_heads linear_num_value_heads "
        "linear_num_heads mamba_n_heads mamba_num_heads index_n_heads n_mamba_heads",
        8: "sliding_window attention_window_size sliding_window_size window_size attention_chunk_size block_size "
        "local_attention chunk_size mamba_chunk_size",
        16: "head_dim global_head_dim swa_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim dim_head kv_channels "
        "attention_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim attention_head_size d_head d_kv "
        "index_head_dim mamba_d_head mamba_head_dim mamba_headdim rotary_dim kv_lora_rank q_lora_rank o_lora_rank "
        "time_step_rank mamba_dt_rank router_hidden_size laurel_rank hidden_size_per_layer_input gated_norm_rank "
        "hc_lowrank adapter_rank state_size mamba_d_state ssm_state_size",
        32: "moe_intermediate_size qk_head_dim",
        64: "hidden_size n_embd d_model embedding_size emb_dim embedding_dim lru_width attention_hidden_size "
        "word_embed_proj_dim input_embedding_size output_embedding_size backbone_hidden_size mamba_d_ssm "
        "pronunciation_vocab_size shape_vocab_size",
        96: "intermediate_size n_inner decoder_ffn_dim encoder_ffn_dim ffn_dim ffn_hidden_size dim_ff dff "
        "intermediate_size_mlp dense_intermediate_size d_inner shared_intermediate_size feed_forward_size "
        "moe_shared_expert_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
        256: "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length "
        "max_target_positions max_source_positions",
    }.items()
    for name in names.split()
}
_WIDTHS = range(16, 97)
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"layer_types": [_FULL, _FULL], "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gemma3n_text": {"layer_types": [_FULL, _SLIDING], "num_kv_shared_layers": 0},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "hunyuan_v1_dense": {"head_dim": 16, "rope_theta": 1e4},
    "hunyuan_v1_moe": {"head_dim": 16, "rope_theta": 1e4, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", _FULL], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2},
    "xmod": {"default_language": "en_XX"},
    "youtu": {"pad_token_id": None},  # loading it makes the padding token's row zero
    "zaya": {"num_experts_per_tok": 1},
}
#: Families whose buffers follow from their configuration: other numbers would make other masks.
_COMPUTED = ("minimax",)
#: Families of transformers 5.19 that this file does not make.
NOT_MADE: dict[str, str] = {
    "blt": "a patcher's byte hashes, of which there is no small number",
    "cohere_compass_text": "its layers share keys across kinds that two layers do not have",
    "dbrx": "its configuration's parts lack rope_theta in this version",
    "emu3": "its text part alone is saved, which no AutoModelForCausalLM loads",
    "gemma3n": "needs the package timm",
    "gemma4_assistant": "drafts for another model",
    "gemma4_unified_assistant": "drafts for another model",
    "mllama": "its text part alone is saved, which no AutoModelForCausalLM loads",
    "musicgen": "has an encoder of texts and one of audio",
    "musicgen_melody": "has an encoder of texts and one of audio",
    "qwen4_exp": "its configuration has no defaults",
    "qwen4_exp_text": "its configuration has no defaults",
    "reformer": "hashes need lengths of their own",
    "zamba": "ties layers, of which it needs many",
    "zamba2": "ties layers, of which it needs many",
}


def families() -> list[str]:
    """Return transformers' causal language models, by `model_type`, without those that are not made."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in NOT_MADE]


def make_model(name: str, *, seed: int = 0, scale: int = 1, **changes: Any) -> Any:
    """Return a random model of a family, in float32; no number in it is the one that it was born with.

    Args:
        name: The family.
        seed: Of its weights.
        scale: How many times as wide it is (hidden sizes, head sizes and ranks). Heads of 16 are too small for engines.
        changes: Entries of its configuration, and of its parts.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[name](**_small(CONFIG_MAPPING[name], {**_OWN.get(name, {}), **changes}, scale))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for owner in () if name in _COMPUTED else model.modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None and key not in owner._non_persistent_buffers_set and buffer.is_floating_point():
                    buffer.add_(0.3 * torch.rand_like(buffer))
    return model


def save_model(model: Any, directory: Path) -> Path:
    """Write a model as transformers does, with the tiny tokenizer."""
    model.save_pretrained(directory)
    make_tiny_tokenizer().save_pretrained(directory)
    return directory


def _small(kind: Any, own: dict[str, Any], scale: int) -> dict[str, Any]:
    """Return the changes to a configuration that make it small."""
    default = kind()
    values = default.to_dict()
    small: dict[str, Any] = {key: value for key, value in _TOKENS.items() if key in values}
    layers = max((value for key, value in values.items() if _SIZES.get(key) == _LAYERS and _is_size(value)), default=0)
    for key, value in values.items():
        if key in _SIZES and _is_size(value) and value > 0:
            small[key] = min(value, _SIZES[key] * scale if _SIZES[key] in _WIDTHS else _SIZES[key])
        elif key.endswith("_token_id") and _is_size(value):
            small.setdefault(key, min(value, 9))
        elif isinstance(value, list | tuple) and len(value) == layers > _LAYERS:  # one entry a layer
            other = next((each for each in value if each != value[0]), value[1])
            small[key] = [value[0], other]
        elif key in kind.sub_configs and isinstance(value, dict) and type(getattr(default, key)).model_type:
            small[key] = _small(type(getattr(default, key)), own.get(key, {}), scale)
    if "kv_lora_rank" in small and "num_key_value_heads" in small:  # latent attention has keys for every head
        small["num_key_value_heads"] = small["num_attention_heads"]
    return {**small, **{key: value for key, value in own.items() if not (key in kind.sub_configs and key in small)}}


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
