"""Adapters in peft's format, such as `model/adapter` of a run: what they are, and whether a model is theirs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from roll_like.errors import ConfigError
from roll_like.models.load import is_hub_id
from roll_like.models.lora import linear_layers, tower_name

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
#: Settings of peft that engines do not compute, and the values with which they change nothing.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
}


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """A low-rank adapter in a directory.

    Attributes:
        path: The directory, absolute.
        base: What it says its model is: a directory or a hub id; empty if it does not say.
        rank: Largest rank of its matrices.
        layers: Inputs and outputs of each layer that it changes, by the whole name in transformers' model.
    """

    path: Path
    base: str
    rank: int
    layers: dict[str, tuple[int, int]]

    @classmethod
    def read(cls, path: Path, key: str) -> Self:
        """Read what an adapter is; its numbers are not read.

        Args:
            key: The configuration key that names it, for messages.

        Raises:
            ConfigError: It is not there, or is no plain low-rank adapter.
        """
        for name in (_CONFIG, _WEIGHTS):
            if not (path / name).is_file():
                found = f"{path} has no {name}" if path.is_dir() else f"there is no directory {path}"
                raise ConfigError(
                    f"{key}: {found}",
                    fix="correct the path to a directory that peft has written, or `model/adapter` of a run",
                )
        try:
            config = json.loads((path / _CONFIG).read_text(encoding="utf-8"))
            shapes = _shapes(path / _WEIGHTS)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key}: the adapter in {path} cannot be read: {error}", fix="copy it again") from error
        for name, plain in _PLAIN.items():
            if config.get(name) not in plain:
                raise ConfigError(
                    f"{key}: {path / _CONFIG} has {name}: {config.get(name)!r}, and engines take {plain[-1]!r} only",
                    fix="remove it, or merge it into a model and measure that with `roll-like eval --model`",
                )
        downs = {name.removesuffix(".lora_A.weight"): shape for name, shape in shapes.items() if ".lora_A." in name}
        ups = {name.removesuffix(".lora_B.weight"): shape for name, shape in shapes.items() if ".lora_B." in name}
        if not downs or downs.keys() != ups.keys():
            raise ConfigError(f"{key}: {path / _WEIGHTS} does not hold pairs lora_A and lora_B", fix="write it again")
        return cls(
            path=path.resolve(),
            base=config.get("base_model_name_or_path") or "",
            rank=max(shape[0] for shape in downs.values()),
            layers={name.removeprefix(_PREFIX): (shape[1], ups[name][0]) for name, shape in downs.items()},
        )

    @property
    def modules(self) -> tuple[str, ...]:
        """Last parts of the names of the layers that it changes."""
        return tuple(sorted({name.rpartition(".")[2] for name in self.layers}))

    def require_base(self, model: Any, base: str, key: str) -> None:
        """Raise a ConfigError if the adapter is another model's.

        Two hub ids that differ are two models. Of directories only the layers are compared: one model may have several.

        Args:
            model: The model, perhaps an empty one.
            base: `model.path`.
        """
        there, tower = linear_layers(model), tower_name(model)
        seen = [name for name in self.layers if tower is not None and name.startswith(f"{tower}.")]
        if seen:
            raise ConfigError(
                f"{key}: the adapter in {self.path} changes {len(seen)} layers of the vision tower, such as {seen[0]}, "
                "and engines take adapters of the language model only",
                fix="choose an adapter of the language model, or merge it into a model and measure that with "
                "`roll-like eval --model`",
            )
        strange = [name for name, size in self.layers.items() if there.get(name) != size]
        if strange:
            size, found = self.layers[strange[0]], there.get(strange[0])
            has = "none of that name" if found is None else f"one of {found[0]} × {found[1]}"
            raise ConfigError(
                f"{key}: the adapter in {self.path} is of another base model: it changes a layer {strange[0]} of "
                f"{size[0]} × {size[1]}, and {base} has {has}",
                fix="choose an adapter of model.path",
            )
        if is_hub_id(self.base) and is_hub_id(base) and self.base != base:
            raise ConfigError(
                f"{key}: the adapter in {self.path} is of {self.base} (base_model_name_or_path), and model.path is "
                f"{base}",
                fix="choose an adapter of model.path",
            )


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file.name}: {error}") from error
