"""Images as a model sees them when it is served: compared with vLLM's own code, which its server calls."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from loose_modules import load_module
from PIL import Image, PngImagePlugin
from tiny_vision import make_vision_model, renderer

from roll_like.check import data as check_data
from roll_like.check.data import damaged_images
from roll_like.config.data import ConversationData, DataSource
from roll_like.data.conversations import load_conversations
from roll_like.data.images import read_picture
from roll_like.data.rows import Row
from roll_like.data.tasks import load_tasks
from roll_like.errors import DataError
from roll_like.types import Picture

RED, GREEN, WHITE = (255, 0, 0), (0, 255, 0), (255, 255, 255)


@pytest.fixture(scope="module")
def served() -> ModuleType:
    """vLLM's functions that make pixels of images; the file alone, as vLLM itself takes long to import."""
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    return load_module(Path(package.origin).parent / "multimodal" / "image.py")


def as_served(data: bytes, served: ModuleType) -> Image.Image:
    """Return what vLLM's server makes of an image, as its `ImageMediaIO.load_bytes` does."""
    with warnings.catch_warnings(action="ignore"):
        image = served.normalize_image(served.open_image(io.BytesIO(data)))
        image.load()
        found: Image.Image = served.convert_image_mode(image, "RGB")
    return found


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def noise(mode: str = "RGB", size: tuple[int, int] = (31, 17)) -> Image.Image:
    generator = np.random.default_rng(0)
    if mode == "I;16":
        return Image.fromarray(generator.integers(0, 2**16, size[::-1], dtype=np.uint16))
    return Image.fromarray(generator.integers(0, 256, (*size[::-1], 4), dtype=np.uint8), "RGBA").convert(mode)


