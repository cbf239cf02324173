"""A scorer that reads photos and words: by path or by image, alone or as a data set, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vacsr.backbones.images import tower_inputs
from vacsr.config import BackboneConfig, HeadConfig, TrainConfig
from vacsr.data import PhotoSet, load_pairs
from vacsr.errors import DataError, ShapeMismatch, UsageError
from vacsr.scoring import PairScorer
from vacsr.train import fit

from .models import model as feature_model

TINY = BackboneConfig(spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32", head=HeadConfig(dim=8))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> PhotoSet:
    """Twelve photos of other sizes than the tower's, as files."""
    root = tmp_path_factory.mktemp("photos")
    drawn = load_pairs("scenes:images=12,held_out=2,per_image=3,size=64", split="train")
    assert isinstance(drawn, PhotoSet)
    for row in range(12):
        drawn.photos.open(row).resize((400 + row, 300)).save(root / f"{row:02d}.jpg")
        words = [drawn.captions[col] for col in (drawn.caption_image == row).nonzero().flatten().tolist()]
        (root / f"{row:02d}.txt").write_text("\n".join(words), encoding="utf-8")
    pairs = load_pairs(f"folder:{root}")
    assert isinstance(pairs, PhotoSet)
    return pairs


@pytest.fixture(scope="module")
def scorer(pairs: PhotoSet) -> PairScorer:
    config = TrainConfig(epochs=1, batch_size=12, device="cpu")
    return PairScorer(fit("vacsr", pairs, config, backbone=TINY, progress=False).model, device="cpu")


@pytest.fixture(scope="module")
def paths(pairs: PhotoSet) -> list[str]:
    return [pairs.photos.name(row) for row in range(len(pairs.photos))]


def test_scores_are_those_of_single_pairs(scorer: PairScorer, pairs: PhotoSet, paths: list[str]) -> None:
    """Batches and padding change nothing but rounding; a data set scores as its photos and words."""
    model, backbone = scorer.model, scorer.model.backbone
    with torch.no_grad():
        squares = [backbone.transform.pixels(pairs.photos.open(row))[None] for row in range(len(paths))]
        images = [model.embed_images(square) for square in squares]
        texts = [model.embed_texts(backbone.tokenize([text])) for text in pairs.captions]
        slow = torch.cat([torch.cat([model.method.score(v, t) for t in texts], dim=1) for v in images])
    scores = scorer.score_set(pairs).score
    torch.testing.assert_close(scores, slow, atol=1e-4, rtol=1e-4)
    assert torch.equal(scorer.score_all(paths, pairs.captions).score, scores)
    for cache in (0.0, 1.0):
        inputs = tower_inputs(backbone, pairs, cache_gb=cache)
        assert torch.equal(scorer.score_set(pairs, inputs=inputs).score, scores)


def test_aligned_and_named_pairs(scorer: PairScorer, pairs: PhotoSet, paths: list[str]) -> None:
    """A photo of a set is read as the whole set's are, whatever its size."""
    matrix = scorer.score_set(pairs)
    rows, cols = torch.tensor([5, 5, 5, 11]), torch.tensor([3, 0, 35, 7])
    aligned = scorer.score_pairs([paths[row] for row in rows], [pairs.captions[col] for col in cols])
    torch.testing.assert_close(aligned.score, matrix.score[rows, cols], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(aligned.uncertainty, matrix.uncertainty(rows, cols), atol=1e-5, rtol=1e-4)
    names = [pairs.caption_ids[3], pairs.caption_ids[0], pairs.captions[35]]
    named = scorer.score_named(pairs, pairs.image_ids[5], names).at(torch.zeros(3, dtype=torch.int64), torch.arange(3))
    torch.testing.assert_close(named.score, matrix.score[5, pairs_of(pairs, cols[:3])], atol=1e-4, rtol=1e-4)
    with pytest.raises(ShapeMismatch, match="2 and 1"):
        scorer.score_pairs(paths[:2], ["a dog"])


def pairs_of(pairs: PhotoSet, cols: torch.Tensor) -> list[int]:
    """Equal words score alike: the first caption with the words of each."""
    return [pairs.captions.index(pairs.captions[col]) for col in cols]


def test_neither_texts_nor_photos(scorer: PairScorer) -> None:
    features: list[Any] = [torch.ones(2, 4), np.ones((2, 4))]
    for texts in (["a dog", " \t"], [], "a dog", ["a dog", 3], *features):
        with pytest.raises(UsageError, match="pass a list of texts"):
            scorer.embed_texts(texts)
    for images in (features[0], "photo.jpg", Image.new("RGB", (2, 2)), [3], None):
        with pytest.raises(UsageError, match="expected a"):
            scorer.embed_images(images)


def test_other_kinds_of_data_are_refused(scorer: PairScorer, pairs: PhotoSet, paths: list[str]) -> None:
    features = load_pairs("synthetic:images=6,per_image=2", split="train")
    flat = PairScorer(feature_model("sigmoid"), device="cpu")
    for judge, data, action in ((scorer, features, "give photos"), (flat, pairs, "vacsr embed")):
        for call in (judge.score_set, lambda data, judge=judge: judge.score_named(data, data.image_ids[0], ["x"])):
            with pytest.raises(DataError, match=action):
                call(data)
    with pytest.raises(UsageError, match="image features are a list"):
        flat.score_all([paths[0]], ["a dog"])


def test_no_photos_blank_photos_and_long_or_foreign_words(scorer: PairScorer) -> None:
    assert scorer.score_all([], ["a dog"]).score.shape == (0, 1)
    texts = ["word " * 2000, "x" * 10_000, "собака бежит", "犬", "🐕", "half \ud83d", "?"]
    scores = scorer.score_all([Image.new("RGB", (1, 1)), Image.new("L", (3000, 2))], texts).score
    assert scores.shape == (2, 7)
    assert scores.isfinite().all()
