"""Whether a directory holds a model that can be trained: before a run, from its files' headers.

transformers loads much that is none: with a warning and random numbers, with an adapter that lies beside the weights,
with quantised weights that no gradient changes, or an encoder that reads the answer before it writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.errors import ConfigError
from roll_like.models.checkpoint_names import tensor_groups
from roll_like.models.imports import quick_imports, quiet
from roll_like.models.modules import COMPLETE, UNTIE, load_for_training, load_model_config, untied
from roll_like.models.stored import StoredTensor, equal_values, refuse_adapter, refuse_quantized, stored_tensors
from roll_like.models.vision import FAMILIES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Families of transformers' causal language models whose tokens see what comes after them; encoders that become
#: decoders by `is_decoder: true` are known by their masked language model.
_NOT_CAUSAL = frozenset({"bert-generation", "cpmant", "xlnet"})


def refuse_unsuited(path: Path, *, trust_remote_code: bool = False, whole: bool = True) -> None:
    """Do nothing where a language model can be trained from a directory.

    Args:
        trust_remote_code: Whether the model may bring code.
        whole: Whether it has to be complete; a reward model begins without its output, or without a language model's.

    Raises:
        ConfigError: It cannot; says why, and what to change.
    """
    refuse_adapter(path)
    stored = stored_tensors(path)
    refuse_quantized(path, stored)
    config = load_model_config(path, trust_remote_code=trust_remote_code)
    refuse_other_architecture(path, config, trust_remote_code=trust_remote_code)
    if whole:
        _refuse_incomplete(path, config, stored, trust_remote_code=trust_remote_code)


def refuse_other_architecture(path: Path, config: PretrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Raise a ConfigError where a configuration is none of a decoder that transformers can train."""
    from transformers.models.auto import modeling_auto as auto

    kind = str(config.model_type)
    classes = config.architectures
    named = f"{kind} ({', '.join(map(str, classes))})" if classes and isinstance(classes, list) else kind
    fix = "set model.path to a decoder-only language model"
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{path} holds an encoder with a decoder, {named}", fix=fix)
    remote: Any = getattr(config, "auto_map", None) or {}
    if kind in FAMILIES or (trust_remote_code and "AutoModelForCausalLM" in remote):
        return
    if kind not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        sees = kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        raise ConfigError(
            f"{path} holds {named}, "
            + ("a vision-language model of a family whose images" if sees else "which transformers knows no causal")
            + (" are not supported" if sees else " language model of"),
            fix=f"{fix}, or to a vision-language model of one of the families {', '.join(FAMILIES)}",
        )
    encodes = kind in _NOT_CAUSAL or kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if encodes and not getattr(config, "is_decoder", False):
        raise ConfigError(
            f"{path} holds an encoder, {named}: its tokens see those after them, so it does not write one by one",
            fix=fix,
        )


def _refuse_incomplete(
    path: Path, config: PretrainedConfig, stored: Mapping[str, StoredTensor], *, trust_remote_code: bool
) -> None:
    """Raise a ConfigError where tensors are missing, have another shape, or are said to be one and are not."""
    with quick_imports():
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    with quiet(warnings=False):  # of transformers, that tensors are missing
        model, absent = load_for_training(
            AutoModelForImageTextToText if config.model_type in FAMILIES else AutoModelForCausalLM,
            "causal language model",
            path,
            "bfloat16",
            trust_remote_code=trust_remote_code,
            device_map="meta",  # names and shapes only
        )
    head = model.get_output_embeddings()
    own = next((name for name, each in model.named_modules() if each is head), "")
    if absent == [f"{own}.weight"]:
        raise ConfigError(
            f"{path} holds no {absent[0]}, and its config.json says tie_word_embeddings: false",
            fix="set tie_word_embeddings: true in config.json, if the model was made so; otherwise " + COMPLETE,
        )
    if absent:
        raise ConfigError(
            f"{len(absent)} of the model's tensors are missing in {path}, or have another shape; first: {absent[0]}",
            fix=COMPLETE,
        )
    stated: Mapping[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)
    for one, other in stated.items():
        names = _file_names(model, one, other)
        if all(name in stored for name in names) and not _one_tensor(stored, *names):
            raise ConfigError(untied(path, one, other), fix=UNTIE)


def _file_names(model: Any, *names: str) -> list[str]:
    """Return the names that parameters have in a checkpoint."""
    shapes = {name: model.get_parameter(name).shape for name in names}
    return [group.tensors[0] for name in names for group in tensor_groups(model, {name: shapes[name]})]


def _one_tensor(stored: Mapping[str, StoredTensor], one: str, other: str) -> bool:
    """Return whether two tensors have the same precision and the same numbers."""
    return stored[one].dtype == stored[other].dtype and equal_values(stored, one, other)
