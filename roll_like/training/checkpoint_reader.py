"""Reads PyTorch's distributed checkpoints without running anything that is in them.

Their `.metadata` is a pickle, which PyTorch loads as it is; so whoever can write a checkpoint could run code here.
"""

from __future__ import annotations

import pathlib
import pickle
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.serialization import _get_layout

#: What the metadata of tensors consists of. `BytesStorageMetadata` are entries that PyTorch would load as any pickle.
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


class _PassedOver:
    """Stands for any object that is no description of tensors; whatever it was made of is forgotten."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass

    def __call__(self, *_: Any) -> _PassedOver:
        return self


class _TensorsOnly(pickle.Unpickler):
    others = False

    def find_class(self, module: str, name: str) -> Any:
        """Return one of few classes, or a dtype."""
        if (module, name) in _ADMITTED:
            return _ADMITTED[module, name]
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if self.others:
            return _PassedOver
        raise pickle.UnpicklingError(f"it holds {module}.{name}, and nothing but tensors was expected")


class TensorReader(FileSystemReader):
    """Reads a checkpoint that holds tensors only, or the tensors of one.

    Args:
        others: Whether the folder may hold something else, which is passed over.
    """

    def __init__(self, path: pathlib.Path, *, others: bool = False) -> None:
        super().__init__(path)
        self._others = others

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Return what the checkpoint holds.

        Raises:
            FileNotFoundError: There is no checkpoint.
            RuntimeError: It holds something else than tensors, or is damaged.
        """
        del args, kwargs
        path = pathlib.Path(self.path) / filesystem._metadata_fn
        with path.open("rb") as file:
            unpickler = _TensorsOnly(file)
            unpickler.others = self._others
            try:
                found = unpickler.load()
            except Exception as error:  # damaged pickles raise anything
                raise RuntimeError(f"{path} is refused: {error}") from error
        if not isinstance(found, metadata.Metadata):
            raise RuntimeError(f"{path} is refused: it holds {type(found).__name__}, and Metadata was expected")
        entries = found.state_dict_metadata
        found.state_dict_metadata = {key: each for key, each in entries.items() if not isinstance(each, _PassedOver)}
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def read_tensor(self, key: str, row: int | None = None) -> Tensor:
        """Return a tensor, or one index of its first dimension; of the files only what overlaps with it is read.

        Raises:
            KeyError: There is no such tensor.
        """
        found = self.read_metadata()
        described: Any = found.state_dict_metadata[key]
        sizes, offsets = [*described.size], [0] * len(described.size)
        if row is not None:
            sizes[0], offsets[0] = 1, row
        chunk = metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, described, [chunk])
        taken = _Taken(torch.empty(sizes, dtype=described.properties.dtype))
        self.set_up_storage_reader(found, is_coordinator=True)
        self.read_data(LoadPlan(items), taken).wait()
        return taken.tensor if row is None else taken.tensor[0]


class _Taken(DefaultLoadPlanner):
    """Writes what is read into a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return where a part goes."""
        return narrow_tensor_by_index(self.tensor, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: it is there."""