def turned(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(noise(), kind, exif=exif)


def turned_by_xmp() -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", '<x:xmpmeta><a tiff:Orientation="6"/></x:xmpmeta>')
    return encoded(noise(), "PNG", pnginfo=info)


def frames() -> list[Image.Image]:
    return [noise(), noise().transpose(Image.Transpose.ROTATE_180)]


IMAGES: dict[str, Callable[[], bytes]] = {
    **{
        f"{kind} turned {number}": lambda kind=kind, number=number: turned(kind, number)  # type: ignore[misc]
        for kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")
        for number in range(10)
    },
    "turned by XMP": turned_by_xmp,
    "EXIF is damaged": lambda: encoded(noise(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\0"),
    "RGBA": lambda: encoded(noise("RGBA"), "PNG"),
    "RGBA of WebP": lambda: encoded(noise("RGBA"), "WEBP", lossless=True),
    "grey and alpha": lambda: encoded(noise("LA"), "PNG"),
    "palette": lambda: encoded(noise("P"), "PNG"),
    "palette, one colour transparent": lambda: encoded(noise("P"), "PNG", transparency=7),
    "palette, colours half transparent": lambda: encoded(noise("P"), "PNG", transparency=bytes(range(256))),
    "RGB, one colour transparent": lambda: encoded(noise(), "PNG", transparency=(1, 2, 3)),
    "grey, one transparent": lambda: encoded(noise("L"), "PNG", transparency=100),
    "grey of 16 bits": lambda: encoded(noise("I;16"), "PNG"),
    "grey of 16 bits, TIFF": lambda: encoded(noise("I;16"), "TIFF"),
    "grey of 32 bits": lambda: encoded(noise("L").convert("F"), "TIFF"),
    "grey": lambda: encoded(noise("L"), "JPEG"),
    "1 bit": lambda: encoded(noise("1"), "PNG"),
    "CMYK": lambda: encoded(noise("CMYK"), "JPEG"),
    "CMYK of TIFF": lambda: encoded(noise("CMYK"), "TIFF"),
    "YCbCr": lambda: encoded(noise("YCbCr"), "TIFF"),
    "Lab": lambda: encoded(noise("RGB").convert("RGB"), "TIFF"),
    "frames of GIF": lambda: encoded(frames()[0], "GIF", save_all=True, append_images=frames()[1:], transparency=0),
    "frames of WebP": lambda: encoded(frames()[0], "WEBP", save_all=True, append_images=frames()[1:], lossless=True),
    "frames of PNG": lambda: encoded(frames()[0], "PNG", save_all=True, append_images=frames()[1:]),
    "several JPEGs": lambda: encoded(frames()[0], "MPO", save_all=True, append_images=frames()[1:]),
    "BMP": lambda: encoded(noise(), "BMP"),
    "icon": lambda: encoded(noise("RGBA", (32, 32)), "ICO", sizes=[(32, 32)]),
    "JPEG 2000": lambda: encoded(noise("RGBA"), "JPEG2000"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_pixels_are_those_that_vllm_serves(name: str, served: ModuleType) -> None:
    data = IMAGES[name]()
    picture, expected = Picture(data=data, label=name), as_served(data, served)
    found = picture.image()
    assert found.mode == "RGB"
    assert found.size == picture.size() == expected.size
    assert found.tobytes() == expected.tobytes()


def test_pixels_by_hand() -> None:
    wide = Image.new("RGB", (3, 2), RED)
    wide.putpixel((0, 0), GREEN)  # left above: right above when it is turned by a quarter, clockwise
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = Picture(data=encoded(wide, "PNG", exif=exif), label="a").image()
    assert upright.size == (2, 3)
    assert (upright.getpixel((1, 0)), upright.getpixel((0, 0))) == (GREEN, RED)
    glass = Picture(data=encoded(Image.new("RGBA", (2, 2), (0, 0, 0, 0)), "PNG"), label="b").image()
    assert glass.getpixel((0, 0)) == WHITE
    bright = Image.fromarray(np.full((2, 2), 255, np.uint16))
    assert Picture(data=encoded(bright, "PNG"), label="c").image().getpixel((0, 0)) == WHITE


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, pixels: bytes = b"") -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


JPEG = encoded(noise(size=(200, 100)), "JPEG")
BAD: dict[str, tuple[Any, str]] = {
    "no image": (
        {"bytes": base64.b64encode(b"hello").decode()},
        "is no image that Pillow can read: its bytes are of no",
    ),
    "nothing": ({"bytes": ""}, "is no image that Pillow can read"),
    "a bomb": ({"bytes": base64.b64encode(png(50_000, 50_000)).decode()}, "exceeds limit"),
    "no pixels": ({"bytes": base64.b64encode(png(0, 10)).decode()}, "is no image that Pillow can read"),
    "a cut JPEG": ({"bytes": base64.b64encode(JPEG[:-30]).decode()}, "image file is truncated"),
    "a cut PNG": ({"bytes": base64.b64encode(encoded(noise(), "PNG")[:-60]).decode()}, "truncated"),
    "a cut WebP": ({"bytes": base64.b64encode(encoded(noise(), "WEBP")[:-9]).decode()}, "could not create decoder"),
    "a cut BMP": ({"bytes": base64.b64encode(encoded(noise(), "BMP")[:-9]).decode()}, "truncated"),
    "PostScript": ({"bytes": base64.b64encode(encoded(noise(), "EPS")).decode()}, "no format of images that is read"),
    "too long and thin": ({"bytes": base64.b64encode(encoded(noise(size=(3000, 2)), "PNG")).decode()}, "aspect ratio"),
    "no base64": ({"bytes": "%%%"}, "an image is not base64"),
    "no file": ("nowhere.png", "cannot be read: No such file"),
    "a folder": (".", "cannot be read: Is a directory"),
    "no name of a file": ("a\0b.png", "cannot be read: embedded null"),
    "a long name": ("x" * 5000, "cannot be read: File name too long"),
    "no home": ("~nobody-has-this-name/a.png", "cannot be read"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("vision"))


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_named_with_its_row_or_left_out(name: str, folder: Path, tmp_path: Path) -> None:
    value, message = BAD[name]
    good = {"prompt": "What?", "completion": "a", "images": [{"bytes": base64.b64encode(JPEG).decode()}]}
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in (good, {**good, "images": [value]}, good)))
    with pytest.raises(DataError) as caught:
        load_tasks([DataSource(path=str(rows))], renderer(folder), 2000)
    assert caught.value.message.startswith(f"{rows}:2: ")
    assert message in caught.value.message
    data = ConversationData(sources=[{"path": str(rows)}], max_tokens=4000, bad_rows="skip")
    (report,) = load_conversations(data, renderer(folder)).report
    assert (report.rows, report.kept) == (3, 2)
    assert [(left.problem.name, left.count) for left in report.left_out] == [("IMAGE", 1)]
    assert f"{rows}:2" in report.left_out[0].first


def test_a_large_image_is_no_bomb() -> None:
    large = encoded(Image.new("1", (10_000, 9_000)), "PNG")  # above what Pillow warns about
    assert Picture(data=large, label="a").size() == (10_000, 9_000)


SPELLINGS: dict[str, Any] = {
    "base64 alone": base64.b64encode(JPEG).decode(),
    "base64 in lines": {"bytes": base64.encodebytes(JPEG).decode(), "path": None},
    "base64 for URLs": {"bytes": base64.urlsafe_b64encode(JPEG).decode().rstrip("=")},
    "data URL": "DATA:image/jpeg;base64," + base64.b64encode(JPEG).decode(),
    "escaped data URL": "data:image/jpeg;base64," + base64.b64encode(JPEG).decode().replace("+", "%2B"),
    "bytes": JPEG,
    "array of bytes": bytearray(JPEG),
    "path": "a picture.jpg",
    "file URL": "file:{folder}/a%20picture.jpg",
    "path of a mapping": {"bytes": None, "path": "a picture.jpg"},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_an_image(name: str, tmp_path: Path) -> None:
    (tmp_path / "a picture.jpg").write_bytes(JPEG)
    value = SPELLINGS[name]
    if name == "file URL":
        value = value.replace("{folder}", f"//{tmp_path}")
    assert read_picture(value, Row({}, f"{tmp_path}/rows.jsonl:1")).data == JPEG


@pytest.mark.parametrize("mode", ["RGB", "CMYK", "RGBA", "LA", "P", "1", "L", "I;16", "F", "HSV"])
def test_decoded_images_are_those_of_their_pixels(mode: str) -> None:
    picture = read_picture(noise(mode), Row({}, "rows:1"))
    expected = noise(mode)
    if mode in ("RGBA", "LA"):
        white = Image.new("RGBA", expected.size, "white")
        expected = Image.alpha_composite(white, expected.convert("RGBA"))
    difference = np.asarray(picture.image(), int) - np.asarray(expected.convert("RGB"), int)
    assert abs(difference).max() <= 1  # two ways of rounding


def test_damaged_pixels_are_found_in_all_images_or_in_some_of_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = bytearray(encoded(noise(size=(40, 40)), "PNG"))
    at = broken.index(b"IDAT") + 60
    broken[at : at + 20] = bytes(20)  # its beginning and its end are whole
    good = [(f"rows:{number}", Picture(data=png(4, 4, bytes(4 * 13)), label=f"{number}")) for number in range(9)]
    images = [*good, ("rows:10", Picture(data=bytes(broken), label="ten"))]
    (found,) = damaged_images(images, "data.sources.0")
    assert (found.level, found.key) == ("error", "data.sources.0")
    assert found.message.startswith("rows:10: ten is damaged: ")
    decoded = []
    monkeypatch.setattr(Picture, "image", lambda self: decoded.append(self.label))
    many = [(f"rows:{n}", Picture(data=png(10, 10) + bytes([n]), label=str(n))) for n in range(100)]
    monkeypatch.setattr(check_data, "DECODED_PIXELS", 1000)
    assert not list(damaged_images(many, "data.sources.0"))
    assert decoded == [str(number) for number in range(0, 100, 10)]
