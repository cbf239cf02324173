"""A scorer that reads photos and words: by path or by image, alone or as a data set, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vacsr.backbones.images import tower_inputs
from vacsr.cli.lookup import score_named, score_photo
from vacsr.config import BackboneConfig, HeadConfig, TrainConfig
from vacsr.data import PhotoSet, load_pairs
from vacsr.errors import DataError, ShapeMismatch, UsageError
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer
from vacsr.train import fit

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
    found = load_pairs(f"folder:{root}")
    assert isinstance(found, PhotoSet)
    return found


@pytest.fixture(scope="module")
def model(pairs: PhotoSet) -> MatchingModel:
    return fit("vacsr", pairs, TrainConfig(epochs=1, batch_size=12, device="cpu"), backbone=TINY, progress=False).model


@pytest.fixture
def scorer(model: MatchingModel) -> PairScorer:
    return PairScorer(model, device="cpu")


def paths(pairs: PhotoSet) -> list[str]:
    return [pairs.photos.name(row) for row in range(len(pairs.photos))]


def slow_matrix(model: MatchingModel, pairs: PhotoSet) -> torch.Tensor:
    """One photo and one caption at a time."""
    backbone: Any = model.backbone
    with torch.no_grad():
        squares = [backbone.transform.pixels(pairs.photos.open(row))[None] for row in range(len(pairs.photos))]
        images = [model.embed_images(square) for square in squares]
        texts = [model.embed_texts(backbone.tokenize([text])) for text in pairs.captions]
        return torch.cat([torch.cat([model.method.score(v, t) for t in texts], dim=1) for v in images])


def test_scores_are_those_of_single_pairs(scorer: PairScorer, model: MatchingModel, pairs: PhotoSet) -> None:
    """Batches and padding change nothing but rounding."""
    torch.testing.assert_close(scorer.score_set(pairs).score, slow_matrix(model, pairs), atol=1e-4, rtol=1e-4)


def test_a_data_set_scores_as_its_photos_and_words(scorer: PairScorer, model: MatchingModel, pairs: PhotoSet) -> None:
    whole = scorer.score_set(pairs)
    assert torch.equal(scorer.score_all(paths(pairs), pairs.captions).score, whole.score)
    backbone: Any = model.backbone
    for cache in (0.0, 1.0):
        inputs = tower_inputs(backbone, pairs, cache_gb=cache)
        assert torch.equal(scorer.score_set(pairs, inputs=inputs).score, whole.score)


def test_paths_and_images_mixed(scorer: PairScorer, pairs: PhotoSet, tmp_path: Path) -> None:
    """PNG, since a large JPEG by its path is decoded at a fraction of its size."""
    names = []
    for row in range(3):
        names.append(tmp_path / f"{row}.png")
        pairs.photos.open(row).save(names[-1])
    texts = list(pairs.captions[:4])
    expected = scorer.score_all(names, texts).score
    for given in (
        [str(name) for name in names],
        [Image.open(name) for name in names],
        [names[0], Image.open(names[1]), str(names[2])],
        (Image.open(names[0]), names[1], Image.open(names[2])),
    ):
        assert torch.equal(scorer.score_all(given, texts).score, expected)


def test_aligned_pairs(scorer: PairScorer, pairs: PhotoSet) -> None:
    matrix = scorer.score_set(pairs)
    rows, cols = torch.tensor([0, 5, 5, 11]), torch.tensor([3, 0, 35, 7])
    found = scorer.score_pairs([paths(pairs)[row] for row in rows], [pairs.captions[col] for col in cols])
    torch.testing.assert_close(found.score, matrix.score[rows, cols], atol=1e-4, rtol=1e-4)
    assert found.uncertainty is not None
    torch.testing.assert_close(found.uncertainty, matrix.uncertainty(rows, cols), atol=1e-5, rtol=1e-4)
    with pytest.raises(ShapeMismatch, match="2 and 1"):
        scorer.score_pairs(paths(pairs)[:2], ["a dog"])


def test_bf16(model: MatchingModel, pairs: PhotoSet) -> None:
    exact = PairScorer(model, device="cpu").score_set(pairs).score
    low = PairScorer(model, device="cpu", dtype=torch.bfloat16).score_set(pairs).score
    assert low.dtype == torch.float32
    assert 0 < (low - exact).abs().max() < 0.05 * exact.abs().max()


def test_topk_of_photos(scorer: PairScorer, pairs: PhotoSet) -> None:
    scores = scorer.score_set(pairs)
    expected = scores.score.argsort(dim=0, descending=True, stable=True)[:2].T
    assert torch.equal(scorer.score_set(pairs).topk(2, direction="t2i").index, expected)


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        (["a dog", " \t"], UsageError),
        (["", "a dog"], UsageError),
        ([], UsageError),
        ("a dog", UsageError),
        (["a dog", 3], UsageError),
        (["a dog", None], UsageError),
        (torch.ones(2, 4), UsageError),
        (np.ones((2, 4)), UsageError),
    ],
)
def test_texts_that_are_none(scorer: PairScorer, texts: Any, error: type[UsageError]) -> None:
    with pytest.raises(error, match=r"the model reads words — pass a list of texts that are not blank") as caught:
        scorer.embed_texts(texts)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "images", [torch.ones(2, 4), np.ones((2, 4)), "photo.jpg", Image.new("RGB", (2, 2)), [3], None]
)
def test_images_that_are_none(scorer: PairScorer, images: Any) -> None:
    with pytest.raises(UsageError, match="expected a"):
        scorer.embed_images(images)


def test_photos_that_cannot_be_read(scorer: PairScorer, pairs: PhotoSet, tmp_path: Path) -> None:
    (tmp_path / "torn.jpg").write_bytes(Path(paths(pairs)[0]).read_bytes()[:300])
    for bad in (tmp_path / "torn.jpg", tmp_path / "none.jpg"):
        with pytest.raises(DataError, match=bad.name) as caught:
            scorer.score_all([paths(pairs)[0], bad], ["a dog"])
        assert caught.value.exit_code == 4


def test_other_kinds_of_data_are_refused(scorer: PairScorer, pairs: PhotoSet) -> None:
    features = load_pairs("synthetic:images=6,per_image=2", split="train")
    run = fit("sigmoid", features, TrainConfig(epochs=1, batch_size=4, device="cpu"), progress=False)
    flat = PairScorer(run.model, device="cpu")
    for entry in (
        lambda judge, data: judge.score_set(data),
        lambda judge, data: list(score_named(judge, data, image=data.image_ids[0], texts=[data.caption_ids[0]])),
    ):
        with pytest.raises(DataError, match=r"the model reads photos, these data are cached features — give photos"):
            entry(scorer, features)
        with pytest.raises(DataError, match=r"the model reads cached features, these data are photos — embed them"):
            entry(flat, pairs)
    with pytest.raises(UsageError, match="image features are a list"):
        flat.score_all([paths(pairs)[0]], ["a dog"])


def test_no_photos(scorer: PairScorer) -> None:
    assert scorer.score_all([], ["a dog"]).score.shape == (0, 1)


def test_a_blank_photo_and_long_or_foreign_words(scorer: PairScorer) -> None:
    texts = ["word " * 2000, "x" * 10_000, "собака бежит", "犬", "🐕", "half \ud83d", "?"]
    scores = scorer.score_all([Image.new("RGB", (1, 1)), Image.new("L", (3000, 2))], texts).score
    assert scores.shape == (2, 7)
    assert scores.isfinite().all()


# ---------------------------------------------------------------------------------------------------- by their names


def test_named_pairs_are_the_matrix_entries(scorer: PairScorer, pairs: PhotoSet) -> None:
    """A photo of a set is read as the whole set's are, whatever its size."""
    matrix = scorer.score_set(pairs)
    cols = [7, 7, 0, 35]
    lines = list(score_named(scorer, pairs, image=pairs.image_ids[3], texts=[pairs.caption_ids[col] for col in cols]))
    for line, col in zip(lines, cols, strict=True):
        assert line[:2] == (pairs.image_ids[3], pairs.caption_ids[col])
        assert float(line[2]) == pytest.approx(float(matrix.score[3, col]), abs=2e-4)
        sigma = matrix.uncertainty(torch.tensor([3]), torch.tensor([col]))
        assert sigma is not None
        assert float(line[4]) == pytest.approx(float(sigma), abs=2e-4)


def test_a_photo_on_disk_with_any_words(scorer: PairScorer, pairs: PhotoSet) -> None:
    texts = ["a red dog", pairs.captions[0], "a red dog"]
    lines = list(score_photo(scorer, image=paths(pairs)[2], texts=texts))
    expected = scorer.score_all([paths(pairs)[2]], texts).score[0]
    assert [line[:2] for line in lines] == [(paths(pairs)[2], text) for text in texts]
    assert [float(line[2]) for line in lines] == pytest.approx(expected.tolist(), abs=1e-4)
    assert lines[0] == lines[2]
    with pytest.raises(DataError, match="no caption id 'nothing like it'"):
        list(score_named(scorer, pairs, image=pairs.image_ids[0], texts=["nothing like it"]))
