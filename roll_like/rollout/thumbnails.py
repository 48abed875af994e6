"""Small copies of the images that rollouts are about, for people: one file each, however often it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from roll_like.metrics.files import replacing
from roll_like.types import Group, Picture, Scored

#: Longest side. Pixels.
SIDE = 256
#: Pixels that one step's copies are made of, in about two seconds; images beyond are shown by their names.
MOST_PIXELS = 200_000_000


def thumbnail_name(picture: Picture) -> str:
    """Return the name of a picture's small copy, which follows from its bytes."""
    return f"{picture.digest.hex()}.webp"


def thumbnails_folder(run_dir: Path) -> Path:
    """Return where a run keeps them."""
    return run_dir / "rollouts" / "images"


def keep_thumbnails(run_dir: Path, groups: Sequence[Group[Scored]]) -> None:
    """Write small copies of the images that these groups were shown, as far as they are not there.

    Of many large images those of the first samples are copied.

    Raises:
        OSError: The disk is full or not writable.
    """
    pictures = {
        thumbnail_name(picture): picture
        for group in groups
        for sample in group.samples
        for picture in sample.trajectory.pictures
    }
    folder, left = thumbnails_folder(run_dir), MOST_PIXELS
    for name, picture in pictures.items():
        path = folder / name
        if path.exists():
            continue
        width, height = picture.size()
        if (left := left - width * height) < 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        small = picture.image()
        small.thumbnail((SIDE, SIDE))
        with replacing(path) as temporary:
            small.save(temporary, format="WEBP", quality=80)
