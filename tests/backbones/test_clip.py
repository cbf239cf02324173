from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.backbones import TowerBackbone, build_pooling, load_backbone
from vacsr.backbones.heads import ProjectionHead
from vacsr.config import BackboneConfig, HeadConfig
from vacsr.errors import DataError, EnvironmentProblem, MissingExtra, UsageError

transformers = pytest.importorskip("transformers")

CAPTIONS = ["a dog", "two cats on a mat", "x"]


def load(folder: Path | str, **fields: Any) -> TowerBackbone:
    backbone = load_backbone(BackboneConfig.model_validate({"spec": f"clip:{folder}", **fields}))
    assert isinstance(backbone, TowerBackbone)
    return backbone


def count(module: torch.nn.Module) -> int:
    """All parameters that tokens pass."""
    unused = module.unused_params() if isinstance(module, TowerBackbone) else []
    return sum(p.numel() for p in module.parameters()) - sum(p.numel() for p in unused)


def test_parameters_of_vit_b32_are_the_papers() -> None:
    with torch.device("meta"):
        backbone = load("vit-b32", weights="random")
        heads = [ProjectionHead(dim, HeadConfig(kind="linear", dim=1024)) for dim in (768, 512)]
        pooling = [build_pooling("gpo"), build_pooling("gpo")]
    assert (backbone.image_dim, backbone.text_dim) == (768, 512)
    parts = backbone.tower_params()
    sides = [sum(p.numel() for group in (part.stem, *part.blocks) for _, p in group) for part in parts.values()]
    assert sides == [87_454_464, 63_165_952]
    assert count(backbone) + sum(map(count, (*heads, *pooling))) == 151_958_592
    assert [len(parts[side].blocks) for side in ("image", "text")] == [12, 12]
    assert backbone.transform.size == 224
    assert backbone.tokenizer.context == 77


def test_vit_b16_has_its_patches() -> None:
    with torch.device("meta"):
        backbone = load("vit-b16", weights="random", image_output="projected", text_output="projected")
        full = transformers.CLIPModel(transformers.CLIPConfig(vision_config={"patch_size": 16}))
    assert count(backbone) == count(full) - 1  # the logit scale
    assert (backbone.image_dim, backbone.text_dim) == (512, 512)


