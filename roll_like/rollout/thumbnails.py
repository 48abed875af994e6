"""Small copies of the images that rollouts are about, for people: one file each, however often it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from roll_like.metrics.files import replacing
from roll_like.types import Group, Picture, Scored

#: Longest side. Pixels.
SIDE = 256


def thumbnail_name(picture: Picture) -> str:
    """Return the name of a picture's small copy, which follows from its bytes."""
    return f"{picture.digest.hex()}.webp"


def thumbnails_folder(run_dir: Path) -> Path:
    """Return where a run keeps them."""
    return run_dir / "rollouts" / "images"


def keep_thumbnails(run_dir: Path, groups: Sequence[Group[Scored]]) -> None:
    """Write small copies of the images of these groups' prompts, as far as they are not there.

    Raises:
        OSError: The disk is full or not writable.
    """
    pictures = {thumbnail_name(image.picture): image.picture for group in groups for image in group.task.images}
    folder = thumbnails_folder(run_dir)
    for name, picture in pictures.items():
        path = folder / name
        if path.exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        small = picture.image()
        small.thumbnail((SIDE, SIDE))
        with replacing(path) as temporary:
            small.save(temporary, format="WEBP", quality=80)
