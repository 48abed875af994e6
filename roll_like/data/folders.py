"""Which files of a folder hold the rows of a split.

Their names say so, as those of datasets on the hub do:

    train.jsonl  test.jsonl          gsm8k_train.csv  gsm8k_test.csv        train/a.jsonl  test/a.jsonl
    data/train-00000-of-00002.parquet                 main/train-00000-of-00001.parquet  (a subset before it)

A README.md with `configs:`, as on the hub, says it in their place, and so does what `datasets` writes with
`save_to_disk`. Where no name says anything, all files are of one split.
"""

from __future__ import annotations

import filecmp
import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from roll_like.content.unicode import whole_text
from roll_like.data.files import READABLE, ending
from roll_like.errors import DataError

#: Words for a split, in names of files and folders: those that `datasets` knows.
_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_BETWEEN_WORDS = re.compile(r"[-._ 0-9]+")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
_NUMBER = re.compile(r"[-._ ]?\d+$")
#: Files about a dataset.
_ABOUT = ("config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")
_SHOWN = 8  # names in a message
#: The file of a folder that may say which of its files are of which subset and split.
CARD = "README.md"


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of rows, or a folder that `Dataset.save_to_disk` wrote.

    Attributes:
        path: Where it is.
        name: What it is called, or the folder that says its split, without numbers.
        words: The words for splits in that; of several splits if it is unclear which.
        subset: The folder of the subset that it is of, in layouts that have some; empty in others.
    """

    path: Path
    name: str = ""
    words: frozenset[str] = frozenset()
    subset: str = ""

    @property
    def splits(self) -> frozenset[str]:
        """The splits that its words are for; empty where no word says one."""
        return frozenset(_WORDS.get(word, word) for word in self.words)


def is_saved(folder: Path) -> bool:
    """Return whether `Dataset.save_to_disk` wrote a folder."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def says_other(name: str, split: str) -> bool:
    """Return whether a file's name says that it is of another split.

    >>> says_other("test.jsonl", "validation"), says_other("val.jsonl", "validation"), says_other("a.jsonl", "test")
    (True, False, False)
    """
    said, asked = _said(_stem(Path(name))), _WORDS.get(split.lower())
    return asked is not None and bool(said) and asked not in {_WORDS[word] for word in said}


def find_parts(folder: Path, split: str, subset: str | None, key: str) -> list[Path]:
    """Return the files of a folder that hold a split, in the order of their names.

    Args:
        split: The split's name; other words for it are found too (`val` for `validation`).
        subset: Which subset, where there are several.
        key: Place of the source in the configuration, for messages.

    Raises:
        DataError: There are none, or it is not clear which are.
    """
    parts = _parts(folder, subset, key)
    if not parts:
        names = sorted(path.name for path in walk(folder))
        found = f"; it has {', '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''}" if names else ""
        raise DataError(f"the directory {folder} holds no {READABLE} file{found}", fix=f"correct {key}.path")
    chosen = _of_split(parts, split, folder, key)
    odd = next((name for part in chosen if whole_text(name := str(part.path)) != name), None)
    if odd is not None:
        raise DataError(f"the name {odd!r} is not UTF-8", fix="rename the file")
    _refuse_several_subsets(chosen, folder, key)
    _refuse_copies(chosen, key)
    _refuse_missing(chosen, key)
    return [part.path for part in sorted(chosen, key=lambda part: part.path)]


def _parts(folder: Path, subset: str | None, key: str) -> list[DataFile]:
    """Return everything in a folder that holds rows."""
    if is_saved(folder):
        return [DataFile(folder)]
    if (folder / "dataset_dict.json").is_file():
        names = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        return [DataFile(folder / name, name, frozenset((name,))) for name in names]
    configs = _configs(folder, key)
    if configs:
        config = _config(configs, subset, folder, key)
        if config.get("data_files"):
            return _stated(config, folder)
        folder = folder / str(config.get("data_dir") or "")
    elif subset is not None:
        if not (folder / subset).is_dir():
            raise DataError(
                f"the directory {folder} has no subset {subset!r}, which would be a directory in it",
                fix=f"correct {key}.subset, or remove it",
            )
        folder = folder / subset
    return _named(folder)


def walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, but those that are hidden, or copies that editors keep. Links are followed."""

    def refuse(error: OSError) -> None:
        raise error

    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        real = os.path.realpath(place)
        if real in seen:  # a link to a folder above it
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        yield from (Path(place, name) for name in files if not name.startswith((".", "_", "~", "#")))


def _named(folder: Path) -> list[DataFile]:
    """Return what holds rows below a folder, with the splits that names say."""
    saved = sorted({path.parent for path in walk(folder) if path.name == "state.json" and is_saved(path.parent)})
    files = [path for path in walk(folder) if path.name not in _ABOUT and ending(path.name)]
    files = [path for path in files if not any(place in path.parents for place in saved)]
    # beside other files, what ends in .json and names no split is about the dataset
    files = [path for path in files if not path.name.lower().endswith(".json") or _said(_stem(path))] or files
    shards = {path: found[1] for path in files if (found := _SHARD.fullmatch(_stem(path)))}
    named = len(set(shards.values())) > 1 or any(map(_said, shards.values()))
    if named:  # the layout of the hub, where other files are about the dataset
        return [_shard(path, name, path.relative_to(folder).parts[:-1]) for path, name in shards.items()]
    parts = {path: path.relative_to(folder).parts[:-1] for path in [*files, *saved]}
    # the directories beside one that is called as a split are splits too
    levels = {level for above in parts.values() if (level := _level(above))}
    return [_part(path, above, levels) for path, above in parts.items()]


def _level(above: tuple[str, ...]) -> int:
    """Return which of the directories above a file is the last whose name says a split, from 1; 0 where none does."""
    return next((level for level in range(len(above), 0, -1) if _said(above[level - 1])), 0)


def _shard(path: Path, name: str, above: tuple[str, ...]) -> DataFile:
    return DataFile(path, name, frozenset((name,)), "" if above == ("data",) else "/".join(above))


def _part(path: Path, above: tuple[str, ...], levels: set[int]) -> DataFile:
    name = _NUMBER.sub("", _stem(path))
    words, level = _said(name), _level(above)
    if name.lower() in _WORDS or not (level or (levels and not words)):
        return DataFile(path, name, words)
    if not level:
        level = next((each for each in sorted(levels) if each <= len(above)), 0)
        return (
            DataFile(path, above[level - 1], frozenset((above[level - 1].lower(),))) if level else DataFile(path, name)
        )
    # as the hub exports datasets: SUBSET/train/0000.parquet
    exported = path.suffix.lower() == ".parquet" and _stem(path).isdigit()
    subset = "/".join(above[: level - 1]) if exported else ""
    return DataFile(path, above[level - 1], words | _said(above[level - 1]), subset)


def _stem(path: Path) -> str:
    found = ending(path.name)
    return found.stem if found else path.name


def _said(name: str) -> frozenset[str]:
    """Return the words for splits in a name."""
    return frozenset(word for word in _BETWEEN_WORDS.split(name.lower()) if word in _WORDS)


def _of_split(parts: Sequence[DataFile], split: str, folder: Path, key: str) -> list[DataFile]:
    """Return the parts that hold a split.

    Raises:
        DataError: None does, or it is not clear which do.
    """
    asked = split.lower()
    unnamed = [part for part in parts if not part.words]
    if len(unnamed) == len(parts) and (
        asked == "train" or (asked in _WORDS and _WORDS[asked] == _WORDS.get(folder.name.lower()))
    ):
        return unnamed
    chosen = [part for part in parts if split == part.name or asked in part.words]
    if not chosen:
        chosen = [part for part in parts if _WORDS.get(asked, asked) in part.splits]
        words = sorted({word for part in chosen for word in part.words})
        if len(words) > 1:
            raise DataError(
                f"the directory {folder} has the splits {' and '.join(words)}, and {key}.split: {split} may be either",
                fix=f"set {key}.split to one of them",
            )
    if not chosen:
        found = ", ".join(sorted({part.name if part.name else "" for part in parts if part.words})) or "none"
        remedy = f"remove {key}.split" if found == "none" else f"set {key}.split to one of them"
        raise DataError(
            f"the directory {folder} has no split {split!r}; the splits that names of its files say: {found}",
            fix=f"{remedy}, or {key}.path to a file",
        )
    by_name = asked not in _WORDS and all(part.name == split for part in chosen)
    unclear = [] if by_name else [part for part in chosen if len(part.splits) > 1] or unnamed
    if unclear:
        names = ", ".join(str(part.path.relative_to(folder)) for part in unclear[:_SHOWN])
        raise DataError(
            f"the directory {folder} has files of the split {split!r}, and others whose split is not clear from their "
            f"names: {names}",
            fix=f"set {key}.path to a file, or move files so that each directory holds one split",
        )
    return chosen


def _refuse_several_subsets(parts: Sequence[DataFile], folder: Path, key: str) -> None:
    subsets = sorted({part.subset for part in parts})
    if len(subsets) > 1:
        found = ", ".join(name or "(the directory itself)" for name in subsets)
        raise DataError(
            f"the directory {folder} holds several subsets: {found}",
            fix=f"set {key}.subset to one of them, or {key}.path to its directory",
        )


def _refuse_copies(parts: Sequence[DataFile], key: str) -> None:
    """Raise a DataError where two files hold the same rows, or seem to: `train.jsonl` and `train.jsonl.gz`."""
    names: dict[Path, Path] = {}
    sizes: dict[int, list[Path]] = {}
    for path in (part.path for part in parts):
        other = names.setdefault(path.with_name(_stem(path)), path)
        why = "have one name, as if they held the same rows"
        if other == path and path.is_file() and (size := path.stat().st_size):
            equals = sizes.setdefault(size, [])
            other = next((each for each in equals if filecmp.cmp(each, path, shallow=False)), path)
            why = "hold the same rows"
            equals.append(path)
        if other != path:
            raise DataError(f"{other} and {path} {why}", fix=f"set {key}.path to one of them, or remove or rename one")


def _refuse_missing(parts: Sequence[DataFile], key: str) -> None:
    """Raise a DataError where a file is not there of those that the names of others count: `-00000-of-00002`."""
    found: dict[tuple[Path, str, int], set[int]] = {}
    for path in (part.path for part in parts):
        if shard := _SHARD.fullmatch(_stem(path)):
            found.setdefault((path.parent, shard[1], int(shard[3])), set()).add(int(shard[2]))
    for (folder, name, count), numbers in found.items():
        missing = next((number for number in range(count) if number not in numbers), None)
        if missing is not None:
            raise DataError(
                f"{folder / name}-…-of-{count:05}: {len(numbers)} of {count} files are there, and {missing:05} is not",
                fix=f"download it; for some of the files alone, set {key}.path to one, or rename them",
            )


def _configs(folder: Path, key: str) -> list[dict[str, Any]]:
    """Return what a folder's README.md says of its subsets, as on the hub; nothing where it says nothing."""
    file = folder / CARD
    if not file.is_file():
        return []
    found = re.match(r"\ufeff?---\s*\n(.*?)\n---\s*(\n|$)", file.read_text("utf-8", errors="replace"), re.DOTALL)
    try:
        head = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError as error:
        raise DataError(
            f"{file} begins with a block that is not YAML: {error}", fix=f"correct it, or {key}.path"
        ) from error
    configs = head.get("configs") if isinstance(head, dict) else None
    if configs is None:
        return []
    if not isinstance(configs, list) or not all(isinstance(each, dict) and "config_name" in each for each in configs):
        raise DataError(f"{file}: expected a list of subsets in `configs`, each with a config_name", fix="correct it")
    return configs


