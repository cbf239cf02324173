"""Pretrained encoders without training: the cosines of transformers' own models, in every command that takes RUN."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from vacsr import fit
from vacsr.config import BackboneConfig, HeadConfig, TrainConfig
from vacsr.config.io import method_config
from vacsr.data import PhotoSet, load_pairs
from vacsr.embed import embed_pairs, embedding_config
from vacsr.errors import DataError, UsageError
from vacsr.model import MatchingModel, load_model
from vacsr.pretrained import encoder_spec
from vacsr.scoring import PairScorer
from vacsr.search import Searcher, open_index

from .conftest import Answer, byte_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
CAPTIONS = ["a dog", "two red boats"]


@pytest.fixture(scope="module")
def siglip_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("siglip") / "small-siglip"
    sides = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**sides, "vocab_size": 600, "max_position_embeddings": 64, "pad_token_id": 1, "projection_size": 32}
    config = transformers.SiglipConfig(vision_config={**sides, "image_size": 32, "patch_size": 8}, text_config=text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.SiglipModel(config)
        torch.nn.init.constant_(model.logit_scale, 2.0)
        torch.nn.init.constant_(model.logit_bias, -3.0)
        model.save_pretrained(folder)
    tokenizer = byte_tokenizer(transformers)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(1)
    tokenizer.save_pretrained(folder)
    return folder


def _pooled(output: Any) -> Tensor:
    """Features of transformers, which are wrapped in newer versions. -> [N, d], of length 1"""
    return functional.normalize(output if isinstance(output, Tensor) else output.pooler_output, dim=-1)


@torch.no_grad()
def test_clip_gives_its_own_cosines(clip_checkpoint: Path, photos: Tensor, tmp_path: Path) -> None:
    model, own = load_model(f"clip:{clip_checkpoint}"), transformers.CLIPModel.from_pretrained(clip_checkpoint).eval()
    encoded = transformers.AutoTokenizer.from_pretrained(clip_checkpoint)(CAPTIONS, padding=True, return_tensors="pt")
    image = _pooled(own.get_image_features(pixel_values=model.backbone.transform.normalize(photos)))
    text = _pooled(own.get_text_features(**encoded))
    torch.testing.assert_close(model.embed_images(photos).mean, image)
    torch.testing.assert_close(model.embed_texts(model.backbone.tokenize(CAPTIONS)).mean, text)
    assert model.untrained
    likelihood = model.method.likelihood()
    assert likelihood is not None
    assert likelihood.scale == pytest.approx(float(own.logit_scale.exp()))
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path)
    assert again.untrained
    assert torch.equal(again.embed_images(photos).mean, model.embed_images(photos).mean)


@torch.no_grad()
def test_siglip_pools_photos_and_fills_captions_as_in_its_training(siglip_checkpoint: Path, photos: Tensor) -> None:
    model, own = load_model(siglip_checkpoint), transformers.SiglipModel.from_pretrained(siglip_checkpoint).eval()
    torch.testing.assert_close(
        model.embed_images(photos).mean,
        _pooled(own.get_image_features(pixel_values=model.backbone.transform.normalize(photos))),
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(siglip_checkpoint)
    filled = tokenizer(CAPTIONS, padding="max_length", max_length=64, return_tensors="pt").input_ids
    text, short = (_pooled(own.get_text_features(input_ids=ids)) for ids in (filled, filled[:, :20]))
    torch.testing.assert_close(model.embed_texts(model.backbone.tokenize(CAPTIONS)).mean, text)
    assert not torch.allclose(text, short, atol=1e-3), "shorter rows are other texts to it"
    score = torch.tensor([0.1, 0.4])
    torch.testing.assert_close(model.method.grade(score), torch.sigmoid(score * own.logit_scale.exp() - 3.0))


def test_what_is_encoders_and_what_is_a_folder(
    clip_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert encoder_spec("runs/mine") is None, "where runs are written by default"
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert encoder_spec("towers:a,b") == "towers:a,b"
    assert encoder_spec(clip_checkpoint) == f"clip:{clip_checkpoint}"
    assert encoder_spec("models/mine") is None
    assert encoder_spec("models/mistyped") is None, "the folder models is here, so this is no id"
    with pytest.raises(DataError, match="no such folder: models/mistyped"):
        load_model("models/mistyped")


def test_two_towers_must_share_a_space(clip_checkpoint: Path, siglip_checkpoint: Path, tmp_path: Path) -> None:
    both = load_model(f"towers:{clip_checkpoint},{clip_checkpoint}")
    assert both.untrained
    with pytest.raises(UsageError, match="16 and 32"):
        load_model(f"towers:{clip_checkpoint},{siglip_checkpoint}")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=32, patch_size=16)).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="train heads"):
        load_model(f"towers:{tmp_path},{clip_checkpoint}")
    with pytest.raises(UsageError, match="pretrained encoders"):
        MatchingModel.from_encoders("tiny:")


def test_an_adapter_trains_in_the_encoders_own_space() -> None:
    config = BackboneConfig(head=HeadConfig(kind="none", dim=6))
    model = MatchingModel.build(method_config("vacsr"), config, image_dim=6, text_dim=6)
    assert not model.untrained
    assert not model.head_params()
    assert model.embed_images(torch.randn(3, 6)).mean.shape == (3, 6)
    with pytest.raises(UsageError, match=r"head\.dim"):
        MatchingModel.build(method_config("vacsr"), config, image_dim=6, text_dim=5)
    with pytest.raises(UsageError, match=r"head\.kind"):
        MatchingModel.build(method_config("pcmepp"), config, image_dim=6, text_dim=6)


def test_every_command_that_takes_a_run_takes_encoders(
    clip_checkpoint: Path, tmp_path: Path, vacsr: Callable[..., Answer]
) -> None:
    spec, run = "scenes:images=20,held_out=5,per_image=2,size=32", f"clip:{clip_checkpoint}"
    pairs = load_pairs(spec, split="all")
    index, out = f"exact:{tmp_path / 'index'}", tmp_path / "hits.json"
    added = vacsr("index", "add", index, "--run", run, "--pairs", spec)
    assert added.code == 0, added.err
    assert "without training" in added.err
    words = pairs.captions[0]
    assert vacsr("search", run, "--index", index, "--text", words, "--json", out).code == 0
    hits = json.loads(out.read_text())["hits"]
    best = PairScorer(load_model(run), device="cpu").score_set(pairs).topk(10, direction="t2i")
    assert [hit["id"] for hit in hits] == [pairs.image_ids[row] for row in best.index[0]]
    assert {hit["grade"] for hit in hits} == {None}, "a cosine is no probability"
    assert [hit["score"] for hit in hits] == pytest.approx(best.score[0].tolist(), abs=1e-5)
    pairs.photos.open(0).save(tmp_path / "photo.png")
    for argv in (
        ("score", run, "--image", tmp_path / "photo.png", "--text", words),
        ("evaluate", run, "--pairs", spec, "--split", "test"),
        ("audit", run, "--pairs", spec, "--out", tmp_path / "audit"),
    ):
        answer = vacsr(*argv)
        assert answer.code == 0, answer.err
        assert "without training" in answer.err
    assert vacsr(*argv, "--min-grade", 0.5).refused(2, "leave min_grade out")
    assert vacsr("evaluate", run).refused(2, "--pairs")
    assert vacsr("calibrate", run).refused(2, "--pairs")
    assert vacsr("calibrate", run, "--pairs", spec).refused(2, "--index", "--out")


def test_encoders_are_calibrated_to_a_file_or_with_an_index(
    clip_checkpoint: Path, tmp_path: Path, vacsr: Callable[..., Answer]
) -> None:
    spec, run, out = "scenes:images=20,held_out=45,per_image=2,size=32", f"clip:{clip_checkpoint}", tmp_path / "hits"
    index, file = f"exact:{tmp_path / 'index'}", tmp_path / "calibration.json"
    assert vacsr("index", "add", index, "--run", run, "--pairs", spec).code == 0

    def search(*words: object) -> Any:
        answer = vacsr("search", run, "--index", index, "--text", "a red boat", "--json", out, *words)
        assert answer.code == 0, answer.err
        found = json.loads(out.read_text())
        assert ("used without training" in answer.err) == (found["confident"] is None), "calibrated: no advice to do so"
        assert found["hits"][0]["metadata"].keys() == {"captions"}
        return found

    assert {hit["grade"] for hit in search()["hits"]} == {None}
    fitted = vacsr("calibrate", clip_checkpoint, "--pairs", spec, "--out", file)
    assert fitted.code == 0, fitted.err
    assert search()["confident"] is None, "the file is used where it is named"
    found = search("--calibration", file)
    assert all(0 <= hit["grade"] <= 1 for hit in found["hits"])
    assert found["confident"] is not None
    assert not found["guaranteed"], "the index holds more than the labelled images that were searched"
    fitted = vacsr("calibrate", run, "--pairs", spec, "--index", index)
    assert fitted.code == 0, fitted.err
    assert search()["guaranteed"], "fitted to this index, and stored with it"
    assert search("--calibration", file) == found


def test_a_model_on_features_embeds_photos_and_words_with_their_encoders(
    clip_checkpoint: Path, tmp_path: Path, vacsr: Callable[..., Answer]
) -> None:
    spec, moved = "scenes:images=20,held_out=5,per_image=2,size=32", tmp_path / "clip"
    shutil.copytree(clip_checkpoint, moved)
    features = embed_pairs(
        embedding_config(f"clip:{moved}"), spec, tmp_path / "features.safetensors", dtype=torch.float32, device="cpu"
    ).spec
    pairs, photos = load_pairs(features, split="all"), load_pairs(spec, split="all")
    config = TrainConfig(epochs=1, batch_size=8, device="cpu", eval_every=0, select="last")
    run = fit("vacsr", load_pairs(features, split="train"), config, backbone=BackboneConfig(head=HeadConfig(dim=8)))
    run.model.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").stat().st_size < 1 << 16, "without the encoders"
    scorer = PairScorer.from_pretrained(tmp_path / "model", device="cpu")
    assert isinstance(photos, PhotoSet)
    seen, cached = scorer.score_set(photos), scorer.score_set(pairs)
    torch.testing.assert_close(seen.score, cached.score, atol=1e-4, rtol=0)
    index = f"exact:{tmp_path / 'index'}"
    assert vacsr("index", "add", index, "--run", tmp_path / "model", "--pairs", features).code == 0
    found = vacsr("search", tmp_path / "model", "--index", index, "--text", photos.captions[0], "-k", 3)
    best = cached.topk(3, direction="t2i").index[0]
    assert [line.split()[1] for line in found.out.splitlines()[1:]] == [pairs.image_ids[row] for row in best]
    client = pytest.importorskip("starlette.testclient")
    from vacsr.serve import create_app

    with client.TestClient(create_app(Searcher(scorer, open_index(index)))) as page:
        hits = page.post("/search", json={"text": photos.captions[0], "k": 3}).json()["hits"]
    assert [hit["id"] for hit in hits] == [pairs.image_ids[row] for row in best]
    shutil.rmtree(moved)
    with pytest.raises(DataError, match="put the encoders where they were"):
        PairScorer.from_pretrained(tmp_path / "model", device="cpu").embed_texts(["a dog"])
