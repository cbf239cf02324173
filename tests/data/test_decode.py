"""From encoded photos to upright RGB pixels."""

import io
import struct
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from vacsr.data.decode import MAX_PIXELS, MAX_SCANS, MAX_SEGMENTS, TooManyPixels, decode_photo
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


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "GIF", "JPEG", "WEBP"])
def test_formats(kind: str) -> None:
    data = saved(PHOTO, kind)
    assert np.array_equal(decode_photo(data, name="a"), Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize(
    ("image", "colour"),
    [
        (Image.new("L", (4, 4), 77), (77, 77, 77)),
        (Image.new("1", (4, 4), 1), (255, 255, 255)),
        (Image.new("RGB", (4, 4), (10, 200, 30)).convert("P", palette=Image.Palette.ADAPTIVE), (10, 200, 30)),
        (Image.new("LA", (4, 4), (100, 0)), (255, 255, 255)),
        (Image.new("RGBA", (4, 4), (9, 9, 9, 0)), (255, 255, 255)),
        (Image.new("RGBA", (4, 4), (0, 0, 255, 51)), (204, 204, 255)),
        (Image.new("RGBA", (4, 4), (9, 8, 7, 255)), (9, 8, 7)),
        (Image.fromarray(np.full((4, 4), 257 * 40, dtype=np.uint16)), (40, 40, 40)),
    ],
    ids=lambda value: getattr(value, "mode", ""),
)
def test_any_mode_becomes_rgb(image: Image.Image, colour: tuple[int, int, int]) -> None:
    photo = decode_photo(saved(image, "PNG"), name="a")
    assert (photo.mode, photo.size) == ("RGB", (4, 4))
    assert photo.getpixel((2, 2)) == colour


def test_clear_colours_are_white_and_cmyk_is_converted() -> None:
    image = Image.new("RGB", (4, 4), (1, 2, 3))
    assert decode_photo(saved(image, "PNG", transparency=(1, 2, 3)), name="a").getpixel((0, 0)) == (255, 255, 255)
    cyan = decode_photo(saved(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "JPEG"), name="a")
    assert cyan.mode == "RGB"
    assert np.abs(np.asarray(cyan, dtype=int)[8, 8] - (0, 255, 255)).max() < 6


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "JPEG"])
@pytest.mark.parametrize("orientation", range(1, 10))
def test_upright_by_exif(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(PHOTO, kind, exif=exif)
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


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_truncated_files(kind: str) -> None:
    data = saved(PHOTO, kind)
    for share in (0.1, 0.5, 0.9):
        assert_refused(data[: int(share * len(data))], "copy it again")


@given(st.integers(0, 3), st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=20))
def test_any_bytes_give_a_photo_or_a_data_error(kind: int, changes: list[tuple[float, int]]) -> None:
    data = bytearray(saved(PHOTO.resize((16, 12)), ("JPEG", "PNG", "WEBP", "GIF")[kind]))
    for share, value in changes:
        data[int(share * len(data))] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's words on odd metadata
        try:
            assert decode_photo(bytes(data), name="a").mode == "RGB"
        except DataError as error:
            assert " — " in str(error)  # noqa: PT017


def test_a_bomb_is_refused_by_its_header() -> None:
    """Pillow refuses the first by itself; the second is over the caller's own limit."""
    for data, limit in ((png_header(100_000, 100_000), MAX_PIXELS), (saved(PHOTO, "PNG"), 64 * 48 - 1)):
        with pytest.raises(TooManyPixels, match=f"more than {limit:,} pixels.*make it smaller"):
            decode_photo(data, name="a", max_pixels=limit)
    assert decode_photo(saved(PHOTO, "PNG"), name="a", max_pixels=64 * 48).size == PHOTO.size


def test_grey_of_many_bits_is_scaled_and_not_clipped() -> None:
    every = np.arange(2**16, dtype=np.uint16).reshape(128, 512)
    floats = np.linspace(-0.5, 1, 128 * 64, dtype=np.float32).reshape(64, 128)
    odd = floats.copy()
    odd[0, :3] = [np.nan, np.inf, -np.inf]
    scaled = np.rint(every / 257)
    for values, kind, expected in (
        (every, "PNG", scaled),
        (every.astype(np.int32), "TIFF", scaled),
        (floats, "TIFF", np.rint(floats.astype(float).clip(0) * 255)),
        (floats * 300, "TIFF", np.rint((floats * 300).clip(0, 255))),
        (odd, "TIFF", np.rint(np.nan_to_num(odd).clip(0, 255))),  # infinite is more than 1, so the rest is almost black
    ):
        photo = decode_photo(saved(Image.fromarray(values), kind), name="grey")
        assert (np.asarray(photo) == expected[..., None]).all()


# Prepared files


def ifd(*entries: tuple[int, int, int, int]) -> bytes:
    """A TIFF header and its first directory: (tag, type, count, value)."""
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return struct.pack("<2sHIH", b"II", 42, 8, len(entries)) + body + bytes(4)


def with_segments(*segments: bytes) -> bytes:
    jpeg = saved(PHOTO, "JPEG")
    return jpeg[:2] + b"".join(segments) + jpeg[2:]


def app1(exif: bytes) -> bytes:
    return b"\xff\xe1" + struct.pack(">H", len(exif) + 8) + b"Exif\0\0" + exif


def test_a_jpeg_with_nested_exif_is_decoded_without_parsing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would read each of the blocks that a directory names, again and again."""

    def parse(*_: object) -> None:
        raise AssertionError("Pillow parsed EXIF data")

    monkeypatch.setattr(Image.Exif, "load", parse)
    monkeypatch.setattr(Image.Exif, "load_from_fp", parse)
    nested = ifd(
        (0x0112, 3, 1, 6), *((0x8769, 4, 1, 8),) * 2000, *((0x9000 + tag, 7, 60_000, 0) for tag in range(2000))
    )
    data = with_segments(*[app1(nested)] * 160, b"\xff\xe2\0\x10MPF\0" + bytes(10))
    plain = decode_photo(saved(PHOTO, "JPEG"), name="a")
    assert np.array_equal(decode_photo(data, name="a"), plain.transpose(Image.Transpose.ROTATE_270))


def test_the_orientation_is_read_from_the_first_directory() -> None:
    exif = struct.pack(">2sHIHHHIHHI", b"MM", 42, 8, 1, 0x0112, 3, 1, 6, 0, 0)
    assert decode_photo(with_segments(app1(exif), app1(ifd((0x0112, 3, 1, 3)))), name="a").size == (48, 64)


def progressive(scans: int) -> bytes:
    jpeg = saved(PHOTO, "JPEG", progressive=True)
    last = jpeg.rindex(b"\xff\xda")
    return jpeg[:-2] + jpeg[last:-2] * scans + b"\xff\xd9"


def test_jpegs_that_cost_more_than_their_pixels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    video = b"\0\0\0\x18ftypmp42" + b"\xff\xda\0\x02" * 2 * MAX_SCANS  # as phones append it
    for data in (progressive(50), progressive(2) + video, with_segments(*[b"\xff\xfe\0\2"] * 1000)):
        assert decode_photo(data, name="a").size == PHOTO.size

    def opened(*_: object, **__: object) -> None:
        raise AssertionError("Pillow saw the file")

    monkeypatch.setattr(Image, "open", opened)
    for data in (with_segments(*[b"\xff\xfe\0\2"] * (MAX_SEGMENTS + 1)), progressive(MAX_SCANS + 1)):
        assert_refused(data, "make it smaller or save it again")
