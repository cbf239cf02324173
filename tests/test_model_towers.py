"""A model with towers in a folder: the same scores again, and no folder but its own is needed."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from vacsr.backbones.towers import TowerBackbone
from vacsr.config import BackboneConfig, HeadConfig, TrainConfig
from vacsr.config.io import method_config
from vacsr.data import PhotoSet, load_pairs
from vacsr.errors import DataError, UsageError
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer
from vacsr.train import fit

HELPERS = runpy.run_path(str(Path(__file__).parent / "backbones" / "conftest.py"))
HEAD = HeadConfig(dim=8)
TINY = BackboneConfig(spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32", head=HEAD)


@pytest.fixture(scope="module")
def pairs() -> PhotoSet:
    found = load_pairs("scenes:images=8,held_out=2,per_image=2,size=32", split="train")
    assert isinstance(found, PhotoSet)
    return found


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return HELPERS["clip_folder"](tmp_path_factory.mktemp("towers") / "small-clip")  # type: ignore[no-any-return]


def backbone(kind: str, clip: Path, **fields: Any) -> BackboneConfig:
    config = TINY if kind == "tiny" else BackboneConfig(spec=f"clip:{clip}", head=HEAD)
    return config.model_copy(update=fields)


def trained(pairs: PhotoSet, config: BackboneConfig, method: str = "vacsr") -> MatchingModel:
    """After two steps, so that no weight is what the seed gave."""
    return fit(method, pairs, TrainConfig(epochs=1, batch_size=8, device="cpu"), backbone=config, progress=False).model


@pytest.mark.parametrize("pooling", ["gpo", "mean", "cls"])
@pytest.mark.parametrize("kind", ["tiny", "clip"])
def test_a_saved_model_scores_the_same(
    pairs: PhotoSet, clip_folder: Path, tmp_path: Path, kind: str, pooling: str
) -> None:
    model = trained(pairs, backbone(kind, clip_folder, pooling=pooling))
    scorer = PairScorer(model, device="cpu")
    before = scorer.score_set(pairs)
    rows = torch.arange(8)
    uncertainty = before.uncertainty(rows, rows)
    model.save_pretrained(tmp_path / "model")
    again = PairScorer.from_pretrained(tmp_path, device="cpu").score_set(pairs)
    assert torch.equal(again.score, before.score)
    assert uncertainty is not None
    assert torch.equal(again.uncertainty(rows, rows), uncertainty)  # type: ignore[arg-type]


@pytest.mark.parametrize("output", ["hidden", "norm", "projected"])
def test_every_output_of_clip_comes_back(pairs: PhotoSet, clip_folder: Path, tmp_path: Path, output: str) -> None:
    config = backbone("clip", clip_folder, image_output=output, text_output=output, image_size=24, context=12)
    model = trained(pairs, config, "sigmoid")
    expected = PairScorer(model, device="cpu").score_set(pairs).score
    model.save_pretrained(tmp_path)
    assert torch.equal(PairScorer.from_pretrained(tmp_path, device="cpu").score_set(pairs).score, expected)


def test_the_original_weights_are_not_needed(pairs: PhotoSet, clip_folder: Path, tmp_path: Path) -> None:
    """Nor the folder's name: the assets hold configuration and tokenizer, and no path of this machine."""
    folder = Path(shutil.copytree(clip_folder, tmp_path / "original"))
    model = trained(pairs, backbone("clip", folder))
    expected = PairScorer(model, device="cpu").score_all([pairs.photos.open(0)], ["a red thing"]).score
    model.save_pretrained(tmp_path / "model")
    shutil.rmtree(folder)
    found = PairScorer.from_pretrained(tmp_path / "model", device="cpu").score_all(
        [pairs.photos.open(0)], ["a red thing"]
    )
    assert torch.equal(found.score, expected)
    for path in (tmp_path / "model" / "backbone").rglob("*"):
        if path.is_file():
            assert str(tmp_path) not in path.read_text(encoding="utf-8"), path


