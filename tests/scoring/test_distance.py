"""1 − cosine as uncertainty: what it is for one network and for two, what it says, and who is refused."""

from __future__ import annotations

import math

import pytest
import torch

from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.data import PairSet, load_pairs
from vacsr.errors import UsageError
from vacsr.evaluate.retrieval import evaluate_retrieval
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer
from vacsr.scoring.distance import CosineDistanceScorer


@pytest.fixture(scope="module")
def pairs() -> PairSet:
    found = load_pairs("synthetic:images=40,held_out=25,per_image=2", split="test")
    assert isinstance(found, PairSet)
    return found


def model_of(name: str, pairs: PairSet) -> MatchingModel:
    config = BackboneConfig(head=HeadConfig(dim=6))
    image_dim, text_dim = pairs.images.shape[1], pairs.texts.shape[1]
    return MatchingModel.build(method_config({"name": name}), config, image_dim=image_dim, text_dim=text_dim, seed=5)


def slow_cosine(x: list[float], y: list[float]) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True)) / math.hypot(*x) / math.hypot(*y)


@pytest.mark.parametrize("name", ["infonce", "sigmoid", "vse", "npc", "ncr", "bicro"])
def test_it_is_one_minus_the_mean_cosine_of_the_networks(name: str, pairs: PairSet) -> None:
    model = model_of(name, pairs)
    scorer, plain = CosineDistanceScorer(model, device="cpu"), PairScorer(model, device="cpu")
    rows, cols = torch.tensor([3, 0, 24]), torch.tensor([1, 5, 49])
    found = scorer.score_set(pairs).uncertainty(rows, cols)
    assert found is not None
    assert plain.score_set(pairs).uncertainty(rows, cols) is None
    for value, i, j in zip(found.tolist(), rows.tolist(), cols.tolist(), strict=True):
        cosines = []
        for network in model.networks:
            v = network.image_head(network.backbone.encode_images(pairs.images[i : i + 1]).values.squeeze(1))
            t = network.text_head(network.backbone.encode_texts(pairs.texts[j : j + 1]).values.squeeze(1))
            cosines.append(slow_cosine(v[0].tolist(), t[0].tolist()))
        assert len(cosines) == (2 if name in ("ncr", "bicro") else 1)
        assert value == pytest.approx(1 - sum(cosines) / len(cosines), abs=1e-5)


def test_scores_stay_and_the_order_within_a_query_is_the_ranking_s(pairs: PairSet) -> None:
    model = model_of("infonce", pairs)
    found, plain = (kind(model, device="cpu").score_set(pairs) for kind in (CosineDistanceScorer, PairScorer))
    assert torch.equal(found.score, plain.score)
    captions = torch.arange(len(pairs.caption_ids))
    sigma = found.uncertainty(torch.full_like(captions, 7), captions)
    assert sigma is not None
    torch.testing.assert_close(sigma, 1 - plain.score[7])
    assert int(sigma.argmin()) == int(plain.score[7].argmax())
    report, before = (
        evaluate_retrieval(kind(model, device="cpu"), pairs) for kind in (CosineDistanceScorer, PairScorer)
    )
    assert report.results[0]["rsum"] == before.results[0]["rsum"]
    assert before.results[0]["uncertainty"] is None
    assert report.results[0]["uncertainty"]["aurc_i2t"] > 0


@pytest.mark.parametrize("name", ["vacsr", "pcme", "pcmepp"])
def test_scores_that_are_no_cosines_are_refused(name: str, pairs: PairSet) -> None:
    with pytest.raises(UsageError, match=r"does not score by a cosine.*evaluate\.posthoc=none"):
        CosineDistanceScorer(model_of(name, pairs), device="cpu")


def test_pooling_after_the_head_is_no_hindrance() -> None:
    photos = load_pairs("scenes:images=6,held_out=2,per_image=2,size=32", split="train")
    config = BackboneConfig(
        spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32", pooling="gpo", head=HeadConfig(dim=8)
    )
    scorer = CosineDistanceScorer(
        MatchingModel.build(method_config({"name": "infonce"}), config, seed=0, fit=photos), device="cpu"
    )
    scores = scorer.score_set(photos)
    every = torch.arange(len(photos.image_ids))
    found = scores.uncertainty(every, every)
    assert found is not None
    torch.testing.assert_close(found, 1 - scores.score[every, every])
