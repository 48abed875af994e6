"""Write a model as a Hugging Face directory that transformers and vLLM load, with a card of its run."""

from __future__ import annotations

import copy
import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING

from roll_like.config.model import ModelTask, Precision
from roll_like.errors import CheckpointError, RollLikeError
from roll_like.models.card import CARD, CURVES, ModelCard, render_model_card
from roll_like.models.checkpoint_names import converted, tensor_groups
from roll_like.models.classifier import classifier_config
from roll_like.models.ends import state_end
from roll_like.models.imports import quiet
from roll_like.models.lora import Adapter
from roll_like.models.modules import empty_model, persistent_buffers
from roll_like.models.mtp import FurtherLayers
from roll_like.models.shards import ShardWriter
from roll_like.models.stored import read_tensor, stored_tensors

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


#: Where an exported model keeps its adapters alone.
ADAPTER_FOLDER = "adapter"


def save_hf_directory(
    weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    out_dir: Path,
    card: ModelCard | None = None,
    *,
    dtype: Precision | None = None,
    base_dir: Path | None = None,
    trust_remote_code: bool = False,
    adapter: Adapter | None = None,
    task: ModelTask = "text-generation",
    more_files: Sequence[Path] = (),
) -> Path:
    """Write a model so that transformers and vLLM load it; all of it appears at once, or nothing.

    Weights are taken one after the other. Of what they bring, no more is in memory than one file's tensors.

    Args:
        weights: Full (unsharded) weights by parameter name; of tied tensors, one copy will do.
        tokenizer: The tokenizer, with the chat template to keep.
        out_dir: Where to write; an earlier export there is replaced.
        card: The run, for README.md and its picture; none is written without it.
        dtype: Precision to write; default: as the weights are.
        base_dir: Directory of the starting model, whose generation settings are kept (with what the chat template ends
            a turn with, should they not name it), and what no training changes: buffers, which a checkpoint holds
            beside parameters, and layers that predict further tokens. Their bits are those of its files.
        more_files: Further files to copy, such as those of an image processor.
        trust_remote_code: Whether the model's class comes with the model.
        adapter: What of the model was trained, where that is less than all; goes into the folder `adapter`.
        task: Whether it is a language model, or a classifier with one output: of sequences, or of tokens.

    Raises:
        CheckpointError: The weights do not fit the configuration, or the directory cannot be written.
    """
    config = copy.deepcopy(config)  # saving writes precision and architecture into it
    if task != "text-generation":
        classifier_config(config, tokenizer)
    model = empty_model(config, trust_remote_code, task)
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    out_dir = Path(os.path.expanduser(out_dir)).resolve()  # leaves a home that is not known
    temporary: Path | None = None
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
        temporary.chmod(0o755)
        writer = ShardWriter(temporary)
        for name, tensor in _checkpoint(pairs, model, dtype, base_dir):
            writer.add(name, tensor)
        model.to(writer.dtype)  # what config.json states
        with quiet():
            model.save_pretrained(temporary, state_dict={})  # all but the weights; it removes other files of weights
        writer.finish()
        tokenizer.save_pretrained(temporary)
        for file in more_files:
            shutil.copyfile(file, temporary / file.name)
        if base_dir is not None and (base_dir / "generation_config.json").is_file():
            shutil.copyfile(base_dir / "generation_config.json", temporary / "generation_config.json")
        if task == "text-generation":
            state_end(temporary, tokenizer)
        if card is not None:
            (temporary / CARD).write_text(render_model_card(card, task), encoding="utf-8")
            if card.curves is not None:
                shutil.copyfile(card.curves, temporary / CURVES)
        if adapter is not None:
            adapter.write(temporary / ADAPTER_FOLDER)
        _sync(temporary)
        _swap(temporary, out_dir)
    except RollLikeError:
        raise
    except Exception as error:  # a full disk is an OSError, a SafetensorError or a plain Exception of tokenizers
        raise _unwritten(out_dir, error) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return out_dir


#: What a disk answers that has no room, takes no files or is out of order.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG)


def _unwritten(out_dir: Path, error: Exception) -> CheckpointError:
    """Return why a model was not written: whether the disk is the reason, or something about the model."""
    known = isinstance(error, OSError) and error.errno in _DISK
    # other libraries tell the disk's answer in words alone
    if not known and not any(os.strerror(number) in str(error) for number in _DISK):
        return CheckpointError(f"the model cannot be exported to {out_dir}: {type(error).__name__}: {error}")
    return CheckpointError(
        f"the model cannot be written to {out_dir}: {error}",
        fix="free space there, or write elsewhere (output_dir, or model.cache_dir for converted models)",
    )


