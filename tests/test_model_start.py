"""Training that starts from a trained model takes over everything but the method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.config import AugmentConfig, BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.data import load_pairs
from vacsr.errors import DataError, UsageError
from vacsr.model import MatchingModel

TINY = "tiny:width=16,depth=1,text_depth=1,heads=2,size=32"
WORLD = "scenes:images=8,held_out=2,size=32"


def backbone(dim: int = 8, **fields: str) -> BackboneConfig:
    return BackboneConfig(spec=TINY, head=HeadConfig(kind="linear", dim=dim), **fields)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, MatchingModel]:
    pairs = load_pairs(WORLD, split="train")
    model = MatchingModel.build(method_config("infonce"), backbone(), seed=3, fit=pairs)
    model.save_pretrained(tmp_path / "first" / "model")
    return tmp_path / "first", model


def test_towers_words_pooling_and_heads_are_taken_over(trained: tuple[Path, MatchingModel]) -> None:
    folder, first = trained
    other = load_pairs("scenes:images=4,held_out=2,size=32,seed=9", split="train")
    second = MatchingModel.build(method_config("vacsr"), backbone(start=str(folder)), seed=5, fit=other)
    taken = {name: tensor for name, tensor in first.state_dict().items() if not name.startswith("method.")}
    found = second.state_dict()
    assert len(taken) > 20
    for name, tensor in taken.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    words = ["a red star above a boat", "zebra"]
    assert second.backbone.tokenize(words).equal(first.backbone.tokenize(words))
    fresh = MatchingModel.build(method_config("vacsr"), backbone(), seed=5, fit=load_pairs(WORLD, split="train"))
    assert [name for name in found if name.startswith("method.")] == [
        name for name in fresh.state_dict() if name.startswith("method.")
    ]


def test_a_saved_model_no_longer_needs_its_start(trained: tuple[Path, MatchingModel], tmp_path: Path) -> None:
    folder, _ = trained
    second = MatchingModel.build(method_config("vacsr"), backbone(start=str(folder)))
    second.save_pretrained(tmp_path / "second")
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    again = MatchingModel.from_pretrained(tmp_path / "second")
    for name, tensor in second.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head": HeadConfig(kind="linear", dim=12)}, "backbone.head is"),
        ({"spec": "clip:vit-b32"}, "backbone.spec is 'clip:vit-b32', the model in"),
        ({"image_size": 48}, "backbone.image_size is 48"),
        ({"pooling": "mean"}, "backbone.pooling is 'mean'"),
    ],
)
def test_other_towers_are_refused(trained: tuple[Path, MatchingModel], change: dict[str, Any], said: str) -> None:
    config = backbone(start=str(trained[0])).model_copy(update=change)
    with pytest.raises(UsageError, match=said):
        MatchingModel.build(method_config("vacsr"), config)


def test_other_augmentation_is_not(trained: tuple[Path, MatchingModel]) -> None:
    config = backbone(start=str(trained[0])).model_copy(update={"augment": AugmentConfig(flip=0.0)})
    assert MatchingModel.build(method_config("vacsr"), config).config.augment.flip == 0.0


def test_no_model_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no trained model in"):
        MatchingModel.build(method_config("vacsr"), backbone(start=str(tmp_path)))
