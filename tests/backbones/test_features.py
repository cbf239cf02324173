from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

import pytest
import torch

from vacsr.backbones import SCHEMES, Backbone, Scheme, Source, Tokens, build_pooling, load_backbone
from vacsr.backbones.features import FeatureScaling
from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.errors import ShapeMismatch, UsageError
from vacsr.model import MatchingModel


def features(rows: int = 50, dim: int = 4) -> torch.Tensor:
    x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(0))
    return x * torch.tensor([0.01, 1.0, 30.0, 5.0])[:dim] + torch.tensor([4.0, 0.0, -7.0, 1.0])[:dim]


def test_standardize_is_the_training_sets_mean_and_deviation() -> None:
    scaling, train = FeatureScaling(4, "standardize"), features()
    scaling.fit(train)
    new = features(3) + 1
    got = scaling(new)
    for j in range(4):
        column = train[:, j].double().tolist()
        mean, deviation = statistics.fmean(column), statistics.pstdev(column)
        expected = [(x - mean) / deviation for x in new[:, j].double().tolist()]
        assert got[:, j].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-3)
    scaled = scaling(train)
    torch.testing.assert_close(scaled.mean(0), torch.zeros(4), atol=2e-4, rtol=0)
    torch.testing.assert_close(scaled.std(0, correction=0), torch.ones(4), atol=1e-3, rtol=0)


def test_a_dimension_that_never_varies_is_not_blown_up() -> None:
    train = features()
    train[:, 1] = 3.0
    scaling = FeatureScaling(4, "standardize")
    scaling.fit(train)
    assert float(scaling.factor[1]) == 1.0
    assert torch.isfinite(scaling(train)).all()
    assert scaling(train)[:, 1].unique().numel() == 1
    assert float(scaling(train + 0.5)[0, 1] - scaling(train)[0, 1]) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["unit", "none"])
def test_other_scalings_learn_nothing(kind: str) -> None:
    scaling, x = FeatureScaling(4, kind), features()
    before = scaling(x)
    scaling.fit(x)
    assert torch.equal(scaling(x), before)
    assert torch.equal(scaling.factor, torch.ones(4))


def test_unit_has_root_d_length_and_keeps_direction() -> None:
    x = features()
    got = FeatureScaling(4, "unit")(x)
    for row, out in zip(x.tolist(), got.tolist(), strict=True):
        length = math.sqrt(sum(value * value for value in row))
        assert out == pytest.approx([2 * value / length for value in row], rel=1e-5)
    assert torch.isfinite(FeatureScaling(4, "unit")(torch.zeros(1, 4))).all()


def test_none_is_the_identity() -> None:
    x = features()
    assert torch.equal(FeatureScaling(4, "none")(x), x)


@pytest.mark.parametrize("kind", ["standardize", "unit", "none"])
@pytest.mark.parametrize("dim", [1, 3, 5])
def test_a_wrong_dimension_is_refused(kind: str, dim: int) -> None:
    with pytest.raises(ShapeMismatch, match=f"dimension 4, these have {dim}") as caught:
        FeatureScaling(4, kind)(torch.ones(2, dim))
    assert caught.value.exit_code == 4


def test_the_statistics_travel_with_the_state() -> None:
    scaling, other = FeatureScaling(4, "standardize"), FeatureScaling(4, "standardize")
    scaling.fit(features())
    other.load_state_dict(scaling.state_dict())
    assert torch.equal(other(features(3)), scaling(features(3)))
    assert list(scaling.parameters()) == []


class Pairs(NamedTuple):
    images: torch.Tensor
    texts: torch.Tensor


def test_features_are_tokens_of_length_one() -> None:
    backbone = load_backbone(BackboneConfig(), image_dim=4, text_dim=2)
    images, texts = features(), features(30, 2)
    backbone.fit(Pairs(images, texts))
    alone = FeatureScaling(4, "standardize")
    alone.fit(images)
    tokens = backbone.encode_images(images)
    assert tokens.values.shape == (50, 1, 4)
    assert tokens.mask.all()
    for pooling in ("cls", "mean"):
        assert torch.equal(build_pooling(pooling)(tokens), alone(images))
    assert torch.equal(build_pooling(backbone.pooling)(backbone.encode_texts(texts)), FeatureScaling(2, "unit")(texts))
    assert list(build_pooling(backbone.pooling).parameters()) == []


def test_features_know_no_words() -> None:
    backbone = load_backbone(BackboneConfig(), image_dim=4, text_dim=2)
    assert backbone.cached
    with pytest.raises(UsageError, match="clip:"):
        backbone.tokenize(["a dog"])


def test_backbones_by_scheme() -> None:
    config = BackboneConfig(image_scaling="none", text_scaling="standardize")
    backbone = load_backbone(config, image_dim=3, text_dim=2)
    assert (backbone.image_dim, backbone.text_dim) == (3, 2)
    assert (backbone.image.kind, backbone.text.kind) == ("none", "standardize")
    with pytest.raises(UsageError, match="nowhere:x") as caught:
        load_backbone(BackboneConfig(spec="nowhere:x"), image_dim=3, text_dim=2)
    assert caught.value.exit_code == 2


class Doubled(Backbone):
    """A backbone of somebody else: features times two."""

    cached, name = True, "doubled"

    def __init__(self, config: BackboneConfig, source: Source) -> None:
        super().__init__(config, image_dim=source.image_dim, text_dim=source.text_dim)
        self.pooling = "mean"

    def encode_images(self, images: torch.Tensor, noise: Any = None, mix: Any = None) -> Tokens:
        first = torch.zeros(len(images), dtype=torch.int64)
        return Tokens(2 * images.unsqueeze(1), torch.ones(len(images), 1, dtype=torch.bool), first)

    encode_texts = encode_images


def test_a_backbone_is_one_class_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "doubled", Scheme("doubled:", Doubled, cached=True))
    config = BackboneConfig(spec="doubled:", head=HeadConfig(dim=8))
    model = MatchingModel.build(method_config("vacsr"), config, image_dim=4, text_dim=2)
    images = features()
    torch.testing.assert_close(
        model.embed_images(images).mean, torch.nn.functional.normalize(model.image_head(2 * images), dim=-1)
    )
    assert not model.has_towers
    with pytest.raises(UsageError, match="doubled:"):
        load_backbone(BackboneConfig(spec="nowhere:"))
