"""What models do to the products of their output layer: some scale them, some bound them.

Training computes logits block by block from hidden states and the output layer (`algorithms/blocks.py`), and has to do
the same to them. The keys of `config.json` are those that transformers' own models read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_like.errors import ConfigError
from roll_like.types import LogitTransform

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

#: Products are multiplied by it (Cohere, Falcon-H1, …).
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
#: Products, or the hidden states before them, are divided by it (Granite, MiniCPM3, …).
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
#: Families that multiply by what the others divide by.
_MULTIPLYING = ("hyperclovax",)
#: Largest logit (Gemma 2, NanoChat, RecurrentGemma, xLSTM, …).
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
#: Largest product of the comparison: large enough for any bound to matter, and its share that rounding may take.
_LARGEST, _ROUNDING = 64.0, 0.02


def logit_transform(config: PretrainedConfig) -> LogitTransform:
    """Return what a model does to products, as its configuration says."""
    text: Any = config.get_text_config()
    values = {
        key: float(value)
        for key in (*_FACTORS, *_DIVISORS, *_CAPS)
        if isinstance(value := getattr(text, key, None), int | float) and value
    }
    scale = 1.0
    for key in values.keys() & {*_FACTORS, *_DIVISORS}:
        multiplies = key in _FACTORS or text.model_type in _MULTIPLYING
        scale *= values[key] if multiplies else 1 / values[key]
    return LogitTransform(scale=scale, cap=next((values[key] for key in _CAPS if key in values), None))


def refuse_other_logits(causal_lm: Any) -> None:
    """Raise a ConfigError where transformers computes other logits than `logit_transform` says.

    The model's own forward pass runs with random hidden states in the place of its layers' output.

    Args:
        causal_lm: The model, whole, on the CPU.
    """
    import torch

    head = causal_lm.get_output_embeddings()
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(4, head.weight.shape[1], generator=generator).to(head.weight.dtype)
    kind = type(causal_lm).__name__
    with torch.no_grad():
        products_TV = torch.nn.functional.linear(hidden_TD, head.weight, head.bias)
        hidden_TD *= _LARGEST / products_TV.abs().max().clamp(min=torch.finfo(products_TV.dtype).tiny)
        products_TV = torch.nn.functional.linear(hidden_TD, head.weight, head.bias)
        expected_TV = logit_transform(causal_lm.config).of(products_TV.float())
        try:
            found_TV = _logits_of(causal_lm, hidden_TD).float()
        except (AttributeError, TypeError) as error:
            raise ConfigError(
                f"the logits of {kind} cannot be compared with those of training: {type(error).__name__}: {error}",
                fix="set model.path to a model of an architecture of transformers",
            ) from error
    apart = float((found_TV - expected_TV).abs().max() / expected_TV.abs().max())
    if not apart <= _ROUNDING:
        raise ConfigError(
            f"{kind} does to the products of its output layer what training does not know: logits differ by "
            f"{apart:.0%} of the largest, so log-probabilities would differ from those of inference",
            fix="set model.path to a model of another architecture",
        )


def _logits_of(causal_lm: Any, hidden_TD: Tensor) -> Tensor:
    """Return the logits that a model makes of hidden states, shape [T, V]."""
    import torch
    from transformers.modeling_outputs import MoeModelOutputWithPast

    backbone = causal_lm.base_model
    output = MoeModelOutputWithPast(last_hidden_state=hidden_TD[None])
    # what models that see images or hear, and those with a state, hand on
    for name in ("rope_deltas", "cache_params", "image_outputs", "video_outputs", "audio_outputs"):
        setattr(output, name, None)
    backbone.forward = lambda *_, **__: output
    try:
        tokens_1T = torch.zeros(1, len(hidden_TD), dtype=torch.int64)
        logits_TV: Tensor = causal_lm(input_ids=tokens_1T, use_cache=False).logits[0]
    finally:
        del backbone.forward
    return logits_TV