def _checkpoint(
    weights: Iterable[tuple[str, torch.Tensor]], model: PreTrainedModel, dtype: Precision | None, base_dir: Path | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint: weights as they are, and what is not trained as the base's files have it.

    Where those have no such buffer, or the checkpoint has it in another form, it comes with the weights.
    """
    further = FurtherLayers() if base_dir is None else FurtherLayers.of(model, base_dir)
    shapes = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(model)}
    stored = stored_tensors(base_dir) if shapes and base_dir is not None else {}
    kept: dict[str, str] = {}
    for group in tensor_groups(model, shapes):
        ours, theirs = group.parameters[0], group.tensors[0]
        alone = len(group.parameters) == len(group.tensors) == 1
        if alone and theirs in stored and stored[theirs].shape == shapes[ours]:
            kept[ours] = theirs
    written = None
    for name, tensor in converted(model, _fitting(weights, model, dtype, kept.keys())):
        written = tensor.dtype if tensor.ndim > 1 else written
        for each in (name, *further.copies.get(name, ())):
            yield each, tensor
    for name in kept.values():
        yield name, read_tensor(stored, name)
    yield from further.tensors(written)


def _fitting(
    weights: Iterable[tuple[str, torch.Tensor]], model: PreTrainedModel, dtype: Precision | None, kept: AbstractSet[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield exactly the tensors that the architecture stores, each once, but for those that are kept as they were.

    Raises:
        CheckpointError: One is missing, is not known, has another shape, or differs from what it is tied to.
    """
    import torch

    tied: Mapping[str, str] = model.all_tied_weights_keys
    expected = {name: tensor.shape for name, tensor in model.state_dict().items() if name not in tied}
    buffers = {name for name, _ in persistent_buffers(model)}
    shared = set(tied.values())
    found: dict[str, tuple[str, str | None]] = {}
    unknown: list[str] = []
    for alias, weight in weights:
        name = tied.get(alias, alias)
        if name in kept:
            continue
        if name not in expected:
            unknown.append(alias)
            continue
        if weight.shape != expected[name]:
            raise CheckpointError(
                f"the weights to export hold {alias} in shape {tuple(weight.shape)}; "
                f"the model's configuration says {tuple(expected[name])}"
            )
        content = _digest(weight) if name in shared else None
        if name in found:
            first, known = found[name]
            if content != known:
                aliases = " and ".join(sorted((first, alias), key=lambda each: each != name))
                raise CheckpointError(f"the model ties {aliases}, but the weights to export differ there")
            continue
        found[name] = alias, content
        changed = dtype is not None and weight.is_floating_point() and name not in buffers
        yield name, weight.to(getattr(torch, dtype)) if changed and dtype else weight
    if unknown:
        raise CheckpointError(
            f"the weights to export hold {len(unknown)} tensors that the model's configuration does not know; "
            f"first: {min(unknown)}"
        )
    missing = [name for name in expected if name not in found and name not in kept]
    if missing:
        raise CheckpointError(
            f"{missing[0]}, of shape {tuple(expected[missing[0]])}, is missing in the weights to export"
        )


def _digest(tensor: torch.Tensor) -> str:
    import torch
    import xxhash

    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(content.numpy().data)


def _sync(directory: Path) -> None:
    for file in directory.rglob("*"):
        if file.is_file():
            file.chmod(0o644)  # safetensors writes files that only their owner may read
            with file.open("rb") as stream:
                os.fsync(stream.fileno())


def _swap(temporary: Path, out_dir: Path) -> None:
    """Put `temporary` in the place of `out_dir`.

    The two change places in one step, so that there is a model at every moment; where the file system cannot, there is
    none for an instant.
    """
    if not out_dir.exists():
        temporary.rename(out_dir)
    elif not (out_dir.is_dir() and _exchanged(temporary, out_dir)):
        old = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.old.", dir=out_dir.parent))
        out_dir.rename(old / "was")
        temporary.rename(out_dir)
        shutil.rmtree(old)


def _exchanged(one: Path, other: Path) -> bool:
    """Let two paths change places in one step; return whether the system and the file system can."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:  # another system than Linux
        return False
    from_here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE
    done: int = renameat2(from_here, os.fsencode(one), from_here, os.fsencode(other), exchange)
    return done == 0
