"""Distributed checkpoints: tensors are read, and nothing that is in the files is run."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from roll_like.errors import CheckpointError
from roll_like.run.export import merged_weights
from roll_like.training.checkpoint_reader import TensorReader

WEIGHTS = {
    "weight.causal_lm.a": torch.arange(6.0).view(2, 3),
    "weight.causal_lm.b": torch.ones(2, dtype=torch.bfloat16),
}


class Creates:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (str(self._path), "w")


def write(folder: Path, **more: Any) -> Path:
    """Write a checkpoint, and return its metadata."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({**WEIGHTS, **more}, checkpoint_id=folder / "engine", no_dist=True)
    return folder / "engine" / ".metadata"


def replaced(metadata: Path, content: Any) -> None:
    metadata.write_bytes(pickle.dumps(content))


def test_tensors_are_read(tmp_path: Path) -> None:
    write(tmp_path)
    found = merged_weights(tmp_path, "fsdp2")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"a": [[0, 1, 2], [3, 4, 5]], "b": [1, 1]}


def test_metadata_that_would_run_something_is_refused(tmp_path: Path) -> None:
    replaced(write(tmp_path), Creates(tmp_path / "created"))
    with pytest.raises(
        CheckpointError, match=r"\.metadata is refused: it holds \w+\.open, and nothing but tensors was"
    ):
        merged_weights(tmp_path, "fsdp2")
    assert not (tmp_path / "created").exists()


def test_bytes_that_would_run_something_are_refused(tmp_path: Path) -> None:
    write(tmp_path, **{"weight.causal_lm.c": Creates(tmp_path / "created")})
    with pytest.raises(CheckpointError, match="BytesStorageMetadata, and nothing but tensors was expected"):
        merged_weights(tmp_path, "fsdp2")
    assert not (tmp_path / "created").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04", pickle.dumps({}), pickle.dumps([1, 2])[:-3]])
def test_damaged_metadata_is_refused(tmp_path: Path, content: bytes) -> None:
    write(tmp_path).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata is refused"):
        merged_weights(tmp_path, "fsdp2")


def test_a_tensor_or_one_layer_of_it_is_read_and_the_rest_passed_over(tmp_path: Path) -> None:
    layers, scalar = torch.randn(5, 4, 3), torch.tensor(3.0)
    metadata = write(tmp_path, layers=layers, scalar=scalar, other=Creates(tmp_path / "created"))
    found = pickle.loads(metadata.read_bytes())
    found.planner_data = [Creates(tmp_path / "created")]
    replaced(metadata, found)
    reader = TensorReader(metadata.parent, others=True)
    assert reader.read_metadata().state_dict_metadata.keys() == {*WEIGHTS, "layers", "scalar"}
    for row, layer in enumerate(layers):
        assert torch.equal(reader.read_tensor("layers", row), layer)
    for key, tensor in {**WEIGHTS, "layers": layers, "scalar": scalar}.items():
        assert torch.equal(reader.read_tensor(key), tensor)
    for key in ("nothing", "other"):
        with pytest.raises(KeyError, match=key):
            reader.read_tensor(key)
    assert not (tmp_path / "created").exists()
