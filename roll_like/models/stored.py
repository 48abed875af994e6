"""What the files of a model's directory hold, by their headers: no tensor is read before it is asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.content.pointers import PULL, is_pointer
from roll_like.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

#: Files of weights, and what says which of them holds which tensor.
WEIGHTS = "*.safetensors"
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"
#: Where config.json says that weights are quantised.
_QUANTIZED = ("quantization_config", "compression_config")
#: Ends of the names of tensors that quantised weights have beside them, or consist of.
_PARTS = (
    "qweight",
    "qzeros",
    "scales",
    "weight_scale",
    "weight_scale_inv",
    "weight_packed",
    "absmax",
    "quant_map",
    "_blocks",
    "_scales",
    "SCB",
)
#: Rows of a matrix that are read at a time.
_ROWS = 4096
#: Precisions of weights that nothing trains.
_FEW_BITS = ("F8_E4M3", "F8_E5M2", "I8", "U8", "F4")
_AGAIN = "download or export the model again"

_DEQUANTIZED = (
    "set model.path to the release in bfloat16, or write one (transformers: from_pretrained, dequantize(), "
    "save_pretrained); to train adapters beside a 4-bit base, set training.lora.quantization: nf4, which quantises an "
    "ordinary model itself"
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: The file.
        dtype: Its precision, as safetensors calls it: `BF16`, `F32`, `F8_E4M3`.
        shape: Its shape.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


def weight_files(directory: Path) -> list[Path]:
    """Return the files that a model's weights are read from: those that its index names, or the one file.

    Adapters and copies of another kind (`consolidated.safetensors`) beside them are none of them.

    Raises:
        ConfigError: Files that the index names are missing; or the index cannot be read, or is missing.
    """
    index = directory / INDEX
    if not index.is_file():
        single = directory / _SINGLE
        if single.is_file():
            return [single]
        found = sorted(each for each in directory.glob(WEIGHTS) if not each.name.startswith("adapter_"))
        if len(found) > 1:
            raise ConfigError(
                f"{directory} holds {len(found)} files of weights ({found[0].name}, …) and no {INDEX} that says what "
                "is in which",
                fix=f"add {INDEX} from where the model is from, or save the model again (save_pretrained)",
            )
        return found
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(places.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} cannot be read: {type(error).__name__}: {error}", fix=_AGAIN) from error
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ConfigError(
            f"{directory} lacks {len(missing)} of the {len(names)} files that {INDEX} names: {', '.join(missing[:3])}"
            f"{', …' if len(missing) > 3 else ''}",
            fix="finish the download",
        )
    return [directory / name for name in names]


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a model by its name in the files.

    Raises:
        ConfigError: A file is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, StoredTensor] = {}
    for file in weight_files(directory):
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    outline = tensors.get_slice(name)
                    found[name] = StoredTensor(file, outline.get_dtype(), tuple(outline.get_shape()))
        except (OSError, SafetensorError) as error:
            if isinstance(error, SafetensorError) and is_pointer(file):
                raise ConfigError(f"{file} is a pointer of Git LFS, and not the file", fix=PULL) from error
            raise ConfigError(f"{file} is not a safetensors file, or a damaged one: {error}", fix=_AGAIN) from error
    return found


def read_tensor(stored: Mapping[str, StoredTensor], name: str) -> Tensor:
    """Return a tensor with its own precision."""
    from safetensors import safe_open

    with safe_open(stored[name].file, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor


def rows_of(stored: Mapping[str, StoredTensor], name: str) -> Iterator[Tensor]:
    """Yield a matrix some rows at a time, so that little of it is in memory."""
    from safetensors import safe_open

    with safe_open(stored[name].file, framework="pt") as tensors:
        matrix = tensors.get_slice(name)
        for start in range(0, stored[name].shape[0], _ROWS):
            yield matrix[start : start + _ROWS]


def equal_values(stored: Mapping[str, StoredTensor], one: str, other: str) -> bool:
    """Whether two tensors are equal, in the precision of the narrower one; they are read until they differ."""
    if stored[one].shape != stored[other].shape:
        return False
    for left, right in zip(rows_of(stored, one), rows_of(stored, other), strict=True):
        narrow = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
        if not bool((left.to(narrow) == right.to(narrow)).all()):
            return False
    return True


def refuse_adapter(path: Path) -> None:
    """Raise a ConfigError where an adapter lies beside a model's config.json, or alone."""
    file = path / ADAPTER
    if not file.is_file():
        return
    base = stated_json(file).get("base_model_name_or_path") or "its base model"
    if (path / "config.json").is_file():
        raise ConfigError(
            f"{path} holds an adapter ({ADAPTER}) beside a model: transformers would add it to the weights, and "
            "inference engines would not",
            fix=f"move {ADAPTER} and adapter_model.safetensors out of the directory, or merge them into the weights "
            "(peft: merge_and_unload, save_pretrained)",
        )
    raise ConfigError(
        f"{path} holds an adapter of {base}, and no model",
        fix="merge it into its model and set model.path to the result (peft: AutoPeftModelForCausalLM.from_pretrained, "
        f"merge_and_unload, save_pretrained); or set model.path to {base}, and train new adapters with training.lora",
    )


def refuse_quantized(path: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Raise a ConfigError where weights are quantised, or config.json says so.

    Args:
        stored: What its files hold; nothing where only config.json is there.
    """
    raw = stated_json(path / "config.json")
    inner = raw.get("text_config")
    places = [raw, inner] if isinstance(inner, dict) else [raw]
    named = next((place[key] for place in places for key in _QUANTIZED if place.get(key)), None)
    parts = [name for name, each in stored.items() if name.endswith(_PARTS) or each.dtype in _FEW_BITS]
    if named is None and not parts:
        return
    if named is None:
        raise ConfigError(
            f"{path} holds quantised weights ({parts[0]}: {stored[parts[0]].dtype}), of which config.json says "
            "nothing; they cannot be trained",
            fix=_DEQUANTIZED,
        )
    method = named.get("quant_method", "?") if isinstance(named, dict) else named
    if stored and not parts:
        raise ConfigError(
            f"config.json in {path} says that the weights are quantised ({method}), and the files hold ordinary ones",
            fix="remove quantization_config from config.json (in a copy of the directory, if it is the hub's cache)",
        )
    raise ConfigError(f"the weights in {path} are quantised ({method}), and cannot be trained", fix=_DEQUANTIZED)


def stated_json(file: Path) -> dict[str, Any]:
    """Return the object that a file holds; an empty one where it cannot be read, which is found elsewhere."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