def _config(configs: list[dict[str, Any]], subset: str | None, folder: Path, key: str) -> dict[str, Any]:
    names = [str(config["config_name"]) for config in configs]
    if subset is None:
        if len(configs) == 1:
            return configs[0]
        default = [each for each in configs if each.get("default") or each["config_name"] == "default"]
        if default:
            return default[0]
    elif subset in names:
        return configs[names.index(subset)]
    found = f"has no subset {subset!r}; it has" if subset is not None else "has several subsets:"
    raise DataError(
        f"the dataset in {folder} {found} {', '.join(names)}, as its README.md says",
        fix=f"set {key}.subset to one of them",
    )


def _stated(config: dict[str, Any], folder: Path) -> list[DataFile]:
    """Return the files that a README.md names, with their splits."""
    data_files = config["data_files"]
    if not isinstance(data_files, list) or not all(isinstance(each, dict) for each in data_files):
        data_files = [{"split": "train", "path": data_files}]
    parts = []
    for entry in data_files:
        split, patterns = str(entry.get("split", "train")), entry.get("path")
        for pattern in [patterns] if isinstance(patterns, str) else patterns or []:
            root = folder / str(config.get("data_dir") or "")
            paths = [root / name for name in sorted(glob.glob(str(pattern), root_dir=root, recursive=True))]
            parts += [DataFile(path, split, frozenset((split,))) for path in paths if path.is_file()]
    return parts
