"""A saved model in the real sentence-transformers: its embeddings and scores are those of PairScorer."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from PIL import Image

from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.data import PhotoSet, load_pairs
from vacsr.errors import MissingExtra, UsageError
from vacsr.model import MatchingModel, load_model
from vacsr.scoring import PairScorer
from vacsr.sentence_transformers import Matcher, cross_encoder

from .fake_hub import PUSH, serve_hub

library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
DIM = 8


def build(spec: str, method: dict[str, Any], pairs: PhotoSet) -> MatchingModel:
    """With weights unlike the initial ones, so that scores are no cosines."""
    config = BackboneConfig(spec=spec, head=HeadConfig(dim=DIM))
    model = MatchingModel.build(method_config(method), config, seed=1, fit=pairs).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.method.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def pairs() -> PhotoSet:
    pairs = load_pairs("scenes:images=10,held_out=2,per_image=2,size=48", split="train")
    assert isinstance(pairs, PhotoSet)
    return pairs


@pytest.fixture(scope="module", params=["clip", "tiny, two members"])
def saved(request: pytest.FixtureRequest, pairs: PhotoSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    if request.param == "clip":
        clip = request.getfixturevalue("clip_checkpoint")
        model = build(f"clip:{clip}", {"name": "vacsr"}, pairs)
    else:
        spec = "tiny:width=16,depth=1,text_depth=1,heads=2,size=32"
        model = build(spec, {"name": "vacsr", "members": 2}, pairs)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def photos(pairs: PhotoSet) -> list[Image.Image]:
    return [pairs.photos.open(row) for row in range(len(pairs.photos))]


def opened(folder: Path) -> Any:
    return library.SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")


def test_embeddings_are_the_models(saved: Path, pairs: PhotoSet, photos: list[Image.Image], tmp_path: Path) -> None:
    encoder, scorer, texts = opened(saved), PairScorer.from_pretrained(saved, device="cpu"), list(pairs.captions)
    v, t = encoder.encode(photos, batch_size=3), encoder.encode(texts, batch_size=4)
    assert encoder.get_embedding_dimension() == v.shape[1] == scorer.model.dim
    np.testing.assert_allclose(v, scorer.embed_images(photos).mean.numpy(), atol=1e-5)
    np.testing.assert_allclose(t, scorer.embed_texts(texts).mean.numpy(), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(v, axis=1), 1, atol=1e-5)
    images, captions = scorer.embed_images(photos).mean, scorer.embed_texts(texts).mean
    members = scorer.model.dim // DIM
    cosines = sum(a @ b.T for a, b in zip(images.chunk(members, 1), captions.chunk(members, 1), strict=True))
    torch.testing.assert_close(library.util.cos_sim(v, t), cosines, atol=1e-5, rtol=0)
    torch.testing.assert_close(encoder.similarity(v, t), cosines, atol=1e-5, rtol=0)
    files = [tmp_path / f"{row}.png" for row in range(3)]
    for file, photo in zip(files, photos, strict=False):
        photo.save(file)
    np.testing.assert_allclose(encoder.encode([str(file) for file in files]), v[:3], atol=1e-5)
    np.testing.assert_allclose(encoder.encode(files), v[:3], atol=1e-5)
    np.testing.assert_allclose(encoder.encode(photos[0]), v[0], atol=1e-5)
    np.testing.assert_allclose(encoder.encode("1.png"), encoder.encode(["1.png"])[0], atol=1e-5)
    trusted = library.SentenceTransformer(modules=[Matcher(load_model(saved))], device="cpu")
    np.testing.assert_allclose(trusted.encode(photos), v, atol=1e-5)
    hit = library.util.semantic_search(t[:1], v, top_k=1)[0][0]
    assert hit["corpus_id"] == int(cosines[:, 0].argmax())


def test_a_prompt_goes_before_texts_alone(saved: Path, photos: list[Image.Image], tmp_path: Path) -> None:
    encoder = opened(saved)
    prompted = encoder.encode(["red boat"], prompt="a ")
    np.testing.assert_allclose(prompted, encoder.encode(["a red boat"]), atol=1e-6)
    np.testing.assert_allclose(encoder.encode(photos[:1], prompt="a "), encoder.encode(photos[:1]), atol=1e-6)
    photos[0].save(tmp_path / "a.png")
    file = [str(tmp_path / "a.png")]
    np.testing.assert_allclose(encoder.encode(file, prompt="a "), encoder.encode(photos[:1]), atol=1e-5)
    encoder.encode(["https://example.org is where a dog lives"])  # words that begin with an address are words


def test_scores_are_those_of_a_pair_scorer(
    saved: Path, pairs: PhotoSet, photos: list[Image.Image], tmp_path: Path
) -> None:
    scorer, reranker = PairScorer.from_pretrained(saved, device="cpu"), cross_encoder(saved, device="cpu")
    assert isinstance(reranker, library.CrossEncoder)
    texts = [pairs.captions[2 * row] for row in range(len(photos))]
    expected = scorer.score_pairs(photos, texts).score.numpy()
    assert np.std(expected) > 1e-3
    both = list(zip(texts, photos, strict=True))
    np.testing.assert_allclose(reranker.predict(both, batch_size=3), expected, atol=1e-4)
    np.testing.assert_allclose(reranker.predict([(photo, text) for text, photo in both]), expected, atol=1e-4)
    assert float(reranker.predict(both[0])) == pytest.approx(expected[0], abs=1e-4)
    matrix = scorer.score_all(photos, texts).score
    for ranked, row in ((reranker.rank(texts[0], photos), matrix[:, 0]), (reranker.rank(photos[2], texts), matrix[2])):
        best = sorted(range(len(row)), key=lambda item, row=row: -float(row[item]))
        assert [one["corpus_id"] for one in ranked] == best
        np.testing.assert_allclose([one["score"] for one in ranked], row[best], atol=1e-4)
    reranker.save_pretrained(str(tmp_path / "reranker"))
    again = library.CrossEncoder(str(tmp_path / "reranker"), trust_remote_code=True, device="cpu")
    np.testing.assert_allclose(again.predict(both), expected, atol=1e-4)
    opened(saved).save_pretrained(str(tmp_path / "encoder"))
    assert load_model(tmp_path / "encoder").identity() == load_model(saved).identity()


def test_what_is_neither_text_nor_photo_is_refused(saved: Path, photos: list[Image.Image]) -> None:
    reranker, encoder = cross_encoder(saved, device="cpu"), opened(saved)
    for pair in (("a", "b"), (photos[0], photos[1]), ("a", photos[0], "b")):
        with pytest.raises(UsageError, match="a text and a photo"):
            reranker.predict([pair])
    with pytest.raises(UsageError, match="nothing is downloaded"):
        encoder.encode(["https://example.org/dog.jpg"])
    with pytest.raises(UsageError, match="pass a list of texts"):
        encoder.encode([" "])
    with pytest.raises(ValueError, match="trust_remote_code"):
        library.SentenceTransformer(str(saved))
    features = MatchingModel.build(
        method_config("vacsr"), BackboneConfig(head=HeadConfig(dim=8)), image_dim=6, text_dim=4
    )
    with pytest.raises(UsageError, match="cached features"):
        cross_encoder(features)


def test_a_missing_library_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtra, match=re.escape("vacsr[sentence-transformers]")):
        cross_encoder(saved)


def test_it_opens_by_hub_id(
    saved: Path, photos: list[Image.Image], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with serve_hub() as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        settings = {"HUGGINGFACE_CO_URL_TEMPLATE": template, "ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": True}
        for name, value in {**settings, "HF_HUB_CACHE": str(tmp_path)}.items():
            monkeypatch.setattr(constants, name, value)
        model = load_model(saved)
        model.push_to_hub("someone/matcher", token=PUSH)
        encoder = library.SentenceTransformer("someone/matcher", trust_remote_code=True, device="cpu")
        expected = PairScorer(model, device="cpu").embed_images(photos).mean
        np.testing.assert_allclose(encoder.encode(photos), expected.numpy(), atol=1e-5)
