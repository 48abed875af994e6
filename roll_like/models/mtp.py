"""Layers that predict further tokens (multi-token prediction, MTP: DeepSeek-V3, arXiv:2412.19437, section 2.2).

Checkpoints of DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5 and others hold them beside the model's layers, for
speculative decoding. transformers leaves them out when it loads a model, so they have to be brought from the files
wherever the model is written again: config.json goes on to say that they are there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from roll_like.models.checkpoint_names import tensor_groups
from roll_like.models.stored import StoredTensor, equal_values, read_tensor, stated_json, stored_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

#: How config.json calls the number of these layers.
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_LAYER = re.compile(r".*?\blayers\.\d+")
_JOINS = re.compile(r"\.eh_proj\.weight$")


@dataclass(frozen=True, slots=True)
class FurtherLayers:
    """The tensors of these layers in a model's files.

    Attributes:
        stored: What the files hold.
        own: Names of the tensors that the layers have for themselves.
        copies: Names of those that are the model's embeddings or its output head once more, by the name of that.
    """

    stored: Mapping[str, StoredTensor] = field(default_factory=dict)
    own: Sequence[str] = ()
    copies: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: PreTrainedModel, directory: Path) -> FurtherLayers:
        """Find them in the directory that a model was loaded from.

        There are none for a model that predicts no tokens, and for one with some of the layers (`model.keep_layers`).

        Args:
            model: The model, perhaps an empty one.
        """
        head, layers = model.get_output_embeddings(), model.config.get_text_config().num_hidden_layers
        stated = stated_json(directory / "config.json")
        if head is None or stated.get("text_config", stated).get("num_hidden_layers", layers) != layers:
            return cls()
        stored = stored_tensors(directory)
        found = mtp_tensors(stored)
        if not found:
            return cls()
        parameters = model.state_dict(keep_vars=True)
        groups = tensor_groups(model, {name: tensor.shape for name, tensor in parameters.items()})
        ends = [end.weight for end in (model.get_input_embeddings(), head)]
        candidates = [
            group.tensors[0]
            for group in groups
            if any(parameters[group.parameters[0]] is end for end in ends) and group.tensors[0] in stored
        ]
        copies: dict[str, list[str]] = {}
        for name in found:
            whole = next((each for each in candidates if equal_values(stored, name, each)), None)
            if whole is not None:
                copies.setdefault(whole, []).append(name)
        copied = {name for names in copies.values() for name in names}
        return cls(stored, [name for name in found if name not in copied], copies)

    def tensors(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield the layers' own tensors; matrices in the precision of the model's, vectors as the files have them."""
        for name in self.own:
            tensor = read_tensor(self.stored, name)
            yield name, tensor.to(dtype) if tensor.ndim > 1 else tensor


def mtp_tensors(names: Iterable[str]) -> list[str]:
    """Return which tensors of a model's files are of layers that predict further tokens, in order.

    A part of their names begins with `mtp`; or they are in a layer with an `eh_proj`, which joins a token's embedding
    and the hidden state of the one before: DeepSeek-V3, GLM-4.5 and others number these layers behind the model's.

    Args:
        names: Names in the files.
    """
    found = [*names]
    joining = {name[: match.start()] for name in found if (match := _JOINS.search(name)) is not None}
    return sorted(name for name in found if named_mtp(name) or _owner(name) in joining)


def named_mtp(name: str) -> bool:
    """Whether a tensor's name says that it is of such layers; the names of others only have the layer's number."""
    return any(part.startswith("mtp") for part in name.lower().split("."))


def _owner(name: str) -> str:
    """Return the layer that a tensor is of; empty for those outside of layers."""
    match = _LAYER.match(name)
    return "" if match is None else match[0]
