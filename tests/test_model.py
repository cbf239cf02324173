from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.data.pairs import Provenance
from vacsr.errors import ShapeMismatch, UsageError
from vacsr.model import MatchingModel

BACKBONE = BackboneConfig(head=HeadConfig(dim=8, hidden=5, dropout=0.3))
METHODS = ["vacsr", "vacsr-paper", "sigmoid", "infonce"]


def build(
    method: str | dict[str, Any] = "vacsr", *, seed: int = 0, backbone: BackboneConfig = BACKBONE
) -> MatchingModel:
    model = MatchingModel.build(
        method_config(method),
        backbone,
        image_dim=6,
        text_dim=4,
        provenance=Provenance("clip:a", "224", "r1"),
        seed=seed,
    )
    images, texts = inputs(20, seed=9)
    model.backbone.fit(SimpleNamespace(images=images, texts=texts))
    return model


def inputs(count: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(count, 6, generator=generator) + 1, torch.randn(count, 4, generator=generator)


# ----------------------------------------------------------------------------------------------------------- build


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_weights(method: str) -> None:
    one, same, other = build(method).state_dict(), build(method).state_dict(), build(method, seed=1).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_building_leaves_torchs_generators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(123)
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.random.get_rng_state()
    one = build(seed=5).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert seeded == []
    torch.manual_seed(1)
    two = build(seed=5).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one), "nor do weights depend on it"


def test_an_object_that_is_no_method_is_refused() -> None:
    with pytest.raises(UsageError, match="Linear"):
        MatchingModel.build(nn.Linear(2, 2), BACKBONE, image_dim=6, text_dim=4)


# ------------------------------------------------------------------------------------------------------- embeddings


def test_embeddings_are_scaled_projected_and_normalised() -> None:
    model, (images, texts) = build(), inputs(7)
    embedded = model.embed_images(images)
    assert embedded.log_var is None
    expected = functional.normalize(model.image_head(model.backbone.image(images)), dim=-1)
    torch.testing.assert_close(embedded.mean, expected)
    words = model.embed_texts(texts).mean
    torch.testing.assert_close(words, functional.normalize(model.text_head(model.backbone.text(texts)), dim=-1))
    torch.testing.assert_close(words.norm(dim=-1), torch.ones(7))


def test_dropout_only_with_noise_and_never_the_same_on_both_sides() -> None:
    model, (images, texts) = build().train(), inputs(7)
    assert torch.equal(model.embed_images(images).mean, model.embed_images(images).mean)
    image_noise, text_noise = model.dropout_noise(seed=0, step=torch.tensor(3), rows=torch.arange(7))
    assert not torch.allclose(model.embed_images(images, image_noise).mean, model.embed_images(images).mean)
    assert not torch.allclose(model.embed_texts(texts, text_noise).mean, model.embed_texts(texts).mean)
    assert not torch.equal(image_noise.uniform(5), text_noise.uniform(5))


@pytest.mark.parametrize("side", ["image", "text"])
def test_a_wrong_dimension_is_refused(side: str) -> None:
    model = build()
    with pytest.raises(ShapeMismatch, match="these have 5") as caught:
        (model.embed_images if side == "image" else model.embed_texts)(torch.ones(2, 5))
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_groups_cover_every_trainable_parameter_once(method: str, kind: str) -> None:
    model = build(method, backbone=BackboneConfig(head=HeadConfig(dim=8, kind=kind)))
    groups = model.param_groups()
    listed = [id(p) for group in groups for p in group.params]
    assert sorted(listed) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert len({group.name for group in groups}) == len(groups)
    for group in groups:
        assert all((p.ndim >= 2) == group.decay for p in group.params)


def test_fixed_scales_are_in_no_group() -> None:
    model = build({"name": "sigmoid", "learnable": False})
    assert {group.name for group in model.param_groups()} == {"heads", "heads-plain"}
