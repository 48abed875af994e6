"""Pixels of encoded images, as a model sees them when it is served.

vLLM's server turns an image upright as its EXIF or XMP data say, lays what is transparent over white, and leaves all
else to Pillow's conversion to RGB. Trainers, engines, rewards and pages here are given the same pixels.
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

#: Formats that Pillow would hand to other programs, or can name only.
_REFUSED = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "PDF", "WMF"}
#: What Pillow and the formats' libraries raise about bytes that are no image, or a damaged one.
_ABOUT_BYTES = (ArithmeticError, EOFError, LookupError, OSError, SyntaxError, TypeError, ValueError, struct.error)
#: Where a PNG may say that it is turned. Without one of these, its end need not be read.
_PNG_TURNED = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
_TRANSPARENT = ("RGBA", "LA", "PA")


def size(data: bytes) -> tuple[int, int]:
    """Return the width and height of an image as `pixels` returns it; only the beginning of most images is read.

    Raises:
        OSError: It is no image, has no pixels, or more than a server decodes.
    """
    with _opened(data) as image:
        width, height = image.size
        return (height, width) if _orientation(image, data) in (5, 6, 7, 8) else (width, height)


def pixels(data: bytes) -> Image:
    """Return an image, RGB; the first of several frames.

    Raises:
        OSError: It is no image, damaged, or has more pixels than a server decodes.
    """
    with _opened(data) as image:
        image.load()
        return as_seen(image, _orientation(image, data))


def as_seen(image: Image, orientation: int | None = None) -> Image:
    """Return an image upright, on white, and RGB.

    Args:
        image: Decoded.
        orientation: How it is turned, as EXIF counts it; None where the image itself says so.
    """
    from PIL.Image import Transpose, new

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    turn = turns.get(_orientation(image) if orientation is None else orientation)
    upright = image if turn is None else image.transpose(turn)
    if upright.mode != "RGB" and (upright.mode in _TRANSPARENT or "transparency" in upright.info):
        layer = upright.convert("RGBA")
        white = new("RGB", layer.size, "white")
        white.paste(layer, mask=layer.getchannel("A"))
        return white
    return upright.convert("RGB")


def may_be_cut(data: bytes) -> bool:
    """Return whether an image that `size` takes may have lost its end, which only decoding it tells.

    >>> may_be_cut(bytes.fromhex("ffd8 ffda")), may_be_cut(bytes.fromhex("ffd8 ffda ffd9"))
    (True, False)
    """
    if data.startswith(b"\xff\xd8"):  # a JPEG ends with a marker, which follows that of its pixels
        return data.rfind(b"\xff\xd9") <= data.rfind(b"\xff\xda")
    if data.startswith(b"\x89PNG"):
        return data.rfind(b"IEND") <= data.rfind(b"IDAT")
    if data.startswith(b"GIF8"):
        return not data.rstrip(b"\0").endswith(b";")
    return not data.startswith(b"RIFF")  # a WebP's beginning tells


@contextmanager
def _opened(data: bytes) -> Iterator[Image]:
    """Open an image; whatever goes wrong with it is an OSError."""
    from PIL import Image, UnidentifiedImageError

    Image.init()
    _ignore(Image.DecompressionBombWarning)  # the error at twice as many pixels is the limit here, as it is vLLM's
    _ignore(UserWarning)  # about EXIF data that cannot be read
    try:
        with Image.open(io.BytesIO(data), formats=[each for each in Image.ID if each not in _REFUSED]) as image:
            if 0 in image.size:
                raise OSError("it has no pixels")
            yield image
    except UnidentifiedImageError as error:
        raise OSError("its bytes are of no format of images that is read") from error
    except (*_ABOUT_BYTES, Image.DecompressionBombError) as error:
        raise OSError(str(error) or type(error).__name__) from error


def _ignore(category: type[Warning]) -> None:
    """Ignore Pillow's warnings of a category, in the whole process: to do so for a while is not safe with threads."""
    if not any(each[0] == "ignore" and each[2] is category and each[3] is not None for each in warnings.filters):
        warnings.filterwarnings("ignore", category=category, module=r"PIL\.")


def _orientation(image: Image, data: bytes | None = None) -> int:
    """Return how an image is turned, as EXIF counts it; 1 where it is upright or does not say."""
    from PIL.ExifTags import Base

    if image.format == "TIFF":  # Pillow turns these as it decodes them
        return 1
    if image.format == "PNG" and data is not None and not any(mark in data for mark in _PNG_TURNED):
        return 1
    try:
        said = image.getexif().get(Base.Orientation, 1)
    except _ABOUT_BYTES:  # where EXIF data cannot be read, a server shows the image as it is
        return 1
    return said if isinstance(said, int) else 1
