"""A model as a torch module: with its weights, for training, or without, for its names and shapes.

Torch and transformers are imported only by the functions that need them, so that planning stays quick.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.config.model import ModelTask, Precision
from roll_like.errors import ConfigError
from roll_like.models.imports import quick_imports, quiet
from roll_like.models.stored import refuse_adapter, refuse_quantized, stored_tensors
from roll_like.models.vision import is_vision_model, sees_images

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

#: What a directory of a model has to hold.
COMPLETE = "set model.path to a directory with config.json, *.safetensors and a tokenizer"


@quick_imports()
def load_model_config(path: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return what transformers reads in `path/config.json`.

    Raises:
        ConfigError: It cannot: the file is damaged, a value has another type, or the model needs code of its own.
    """
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # each model's class checks its values in its own way
        raise ConfigError(
            f"transformers cannot read {path / 'config.json'}: {' '.join(str(error).split())}",
            fix="set model.path to a complete model of transformers; model.trust_remote_code if it brings its own code",
        ) from error
    return config


def load_causal_lm(
    path: Path, dtype: Precision, *, trust_remote_code: bool = False, late: bool = False
) -> PreTrainedModel:
    """Return the model on CPU in `dtype`, for training: no key-value cache, attention as transformers chooses it.

    That is torch's scaled-dot-product attention, unless the model bounds its scores or has attention sinks.

    Args:
        path: A directory from `resolve_model` or from an export.
        dtype: Precision of every floating-point parameter.
        trust_remote_code: Run Python code that comes with the model.
        late: Leave what would take memory in the files, for `unread.materialise` to read tensor by tensor.

    Raises:
        ConfigError: The directory does not hold a complete model of an architecture that transformers knows.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    model, absent = load_for_training(
        AutoModelForImageTextToText if is_vision_model(path) else AutoModelForCausalLM,
        "causal language model",
        path,
        dtype,
        trust_remote_code=trust_remote_code,
        late=late,
    )
    refuse_absent(path, absent)
    return model


def load_for_training(
    auto_class: Any,
    what: str,
    path: Path,
    dtype: Precision,
    *,
    trust_remote_code: bool,
    late: bool = False,
    **options: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """Return a model, and the names of its tensors that are missing in the directory or have another shape.

    Args:
        what: What is loaded, for messages.
        dtype: Precision of every floating-point parameter.
        trust_remote_code: Run Python code that comes with the model.
        late: As `load_causal_lm` takes it.
        options: Further ones of `from_pretrained`.

    Raises:
        ConfigError: The directory does not hold such a model.
    """
    with quick_imports():
        import torch
        import transformers.modeling_utils  # noqa: F401 - what loading a model would import

    from roll_like.models.unread import late_reading, mark

    refuse_adapter(path)
    refuse_quantized(path, stored_tensors(path))
    reading: AbstractContextManager[dict[str, Any]] = late_reading() if late else nullcontext({})
    with quiet(), reading as unread:
        try:
            model, info = auto_class.from_pretrained(
                str(path),
                dtype=getattr(torch, dtype),
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told as missing, with both sizes
                **options,
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"no {what} can be loaded from {path}: {error}", fix=COMPLETE) from error
        except RuntimeError as error:
            if "conversion" not in str(error):
                raise
            raise ConfigError(
                f"no {what} can be loaded from {path}: its experts are not those that config.json describes; some are "
                "missing, or have another shape",
                fix=COMPLETE,
            ) from error
    refuse_untied(path, model)
    refuse_further_layers(path, model, info["unexpected_keys"])
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # scaled-dot-product attention would drop the bound
    _keep_time_steps(model)
    # transformers only warns about these and goes on with random numbers
    absent = sorted(info["missing_keys"])
    absent += sorted(
        f"{name} ({list(found)} in the files, {list(expected)} by config.json)"
        for name, found, expected in info["mismatched_keys"]
    )
    model.config.use_cache = False
    mark(model, unread)
    loaded: PreTrainedModel = model
    return loaded, absent


def _keep_time_steps(model: Any) -> None:
    """Bound the time steps of Mamba layers as config.json says.

    transformers 5.19 lets no step of Nemotron-H be below `time_step_min` (0.001), which is for new models; the
    model's own code and engines have `time_step_limit` (transformers#48989).
    """
    limit = getattr(model.config.get_text_config(), "time_step_limit", None)
    if limit is None:
        return
    for mixer in model.modules():
        if hasattr(mixer, "time_step_limit"):
            mixer.time_step_limit = tuple(map(float, limit))


def refuse_absent(path: Path, absent: Sequence[str]) -> None:
    """Raise a ConfigError where tensors of the model are missing in its directory."""
    if absent:
        raise ConfigError(
            f"{len(absent)} of the model's tensors are missing in {path}, or have another shape; first: {absent[0]}",
            fix=COMPLETE,
        )


def refuse_further_layers(path: Path, model: Any, unexpected: Iterable[str]) -> None:
    """Raise a ConfigError where the files hold more layers than config.json says; transformers would leave them out."""
    config = model.config.get_text_config()
    layers = int(config.num_hidden_layers)
    # behind the layers some files have those that predict further tokens
    known = layers + int(getattr(config, "num_nextn_predict_layers", None) or 0)
    names = dict(model.named_modules())
    found = [match for match in map(_LAYER.match, unexpected) if match and f"{match[1]}.{layers - 1}" in names]
    most = max((int(match[2]) + 1 for match in found if f"{match[1]}.{layers}" not in names), default=0)
    if most > known:
        key = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        raise ConfigError(
            f"config.json in {path} says {key}: {layers}, and the files hold {most} layers",
            fix=f"set {key}: {most} in config.json; to train fewer layers, set model.keep_layers",
        )


def refuse_untied(path: Path, model: Any) -> None:
    """Raise a ConfigError where the files hold two tensors of what config.json says is one."""
    stated = model.get_expanded_tied_weights_keys(all_submodels=True)
    apart = sorted(stated.keys() - model.all_tied_weights_keys.keys())
    if apart:
        raise ConfigError(untied(path, apart[0], stated[apart[0]]), fix=UNTIE)


_LAYER = re.compile(r"(.*\b(?:layers|h|blocks))\.(\d+)\.")
#: What to do about a flag that is wrong.
UNTIE = "set tie_word_embeddings: false in its config.json (in a copy of the directory, if it is the hub's cache)"


def untied(path: Path, one: str, other: str) -> str:
    """Return what is wrong with a model whose files hold different numbers for tensors that are said to be one."""
    return (
        f"config.json in {path} says that {one} is {other} (tie_word_embeddings: true), and the files hold both, with "
        "different numbers; trainer and engine would not compute the same"
    )


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a checkpoint holds beside parameters: such as a router's correction, which no gradient changes."""
    for path, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def empty_model(
    config: PretrainedConfig, trust_remote_code: bool, task: ModelTask = "text-generation"
) -> PreTrainedModel:
    """Return the architecture without memory for weights: it knows names, shapes and ties."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    generating = AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM
    auto = {
        "text-generation": generating,
        "text-classification": AutoModelForSequenceClassification,
        "token-classification": AutoModelForTokenClassification,
    }[task]
    config = copy.deepcopy(config)  # saving writes precision and architecture into it
    config.use_cache = True  # trainers switch it off; generation uses it
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(config, trust_remote_code=trust_remote_code)
    return model
