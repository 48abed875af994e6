"""GGUF files become ordinary Hugging Face directories, once."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.config.model import Precision
from roll_like.errors import ConfigError
from roll_like.models.cache import made_once
from roll_like.models.export import save_hf_directory

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_LAYOUT = "1"  # goes into the cache key: raise it when what is written changes
_BLOCK, _BLOCKS = 1 << 16, 256


def convert_gguf(file: Path, dtype: Precision, *, cache_dir: Path | None, say: Callable[[str], None]) -> Path:
    """Return a directory with the dequantised model, converting it at the first call.

    Two processes may ask at once: one converts, the other waits and takes the result.

    Args:
        cache_dir: Default: `~/.cache/roll_like`.
        say: Takes one line before a conversion starts.

    Raises:
        ConfigError: The file is not a GGUF file, or of an architecture that transformers cannot convert.
        CheckpointError: The cache directory cannot be written.
    """

    def convert(target: Path) -> None:
        say(f"model: dequantising {file.name} to {dtype}, once, into {target}")
        state_dict, config, tokenizer = _read(file, dtype)
        save_hf_directory(state_dict, config, tokenizer, target)

    return made_once(f"{file.stem}-{_identity(file, dtype)}", convert, cache_dir)


def _identity(file: Path, dtype: str) -> str:
    """Return a hash of the content: all of a small file, evenly spaced blocks of a large one."""
    size = file.stat().st_size
    digest = hashlib.sha256(f"{_LAYOUT}:{dtype}:{size}".encode())
    step = max(_BLOCK, (size - _BLOCK) // (_BLOCKS - 1))
    with file.open("rb") as stream:
        for start in range(0, max(size - _BLOCK, 0) + step, step):
            stream.seek(min(start, max(size - _BLOCK, 0)))
            digest.update(stream.read(_BLOCK))
    return digest.hexdigest()[:12]


def _name_special_tokens(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Take a tokenizer's special tokens from the file: transformers 5.17 takes those of Llama 2 for each Llama."""
    from gguf import GGUFReader

    header = GGUFReader(file)
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        field = header.get_field(f"tokenizer.ggml.{name}_token_id")
        if field is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))


def _read(file: Path, dtype: Precision) -> tuple[dict[str, torch.Tensor], PretrainedConfig, PreTrainedTokenizerBase]:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ConfigError(f"{file} is not a GGUF file: it does not begin with GGUF", fix="correct model.path")
    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    unpack = {}
    if hasattr(transformers, "GgufConfig"):  # before this class existed, weights were always dequantised
        unpack["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # the conversion draws progress bars on standard error and has no switch for them
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **where)
            model = AutoModelForCausalLM.from_pretrained(
                str(file.parent), dtype=getattr(torch, dtype), **unpack, **where
            )
        except (OSError, ValueError, KeyError, ImportError, NotImplementedError) as error:
            raise ConfigError(
                f"{file} cannot be converted by transformers: {error}",
                fix="use the model's own Hugging Face directory instead of the GGUF file",
            ) from error
    _name_special_tokens(tokenizer, file)
    config = model.config
    # the weights are plain numbers now, and the title in the GGUF header is no place to load from
    for entry in ("quantization_config", "_model_name_or_path"):
        vars(config).pop(entry, None)
    return model.state_dict(), config, tokenizer
