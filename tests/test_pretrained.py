"""Model folders: what is saved is loaded again, damage is named, and training can start from one."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import vacsr.pretrained as pretrained_module
from vacsr.config import AugmentConfig, BackboneConfig, HeadConfig
from vacsr.config.base import METHODS, method_entry
from vacsr.config.io import method_config
from vacsr.data import load_pairs
from vacsr.errors import DataError, UsageError
from vacsr.methods.sigmoid import Sigmoid, SigmoidConfig
from vacsr.model import MatchingModel
from vacsr.provenance import Provenance

BACKBONE = BackboneConfig(head=HeadConfig(dim=8, hidden=5, dropout=0.3))
method_entry("vacsr")  # registers the built-in methods


def build(method: str | dict[str, Any] = "vacsr", *, seed: int = 0) -> MatchingModel:
    origin = Provenance("clip:a", "224", "r1")
    return MatchingModel.build(method_config(method), BACKBONE, image_dim=6, text_dim=4, provenance=origin, seed=seed)


@pytest.mark.parametrize("method", [*METHODS["retrieval"], "vacsr-paper"])
def test_saved_and_read_it_is_the_same_model(method: str, tmp_path: Path) -> None:
    model = build(method, seed=3)
    model.save_pretrained(tmp_path / "run" / "model")
    again = MatchingModel.from_pretrained(tmp_path / "run")
    assert not again.training
    assert again.config == model.config
    assert again.method.config == model.method.config
    assert again.provenance == model.provenance
    ours, theirs = model.state_dict(), again.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    images, texts = torch.randn(5, 6), torch.randn(5, 4)
    with torch.no_grad():
        a, b = (m.method.score(m.embed_images(images), m.embed_texts(texts)) for m in (model, again))
    assert torch.equal(a, b)
    files = sorted(path.name for path in (tmp_path / "run" / "model").iterdir())
    assert files == ["README.md", "config.json", "model.safetensors"]


class Unregistered(Sigmoid):
    """A method that nobody could load again."""


def test_a_method_that_is_not_registered_cannot_be_saved(tmp_path: Path) -> None:
    model = MatchingModel.build(Unregistered(SigmoidConfig(), dim=8), BACKBONE, image_dim=6, text_dim=4)
    with pytest.raises(UsageError, match="@register"):
        model.save_pretrained(tmp_path / "m")
    assert not (tmp_path / "m").exists()


def edited(change: Any) -> Any:
    def apply(content: bytes) -> bytes:
        raw = json.loads(content)
        change(raw)
        return json.dumps(raw).encode()

    return apply


def of_another_model(content: bytes) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        build("sigmoid").save_pretrained(folder)
        return (Path(folder) / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", lambda b: b[: len(b) // 2]),
        ("config.json", lambda b: b""),
        ("config.json", lambda b: b"[]"),
        ("config.json", edited(lambda raw: raw.update(schema=99))),
        ("config.json", edited(lambda raw: raw.pop("schema"))),
        ("config.json", lambda b: b"\xff\xfe" + b),
        ("config.json", edited(lambda raw: raw.pop("method"))),
        ("config.json", edited(lambda raw: raw["provenance"].update(more="x"))),
        ("config.json", edited(lambda raw: raw.update(image_dim=7))),
        ("model.safetensors", lambda b: b[:-1]),
        ("model.safetensors", lambda b: b""),
        ("model.safetensors", lambda b: b[:-1] + bytes([b[-1] ^ 1])),
        ("model.safetensors", of_another_model),
    ],
)
def test_a_spoiled_file_is_named(name: str, change: Any, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    with pytest.raises(DataError, match=str(tmp_path)):
        MatchingModel.from_pretrained(tmp_path)


def test_missing_pieces(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such folder.* vacsr train"):
        MatchingModel.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "stopped").mkdir()
    (tmp_path / "stopped" / "config.yaml").touch()
    with pytest.raises(DataError, match=r"not finished.* --resume"):
        MatchingModel.from_pretrained(tmp_path / "stopped")
    with pytest.raises(DataError, match="no trained model in"):
        MatchingModel.build(method_config("vacsr"), backbone(start=str(tmp_path)))
    build().save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"model\.safetensors"):
        MatchingModel.from_pretrained(tmp_path / "m")


@pytest.mark.parametrize("fails", ["save_tensors", "json_text"])
def test_a_save_that_fails_leaves_the_model_that_was_there(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = build()
    old.save_pretrained(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr(pretrained_module, fails, full)
    with pytest.raises(OSError):  # noqa: PT011
        build({"name": "vacsr", "adapter": {"input_scale": "none"}}, seed=1).save_pretrained(tmp_path)
    monkeypatch.undo()
    again = MatchingModel.from_pretrained(tmp_path)
    assert torch.equal(again.image_head.last.weight, old.image_head.last.weight)


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
    state = second.state_dict()
    assert len(taken) > 20
    for name, tensor in taken.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=0)
    words = ["a red star above a boat", "zebra"]
    assert second.backbone.tokenize(words).equal(first.backbone.tokenize(words))
    fresh = MatchingModel.build(method_config("vacsr"), backbone(), seed=5, fit=load_pairs(WORLD, split="train"))
    assert [name for name in state if name.startswith("method.")] == [
        name for name in fresh.state_dict() if name.startswith("method.")
    ]


def test_a_saved_model_no_longer_needs_its_start(trained: tuple[Path, MatchingModel], tmp_path: Path) -> None:
    folder, _ = trained
    second = MatchingModel.build(method_config("vacsr"), backbone(start=str(folder)))
    second.save_pretrained(tmp_path / "second")
    shutil.rmtree(folder)
    again = MatchingModel.from_pretrained(tmp_path / "second")
    for name, tensor in second.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": HeadConfig(kind="linear", dim=12)}, "backbone.head is"),
        ({"spec": "clip:vit-b32"}, "backbone.spec is 'clip:vit-b32', but"),
        ({"image_size": 48}, "backbone.image_size is 48"),
        ({"pooling": "mean"}, "backbone.pooling is 'mean'"),
    ],
)
def test_other_towers_are_refused(trained: tuple[Path, MatchingModel], change: dict[str, Any], message: str) -> None:
    """Other augmentation is not."""
    config = backbone(start=str(trained[0])).model_copy(update={"augment": AugmentConfig(flip=0.0)})
    assert MatchingModel.build(method_config("vacsr"), config).config.augment.flip == 0.0
    with pytest.raises(UsageError, match=message):
        MatchingModel.build(method_config("vacsr"), config.model_copy(update=change))
