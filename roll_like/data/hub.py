"""Datasets of the Hugging Face hub, and what a user can do where one cannot be had."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll_like.config.data import SourceConfig
from roll_like.errors import DataError, RollLikeError

#: What `datasets` says of a subset, a split or a file that is not there, each with what would be right.
_NO_SUBSET = re.compile(r"Config name is missing\.\s*Please pick one among the available configs: (?P<known>\[.*?\])")
_OTHER_SUBSET = re.compile(
    r"(?:BuilderConfig '.*?' not found\. Available|Available configs in the cache): (?P<known>\[.*?\])"
)
_OTHER_SPLIT = re.compile(r"(?:Unknown|Bad) split:? .*?(?:one of|Available splits:) (?P<known>\[.*?\])", re.DOTALL)

_COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_rows(source: SourceConfig, key: str) -> tuple[Any, str]:
    """Return the rows of a dataset on the hub, and what they are called.

    Args:
        source: The dataset; says which subset, split and revision, and whether its files are read as rows are needed.
        key: Its place in the configuration, for messages.

    Raises:
        DataError: It cannot be had: the message says why, and which key to change.
    """
    import datasets

    named = f"{source.path}/{source.subset}" if source.subset else source.path
    with _no_progress_bars(), explained(source, key):
        builder = datasets.load_dataset_builder(source.path, source.subset, revision=source.revision)
        _refuse_another(builder, source, key)
        if source.streaming:
            return builder.as_streaming_dataset(split=source.split), f"{named}[{source.split}]"
        builder.download_and_prepare()
        return builder.as_dataset(split=source.split), f"{named}[{source.split}]"


def is_cached(source: SourceConfig) -> bool:
    """Return whether a hub dataset was read on this machine before, so that it can be read without network."""
    import datasets

    name = source.path.replace("/", "___")
    return (Path(datasets.config.HF_DATASETS_CACHE) / name / (source.subset or "")).is_dir()


def _refuse_another(builder: Any, source: SourceConfig, key: str) -> None:
    """Raise where what was found is not what was asked for: without the hub, `datasets` takes what it has kept.

    Raises:
        DataError: It is another subset or revision.
    """
    import datasets

    offline = datasets.config.HF_HUB_OFFLINE
    if offline and source.subset is None and builder.config.name != "default":
        raise DataError(
            f"{source.path}: this process is offline, and the Hugging Face cache has the subset "
            f"{builder.config.name!r}; whether that is meant is not known",
            fix=f"set {key}.subset: {builder.config.name}",
        )
    if source.revision is None:
        return
    wanted = source.revision if _COMMIT.fullmatch(source.revision) else _commit_of(source)
    if wanted != builder.hash and (offline or wanted is not None):
        raise DataError(
            f"{source.path}: the hub was not asked, and the Hugging Face cache has the revision {builder.hash}, not "
            f"{source.revision!r}",
            fix=f"read it once where there is network, or correct {key}.revision",
        )


def _commit_of(source: SourceConfig) -> str | None:
    """Return the commit of a branch or tag when the hub was asked last; None where it never was."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=source.path, repo_type="dataset")
    file = folder / "refs" / str(source.revision)
    return file.read_text().strip() if file.is_file() else None


@contextlib.contextmanager
def explained(source: SourceConfig, key: str) -> Iterator[None]:
    """Raise what `datasets` raises of a dataset as a DataError that names the key to change."""
    import datasets
    import pyarrow
    from huggingface_hub.errors import HfHubHTTPError

    # of httpx or httpx2, whichever the hub's client is built on: a connection lost in mid-download
    transport_error: Any = HfHubHTTPError.__bases__[0]
    try:
        yield
    except RollLikeError:
        raise
    except (
        OSError,
        ValueError,
        RuntimeError,
        KeyError,
        transport_error,
        pyarrow.ArrowException,
        datasets.exceptions.DatasetsError,
    ) as error:
        found, fix = _meaning(source, key, error)
        raise DataError(f"{source.path}: {found}", fix=fix) from error


def _meaning(source: SourceConfig, key: str, error: Exception) -> tuple[str, str]:
    """Return what is wrong, and the remedy."""
    text = _whole_text(error)
    for pattern, what, field in (
        (_NO_SUBSET, "the dataset has several subsets:", "subset"),
        (_OTHER_SUBSET, f"there is no subset {source.subset!r}; it has", "subset"),
        (_OTHER_SPLIT, f"there is no split {source.split!r}; it has", "split"),
    ):
        if match := pattern.search(text):
            return f"{what} {match['known']}", f"set {key}.{field} to one of them"
    for signs, what, fix in (
        (
            ("scripts are no longer supported",),
            "the dataset is a Python script, which `datasets` does not run any more",
            f"set {key}.revision: refs/convert/parquet, where the hub keeps its rows as Parquet; "
            "or download the files and name their directory",
        ),
        (
            ("gated dataset", "401 Client Error", "403 Client Error"),
            f"the hub gives the dataset only to those who may read it ({_first_line(text)})",
            f"accept its terms at https://huggingface.co/datasets/{source.path} and log in with `hf auth login`, or "
            "set HF_TOKEN",
        ),
        (
            ("Revision '", "Invalid rev id"),
            f"there is no revision {source.revision!r} of the dataset on the hub",
            f"correct {key}.revision",
        ),
        (
            ("OfflineMode", "offline", "Couldn't reach", "ConnectError", "ConnectionError", "Timeout"),
            "it is neither a local file or directory, nor a dataset in the Hugging Face cache, and the hub cannot be "
            f"reached ({_first_line(text)})",
            f"correct {key}.path; or download the dataset where there is network "
            f"(`hf download {source.path} --repo-type dataset --local-dir DIR`) and set {key}.path to DIR",
        ),
        (
            ("doesn't exist on the Hub or cannot be accessed", "Couldn't find"),
            "there is neither a local file or directory of this name, nor a dataset on the hub that you may read",
            f"correct {key}.path; a private dataset needs `hf auth login` or HF_TOKEN",
        ),
    ):
        if any(sign in text for sign in signs):
            return what, fix
    return f"the dataset cannot be read: {_first_line(text)}", f"correct {key}.path, {key}.subset or {key}.split"


def _whole_text(error: BaseException) -> str:
    """Return what an error and those behind it say, the outermost first."""
    texts: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(texts) < 8:
        texts.append(f"{type(seen).__name__}: {seen}")
        seen = seen.__cause__ or seen.__context__
    return "\n".join(texts)


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0]
    return line if len(line) <= 300 else line[:299] + "…"


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    import datasets

    was_off = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not was_off:
            datasets.enable_progress_bars()
