from __future__ import annotations

import io
import struct
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps

from vacsr.data.decode import decode_photo, encoded_format
from vacsr.errors import DataError

RANDOM = np.random.default_rng(0)
PHOTO = Image.fromarray(RANDOM.integers(0, 255, (48, 64, 3), dtype=np.uint8))


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that promises more than it holds."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"\0" * 64)
    body = [struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in (chunk, data)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def assert_refused(data: bytes, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        decode_photo(data, name="folder/a.jpg")
    assert caught.value.exit_code == 4
    assert all(word in str(caught.value) for word in ("folder/a.jpg", *words, " — ")), str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_formats_without_loss(kind: str) -> None:
    assert np.array_equal(decode_photo(saved(PHOTO, kind), name="a"), PHOTO)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_formats_with_loss(kind: str) -> None:
    data = saved(PHOTO, kind)
    assert np.array_equal(decode_photo(data, name="a"), Image.open(io.BytesIO(data)).convert("RGB"))


def test_one_pixel() -> None:
    photo = decode_photo(saved(Image.new("RGB", (1, 1), (1, 2, 3)), "PNG"), name="a", side=224)
    assert photo.size == (1, 1)
    assert photo.getpixel((0, 0)) == (1, 2, 3)


def modes() -> dict[str, tuple[Image.Image, tuple[int, int, int]]]:
    """Photos of one colour in many modes, and that colour as RGB."""
    palette = Image.new("RGB", (4, 4), (10, 200, 30)).convert("P", palette=Image.Palette.ADAPTIVE)
    return {
        "L": (Image.new("L", (4, 4), 77), (77, 77, 77)),
        "1": (Image.new("1", (4, 4), 1), (255, 255, 255)),
        "P": (palette, (10, 200, 30)),
        "LA": (Image.new("LA", (4, 4), (100, 0)), (255, 255, 255)),
        "RGBA clear": (Image.new("RGBA", (4, 4), (9, 9, 9, 0)), (255, 255, 255)),
        "RGBA half": (Image.new("RGBA", (4, 4), (0, 0, 255, 51)), (204, 204, 255)),
        "RGBA full": (Image.new("RGBA", (4, 4), (9, 8, 7, 255)), (9, 8, 7)),
        "I;16": (Image.fromarray(np.full((4, 4), 257 * 40, dtype=np.uint16)), (40, 40, 40)),
    }


@pytest.mark.parametrize("mode", list(modes()))
def test_any_mode_becomes_rgb(mode: str) -> None:
    image, colour = modes()[mode]
    photo = decode_photo(saved(image, "PNG"), name="a")
    assert (photo.mode, photo.size) == ("RGB", (4, 4))
    assert photo.getpixel((2, 2)) == colour


def test_the_colour_that_a_png_calls_clear_is_white() -> None:
    image = Image.new("RGB", (4, 4), (1, 2, 3))
    assert decode_photo(saved(image, "PNG", transparency=(1, 2, 3)), name="a").getpixel((0, 0)) == (255, 255, 255)


def test_cmyk_and_floats() -> None:
    cyan = decode_photo(saved(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "JPEG"), name="a")
    assert cyan.mode == "RGB"
    assert np.abs(np.asarray(cyan, dtype=int)[8, 8] - (0, 255, 255)).max() < 6
    for values, expected in ((0.2, 51), (100.0, 100), (300.0, 255), (float("nan"), 0)):
        image = Image.fromarray(np.full((4, 4), values, dtype=np.float32))
        assert decode_photo(saved(image, "TIFF"), name="a").getpixel((0, 0)) == (expected,) * 3


@pytest.mark.parametrize("orientation", range(1, 10))
def test_upright_by_exif(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(PHOTO, "PNG", exif=exif)
    assert np.array_equal(decode_photo(data, name="a"), ImageOps.exif_transpose(Image.open(io.BytesIO(data))))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_metadata_leaves_a_photo() -> None:
    data = saved(PHOTO, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert decode_photo(data, name="a").size == PHOTO.size


def test_an_animation_shows_its_first_picture() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_photo(data, name="a").getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("size", "side", "expected"),
    [
        ((640, 480), 0, (640, 480)),
        ((640, 480), 224, (320, 240)),
        ((640, 480), 240, (320, 240)),
        ((640, 480), 241, (640, 480)),
        ((645, 483), 224, (323, 242)),
        ((2000, 2000), 224, (250, 250)),
        ((100, 2000), 90, (100, 2000)),
    ],
)
def test_a_large_jpeg_is_decoded_smaller_and_never_below_the_side(
    size: tuple[int, int], side: int, expected: tuple[int, int]
) -> None:
    data = saved(Image.linear_gradient("L").convert("RGB").resize(size), "JPEG", quality=95)
    photo = decode_photo(data, name="a", side=side)
    assert photo.size == expected
    whole = decode_photo(data, name="a").resize(expected, Image.Resampling.BOX)
    assert np.abs(np.asarray(photo, dtype=int) - np.asarray(whole, dtype=int)).max() < 6


def test_what_is_no_photo() -> None:
    assert_refused(b"", "empty file")
    assert_refused(b"hello, I am a text", "no known image format")
    assert_refused(b"%!PS-Adobe-3.0 EPSF-3.0\n", "no known image format")
    assert_refused(b"\xff\xd8\xff", "copy it again")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_files(kind: str, share: float) -> None:
    data = saved(PHOTO, kind)
    assert_refused(data[: int(share * len(data))], "copy it again")


@given(st.integers(0, 3), st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=20))
def test_any_bytes_give_a_photo_or_a_data_error(kind: int, changes: list[tuple[float, int]]) -> None:
    data = bytearray(saved(PHOTO.resize((16, 12)), ("JPEG", "PNG", "WEBP", "GIF")[kind]))
    for place, value in changes:
        data[int(place * len(data))] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's words on odd metadata
        try:
            assert decode_photo(bytes(data), name="a").mode == "RGB"
        except DataError as error:
            assert " — " in str(error)  # noqa: PT017


def test_only_the_caller_knows_what_else_can_be_done() -> None:
    with pytest.raises(DataError, match=r"— copy it again$"):
        decode_photo(b"", name="a")
    with pytest.raises(DataError, match=r"— copy it again, or look away$"):
        decode_photo(b"", name="a", otherwise="look away")
    with pytest.raises(DataError, match=r"— make it smaller, or look away$"):
        decode_photo(png_header(100_000, 100_000), name="a", otherwise="look away")


def test_a_bomb_is_refused_by_its_header() -> None:
    assert_refused(png_header(100_000, 100_000), "100,000 × 100,000", "178,956,970")


def test_a_large_photo_brings_no_warning_of_pillow() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_refused(png_header(9_500, 9_500), "truncated")  # 90 million: over Pillow's warning, under the limit


def test_pillows_own_settings_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode_photo(saved(PHOTO, "PNG"), name="a").size == PHOTO.size
    assert Image.MAX_IMAGE_PIXELS == 10
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_the_format_by_the_first_bytes() -> None:
    kinds = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "GIF": None, "TIFF": None}
    assert {kind: encoded_format(saved(PHOTO, kind)) for kind in kinds} == kinds
