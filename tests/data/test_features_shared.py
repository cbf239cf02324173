from __future__ import annotations

from pathlib import Path

import pytest

from vacsr.data import load_pairs

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "flickr8k"

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="needs ../shared/data/flickr8k beside the checkout"),
]


@pytest.mark.parametrize(
    ("split", "images", "captions"),
    [("train", 6_000, 30_000), ("dev", 1_000, 5_000), ("test", 500, 2_500), ("all", 7_500, 37_500)],
)
def test_flickr8k_features(split: str, images: int, captions: int) -> None:
    pairs = load_pairs(
        f"features:{FOLDER / 'features-tinyvit-minilm.safetensors'}", captions=FOLDER / "captions.json", split=split
    )
    assert pairs.images.shape == (images, 320)
    assert pairs.texts.shape == (captions, 384)
    assert pairs.split == split
    assert pairs.captions is not None
    assert pairs.caption_ids[6] == f"{pairs.image_ids[1]}#1"
