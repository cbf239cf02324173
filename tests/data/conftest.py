"""Small pairs that every test of this room may break in its own way."""

from __future__ import annotations

from typing import Any

import pytest
import torch


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
