"""Writes a model's tensors as safetensors files of bounded size, while holding one file's tensors at most."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: How large a file becomes, unless one tensor alone is larger: transformers' own size. Bytes.
SHARD_BYTES = 5 * 10**9
_NAME = "model.safetensors"


class ShardWriter:
    """Takes tensors one by one and writes a file whenever enough have come.

    Files have the names that `from_pretrained` looks for: `model.safetensors`, or `model-00001-of-00003.safetensors`, …
    with `model.safetensors.index.json`.

    Attributes:
        dtype: Precision of the first tensor; None before it has come.
    """

    def __init__(self, directory: Path) -> None:
        self.dtype: torch.dtype | None = None
        self._directory = directory
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._files: list[list[str]] = []
        self._total_bytes = 0
        self._parameters = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a copy of a tensor."""
        self.dtype = self.dtype or tensor.dtype
        if self._held and self._held_bytes + tensor.nbytes > SHARD_BYTES:
            self._write()
        # a copy: the tensor may be a view, or whole only for now
        self._held[name] = tensor.detach().contiguous().to("cpu", copy=True)
        self._held_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes
        self._parameters += tensor.numel()

    def finish(self) -> None:
        """Write what is left, and the index where there are several files."""
        self._write()
        count = len(self._files)
        if count == 1:
            self._path(0).rename(self._directory / _NAME)
            return
        places: dict[str, str] = {}
        for index, names in enumerate(self._files):
            file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            self._path(index).rename(self._directory / file)
            places.update(dict.fromkeys(names, file))
        content = {
            "metadata": {"total_parameters": self._parameters, "total_size": self._total_bytes},
            "weight_map": places,
        }
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (self._directory / f"{_NAME}.index.json").write_text(text, encoding="utf-8")

    def _write(self) -> None:
        from safetensors.torch import save_file

        save_file(self._held, self._path(len(self._files)), metadata={"format": "pt"})
        self._files.append([*self._held])
        self._held, self._held_bytes = {}, 0

    def _path(self, index: int) -> Path:
        return self._directory / f"model-{index + 1:05d}.part"  # how many there will be is not known yet
