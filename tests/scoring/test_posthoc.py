"""A scorer with post-hoc uncertainty: what it leaves alone, what it adds, what it refuses, and its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from vacsr.config import BackboneConfig, HeadConfig, TrainConfig
from vacsr.config.io import method_config
from vacsr.data import PairSet, load_pairs
from vacsr.errors import DataError, UsageError
from vacsr.evaluate.retrieval import evaluate_retrieval
from vacsr.methods import Sigmoid
from vacsr.methods.sigmoid import SigmoidConfig
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer
from vacsr.scoring.cosine import Gaussians, cosine_moments, coupled_cosine_moments
from vacsr.scoring.laplace import with_one
from vacsr.scoring.posthoc import Laplace, PostHocScorer, PostHocUncertainty, check_posthoc
from vacsr.train import fit


@pytest.fixture(scope="module")
def pairs() -> PairSet:
    found = load_pairs("synthetic:images=150,held_out=60,per_image=2", split="train")
    assert isinstance(found, PairSet)
    return found


@pytest.fixture(scope="module")
def unseen() -> PairSet:
    found = load_pairs("synthetic:images=150,held_out=60,per_image=2", split="test")
    assert isinstance(found, PairSet)
    return found


@pytest.fixture(scope="module", params=["infonce", "sigmoid", "vse"])
def model(request: pytest.FixtureRequest, pairs: PairSet) -> MatchingModel:
    config = TrainConfig(epochs=8, batch_size=50, device="cpu", lr=5e-3)
    return fit(request.param, pairs, config, backbone=BackboneConfig(head=HeadConfig(dim=12)), progress=False).model


@pytest.fixture(scope="module")
def posthoc(model: MatchingModel, pairs: PairSet) -> PostHocUncertainty:
    return PostHocUncertainty.fit(model, pairs, batch_size=50, device="cpu")


def untrained(name: str) -> MatchingModel:
    config = BackboneConfig(head=HeadConfig(kind="linear", dim=3))
    return MatchingModel.build(method_config({"name": name}), config, image_dim=4, text_dim=5, seed=3).eval()


KINDS: list[Laplace] = ["laplace", "laplace-coupled"]


@pytest.mark.parametrize("kind", KINDS)
def test_scores_stay_and_every_pair_has_an_uncertainty(
    model: MatchingModel, posthoc: PostHocUncertainty, unseen: PairSet, kind: Laplace
) -> None:
    scorer, plain = PostHocScorer(model, posthoc, kind=kind, device="cpu"), PairScorer(model, device="cpu")
    assert torch.equal(scorer.score_set(unseen).score, plain.score_set(unseen).score)
    rows, cols = torch.tensor([3, 0, 7]), torch.tensor([1, 5, 9])
    sigma = scorer.score_set(unseen).uncertainty(rows, cols)
    aligned = scorer.score_pairs(unseen.images[rows], unseen.texts[cols])
    assert sigma is not None
    assert aligned.uncertainty is not None
    torch.testing.assert_close(aligned.uncertainty, sigma)
    torch.testing.assert_close(
        sigma.double(), slow_sigma(model, posthoc, unseen, rows, cols, kind=kind), rtol=1e-3, atol=0
    )
    plain_report = evaluate_retrieval(plain, unseen).results[0]
    report = evaluate_retrieval(scorer, unseen).results[0]
    assert plain_report["uncertainty"] is None
    assert report["rsum"] == plain_report["rsum"]
    assert {"corr_r1_i2t", "aurc_i2t", "aurc_t2i"} <= report["uncertainty"].keys()


def slow_sigma(
    model: MatchingModel, posthoc: PostHocUncertainty, pairs: PairSet, rows: Tensor, cols: Tensor, *, kind: Laplace
) -> Tensor:
    """Un-normalised Gaussians by hand, from the layer's weights."""
    sides = []
    for head, raw, posterior in (
        (model.image_head, model.backbone.encode_images(pairs.images[rows]).values.squeeze(1), posthoc.image),
        (model.text_head, model.backbone.encode_texts(pairs.texts[cols]).values.squeeze(1), posthoc.text),
    ):
        assert head.first is not None
        hidden = functional.gelu(head.first(raw)).detach()  # type: ignore[arg-type]
        mean = hidden @ head.last.weight.detach().T + head.last.bias.detach()
        damp = posterior.precision**0.5
        a, b = (torch.linalg.inv(m + damp * torch.eye(len(m))) for m in posterior.factors)
        x = with_one(hidden)
        spread = torch.tensor([float(row @ a @ row) for row in x], dtype=torch.float64)
        sides.append(Gaussians(mean.double(), spread[:, None] * b.diagonal()))
    moments = cosine_moments if kind == "laplace" else coupled_cosine_moments
    return moments(*sides).variance.sqrt()