def test_tokens_are_transformers_own(clip_checkpoint: Path, photos: torch.Tensor) -> None:
    backbone, model = load(clip_checkpoint), transformers.CLIPModel.from_pretrained(clip_checkpoint).eval()
    pixels, texts = backbone.transform.normalize(photos), backbone.tokenize(CAPTIONS)
    image, text = backbone.encode_images(photos), backbone.encode_texts(texts)
    vision = model.vision_model(pixel_values=pixels, output_hidden_states=True)
    torch.testing.assert_close(image.values, vision.hidden_states[-1])
    assert image.mask.all()
    assert image.mask.shape == (4, 1 + 16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(clip_checkpoint)
    given = tokenizer(CAPTIONS, padding=True, return_tensors="pt")
    expected = model.text_model(**given)
    real = given["attention_mask"].bool()
    assert torch.equal(text.mask, real)
    torch.testing.assert_close(text.values[real], expected.last_hidden_state[real])
    torch.testing.assert_close(build_pooling("cls")(text), text.values[torch.arange(3), real.sum(1) - 1])


def test_outputs_and_what_is_left_out(clip_checkpoint: Path, photos: torch.Tensor) -> None:
    model = transformers.CLIPModel.from_pretrained(clip_checkpoint).eval()
    norm = load(clip_checkpoint, image_output="norm", text_output="hidden")
    projected = load(clip_checkpoint, image_output="projected", text_output="projected")
    pixels, texts = norm.transform.normalize(photos), norm.tokenize(CAPTIONS)
    vision = model.vision_model(pixel_values=pixels)
    after = model.vision_model.post_layernorm(vision.last_hidden_state)
    torch.testing.assert_close(norm.encode_images(photos).values, after)
    torch.testing.assert_close(projected.encode_images(photos).values, model.visual_projection(after))
    before = norm.encode_texts(texts)
    finished = model.text_projection(model.text_model.final_layer_norm(before.values))
    torch.testing.assert_close(projected.encode_texts(texts).values, finished)
    features = model.get_text_features(torch.where(texts >= 0, texts, 0).long()).pooler_output
    torch.testing.assert_close(build_pooling("cls")(projected.encode_texts(texts)), features)
    assert count(projected) == count(model) - 1
    assert count(load(clip_checkpoint)) == count(model) - 1 - 2 * 32 - 16 * (32 + 24)


def test_training_mode_draws_nothing_of_its_own(clip_checkpoint: Path, photos: torch.Tensor) -> None:
    backbone = load(clip_checkpoint)
    assert torch.equal(backbone.train().encode_images(photos).values, backbone.eval().encode_images(photos).values)


@pytest.mark.parametrize("capturing", [False, True])
def test_blocks_get_the_same_mask_while_a_graph_is_captured(
    clip_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    """A mask that appears only then would have a compiled block compiled again in the middle of the capture."""
    backbone, calls = load(clip_checkpoint), []
    for block in backbone.text.blocks():
        block.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    texts = backbone.tokenize(CAPTIONS)
    backbone.encode_texts(texts)
    causal = torch.ones(texts.shape[1], texts.shape[1], dtype=torch.bool).tril()
    for args, kwargs in calls:
        masks = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.ndim == 4]
        assert len(masks) == 1
        assert torch.equal(masks[0][0, 0], causal)
    assert len(calls) == len(backbone.text.blocks())


def test_padding_never_matters(clip_checkpoint: Path) -> None:
    backbone = load(clip_checkpoint)
    texts = backbone.tokenize(CAPTIONS)
    wide = torch.nn.functional.pad(texts, (0, 20 - texts.shape[1]), value=-1)
    short, long = backbone.encode_texts(texts), backbone.encode_texts(wide)
    assert torch.equal(short.summary, long.summary)
    torch.testing.assert_close(short.values[short.mask], long.values[long.mask])


def test_another_image_size_is_the_models_own_interpolation(clip_checkpoint: Path) -> None:
    backbone = load(clip_checkpoint, image_size=48)
    model = transformers.CLIPModel.from_pretrained(clip_checkpoint).eval()
    large = torch.randint(0, 256, (2, 3, 48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = model.vision_model(pixel_values=backbone.transform.normalize(large), interpolate_pos_encoding=True)
    torch.testing.assert_close(backbone.encode_images(large).values, expected.last_hidden_state)
    with pytest.raises(UsageError, match="40 or 48"):
        load(clip_checkpoint, image_size=42)


@pytest.mark.parametrize("output", ["hidden", "norm"])
def test_siglip_tokens_and_its_filled_captions(tmp_path: Path, photos: torch.Tensor, output: str) -> None:
    sides = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.SiglipConfig(
        vision_config={**sides, "image_size": 32, "patch_size": 16},
        text_config={**sides, "vocab_size": 300, "max_position_embeddings": 12, "pad_token_id": 1},
    )
    transformers.SiglipModel(config).save_pretrained(tmp_path)
    model = transformers.SiglipModel.from_pretrained(tmp_path).eval()
    backbone = load(tmp_path, weights="random", image_output=output)
    backbone.image.model.load_state_dict(model.vision_model.state_dict(), strict=False)
    backbone.text.model.load_state_dict(model.text_model.state_dict(), strict=False)
    backbone.text.norm.load_state_dict(model.text_model.final_layer_norm.state_dict())
    assert backbone.transform.mean == (0.5, 0.5, 0.5)
    texts = backbone.tokenize(["ab", "abcdef"])
    got = backbone.encode_texts(texts)
    filled = torch.nn.functional.pad(texts, (0, 12 - texts.shape[1]), value=-1)
    expected = model.text_model(torch.where(filled >= 0, filled, 1).long()).last_hidden_state
    torch.testing.assert_close(got.values, expected)
    assert torch.equal(got.mask, filled >= 0)
    assert got.summary.tolist() == [11, 11]
    image = backbone.encode_images(photos)
    vision = model.vision_model(pixel_values=backbone.transform.normalize(photos), output_hidden_states=True)
    if output == "norm":
        backbone.image.norm.load_state_dict(model.vision_model.post_layernorm.state_dict())
        torch.testing.assert_close(backbone.encode_images(photos).values, vision.last_hidden_state)
    else:
        torch.testing.assert_close(image.values, vision.hidden_states[-1])
    assert image.values.shape == (4, 4, 32)
    with pytest.raises(UsageError, match="gpo or mean"):
        load(tmp_path, weights="random", pooling="cls")
    with pytest.raises(UsageError, match="no projection"):
        load(tmp_path, weights="random", image_output="projected")


def test_random_weights_need_no_tokenizer_and_no_weights(clip_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((clip_checkpoint / "config.json").read_text())
    backbone = load(tmp_path, weights="random")
    assert backbone.tokenize(["ab", "c"]).tolist() == [[598, 97, 98, 599], [598, 99, 599, -1]]
    with pytest.raises(DataError, match="cannot be used as a tower"):
        load(tmp_path)


def test_missing_checkpoints_say_what_to_do(
    clip_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="no such folder"):
        load(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"needs config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UsageError, match="towers:IMAGE,TEXT"):
        load(tmp_path)
    with pytest.raises(UsageError, match="names no checkpoint"):
        load("")
    with pytest.raises(UsageError, match="takes 3 to 20"):
        load(clip_checkpoint, context=21)

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(EnvironmentProblem, match="hf download nobody/nothing --local-dir FOLDER"):
        load("nobody/nothing")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"vacsr\[clip\]"):
        load(clip_checkpoint)


@pytest.mark.parametrize("nested", [False, True])
def test_the_processors_own_settings_are_read(clip_checkpoint: Path, tmp_path: Path, nested: bool) -> None:
    for file in clip_checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = {"image_mean": [0.1, 0.2, 0.3], "size": {"shortest_edge": 40}, "crop_size": 32, "resample": 2}
    name = "processor_config.json" if nested else "preprocessor_config.json"
    (tmp_path / name).write_text(json.dumps({"image_processor": settings} if nested else settings))
    transform = load(tmp_path, resize="center").transform
    assert (transform.mean, transform.resample, transform.size, transform.short) == (
        (0.1, 0.2, 0.3),
        "bilinear",
        32,
        40,
    )
    assert load(clip_checkpoint).transform.short == 0


def test_random_words_stay_within_the_embedding(clip_checkpoint: Path, tmp_path: Path) -> None:
    for file in clip_checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens([f"new{number}" for number in range(100)])  # ids up to 613, the embedding has 600 rows
    tokenizer.save_pretrained(tmp_path)
    assert load(tmp_path).ordinary.max() == 599


def test_a_broken_weights_file_is_named(clip_checkpoint: Path, tmp_path: Path) -> None:
    for file in clip_checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"not tensors at all")
    with pytest.raises(DataError, match="cannot be used as a tower"):
        load(tmp_path)
