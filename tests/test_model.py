"""MatchingModel: seeds, embeddings and parameter groups; towers that come back from a folder; variances; mixing."""

import shutil
from pathlib import Path
from types import SimpleNamespace
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
from vacsr.errors import DataError
from vacsr.model import MatchingModel
from vacsr.noise import RowNoise, Stream
from vacsr.scoring import PairScorer
from vacsr.train import fit

FEATURES = BackboneConfig(head=HeadConfig(dim=8, hidden=5, dropout=0.3))
METHODS = ["vacsr", "vacsr-paper", "sigmoid", "infonce"]
STILL = AugmentConfig(crop=(1.0, 1.0), flip=0.0, image_tokens=0.0, text_tokens=0.0)
TINY = "tiny:width=16,depth=2,text_depth=2,heads=2,size=32"
both_kinds = pytest.mark.parametrize("kind", ["tiny", "clip"])


@pytest.fixture(scope="module")
def pairs() -> PhotoSet:
    pairs = load_pairs("scenes:images=8,held_out=2,per_image=2,size=32", split="train")
    assert isinstance(pairs, PhotoSet)
    return pairs


def config(kind: str, clip: Path, **fields: Any) -> BackboneConfig:
    spec = TINY if kind == "tiny" else f"clip:{clip}"
    return BackboneConfig(**{"spec": spec, "head": HeadConfig(kind="linear", dim=8), **fields})


def build(method: Any = "vacsr", backbone: BackboneConfig = FEATURES, **options: Any) -> MatchingModel:
    model = MatchingModel.build(method_config(method), backbone, image_dim=6, text_dim=4, **options)
    if model.backbone.cached:
        images, texts = features(20, seed=9)
        model.backbone.fit(SimpleNamespace(images=images, texts=texts))
    return model


