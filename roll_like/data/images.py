"""Images of a row: read wherever it has them, and put where its messages show them.

A message shows an image as a part of its content, in OpenAI's form or in Hugging Face's:

    {"type": "image_url", "image_url": {"url": "pictures/7.png"}}    {"type": "image", "image": "pictures/7.png"}
    {"type": "image"}                                                the next one of the column with images

Where no part does, each `<image>` in a text stands for one of the column; without these, all come first.

An image is a path (relative to the folder of the row's file), a URL, base64, bytes, or `{bytes, path}` as `datasets`
and Parquet have them, where the bytes may be base64.
"""

from __future__ import annotations

import base64
import binascii
import io
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, unquote_to_bytes

import numpy as np

from roll_like.content.pixels import as_seen, may_be_cut
from roll_like.data.bad_rows import BadRow, Problem
from roll_like.data.downloads import SCHEMES, download_all, downloaded
from roll_like.data.rows import Row
from roll_like.errors import DataError
from roll_like.types import IntArray, Picture, PlacedImage

MessageT = TypeVar("MessageT", bound=Mapping[str, Any])
#: What stands for an image in a text.
MARK = "<image>"
#: How base64 of PNG, JPEG, GIF and WebP begins, and from which length on such a text is no path.
_BASE64 = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
_LONGEST_PATH = 60
_READABLE = "a path, a URL, bytes, or {bytes, path}"


class ImageOrigin(Protocol):
    """Where an image came from: a row, or what shows it."""

    @property
    def origin(self) -> str:
        """Its name in messages."""

    @property
    def folder(self) -> Path:
        """What paths are relative to."""


class ImageTokens(Protocol):
    """How many tokens a model sees of an image."""

    @property
    def token(self) -> int:
        """The placeholder: the chat template writes one for each image, and the model has one for each feature."""

    def count(self, picture: Picture) -> int:
        """Return how many placeholders an image becomes.

        Raises:
            DataError: The model's processor refuses it.
        """


def download_images(rows: Iterable[Row]) -> None:
    """Download the images of rows that are on servers, several at a time; reading a row tells which failed."""
    download_all(url for row in rows for url in _urls(row))


def is_image(part: Any) -> bool:
    """Return whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> tuple[Picture, ...]:
    """Return the images of messages that `placed` returned, in order."""
    contents = (message.get("content") for message in messages)
    return tuple(part["image"] for parts in contents if isinstance(parts, list) for part in parts if is_image(part))


def as_text(content: Any) -> str:
    """Return a message's content for people and rewards: an image as `[image: pictures/7.png]`."""
    if not isinstance(content, list):
        return str(content or "")
    return "".join(f"[image: {part['image'].label}]" if is_image(part) else part["text"] for part in content)


def as_texts(messages: Sequence[MessageT]) -> tuple[MessageT | dict[str, Any], ...]:
    """Return messages for people and rewards; those without images are the same objects."""
    return tuple(
        {**one, "content": as_text(one["content"])} if isinstance(one.get("content"), list) else one for one in messages
    )


def placed(messages: Sequence[Mapping[str, Any]], row: Row) -> list[Mapping[str, Any]]:
    """Return messages with the row's images where they show them: as parts `{"type": "image", "image": Picture}`.

    Raises:
        DataError: There are more or fewer images than the messages show, or one is in no form that is read.
        BadRow: An image cannot be read.
    """
    shown = any(is_image(part) for message in messages for part in _parts(message))
    opening = bool(row.images) and not shown and messages[0]["role"] != "assistant"
    if not shown and not opening:
        return [dict(message) for message in messages]
    marks = sum(part["text"].count(MARK) for message in messages for part in _parts(message)) if opening else 0
    column = iter(row.images)
    read: list[Mapping[str, Any]] = []
    for message in messages:
        parts: list[dict[str, Any]] = []
        if opening and not marks and message["role"] == "user":  # before everything else
            parts += [{"type": "image"} for _ in row.images]
            opening = False
        for part in _parts(message):
            parts += _at_marks(part["text"]) if marks else [dict(part)]
        content = _read(parts, column, row) if any(map(is_image, parts)) else message["content"]
        read.append({**message, "content": content})
    if (left := len(list(column))) and messages[0]["role"] != "assistant":
        raise DataError(
            f"{row.origin}: the row has {len(row.images)} images, and its messages show {len(row.images) - left}",
            fix=f'put {{"type": "image"}} or {MARK} where each belongs',
        )
    return read