def test_the_expected_cosine_is_the_score_on_request(
    model: MatchingModel, posthoc: PostHocUncertainty, unseen: PairSet
) -> None:
    scorer = PostHocScorer(model, posthoc, expected=True, device="cpu")
    plain = PostHocScorer(model, posthoc, device="cpu").score_set(unseen)
    found = scorer.score_set(unseen)
    x, y = (Gaussians(e.mean, e.log_var.exp()) for e in (plain.images, plain.texts) if e.log_var is not None)
    for i, j in ((0, 0), (3, 8), (5, 2)):
        pair = Gaussians(*(part[[i]] for part in x)), Gaussians(*(part[[j]] for part in y))
        assert float(found.score[i, j]) == pytest.approx(float(cosine_moments(*pair).mean), rel=1e-4)
    rows, cols = torch.arange(10), torch.arange(10)
    torch.testing.assert_close(found.uncertainty(rows, cols), plain.uncertainty(rows, cols), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_uncertainty_grows_off_the_training_data(
    model: MatchingModel, posthoc: PostHocUncertainty, pairs: PairSet, kind: Laplace
) -> None:
    scorer = PostHocScorer(model, posthoc, kind=kind, device="cpu")
    generator = torch.Generator().manual_seed(0)
    images, texts = pairs.images[pairs.caption_image], pairs.texts
    known = scorer.score_pairs(images, texts).uncertainty
    strange = [torch.randn(x.shape, generator=generator) * x.std() + x.mean() for x in (images, texts)]
    noise = scorer.score_pairs(*strange).uncertainty
    assert known is not None
    assert noise is not None
    assert float(noise.median()) > 1.1 * float(known.median())


def test_what_is_saved_is_read_again(
    model: MatchingModel, posthoc: PostHocUncertainty, unseen: PairSet, tmp_path: Path
) -> None:
    posthoc.save(tmp_path / "posthoc.safetensors")
    again = PostHocUncertainty.load(tmp_path / "posthoc.safetensors")
    assert (again.image.precision, again.text.precision) == (posthoc.image.precision, posthoc.text.precision)
    rows, cols = torch.arange(20), torch.arange(20)
    old, new = (
        PostHocScorer(model, p, device="cpu").score_set(unseen).uncertainty(rows, cols) for p in (posthoc, again)
    )
    assert old is not None
    assert new is not None
    assert torch.equal(old, new)


def test_it_belongs_to_its_weights(model: MatchingModel, posthoc: PostHocUncertainty, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="other weights"):
        PostHocScorer(untrained("sigmoid"), posthoc, device="cpu")
    model.save_pretrained(tmp_path)
    PostHocScorer(MatchingModel.from_pretrained(tmp_path), posthoc, device="cpu")
    with pytest.raises(DataError, match="holds no post-hoc uncertainty"):
        PostHocUncertainty.load(tmp_path / "model.safetensors")


def test_the_same_seed_gives_the_same_posterior(
    model: MatchingModel, posthoc: PostHocUncertainty, pairs: PairSet
) -> None:
    again = PostHocUncertainty.fit(model, pairs, batch_size=50, device="cpu")
    assert torch.equal(again.image.factors.outputs, posthoc.image.factors.outputs)
    assert torch.equal(again.text.factors.outputs, posthoc.text.factors.outputs)
    assert not model.image_head.last._forward_pre_hooks


def test_scores_that_are_no_cosines_are_refused(pairs: PairSet) -> None:
    with pytest.raises(UsageError, match="does not score by a cosine"):
        PostHocUncertainty.fit(untrained("vacsr"), pairs, device="cpu")


def test_two_networks_are_refused() -> None:
    method = Sigmoid(SigmoidConfig(), dim=8)
    method.networks = 2  # type: ignore[assignment]
    config = BackboneConfig(head=HeadConfig(kind="linear", dim=3))
    with pytest.raises(UsageError, match=r"one network.*evaluate\.posthoc=cosine"):
        check_posthoc(MatchingModel.build(method, config, image_dim=4, text_dim=5))


TINY = "tiny:width=16,depth=1,text_depth=1,heads=2,size=32"


def towers(pooling: Any, pairs: Any) -> MatchingModel:
    config = BackboneConfig(spec=TINY, pooling=pooling, head=HeadConfig(dim=8))
    return MatchingModel.build(method_config({"name": "infonce"}), config, seed=0, fit=pairs).eval()


def test_towers_whose_pooling_comes_before_the_head_work_and_gpo_is_refused() -> None:
    photos = load_pairs("scenes:images=12,held_out=2,per_image=2,size=32", split="train")
    model = towers("mean", photos)
    scorer = PostHocScorer(model, PostHocUncertainty.fit(model, photos, batch_size=8, device="cpu"), device="cpu")
    every = torch.arange(12)
    sigma = scorer.score_set(photos).uncertainty(every, every)
    alone = scorer.score_all([photos.photos.open(5)], [photos.captions[5]])  # type: ignore[union-attr,index]
    one = alone.uncertainty(torch.tensor([0]), torch.tensor([0]))
    assert sigma is not None
    assert one is not None
    assert float(one) == pytest.approx(float(sigma[5]), rel=1e-3)
    with pytest.raises(UsageError, match=r"backbone\.pooling=mean"):
        check_posthoc(towers("gpo", photos))