def features(count: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(count, 6, generator=generator) + 1, torch.randn(count, 4, generator=generator)


def row_noise(count: int, kind: Stream = Stream.IMAGE) -> RowNoise:
    return RowNoise(0, torch.tensor(3), torch.arange(count), kind)


def towers(model: MatchingModel) -> TowerBackbone:
    assert isinstance(model.backbone, TowerBackbone)
    return model.backbone


def inputs(model: MatchingModel, pairs: PhotoSet) -> tuple[torch.Tensor, torch.Tensor]:
    photos = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return photos, towers(model).tokenize(pairs.captions[:4])


def trained(pairs: PhotoSet, backbone: BackboneConfig, method: str = "vacsr") -> MatchingModel:
    """After two steps, so that no weight is what the seed gave."""
    train = TrainConfig(epochs=1, batch_size=8, device="cpu", towers=TowersConfig(freeze_image=0))
    return fit(method, pairs, train, backbone=backbone, progress=False).model


@pytest.mark.parametrize("kind", ["features", "tiny", "clip"])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_weights(method: str, kind: str, pairs: PhotoSet, clip_checkpoint: Path) -> None:
    backbone = FEATURES if kind == "features" else config(kind, clip_checkpoint, weights="random")
    options = {} if kind == "features" else {"fit": pairs}
    one, same, other = (build(method, backbone, seed=seed, **options).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    for part in ("image_head.last.weight", *(["backbone.text.positions"] if kind == "tiny" else [])):
        assert not torch.equal(one[part], other[part])
    assert kind != "clip" or any(not torch.equal(one[n], other[n]) for n in one if n.startswith("backbone.image."))


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


def test_dropout_only_with_noise_and_never_the_same_on_both_sides() -> None:
    model, (images, texts) = build().train(), features(7)
    assert torch.equal(model.embed_images(images).mean, model.embed_images(images).mean)
    image_noise, text_noise = (row_noise(7, kind) for kind in (Stream.IMAGE, Stream.TEXT))
    assert not torch.allclose(model.embed_images(images, image_noise).mean, model.embed_images(images).mean)
    assert not torch.allclose(model.embed_texts(texts, text_noise).mean, model.embed_texts(texts).mean)
    assert not torch.equal(image_noise.uniform(5), text_noise.uniform(5))


def test_two_networks_drop_other_units() -> None:
    model, (images, texts) = build("ncr").train(), features(7)
    assert model.second is not None
    model.second.load_state_dict(
        {name: value for name, value in model.state_dict().items() if name in model.second.state_dict()}
    )
    for embed, inputs, noise in zip(
        (model.embed_images, model.embed_texts), (images, texts),
        (row_noise(7), row_noise(7, Stream.TEXT)), strict=True,
    ):  # fmt: skip
        first, second = embed(inputs).mean.chunk(2, dim=1)
        assert torch.equal(first, second), "with the same weights they agree"
        first, second = embed(inputs, noise).mean.chunk(2, dim=1)
        assert not torch.allclose(first, second)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["mlp", "linear", "tiny", "clip"])
def test_groups_cover_every_trainable_parameter_once(
    method: str, kind: str, pairs: PhotoSet, clip_checkpoint: Path
) -> None:
    if kind in ("mlp", "linear"):
        model = build(method, BackboneConfig(head=HeadConfig(dim=8, kind=kind)))
    else:
        model = build(method, config(kind, clip_checkpoint), fit=pairs)
    groups = model.param_groups()
    listed = [id(p) for group in groups for p in group.params]
    assert sorted(listed) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert len({group.name for group in groups}) == len(groups)
    for group in groups:
        assert all((p.ndim >= 2) == group.decay for p in group.params)


# ---------------------------------------------------------------------------------------------- towers in a folder


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *(("tiny", {"pooling": pooling}) for pooling in ("gpo", "mean", "cls")),
        ("clip", {"pooling": "gpo"}),
        *(
            ("clip", {"image_output": output, "text_output": output, "image_size": 24, "context": 12})
            for output in ("hidden", "norm", "projected")
        ),
    ],
)
def test_a_saved_model_scores_the_same(
    pairs: PhotoSet, clip_checkpoint: Path, tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    model = trained(pairs, config(kind, clip_checkpoint, **fields))
    rows = torch.arange(8)
    before = PairScorer(model, device="cpu").score_set(pairs)
    expected = before.score, before.uncertainty(rows, rows)
    model.save_pretrained(tmp_path / "model")
    again = PairScorer.from_pretrained(tmp_path, device="cpu").score_set(pairs)
    assert torch.equal(again.score, expected[0])
    assert torch.equal(again.uncertainty(rows, rows), expected[1])  # type: ignore[arg-type]


def test_the_original_weights_are_not_needed(pairs: PhotoSet, clip_checkpoint: Path, tmp_path: Path) -> None:
    """Nor the folder's name: the assets hold configuration and tokenizer, and no path of this machine."""
    folder = Path(shutil.copytree(clip_checkpoint, tmp_path / "original"))
    model = trained(pairs, config("clip", folder))
    expected = PairScorer(model, device="cpu").score_all([pairs.photos.open(0)], ["a red thing"]).score
    model.save_pretrained(tmp_path / "model")
    shutil.rmtree(folder)
    scorer = PairScorer.from_pretrained(tmp_path / "model", device="cpu")
    assert torch.equal(scorer.score_all([pairs.photos.open(0)], ["a red thing"]).score, expected)
    for path in (tmp_path / "model" / "backbone").rglob("*"):
        if path.is_file():
            assert str(tmp_path) not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("harm", ["changed", "missing", "empty"])
@both_kinds
def test_every_asset_is_guarded(pairs: PhotoSet, clip_checkpoint: Path, tmp_path: Path, kind: str, harm: str) -> None:
    model = build("sigmoid", config(kind, clip_checkpoint), fit=pairs)
    model.save_pretrained(tmp_path)
    assets = sorted(path for path in (tmp_path / "backbone").rglob("*") if path.is_file())
    assert tmp_path / "backbone" / "backbone.json" in assets
    assert len(assets) > 1 or kind == "tiny", "the tokenizer's files"
    for path in assets:
        whole = path.read_bytes()
        if harm == "missing":
            path.unlink()
        else:
            path.write_bytes(whole + b" " if harm == "changed" else b"")
        with pytest.raises(DataError, match="copy the model folder again") as caught:
            MatchingModel.from_pretrained(tmp_path)
        assert str(path) in str(caught.value)
        path.write_bytes(whole)
    MatchingModel.from_pretrained(tmp_path)


# -------------------------------------------------------------------------------------------------------- variances


@pytest.mark.parametrize(("size", "total"), [("vit-b32", 163_537_026), ("vit-b16", 161_880_450)])
def test_as_many_parameters_as_the_public_model(size: str, total: int) -> None:
    head = HeadConfig(kind="linear", dim=1024)
    with torch.device("meta"):
        model = build("pcmepp", BackboneConfig(spec=f"clip:{size}", weights="random", head=head))
    assert model.count_parameters() == total


def test_other_methods_have_none_of_it(pairs: PhotoSet) -> None:
    names, more = (set(build(name, config("tiny", Path()), fit=pairs).state_dict()) for name in ("sigmoid", "pcmepp"))
    assert all("variance" in name for name in more - names - {"method.affine"})
    assert not any("variance" in name for name in names)


@pytest.mark.parametrize(("method", "norm"), [("pcme", True), ("daa", True), ("pcmepp", False)])
def test_features_get_a_head_for_variances(method: str, norm: bool) -> None:
    """PCME alone normalises them."""
    model = build({"name": method, **({"log_var_start": -4.0} if method == "pcme" else {})})
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    embedded, head = model.embed_images(x), model.image_variance
    assert embedded.log_var is not None
    assert head is not None
    raw = head.head(model.backbone.image(x))
    start = -4.0 if method == "pcme" else -8.0
    expected = start + 0.01 * functional.layer_norm(raw, (8,)) if norm else raw
    torch.testing.assert_close(embedded.log_var, expected)
    assert {"image_variance.head.last.bias", "text_variance.head.last.bias"} <= set(dict(model.named_parameters()))


def test_variances_have_dropout_of_their_own() -> None:
    """A variance head with the weights of the other head gives the same vector, but loses other units."""
    model = build("pcmepp", BackboneConfig(head=HeadConfig(dim=8, dropout=0.5)))
    assert model.image_variance is not None
    model.image_variance.head.load_state_dict(model.image_head.state_dict())
    x, noise = torch.randn(64, 6), row_noise(64)
    still, dropped = model.eval().embed_images(x), model.train().embed_images(x, noise)
    torch.testing.assert_close(functional.normalize(still.log_var, dim=-1), still.mean)  # type: ignore[arg-type]
    assert not torch.isclose(functional.normalize(dropped.log_var, dim=-1), dropped.mean).all(dim=1).any()  # type: ignore[arg-type]


@pytest.mark.parametrize("checkpointing", [False, True])
@both_kinds
def test_a_branch_sees_the_input_of_the_last_block_and_skips_the_final_norm(
    pairs: PhotoSet, clip_checkpoint: Path, kind: str, checkpointing: bool
) -> None:
    """Also of texts, whose means pass the norm: as in PCME and PCME++."""
    model = build("pcmepp", config(kind, clip_checkpoint, checkpointing=checkpointing), fit=pairs)
    photos, texts = inputs(model, pairs)
    backbone = towers(model)
    branches = (backbone.image, backbone.image_variance), (backbone.text, backbone.text_variance)
    for tower, branch in branches:
        branch.load_state_dict(tower.blocks()[-1].state_dict())  # type: ignore[union-attr]
    sides = (backbone.image, backbone.encode_images(photos)), (backbone.text, backbone.encode_texts(texts))
    for tower, tokens in sides:
        assert tokens.spread is not None
        torch.testing.assert_close(tower.finish(tokens.spread), tokens.values)
    assert not torch.allclose(sides[1][1].spread, sides[1][1].values)  # type: ignore[arg-type]
    with torch.no_grad():
        for _, branch in branches:
            for parameter in branch.parameters():  # type: ignore[union-attr]
                parameter.add_(0.1)
    for tokens in (backbone.encode_images(photos), backbone.encode_texts(texts)):
        assert tokens.spread is not None
        assert not torch.allclose(tokens.spread, tokens.values), "its weights are its own"


@both_kinds
def test_means_are_those_of_a_model_without_variances(pairs: PhotoSet, clip_checkpoint: Path, kind: str) -> None:
    with_variance, without = (build(name, config(kind, clip_checkpoint), fit=pairs) for name in ("pcmepp", "sigmoid"))
    photos, texts = inputs(without, pairs)
    assert torch.equal(with_variance.embed_images(photos).mean, without.embed_images(photos).mean)
    assert torch.equal(with_variance.embed_texts(texts).mean, without.embed_texts(texts).mean)


def test_branches_have_the_rate_of_the_block_beside_them_and_freeze_with_it(pairs: PhotoSet) -> None:
    model = build("pcmepp", config("tiny", Path()), fit=pairs)
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
    model = build("pcmepp", config("tiny", Path()), fit=pairs)
    backbone, compiled = towers(model), []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: compiled.append(self))
    model.compile_blocks(True)
    watched = [backbone.image.blocks()[-1], backbone.text.blocks()[-1]]
    assert not any(block is other for block in watched for other in compiled)
    assert [branch in compiled for branch in (backbone.image_variance, backbone.text_variance)] == [True, True]
    assert len(compiled) == 4