def expanded(
    token_ids: IntArray, pictures: Sequence[Picture], tokens: ImageTokens, origin: str
) -> tuple[IntArray, tuple[PlacedImage, ...]]:
    """Return tokens with as many placeholders for each image as the model sees of it, and where they are.

        text PLACEHOLDER text, an image of three tokens  →  text PLACEHOLDER PLACEHOLDER PLACEHOLDER text

    Raises:
        DataError: There is not one placeholder for each image.
        BadRow: The model's processor refuses an image.
    """
    at = np.flatnonzero(token_ids == tokens.token)
    if len(at) != len(pictures):
        raise DataError(
            f"{origin}: the chat template wrote {len(at)} placeholders for {len(pictures)} images",
            fix="take the placeholder's text out of the row; or set model.chat_template to one that writes images",
        )
    if not pictures:
        return token_ids, ()
    try:
        counts = [tokens.count(picture) for picture in pictures]
    except DataError as error:
        raise BadRow(Problem.IMAGE, error.message, error.fix) from error
    repeats = np.ones(len(token_ids), np.int64)
    repeats[at] = counts
    starts = at + np.cumsum([0, *counts[:-1]]) - np.arange(len(at))
    images = tuple(
        PlacedImage(picture=picture, start=int(start), length=count)
        for picture, start, count in zip(pictures, starts, counts, strict=True)
    )
    return np.repeat(token_ids, repeats).astype(np.int32), images


def shift_images(images: Sequence[PlacedImage], tokens: int) -> tuple[PlacedImage, ...]:
    """Return images that many tokens later."""
    return tuple(replace(image, start=image.start + tokens) for image in images)


def images_within(images: Iterable[PlacedImage], begin: int, end: int) -> tuple[PlacedImage, ...]:
    """Return the images among the tokens `[begin, end)`, where these begin a sequence of their own."""
    return shift_images([image for image in images if begin <= image.start < end], -begin)


def read_picture(value: Any, row: ImageOrigin) -> Picture:
    """Return an image of a row.

    Raises:
        DataError: It is in no form that is read; names file and line.
        BadRow: It is not there, is no image, or is damaged.
    """
    label = f"an image of {row.origin}"
    if is_decoded(value):
        return encoded(value, label)
    if isinstance(value, Mapping):
        data, path = value.get("bytes"), value.get("path")
        if data is None and isinstance(path, str):
            return read_picture(path, row)
        label, value = path if isinstance(path, str) else label, data
        if isinstance(value, str):
            value = _decoded(value)
    if isinstance(value, str):
        if value[:5].lower() == "data:":
            value = _data_url(value)
        elif value.startswith(_BASE64) and len(value) > _LONGEST_PATH:
            value = _decoded(value)
        else:
            label, value = _file(value, row)
    if isinstance(value, bytearray | memoryview):
        value = bytes(value)
    if not isinstance(value, bytes):
        raise DataError(
            f"{row.origin}: expected an image as {_READABLE}, found {type(value).__name__}", fix="correct the row"
        )
    picture = Picture(data=value, label=label)
    try:
        picture.size()
        if may_be_cut(value):
            picture.image()
    except OSError as error:
        raise BadRow(Problem.IMAGE, f"{label} is no image that Pillow can read: {error}", "replace it") from error
    return picture


def require_whole_images(pictures: Iterable[Picture]) -> None:
    """Decode images.

    Raises:
        BadRow: One is damaged.
    """
    for picture in pictures:
        try:
            picture.image()
        except OSError as error:
            raise BadRow(Problem.IMAGE, f"{picture.label} is damaged: {error}", "replace it") from error


