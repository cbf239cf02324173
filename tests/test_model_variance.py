"""Where variances come from: heads on cached features, a second last block and heads on towers."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from vacsr.backbones.augment import Mixture, Partners
from vacsr.backbones.towers import TowerBackbone
from vacsr.config import AugmentConfig, BackboneConfig, HeadConfig, TowersConfig, TrainConfig
from vacsr.config.io import method_config
from vacsr.data import PhotoSet, load_pairs
from vacsr.model import MatchingModel
from vacsr.noise import RowNoise, Stream
from vacsr.train import fit

HELPERS = runpy.run_path(str(Path(__file__).parent / "backbones" / "conftest.py"))
STILL = AugmentConfig(crop=(1.0, 1.0), flip=0.0, image_tokens=0.0, text_tokens=0.0)
TINY = "tiny:width=16,depth=2,text_depth=2,heads=2,size=32"


@pytest.fixture(scope="module")
def pairs() -> PhotoSet:
    found = load_pairs("scenes:images=8,held_out=2,per_image=2,size=32", split="train")
    assert isinstance(found, PhotoSet)
    return found


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return HELPERS["clip_folder"](tmp_path_factory.mktemp("towers") / "small-clip")  # type: ignore[no-any-return]


def config(kind: str, clip: Path, **fields: Any) -> BackboneConfig:
    spec = TINY if kind == "tiny" else f"clip:{clip}"
    return BackboneConfig(**{"spec": spec, "head": HeadConfig(kind="linear", dim=8), **fields})


def build(backbone: BackboneConfig, pairs: PhotoSet | None = None, method: Any = "pcmepp") -> MatchingModel:
    return MatchingModel.build(method_config(method), backbone, image_dim=6, text_dim=4, fit=pairs)


def towers(model: MatchingModel) -> TowerBackbone:
    assert isinstance(model.backbone, TowerBackbone)
    return model.backbone


def inputs(model: MatchingModel, pairs: PhotoSet) -> tuple[torch.Tensor, torch.Tensor]:
    photos = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return photos, towers(model).tokenize(pairs.captions[:4])


# ----------------------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize(("size", "total"), [("vit-b32", 163_537_026), ("vit-b16", 161_880_450)])
def test_as_many_parameters_as_the_public_model(size: str, total: int) -> None:
    head = HeadConfig(kind="linear", dim=1024)
    with torch.device("meta"):
        model = build(BackboneConfig(spec=f"clip:{size}", weights="random", head=head))
    assert model.count_parameters() == total


def test_other_methods_have_none_of_it(pairs: PhotoSet) -> None:
    names = set(build(config("tiny", Path()), pairs, "sigmoid").state_dict())
    more = set(build(config("tiny", Path()), pairs).state_dict()) - names
    assert all("variance" in name for name in more - {"method.affine"})
    assert not any("variance" in name for name in names)


# --------------------------------------------------------------------------------------------------------- features


def test_features_get_a_head_for_variances() -> None:
    model = build(BackboneConfig(head=HeadConfig(dim=8, dropout=0.5)), method={"name": "pcme", "log_var_start": -4.0})
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    embedded = model.embed_images(x)
    assert embedded.log_var is not None
    assert embedded.log_var.shape == embedded.mean.shape == (64, 8)
    assert model.image_variance is not None
    raw = model.image_variance.head(model.backbone.image(x))
    torch.testing.assert_close(embedded.log_var, -4.0 + 0.01 * functional.layer_norm(raw, (8,)))
    noise, _ = model.dropout_noise(seed=0, step=torch.tensor(0), rows=torch.arange(64))
    assert not torch.equal(model.embed_images(x, noise).log_var, embedded.log_var)  # type: ignore[arg-type]
    assert {"image_variance.head.last.bias", "text_variance.head.last.bias"} <= set(dict(model.named_parameters()))


# ----------------------------------------------------------------------------------------------------------- towers


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["tiny", "clip"])
def test_a_branch_sees_the_input_of_the_last_block_and_skips_the_final_norm(
    pairs: PhotoSet, clip_folder: Path, kind: str, checkpointing: bool
) -> None:
    """Also of texts, whose means pass the norm: as in PCME and PCME++."""
    model = build(config(kind, clip_folder, checkpointing=checkpointing, variance_block="copy"), pairs)
    photos, texts = inputs(model, pairs)
    sides = (
        (towers(model).image, towers(model).encode_images(photos)),
        (
            towers(model).text,
            towers(model).encode_texts(texts),
        ),
    )
    for tower, tokens in sides:
        assert tokens.spread is not None
        torch.testing.assert_close(tower.finish(tokens.spread), tokens.values)
    assert not torch.allclose(sides[1][1].spread, sides[1][1].values)  # type: ignore[arg-type]
    for branch in (towers(model).image_variance, towers(model).text_variance):
        assert branch is not None
        with torch.no_grad():
            for parameter in branch.parameters():
                parameter.add_(0.1)
    for tokens in (towers(model).encode_images(photos), towers(model).encode_texts(texts)):
        assert tokens.spread is not None
        assert not torch.allclose(tokens.spread, tokens.values), "its weights are its own"


@pytest.mark.parametrize("kind", ["tiny", "clip"])
def test_means_are_those_of_a_model_without_variances(pairs: PhotoSet, clip_folder: Path, kind: str) -> None:
    with_variance, without = (build(config(kind, clip_folder), pairs, name) for name in ("pcmepp", "sigmoid"))
    photos, texts = inputs(without, pairs)
    assert torch.equal(with_variance.embed_images(photos).mean, without.embed_images(photos).mean)
    assert torch.equal(with_variance.embed_texts(texts).mean, without.embed_texts(texts).mean)


@pytest.mark.parametrize("kind", ["tiny", "clip"])
def test_every_part_of_the_path_learns(pairs: PhotoSet, clip_folder: Path, kind: str) -> None:
    """Image and text branch, their heads and poolings, and below them the towers."""
    model = build(config(kind, clip_folder), pairs)
    photos, texts = inputs(model, pairs)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # tiny blocks begin as the identity, through which little flows back
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    total = sum((x.log_var**2).sum() for x in (model.embed_images(photos), model.embed_texts(texts)))  # type: ignore[operator]
    total.backward()  # type: ignore[union-attr]
    silent = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    branch = {name for name, _ in model.named_parameters() if "variance" in name}
    # attention is blind to a constant added to all keys
    assert {name for name in silent & branch if "k_proj.bias" not in name and "gru.bias" not in name} == set()
    below = next(name for name, _ in model.named_parameters() if name.startswith("backbone.image."))
    assert below not in silent


def test_rates_and_rest(pairs: PhotoSet) -> None:
    model = build(config("tiny", Path()), pairs)
    groups = {group.name: group for group in model.param_groups(TowersConfig(image_lr=0.02, text_lr=0.3))}
    assert groups["image-variance"].lr_scale == pytest.approx(0.02 * 0.7)
    assert groups["text-variance"].lr_scale == pytest.approx(0.3 * 0.7)
    assert groups["image-variance"].lr_scale == groups["image-block-1"].lr_scale, "the rate of the block beside it"
    listed = [id(p) for group in groups.values() for p in group.params]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())
    branch: Any = towers(model).image_variance
    model.freeze(["image"])
    assert not any(p.requires_grad for p in branch.parameters())
    assert all(p.requires_grad for p in towers(model).text_variance.parameters())  # type: ignore[union-attr]
    model.freeze([])
    assert all(p.requires_grad for p in branch.parameters())


def test_the_block_that_is_watched_is_not_compiled(pairs: PhotoSet, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(config("tiny", Path()), pairs)
    backbone, compiled = towers(model), []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: compiled.append(self))
    model.compile_blocks(True)
    watched = [backbone.image.blocks()[-1], backbone.text.blocks()[-1]]
    assert not any(block is other for block in watched for other in compiled)
    assert [branch in compiled for branch in (backbone.image_variance, backbone.text_variance)] == [True, True]
    assert len(compiled) == 4


@pytest.mark.parametrize("method", ["pcme", "pcmepp", "daa"])
def test_towers_train_and_come_back_from_a_folder(pairs: PhotoSet, tmp_path: Path, method: str) -> None:
    train = TrainConfig(epochs=2, batch_size=8, device="cpu", towers=TowersConfig(freeze_image=1))
    run = fit(method, pairs, train, backbone=config("tiny", Path()), progress=False)
    run.model.save_pretrained(tmp_path)
    again = MatchingModel.from_pretrained(tmp_path)
    photos, texts = inputs(run.model, pairs)
    with torch.no_grad():
        for ours, theirs in (
            (run.model.embed_images(photos), again.embed_images(photos)),
            (run.model.embed_texts(texts), again.embed_texts(texts)),
        ):
            assert torch.equal(ours.mean, theirs.mean)
            assert torch.equal(ours.log_var, theirs.log_var)  # type: ignore[arg-type]
    fresh = build(config("tiny", Path()), pairs, method).state_dict()
    moved = [name for name, x in again.state_dict().items() if "variance" in name and not torch.equal(x, fresh[name])]
    assert any(name.startswith("backbone.image_variance") for name in moved)
    assert any(name.startswith("text_variance.pool") for name in moved)


def test_a_branch_starts_fresh_or_as_a_copy_of_the_tower_that_training_starts_from(
    pairs: PhotoSet, tmp_path: Path
) -> None:
    train = TrainConfig(epochs=1, batch_size=8, device="cpu", towers=TowersConfig(freeze_image=0))
    fit("sigmoid", pairs, train, backbone=config("tiny", Path()), progress=False).model.save_pretrained(tmp_path)
    model = build(config("tiny", Path(), start=str(tmp_path), variance_block="copy"), pairs)
    branch: Any = towers(model).image_variance
    for ours, theirs in zip(branch.parameters(), towers(model).image.blocks()[-1].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    fresh: Any = towers(build(config("tiny", Path(), start=str(tmp_path)), pairs)).image_variance
    assert not torch.equal(fresh.inputs.weight, branch.inputs.weight)
    assert not fresh.mlp[2].weight.any()  # a tiny block begins as the identity
    assert torch.equal(fresh.attention_norm.weight, torch.ones(len(fresh.attention_norm.weight)))


@pytest.mark.parametrize(("method", "norm"), [("pcme", True), ("daa", True), ("pcmepp", False)])
def test_pcme_alone_normalises_its_log_variances(method: str, norm: bool) -> None:
    model = build(BackboneConfig(head=HeadConfig(dim=8)), method=method)
    for head in (model.image_variance, model.text_variance):
        assert head is not None
        assert isinstance(head.norm, nn.LayerNorm) == norm
        if norm:
            assert torch.equal(head.norm.weight, torch.full((8,), 0.01))
            assert torch.equal(head.norm.bias, torch.full((8,), -8.0))


def test_a_fresh_branch_of_clip_is_not_the_last_block(clip_folder: Path, pairs: PhotoSet) -> None:
    backbone = towers(build(config("clip", clip_folder), pairs))
    for tower, branch in ((backbone.image, backbone.image_variance), (backbone.text, backbone.text_variance)):
        last = dict(tower.blocks()[-1].named_parameters())
        for name, parameter in branch.named_parameters():  # type: ignore[union-attr]
            assert parameter.shape == last[name].shape
            assert parameter.ndim == 1 or not torch.equal(parameter, last[name])


# ----------------------------------------------------------------------------------------------------------- mixing


def partners(own: list[float], rows: torch.Tensor, images: torch.Tensor | None = None) -> Partners:
    count = len(own)
    nothing = torch.zeros(count, 4, dtype=torch.int64)
    return Partners(Mixture(torch.tensor(own), torch.zeros(count, dtype=torch.bool), nothing), rows, images)


def test_photos_are_blended_as_the_tower_sees_them(pairs: PhotoSet) -> None:
    model = build(config("tiny", Path(), augment=STILL), pairs)
    photos, _ = inputs(model, pairs)
    noise, _ = model.dropout_noise(seed=0, step=torch.tensor(0), rows=torch.arange(4))
    own = [0.25, 1.0, 0.5, 0.75]
    found = towers(model).encode_images(photos, noise, partners(own, torch.arange(4).flip(0)))
    seen = towers(model).transform.normalize(photos)
    by_hand = torch.stack([own[n] * seen[n] + (1 - own[n]) * seen[3 - n] for n in range(4)])
    torch.testing.assert_close(found.values, towers(model).image(by_hand))


def test_a_partner_from_elsewhere_is_cropped_as_it_is_there(pairs: PhotoSet) -> None:
    """Half a batch with its partners brought along is the half of the whole batch."""
    model = build(config("tiny", Path()), pairs)
    photos, _ = inputs(model, pairs)
    whole_noise = RowNoise(0, torch.tensor(3), torch.arange(4), Stream.IMAGE)
    own, places = [0.25, 1.0, 0.5, 0.75], torch.arange(4)
    whole = towers(model).encode_images(photos, whole_noise, partners(own, places.flip(0)))
    half_noise = RowNoise(0, torch.tensor(3), places[2:], Stream.IMAGE)
    brought = partners(own[2:], places.flip(0)[2:], photos.flip(0)[2:])
    half = towers(model).encode_images(photos[2:], half_noise, brought)
    torch.testing.assert_close(half.values, whole.values[2:])