def test_a_loaded_model_can_be_trained_on_and_saved_again(pairs: PhotoSet, tmp_path: Path) -> None:
    model = trained(pairs, TINY)
    model.save_pretrained(tmp_path / "one")
    loaded = MatchingModel.from_pretrained(tmp_path / "one")
    loaded.save_pretrained(tmp_path / "two")
    for name in ("model.safetensors", "config.json", "backbone/backbone.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def assets(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "backbone").rglob("*") if path.is_file())


@pytest.mark.parametrize("harm", ["changed", "missing", "empty"])
@pytest.mark.parametrize("kind", ["tiny", "clip"])
def test_every_asset_is_guarded(pairs: PhotoSet, clip_folder: Path, tmp_path: Path, kind: str, harm: str) -> None:
    model = MatchingModel.build(method_config("sigmoid"), backbone(kind, clip_folder), fit=pairs)
    model.save_pretrained(tmp_path)
    names = [path.relative_to(tmp_path / "backbone").as_posix() for path in assets(tmp_path)]
    assert "backbone.json" in names
    assert len(names) > 1 or kind == "tiny", "the tokenizer's files"
    for path in assets(tmp_path):
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


def test_assets_cannot_be_struck_from_the_list(pairs: PhotoSet, tmp_path: Path) -> None:
    MatchingModel.build(method_config("sigmoid"), TINY, fit=pairs).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["assets"] = {}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(DataError, match="were not saved together"):
        MatchingModel.from_pretrained(tmp_path)


def test_a_half_written_save_is_not_seen(pairs: PhotoSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up in the last asset leaves the model that was there."""
    first = MatchingModel.build(method_config("sigmoid"), TINY, fit=pairs, seed=0)
    first.save_pretrained(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    original = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        if "backbone.json" in self.name:
            raise OSError(28, "No space left on device")
        return original(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(Exception, match="no space left"):
        MatchingModel.build(method_config("sigmoid"), TINY, fit=pairs, seed=1).save_pretrained(tmp_path)
    monkeypatch.undo()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_words_come_from_the_training_captions_alone(pairs: PhotoSet, tmp_path: Path) -> None:
    model = MatchingModel.build(method_config("sigmoid"), TINY, fit=pairs)
    assert isinstance(model.backbone, TowerBackbone)
    model.save_pretrained(tmp_path)
    loaded = MatchingModel.from_pretrained(tmp_path)
    assert isinstance(loaded.backbone, TowerBackbone)
    captions = [*pairs.captions[:3], "xylophone"]
    assert torch.equal(loaded.backbone.tokenize(captions), model.backbone.tokenize(captions))
    assert not (model.backbone.tokenize(captions[:3]) == 2).any(), "no training word is unknown"
    assert (model.backbone.tokenize(captions[3:]) == 2).any()


@pytest.mark.parametrize("kind", ["tiny", "clip"])
def test_the_same_seed_gives_the_same_model(pairs: PhotoSet, clip_folder: Path, kind: str) -> None:
    config = backbone(kind, clip_folder, **({"weights": "random"} if kind == "clip" else {}))
    built = [MatchingModel.build(method_config("vacsr"), config, fit=pairs, seed=seed) for seed in (3, 3, 4)]
    one, same, other = (model.state_dict() for model in built)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["backbone.image.model.embeddings.class_embedding"
                               if kind == "clip" else "backbone.image.start"],
                           other["backbone.image.model.embeddings.class_embedding"
                                 if kind == "clip" else "backbone.image.start"])  # fmt: skip


def test_pretrained_towers_are_the_checkpoints_own(pairs: PhotoSet, clip_folder: Path) -> None:
    """The heads depend on the seed, the towers do not."""
    built = [
        MatchingModel.build(method_config("vacsr"), backbone("clip", clip_folder), fit=pairs, seed=s) for s in (1, 2)
    ]
    one, two = (model.state_dict() for model in built)
    for name in one:
        if name.startswith("backbone."):
            assert torch.equal(one[name], two[name]), name
    assert not torch.equal(one["image_head.last.weight"], two["image_head.last.weight"])


def test_parameters_and_groups_are_the_same_set(pairs: PhotoSet, clip_folder: Path) -> None:
    """Nothing that learns is forgotten, and nothing is in two groups."""
    for kind in ("tiny", "clip"):
        model = MatchingModel.build(method_config("vacsr"), backbone(kind, clip_folder), fit=pairs)
        grouped = [id(parameter) for group in model.param_groups() for parameter in group.params]
        assert len(grouped) == len(set(grouped))
        assert set(grouped) == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


def test_photos_of_any_size_and_mode(pairs: PhotoSet) -> None:
    scorer = PairScorer(trained(pairs, TINY, "sigmoid"), device="cpu")
    odd = [
        Image.new("L", (1, 1), 7),
        Image.new("RGBA", (301, 5), (9, 9, 9, 0)),
        Image.new("P", (33, 47)),
        Image.new("1", (9, 9)),
    ]
    assert scorer.score_all(odd, ["a thing"]).score.isfinite().all()


def test_tiny_has_no_projection() -> None:
    with pytest.raises(UsageError, match="tiny: has no projection"):
        MatchingModel.build(method_config("sigmoid"), TINY.model_copy(update={"image_output": "projected"}))
