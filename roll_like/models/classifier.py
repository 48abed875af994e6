"""Models that score conversations: a decoder whose tokens go through one linear output.

A model of whole conversations is what transformers calls a sequence classifier with one label
(`LlamaForSequenceClassification`, …): it reads the score at the last token that is not the padding token. A process
reward model is a token classifier with one label (`LlamaForTokenClassification`, …), which has a score at every token;
those at the ends of steps count. Both are what the `reward_model` reward loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.config.model import ModelTask, Precision
from roll_like.errors import ConfigError
from roll_like.models.imports import quiet
from roll_like.models.modules import load_for_training, load_model_config, refuse_absent

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

#: The output of decoders that transformers makes a sequence classifier of.
HEAD = "score"
#: How transformers' classes end, by what they are for.
ENDINGS: Mapping[ModelTask, str] = {
    "text-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
}


def load_classifier(
    path: Path,
    dtype: Precision,
    *,
    seed: int,
    task: ModelTask = "text-classification",
    trust_remote_code: bool = False,
    late: bool = False,
) -> PreTrainedModel:
    """Return a model with one score, on CPU in `dtype`, for training.

    A classifier keeps its output. A language model gets a new one: normal numbers of standard deviation 1/(D + 1), so
    that scores begin near 0. The output of a token classifier has a bias, which begins at 0.

    Args:
        path: A directory from `resolve_model` or from an export.
        dtype: Precision of every floating-point parameter.
        seed: Seed of a new output.
        task: Whether it scores whole conversations, or steps of answers.
        trust_remote_code: Run Python code that comes with the model.
        late: As `load_causal_lm` takes it.

    Raises:
        ConfigError: The directory does not hold a complete model of an architecture that has such an output, or holds a
            classifier with several.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    check_outputs(path, task, trust_remote_code=trust_remote_code)
    steps = task == "token-classification"
    with quiet(warnings=False):  # of transformers, that the output is new
        model, absent = load_for_training(
            AutoModelForTokenClassification if steps else AutoModelForSequenceClassification,
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
            f"{type(model).__name__} has no linear output {HEAD!r} that is read at a token",
            fix="set model.path to a decoder-only language model",
        )
    new = (f"{HEAD}.weight", f"{HEAD}.bias")
    refuse_absent(path, [name for name in absent if name not in new])
    with torch.no_grad():
        if new[0] in absent:
            numbers = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed))
            head.weight.copy_(numbers / (head.in_features + 1))
        if new[1] in absent:
            head.bias.zero_()
    return model


def check_outputs(path: Path, task: ModelTask = "text-classification", *, trust_remote_code: bool = False) -> None:
    """Check that a directory holds a language model, or a classifier with one output.

    Raises:
        ConfigError: It holds a classifier with several outputs, or a process reward model that is to score whole
            conversations; transformers has none of its family, or its config.json cannot be read.
    """
    from transformers.models.auto import modeling_auto as auto

    known = {
        "text-classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "token-classification": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    }[task]
    config = load_model_config(path, trust_remote_code=trust_remote_code)
    remote: Any = getattr(config, "auto_map", None) or {}
    if config.model_type not in known and not (trust_remote_code and f"AutoModel{ENDINGS[task]}" in remote):
        raise ConfigError(
            f"transformers has no class of {config.model_type} models with a score, which a reward model is",
            fix="set model.path to a model of another family",
        )
    kinds = {kind for kind, ending in ENDINGS.items() for name in config.architectures or () if name.endswith(ending)}
    if kinds == {"token-classification"} and task != "token-classification":
        raise ConfigError(
            f"{path} is a process reward model, whose output has a bias and scores steps",
            fix="set data.type: steps, or model.path to another model",
        )
    if kinds and config.num_labels != 1:
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
