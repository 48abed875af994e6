"""Models that score a whole conversation: a decoder whose last token goes through one linear output.

This is what transformers calls a sequence classifier with one label (`LlamaForSequenceClassification`, …), and what the
`reward_model` reward loads. It reads the score at the last token that is not the padding token.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.config.model import Precision
from roll_like.errors import ConfigError
from roll_like.models.imports import quiet
from roll_like.models.modules import load_for_training, load_model_config, refuse_absent

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

#: The output of decoders that transformers makes a sequence classifier of.
HEAD = "score"
_NAME = "ForSequenceClassification"


def load_classifier(
    path: Path, dtype: Precision, *, seed: int, trust_remote_code: bool = False, late: bool = False
) -> PreTrainedModel:
    """Return a model with one score, on CPU in `dtype`, for training.

    A sequence classifier keeps its output. A language model gets a new one: normal numbers of standard deviation
    1/(D + 1), so that scores begin near 0.

    Args:
        path: A directory from `resolve_model` or from an export.
        dtype: Precision of every floating-point parameter.
        seed: Seed of a new output.
        trust_remote_code: Run Python code that comes with the model.
        late: As `load_causal_lm` takes it.

    Raises:
        ConfigError: The directory does not hold a complete model of an architecture that has such an output, or holds a
            classifier with several.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    check_outputs(path, trust_remote_code=trust_remote_code)
    with quiet(warnings=False):  # of transformers, that the output is new
        model, absent = load_for_training(
            AutoModelForSequenceClassification,
            "model with a score",
            path,
            dtype,
            trust_remote_code=trust_remote_code,
            late=late,
            num_labels=1,
        )
    head = getattr(model, HEAD, None)
    if not isinstance(head, torch.nn.Linear):
        raise ConfigError(
            f"{type(model).__name__} has no linear output {HEAD!r} that is read at the last token",
            fix="set model.path to a decoder-only language model",
        )
    refuse_absent(path, [name for name in absent if name != f"{HEAD}.weight"])
    if absent:
        numbers = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            head.weight.copy_(numbers / (head.in_features + 1))
    return model


def check_outputs(path: Path, *, trust_remote_code: bool = False) -> None:
    """Check that a directory holds a language model, or a classifier with one output.

    Raises:
        ConfigError: It holds a classifier with several outputs, transformers has none of its family, or its config.json
            cannot be read.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN

    config = load_model_config(path, trust_remote_code=trust_remote_code)
    remote: Any = getattr(config, "auto_map", None) or {}
    if config.model_type not in KNOWN and not (trust_remote_code and f"AutoModel{_NAME}" in remote):
        raise ConfigError(
            f"transformers has no class of {config.model_type} models with a score, which a reward model is",
            fix="set model.path to a model of another family",
        )
    if any(name.endswith(_NAME) for name in config.architectures or ()) and config.num_labels != 1:
        raise ConfigError(
            f"{path} is a classifier with {config.num_labels} outputs, and a reward model has one",
            fix="set model.path to a language model, or to a classifier with num_labels: 1",
        )


def classifier_config(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Return a configuration, changed in place, as that of a classifier with one output that takes padded batches."""
    config.num_labels = 1
    text: Any = config.get_text_config()
    text.pad_token_id = pad_token_id(config, tokenizer)
    return config


def pad_token_id(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that a classifier takes for padding, wherever it stands: the model's own, or the tokenizer's.

    Raises:
        ConfigError: Neither names one, nor an end-of-sequence token.
    """
    named = getattr(config.get_text_config(), "pad_token_id", None)
    for token in (named, tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None and int(token) >= 0:
            return int(token)
    raise ConfigError(
        "neither the model nor its tokenizer has a padding token, so a batch of conversations has no form",
        fix="set pad_token_id in the model's config.json, or model.tokenizer to a tokenizer with a pad token",
    )
