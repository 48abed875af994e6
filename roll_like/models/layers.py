"""A smaller model out of a larger one: some of its layers, all of its embeddings."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.config.model import ModelConfig
from roll_like.errors import ConfigError
from roll_like.models.cache import made_once
from roll_like.models.export import save_hf_directory
from roll_like.models.modules import load_model_config
from roll_like.models.mtp import COUNTS, named_mtp
from roll_like.models.shape import load_model_shape

if TYPE_CHECKING:
    from torch import Tensor

#: Where the number of a layer stands in the name of a tensor.
_LAYER = re.compile(r"(?P<before>(?:^|\.)(?:layers|h)\.)(?P<layer>\d+)(?=\.)")


def with_layers(path: Path, keep: Sequence[int], config: ModelConfig, *, say: Callable[[str], None]) -> Path:
    """Return a directory with the model that consists of some layers of the one in `path`, making it once.

    What a layer computes stays as it is; embeddings, final norm and tokenizer are the model's own (a student's
    start as in DistilBERT, Sanh et al. 2019, arXiv:1910.01108). Layers that predict further tokens are left out: they
    read what the last layer of the larger model computes.

    Args:
        keep: Indices of its layers, ascending.
        config: The `model` section.
        say: Takes one line before the smaller model is made.

    Raises:
        ConfigError: A layer is not there, or the tensors of layers cannot be told from others.
    """
    layers = load_model_shape(path).layers
    if keep[-1] >= layers:
        raise ConfigError(
            f"model.keep_layers names layer {keep[-1]}, and the model has layers 0 to {layers - 1}",
            fix="correct model.keep_layers",
        )
    files = "".join(f"{file.name}:{file.stat().st_size};" for file in sorted(path.glob("*.safetensors")))
    identity = hashlib.sha256(f"{path}:{files}:{list(keep)}".encode()).hexdigest()[:12]

    def make(target: Path) -> None:
        from transformers import AutoTokenizer

        say(f"model: {len(keep)} of {layers} layers of {path.name}, once, into {target}")
        trust = config.trust_remote_code
        where: dict[str, bool] = {"local_files_only": True, "trust_remote_code": trust}
        shape = _smaller(load_model_config(path, trust_remote_code=trust), keep)
        tokenizer = AutoTokenizer.from_pretrained(str(path), **where)
        save_hf_directory(_kept(path, keep), shape, tokenizer, target, base_dir=path, trust_remote_code=trust)

    return made_once(f"{path.name}-{len(keep)}-layers-{identity}", make, config.cache_dir)


def _kept(path: Path, keep: Sequence[int]) -> dict[str, Tensor]:
    """Return the tensors of the smaller model under its own names."""
    from safetensors.torch import load_file

    place = {layer: index for index, layer in enumerate(keep)}
    weights: dict[str, Tensor] = {}
    layered = 0
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if named_mtp(name):
                continue
            match = _LAYER.search(name)
            layer = None if match is None else int(match["layer"])
            layered += layer is not None
            if layer is None or match is None:
                weights[name] = tensor
            elif layer in place:
                weights[f"{name[: match.start('layer')]}{place[layer]}{name[match.end('layer') :]}"] = tensor
    if not layered:
        raise ConfigError(
            f"the layers of {path} cannot be told by the names of its tensors (`layers.0.` or `h.0.` was expected)",
            fix="leave model.keep_layers out, and set model.path to a smaller model",
        )
    return weights


def _smaller(config: Any, keep: Sequence[int]) -> Any:
    """Return the configuration with fewer layers; lists with an entry a layer lose those that go."""
    layers = int(config.num_hidden_layers)
    values = json.loads(config.to_json_string(use_diff=False))
    for name, value in values.items():
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, [value[layer] for layer in keep])
    config.num_hidden_layers = len(keep)
    inner = config.get_text_config()
    for count in COUNTS:
        if getattr(inner, count, None):
            setattr(inner, count, 0)
    return config
