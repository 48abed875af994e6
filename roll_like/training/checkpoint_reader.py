"""Reads PyTorch's distributed checkpoints without running anything that is in them.

Their `.metadata` is a pickle, which PyTorch loads as it is; so whoever can write a checkpoint could run code here.
"""

from __future__ import annotations

import pathlib
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.serialization import _get_layout

#: What the metadata of tensors consists of. Not `BytesStorageMetadata`: PyTorch loads such entries as any pickle.
_ADMITTED: dict[tuple[str, str], Any] = {
    (each.__module__, each.__name__): each
    for each in (
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        pathlib.PosixPath,
        torch.Size,
        _get_layout,
    )
}


class _TensorsOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return one of few classes, or a dtype."""
        if (module, name) in _ADMITTED:
            return _ADMITTED[module, name]
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it holds {module}.{name}, and nothing but tensors was expected")


class TensorReader(FileSystemReader):
    """Reads a checkpoint that holds tensors only.

    Args:
        path: Its folder.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Return what the checkpoint holds.

        Raises:
            FileNotFoundError: There is no checkpoint.
            RuntimeError: It holds something else than tensors, or is damaged.
        """
        del args, kwargs
        path = pathlib.Path(self.path) / filesystem._metadata_fn
        with path.open("rb") as file:
            try:
                found = _TensorsOnly(file).load()
            except Exception as error:  # damaged pickles raise anything
                raise RuntimeError(f"{path} is refused: {error}") from error
        if not isinstance(found, metadata.Metadata):
            raise RuntimeError(f"{path} is refused: it holds {type(found).__name__}, and Metadata was expected")
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found
