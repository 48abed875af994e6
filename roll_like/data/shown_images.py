"""Images that environments, tools and agents show: read in whatever form they have, and held once each.

A content is a text, or a list of parts, of which each is one of

    "a text"                        {"type": "text", "text": "a text"}
    an image                        {"type": "image", "image": an image}     {"type": "image_url", "image_url": …}

An image is a Pillow image, an array of bytes ([H, W, 3], also [H, W], [H, W, 1] or [H, W, 4]), the bytes of a PNG, a
JPEG or another format that Pillow reads, or a path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from roll_like.data.bad_rows import BadRow
from roll_like.data.images import encoded, is_decoded, is_image, part_value, read_picture, require_whole_images
from roll_like.errors import DataError, EnvError
from roll_like.types import Picture

_FORMS = "a Pillow image, an array of uint8 [H, W, 3], bytes of an encoded image, or a path"
#: By the hash of their bytes and by their names.
_HELD: WeakValueDictionary[tuple[bytes, str], Picture] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class _Shown:
    """What shows an image; paths are relative to where the process was started."""

    origin: str = "what was shown"
    folder: Path = Path()


def picture_of(value: Any) -> Picture:
    """Return an image that an environment or a tool shows; one without a file is called by the hash of its bytes.

    Raises:
        EnvError: It is in no form that is read, or damaged.
    """
    if isinstance(value, Picture):
        return value
    if isinstance(value, np.ndarray):
        value = _from_array(value)
    try:
        if is_decoded(value):  # whoever waits for the observation waits for zlib
            return _named(encoded(value, "", compress_level=1))
        named = isinstance(value, str | Path) and not str(value).startswith("data:")
        picture = read_picture(str(value) if isinstance(value, Path) else value, _Shown())
        shown = picture if named else _named(picture)
        if (shown.digest, shown.label) not in _HELD:  # agents send an image again with every request
            require_whole_images([picture])
    except BadRow as error:
        raise EnvError(error.message, fix="let the environment show an image that can be read") from error
    except DataError as error:
        raise EnvError(f"expected an image as {_FORMS}, found {type(value).__name__}") from error
    return held(shown)


def _named(picture: Picture) -> Picture:
    return replace(picture, label=picture.digest.hex()[:12])


def _from_array(array: np.ndarray[Any, Any]) -> Any:
    from PIL import Image

    if array.dtype != np.uint8 or not is_image_shape(array.shape):
        raise EnvError(
            f"an image is an array of {array.dtype} with the shape {list(array.shape)}",
            fix="give uint8 [H, W, 3]; transpose [3, H, W], and multiply values from 0 to 1 by 255",
        )
    return Image.fromarray(array[..., 0] if array.shape[2:] == (1,) else array)


def is_image_shape(shape: Sequence[int]) -> bool:
    """Return whether an array of this shape may be an image: grey, RGB, or RGB with alpha; height before width."""
    return 0 not in shape and (len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4)))


def shows_image(value: Any) -> bool:
    """Return whether a value that stands for an observation is an image, as far as its type says; a text is none."""
    return isinstance(value, Picture | np.ndarray | bytes | bytearray | memoryview | Path) or is_decoded(value)


def read_content(content: Any) -> Any:
    """Return a message's content as conversations take it: a text, or parts with images; another value as it is.

    Raises:
        EnvError: A part is none, or an image cannot be read.
    """
    if shows_image(content):
        content = [content]
    if not isinstance(content, list | tuple):
        return content
    parts = [_part(one) for one in content]
    if any(map(is_image, parts)):
        return parts
    return "".join(part["text"] for part in parts)


def _part(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    if shows_image(value):
        return {"type": "image", "image": picture_of(value)}
    if is_image(value):
        return {"type": "image", "image": picture_of(part_value(value))}
    if isinstance(value, Mapping) and isinstance(value.get("text"), str) and value.get("type", "text") == "text":
        return {"type": "text", "text": value["text"]}
    raise EnvError(
        f"a part of a content is {str(value)[:80]}",
        fix='give texts, images, {"type": "text", "text": …} or {"type": "image", "image": …}',
    )


def held(picture: Picture) -> Picture:
    """Return the image of these bytes that this process holds already, if it does."""
    return _HELD.setdefault((picture.digest, picture.label), picture)


def held_once(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return messages whose images are those that this process holds already, where it does."""
    return [
        {**one, "content": [{**part, "image": held(part["image"])} if is_image(part) else part for part in content]}
        if isinstance(content := one.get("content"), list)
        else one
        for one in messages
    ]