@pytest.mark.parametrize("method", ["pcme", "pcmepp"])
def test_branches_train_and_come_back_from_a_folder(pairs: PhotoSet, tmp_path: Path, method: str) -> None:
    model = trained(pairs, config("tiny", Path()), method)
    model.save_pretrained(tmp_path)
    again = MatchingModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    fresh = build(method, config("tiny", Path()), fit=pairs).state_dict()
    for name in ("backbone.image_variance.inputs.weight", "text_variance.pool.score.weight"):
        assert not torch.equal(again[name], fresh[name])


def test_a_branch_starts_fresh_where_the_towers_are_trained(pairs: PhotoSet, tmp_path: Path) -> None:
    trained(pairs, config("tiny", Path()), "sigmoid").save_pretrained(tmp_path)
    model = towers(build("pcmepp", config("tiny", Path(), start=str(tmp_path)), fit=pairs))
    fresh: Any = model.image_variance
    last: Any = model.image.blocks()[-1]
    assert not torch.equal(fresh.inputs.weight, last.inputs.weight)
    assert not fresh.mlp[2].weight.any()  # a tiny block begins as the identity
    assert torch.equal(fresh.attention_norm.weight, torch.ones(len(fresh.attention_norm.weight)))


def test_a_fresh_branch_of_clip_is_not_the_last_block(clip_checkpoint: Path, pairs: PhotoSet) -> None:
    backbone = towers(build("pcmepp", config("clip", clip_checkpoint), fit=pairs))
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
    model = build("pcmepp", config("tiny", Path(), augment=STILL), fit=pairs)
    photos, _ = inputs(model, pairs)
    own = [0.25, 1.0, 0.5, 0.75]
    tokens = towers(model).encode_images(photos, row_noise(4), partners(own, torch.arange(4).flip(0)))
    seen = towers(model).transform.normalize(photos)
    by_hand = torch.stack([own[n] * seen[n] + (1 - own[n]) * seen[3 - n] for n in range(4)])
    torch.testing.assert_close(tokens.values, towers(model).image(by_hand))


def test_a_partner_from_elsewhere_is_cropped_as_it_is_there(pairs: PhotoSet) -> None:
    """Half a batch with its partners brought along is the half of the whole batch."""
    model = build("pcmepp", config("tiny", Path()), fit=pairs)
    photos, _ = inputs(model, pairs)
    own, rows = [0.25, 1.0, 0.5, 0.75], torch.arange(4)
    whole = towers(model).encode_images(photos, row_noise(4), partners(own, rows.flip(0)))
    half_noise = RowNoise(0, torch.tensor(3), rows[2:], Stream.IMAGE)
    brought = partners(own[2:], rows.flip(0)[2:], photos.flip(0)[2:])
    half = towers(model).encode_images(photos[2:], half_noise, brought)
    torch.testing.assert_close(half.values, whole.values[2:])
