"""Files that are not there: Git LFS puts a few lines of text in their place until it downloads them."""

from __future__ import annotations

from pathlib import Path

_BEGINS = b"version https://git-lfs.github.com/"
#: What to do about one.
PULL = "download it: `git lfs pull` in its repository, or `hf download`"


def is_pointer(path: Path) -> bool:
    """Return whether a file only says which one Git LFS would put there.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return file.read(len(_BEGINS)) == _BEGINS