def is_decoded(value: Any) -> bool:
    """Return whether a value is an image of Pillow's, as `datasets` decodes them; Pillow is not imported for it."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def encoded(image: Any, label: str, **options: Any) -> Picture:
    """Return an image of Pillow's as a PNG; `options` are Pillow's.

    Raises:
        BadRow: It is damaged.
    """
    buffer = io.BytesIO()
    try:
        as_seen(image).save(buffer, format="PNG", **options)
    except (OSError, SyntaxError, ValueError) as error:  # it is decoded here, if it was not
        raise BadRow(Problem.IMAGE, f"{label} is damaged: {error}", "replace it") from error
    return Picture(data=buffer.getvalue(), label=label)


def _urls(row: Row) -> list[str]:
    """Return where images of a row are on servers: those in its column of images, and in the parts of its messages."""
    found = list(row.images)
    for messages in row.fields.values():
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, Mapping):
                found += [part_value(part) for part in _parts(message) if is_image(part)]
    paths = (each.get("path") if isinstance(each, Mapping) and each.get("bytes") is None else each for each in found)
    return [path for path in paths if isinstance(path, str) and path.lower().startswith(SCHEMES)]


def part_value(part: Mapping[str, Any]) -> Any:
    """Return what a part of a content has as its image; None where that is the next of the column."""
    found = (part.get(name) for name in ("image_url", "image", "url", "path"))
    value = next((one for one in found if one is not None and not (isinstance(one, str) and not one)), None)
    return value.get("url") if part["type"] == "image_url" and isinstance(value, Mapping) else value


def _parts(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    content = message.get("content")
    if isinstance(content, list):
        yield from content
    elif isinstance(content, str) and content:
        yield {"type": "text", "text": content}


def _at_marks(text: str) -> list[dict[str, Any]]:
    """Return the parts of a text with marks: `a<image>b` is a text, an image, and a text."""
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def _read(parts: Sequence[Mapping[str, Any]], column: Iterator[Any], row: Row) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = []
    for part in parts:
        if not is_image(part):
            read.append({"type": "text", "text": part["text"]})
            continue
        value = part_value(part)
        if value is None:
            value = next(column, None)
        if value is None:
            raise DataError(
                f"{row.origin}: a message shows more images than the row has ({len(row.images)})",
                fix="add them to the column that the source's images_field names, or into the part: image_url",
            )
        read.append({"type": "image", "image": read_picture(value, row)})
    return read


def _decoded(text: str) -> bytes:
    """Return the bytes of base64, in either alphabet, with or without padding and line ends."""
    plain = "".join(text.split()).rstrip("=")
    try:
        return base64.b64decode(
            plain + "=" * (-len(plain) % 4), "-_" if {"-", "_"} & set(plain) else None, validate=True
        )
    except (binascii.Error, ValueError) as error:
        raise BadRow(Problem.IMAGE, f"an image is not base64: {error}", "correct the row") from error


def _data_url(url: str) -> bytes:
    """Return the bytes of a `data:` URL."""
    head, _, data = url.partition(",")
    return _decoded(unquote(data)) if head.lower().endswith(";base64") else unquote_to_bytes(data)


def _file(spelling: str, row: ImageOrigin) -> tuple[str, bytes]:
    """Return an image's path or URL, and its bytes."""
    if spelling.lower().startswith(SCHEMES):
        try:
            return spelling, downloaded(spelling).read_bytes()
        except DataError as error:
            raise BadRow(Problem.IMAGE, error.message, error.fix) from error
    path = Path(unquote(spelling.removeprefix("file://")) if spelling.startswith("file://") else spelling)
    try:
        path = row.folder / path.expanduser()
        return str(path), path.read_bytes()
    except (OSError, RuntimeError, ValueError) as error:  # no such file, no such home, a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadRow(
            Problem.IMAGE,
            f"the image {str(path)[:200]} cannot be read: {reason}",
            f"correct the row: paths are relative to {row.folder}",
        ) from error
