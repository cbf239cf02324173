"""Small pairs and photos that every test of this room may break in its own way."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from vacsr.data import PhotoSet, load_images, load_pairs
from vacsr.errors import DataError

Encode = Callable[..., bytes]
"""(colour, size=(8, 6), format="PNG") -> the encoded photo."""
Draw = Callable[..., Path]
"""(path, colour, size=(8, 6)) -> the path, its photo written in the format of the suffix."""


@pytest.fixture
def parts() -> dict[str, Any]:
    """The arguments of a valid PairSet: images a, b, c with 2, 1 and 0 captions."""
    return {
        "images": torch.arange(12.0).reshape(3, 4),
        "texts": torch.arange(15.0).reshape(3, 5),
        "image_ids": ("a", "b", "c"),
        "caption_ids": ("a#0", "b#0", "a#1"),
        "caption_image": torch.tensor([0, 1, 0]),
        "captions": ("one", "two", "three"),
    }


@pytest.fixture
def encode() -> Encode:
    """A photo of one colour."""

    def encoded(colour: Any = "red", *, size: tuple[int, int] = (8, 6), format: str = "PNG") -> bytes:
        buffer = io.BytesIO()
        Image.new("RGB", size, colour).save(buffer, format=format)
        return buffer.getvalue()

    return encoded


@pytest.fixture
def draw() -> Draw:
    """A photo of one colour in a file."""

    def drawn(path: Path, colour: Any = "red", *, size: tuple[int, int] = (8, 6)) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, colour).save(path)
        return path

    return drawn


@pytest.fixture
def photos_of() -> Callable[..., PhotoSet]:
    """The photos that a SPEC names, with their captions if it has any."""

    def load(spec: str, **options: Any) -> PhotoSet:
        pairs = (load_images if spec.startswith("photos:") else load_pairs)(spec, **options)
        assert isinstance(pairs, PhotoSet)
        return pairs

    return load


@pytest.fixture
def refused() -> Callable[..., str]:
    """(argument, *words, error=DataError, load=load_pairs, **options): the message, which names these and an action."""

    def check(
        argument: Any, *words: str, error: type[Exception] = DataError, load: Any = load_pairs, **options: Any
    ) -> str:
        with pytest.raises(error) as caught:
            load(argument, **options)
        message = str(caught.value)
        assert all(word in message for word in (*words, " — ")), message
        return message

    return check
