"""Cached features as tokens of length one, and a backbone of somebody else."""

import math
import statistics
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from vacsr.backbones import SCHEMES, Backbone, Scheme, Source, Tokens, build_pooling, load_backbone
from vacsr.backbones.base import FeatureScaling
from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.errors import ShapeMismatch, UsageError
from vacsr.model import MatchingModel


def features(rows: int = 50, dim: int = 4) -> Tensor:
    x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(0))
    return x * torch.tensor([0.01, 1.0, 30.0, 5.0])[:dim] + torch.tensor([4.0, 0.0, -7.0, 1.0])[:dim]


def test_standardize_is_the_training_sets_mean_and_deviation() -> None:
    scaling, train, new = FeatureScaling(4, "standardize"), features(), features(3) + 1
    scaling.fit(train)
    scaled = scaling(new)
    for j in range(4):
        column = train[:, j].double().tolist()
        mean, deviation = statistics.fmean(column), statistics.pstdev(column)
        expected = [(x - mean) / deviation for x in new[:, j].double().tolist()]
        assert scaled[:, j].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-3)
    other = FeatureScaling(4, "standardize")
    other.load_state_dict(scaling.state_dict())
    assert torch.equal(other(new), scaled), "the statistics travel with the state"
    assert list(scaling.parameters()) == []


def test_a_dimension_that_never_varies_is_not_blown_up() -> None:
    train, scaling = features(), FeatureScaling(4, "standardize")
    train[:, 1] = 3.0
    scaling.fit(train)
    assert scaling(train)[:, 1].unique().numel() == 1
    assert float(scaling(train + 0.5)[0, 1] - scaling(train)[0, 1]) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["unit", "none"])
def test_other_scalings_learn_nothing(kind: str) -> None:
    scaling, x = FeatureScaling(4, kind), features()
    scaling.fit(x)
    expected = x
    if kind == "unit":  # length √d, the direction stays
        expected = torch.tensor(
            [[2 * value / math.sqrt(sum(y * y for y in row)) for value in row] for row in x.tolist()]
        )
        assert torch.isfinite(scaling(torch.zeros(1, 4))).all()
    torch.testing.assert_close(scaling(x), expected)


@pytest.mark.parametrize("kind", ["standardize", "unit", "none"])
def test_a_wrong_dimension_is_refused(kind: str) -> None:
    with pytest.raises(ShapeMismatch, match="dimension 4, these have 3"):
        FeatureScaling(4, kind)(torch.ones(2, 3))


class Pairs(NamedTuple):
    images: Tensor
    texts: Tensor


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
    assert backbone.cached
    with pytest.raises(UsageError, match="clip:"):
        backbone.tokenize(["a dog"])


class Doubled(Backbone):
    """A backbone of somebody else: features times two."""

    cached, name = True, "doubled"

    def __init__(self, config: BackboneConfig, source: Source) -> None:
        super().__init__(config, image_dim=source.image_dim, text_dim=source.text_dim)
        self.pooling = "mean"

    def encode_images(self, images: Tensor, noise: Any = None, mix: Any = None) -> Tokens:
        first = torch.zeros(len(images), dtype=torch.int64)
        return Tokens(2 * images.unsqueeze(1), torch.ones(len(images), 1, dtype=torch.bool), first)

    encode_texts = encode_images


def test_a_backbone_is_one_class_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "doubled", Scheme("doubled:", Doubled, cached=True))
    config, images = BackboneConfig(spec="doubled:", head=HeadConfig(dim=8)), features()
    model = MatchingModel.build(method_config("vacsr"), config, image_dim=4, text_dim=2)
    expected = functional.normalize(model.image_head(2 * images), dim=-1)
    torch.testing.assert_close(model.embed_images(images).mean, expected)
    assert not model.has_towers
    with pytest.raises(UsageError, match=r"nowhere.*doubled:"):
        load_backbone(BackboneConfig(spec="nowhere:"))
