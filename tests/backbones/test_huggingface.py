"""CLIP, SigLIP and any two towers: what transformers' own models give, and errors that say what to do."""

import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from vacsr.backbones import TowerBackbone, build_pooling, load_backbone
from vacsr.backbones.heads import ProjectionHead
from vacsr.backbones.hub import PatchProduct, use_products
from vacsr.backbones.images import CLIP_MEAN, CLIP_STD
from vacsr.config import BackboneConfig, HeadConfig
from vacsr.errors import DataError, EnvironmentProblem, MissingExtra, UsageError

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
CAPTIONS = ["a dog", "two cats on a mat", "xyz"]


def load(spec: str, **fields: Any) -> TowerBackbone:
    backbone = load_backbone(BackboneConfig.model_validate({"spec": spec, **fields}))
    assert isinstance(backbone, TowerBackbone)
    return backbone


def clip(folder: Path | str, **fields: Any) -> TowerBackbone:
    return load(f"clip:{folder}", **fields)


def towers(image: Path, text: Path, **fields: Any) -> TowerBackbone:
    return load(f"towers:{image},{text}", **{"image_size": 28, **fields})


def auto(folder: Path) -> Any:
    return transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def random_photos(count: int, side: int) -> torch.Tensor:
    """uint8 [count, 3, side, side]"""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)


def count(module: nn.Module) -> int:
    """All parameters that tokens pass."""
    unused = module.unused_params() if isinstance(module, TowerBackbone) else []
    return sum(p.numel() for p in module.parameters()) - sum(p.numel() for p in unused)


def save(model: Any, folder: Path) -> Path:
    model.half().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dinov2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.Dinov2Config(**SMALL, image_size=56, patch_size=14, drop_path_rate=0.3, use_mask_token=True)
    return save(transformers.Dinov2Model(config), tmp_path_factory.mktemp("towers") / "dino")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("towers") / "bert"
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters)]
    transformers.BertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(folder)
    config = transformers.BertConfig(**SMALL, vocab_size=len(words), max_position_embeddings=40)
    return save(transformers.BertModel(config), folder)


def test_parameters_of_vit_b32_are_the_papers() -> None:
    with torch.device("meta"):
        backbone = clip("vit-b32", weights="random")
        heads = [ProjectionHead(dim, HeadConfig(kind="linear", dim=1024)) for dim in (768, 512)]
        pooling = [build_pooling("gpo"), build_pooling("gpo")]
    assert (backbone.image_dim, backbone.text_dim) == (768, 512)
    parts = backbone.tower_params()
    sides = [sum(p.numel() for group in (part.stem, *part.blocks) for _, p in group) for part in parts.values()]
    assert sides == [87_454_464, 63_165_952]
    assert count(backbone) + sum(map(count, (*heads, *pooling))) == 151_958_592
    assert [len(parts[side].blocks) for side in ("image", "text")] == [12, 12]
    assert (backbone.transform.size, backbone.tokenizer.context) == (224, 77)


def test_clip_tokens_are_transformers_own(clip_checkpoint: Path, photos: torch.Tensor) -> None:
    backbone, model = clip(clip_checkpoint), auto(clip_checkpoint)
    pixels, texts = backbone.transform.normalize(photos), backbone.tokenize(CAPTIONS)
    image, text = backbone.encode_images(photos), backbone.encode_texts(texts)
    vision = model.vision_model(pixel_values=pixels, output_hidden_states=True)
    torch.testing.assert_close(image.values, vision.hidden_states[-1])
    assert image.mask.all()
    assert image.mask.shape == (4, 1 + 16)
    encoded = transformers.AutoTokenizer.from_pretrained(clip_checkpoint)(CAPTIONS, padding=True, return_tensors="pt")
    real = encoded["attention_mask"].bool()
    assert torch.equal(text.mask, real)
    torch.testing.assert_close(text.values[real], model.text_model(**encoded).last_hidden_state[real])
    torch.testing.assert_close(build_pooling("cls")(text), text.values[torch.arange(3), real.sum(1) - 1])
    wide = backbone.encode_texts(functional.pad(texts, (0, 20 - texts.shape[1]), value=-1))
    assert torch.equal(wide.summary, text.summary)
    torch.testing.assert_close(wide.values[wide.mask], text.values[real])


def test_clip_outputs_and_what_is_left_out(clip_checkpoint: Path, photos: torch.Tensor) -> None:
    model = auto(clip_checkpoint)
    norm = clip(clip_checkpoint, image_output="norm", text_output="hidden")
    projected = clip(clip_checkpoint, image_output="projected", text_output="projected")
    pixels, texts = norm.transform.normalize(photos), norm.tokenize(CAPTIONS)
    after = model.vision_model.post_layernorm(model.vision_model(pixel_values=pixels).last_hidden_state)
    torch.testing.assert_close(norm.encode_images(photos).values, after)
    torch.testing.assert_close(projected.encode_images(photos).values, model.visual_projection(after))
    finished = model.text_projection(model.text_model.final_layer_norm(norm.encode_texts(texts).values))
    torch.testing.assert_close(projected.encode_texts(texts).values, finished)
    features = model.get_text_features(torch.where(texts >= 0, texts, 0).long()).pooler_output
    torch.testing.assert_close(build_pooling("cls")(projected.encode_texts(texts)), features)
    assert count(projected) == count(model) - 1
    assert count(clip(clip_checkpoint)) == count(model) - 1 - 2 * 32 - 16 * (32 + 24)


@pytest.mark.parametrize("capturing", [False, True])
def test_blocks_get_the_same_mask_while_a_graph_is_captured(
    clip_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    """A mask that appears only then would have a compiled block compiled again in the middle of the capture."""
    backbone, calls = clip(clip_checkpoint), []
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


def test_another_image_size_is_the_models_own_interpolation(clip_checkpoint: Path, bert: Path, tmp_path: Path) -> None:
    config = transformers.ViTConfig(**SMALL, image_size=32, patch_size=16)
    vit, large = save(transformers.ViTModel(config), tmp_path / "vit"), random_photos(2, 48)
    for backbone, model in (
        (clip(clip_checkpoint, image_size=48), auto(clip_checkpoint).vision_model),
        (towers(vit, bert, image_size=48, image_output="norm", pooling="cls"), auto(vit)),
    ):
        expected = model(pixel_values=backbone.transform.normalize(large), interpolate_pos_encoding=True)
        torch.testing.assert_close(backbone.encode_images(large).values, expected.last_hidden_state)
    with pytest.raises(UsageError, match="40 or 48"):
        clip(clip_checkpoint, image_size=42)


@pytest.mark.parametrize("output", ["hidden", "norm"])
def test_siglip_tokens_and_its_filled_captions(tmp_path: Path, photos: torch.Tensor, output: str) -> None:
    config = transformers.SiglipConfig(
        vision_config={**SMALL, "image_size": 32, "patch_size": 16},
        text_config={**SMALL, "vocab_size": 300, "max_position_embeddings": 12, "pad_token_id": 1},
    )
    model = transformers.SiglipModel(config).eval()
    model.save_pretrained(tmp_path)
    backbone = clip(tmp_path, weights="random", image_output=output)
    backbone.image.model.load_state_dict(model.vision_model.state_dict(), strict=False)
    backbone.text.model.load_state_dict(model.text_model.state_dict(), strict=False)
    assert backbone.transform.mean == backbone.transform.std == (0.5, 0.5, 0.5)
    head = {id(parameter) for parameter in backbone.text.model.head.parameters()}
    assert head <= {id(parameter) for parameter in backbone.unused_params()}, "no token passes it"
    texts = backbone.tokenize(["ab", "abcdef"])
    text = backbone.encode_texts(texts)
    filled = functional.pad(texts, (0, 12 - texts.shape[1]), value=-1)
    expected = model.text_model(torch.where(filled >= 0, filled, 1).long()).last_hidden_state
    torch.testing.assert_close(text.values, expected)
    assert torch.equal(text.mask, filled >= 0)
    assert text.summary.tolist() == [11, 11]
    vision = model.vision_model(pixel_values=backbone.transform.normalize(photos), output_hidden_states=True)
    tokens = vision.last_hidden_state if output == "norm" else vision.hidden_states[-1]
    torch.testing.assert_close(backbone.encode_images(photos).values, tokens)
    with pytest.raises(UsageError, match="gpo or mean"):
        clip(tmp_path, weights="random", pooling="cls")
    pooled = clip(tmp_path, weights="random", image_output="projected", pooling="cls")
    assert pooled.encode_images(photos).values.shape == (4, 1, 32), "its own head pools a photo"


def test_random_weights_need_no_tokenizer_and_no_weights(clip_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((clip_checkpoint / "config.json").read_text())
    backbone = clip(tmp_path, weights="random")
    assert backbone.tokenize(["ab", "c"]).tolist() == [[598, 97, 98, 599], [598, 99, 599, -1]]
    own = [clip(clip_checkpoint, weights=weights).tokenize(["a dog"]).tolist() for weights in ("random", "pretrained")]
    assert own[0] == own[1], "the tokenizer that there is"
    with pytest.raises(DataError, match="cannot be used as a tower"):
        clip(tmp_path)


def test_missing_checkpoints_say_what_to_do(
    clip_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="no such folder"):
        clip(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"needs config\.json"):
        clip(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UsageError, match="towers:IMAGE,TEXT"):
        clip(tmp_path)
    broken = Path(shutil.copytree(clip_checkpoint, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"not tensors at all")
    with pytest.raises(DataError, match="cannot be used as a tower"):
        clip(broken)
    with pytest.raises(UsageError, match="names no checkpoint"):
        clip("")
    with pytest.raises(UsageError, match="takes 3 to 20"):
        clip(clip_checkpoint, context=21)

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(EnvironmentProblem, match="hf download nobody/nothing --local-dir FOLDER"):
        clip("nobody/nothing")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"vacsr\[clip\]"):
        clip(clip_checkpoint)


@pytest.mark.parametrize("kind", ["clip", "unknown"])
def test_code_in_a_folder_is_never_run(
    clip_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """transformers would ask whether to run it."""
    folder = Path(shutil.copytree(clip_checkpoint, tmp_path / "checkpoint"))
    names = {"AutoConfig": "code.A", "AutoModel": "code.A", "AutoTokenizer": ["code.A", "code.A"]}
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text())
        changed = {"model_type": kind, "tokenizer_class": "A", "auto_map": names}
        (folder / name).write_text(json.dumps(settings | changed))
    (folder / "code.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for load in (
        clip,
        lambda folder: clip(folder, weights="random"),
        lambda folder: towers(folder, folder, image_size=32),
    ):
        with suppress(DataError):
            load(folder)
        assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("nested", [False, True])
def test_settings_and_vocabulary_are_the_checkpoints(clip_checkpoint: Path, tmp_path: Path, nested: bool) -> None:
    shutil.copytree(clip_checkpoint, tmp_path, dirs_exist_ok=True)
    settings = {"image_mean": [0.1, 0.2, 0.3], "size": {"shortest_edge": 40}, "crop_size": 32, "resample": 2}
    name = "processor_config.json" if nested else "preprocessor_config.json"
    (tmp_path / name).write_text(json.dumps({"image_processor": settings} if nested else settings))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens([f"new{number}" for number in range(100)])  # ids up to 613, the embedding has 600 rows
    tokenizer.save_pretrained(tmp_path)
    backbone = clip(tmp_path, resize="center")
    transform = backbone.transform
    assert (transform.mean, transform.resample) == ((0.1, 0.2, 0.3), "bilinear")
    assert (transform.size, transform.short) == (32, 40)
    assert backbone.ordinary.max() == 599, "random words stay within the embedding"
    assert clip(clip_checkpoint).transform.short == 0


def test_towers_give_what_automodel_gives(dinov2: Path, bert: Path) -> None:
    backbone = towers(dinov2, bert, image_output="norm").train()
    assert all(p.dtype == torch.float32 for p in backbone.parameters())
    photos, texts = random_photos(3, 28), backbone.tokenize(CAPTIONS)
    expected = auto(dinov2)(pixel_values=backbone.transform.normalize(photos)).last_hidden_state
    torch.testing.assert_close(backbone.encode_images(photos).values, expected)
    encoded = transformers.AutoTokenizer.from_pretrained(bert)(CAPTIONS, padding=True, return_tensors="pt")
    text, real = backbone.encode_texts(texts), encoded["attention_mask"].bool()
    assert torch.equal(text.mask, real)
    assert text.summary.tolist() == [0, 0, 0]
    torch.testing.assert_close(text.values[real], auto(bert)(**encoded).last_hidden_state[real])
    assert backbone.tokenizer.context == 40
    assert backbone.provenance().backbone == "towers:dino,bert"
    for encode, inputs in ((backbone.encode_texts, texts), (backbone.encode_images, photos)):
        assert torch.equal(encode(inputs).values, encode(inputs).values), "no dropout is left"


def test_hidden_is_before_the_final_norm(dinov2: Path, bert: Path) -> None:
    before, after = towers(dinov2, bert, text_output="hidden"), towers(dinov2, bert, image_output="norm")
    photos, norm = random_photos(2, 28), auto(dinov2).layernorm
    torch.testing.assert_close(norm(before.encode_images(photos).values), after.encode_images(photos).values)
    texts = before.tokenize(CAPTIONS)  # BERT's blocks end in a norm: both are the same
    torch.testing.assert_close(before.encode_texts(texts).values, after.encode_texts(texts).values)
    with pytest.raises(UsageError, match="no projection"):
        towers(dinov2, bert, image_output="projected")


def test_every_parameter_left_has_a_gradient(dinov2: Path, bert: Path) -> None:
    backbone = towers(dinov2, bert)
    tokens = backbone.encode_images(random_photos(1, 28)), backbone.encode_texts(backbone.tokenize(["a"]))
    sum(x.values.sum() for x in tokens).backward()
    idle = [name for name, p in backbone.named_parameters() if p.grad is None]
    assert idle == ["image.model.layernorm.weight", "image.model.layernorm.bias"]  # the output is taken before it
    assert [len(part.blocks) for part in backbone.tower_params().values()] == [3, 3]


def test_a_two_tower_checkpoint_gives_the_side_that_is_asked_for(clip_checkpoint: Path, photos: torch.Tensor) -> None:
    both, model = towers(clip_checkpoint, clip_checkpoint, image_size=32), auto(clip_checkpoint)
    vision = model.vision_model(pixel_values=both.transform.normalize(photos)).last_hidden_state
    torch.testing.assert_close(both.encode_images(photos).values, vision)
    assert both.encode_texts(both.tokenize(["ab", "abc"])).summary.tolist() == [3, 4]


def test_an_image_tower_of_clip_alone(bert: Path, tmp_path: Path, photos: torch.Tensor) -> None:
    """Saved with its projection and without a processor: pixels are CLIP's, tokens are the model's."""
    config = transformers.CLIPVisionConfig(**SMALL, image_size=32, patch_size=16, projection_dim=8)
    folder = save(transformers.CLIPVisionModelWithProjection(config), tmp_path / "clip-image")
    backbone, model = towers(folder, bert, image_size=32), auto(folder)
    assert (backbone.transform.mean, backbone.transform.std) == (CLIP_MEAN, CLIP_STD)
    pixels = backbone.transform.normalize(photos)
    torch.testing.assert_close(backbone.encode_images(photos).values, model(pixel_values=pixels).last_hidden_state)
    projected = towers(folder, bert, image_size=32, image_output="projected").encode_images(photos).values
    whole = transformers.CLIPVisionModelWithProjection.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(projected[:, 0], whole(pixel_values=pixels).image_embeds)


@pytest.mark.parametrize("kind", ["roberta", "mpnet", "distilbert", "gpt2"])
def test_text_families_ignore_padding(dinov2: Path, tmp_path: Path, kind: str) -> None:
    sizes: dict[str, Any] = {**SMALL, "vocab_size": 300, "max_position_embeddings": 40}
    transformers.AutoConfig.for_model(kind, **sizes, bos_token_id=298, eos_token_id=299).save_pretrained(tmp_path)
    backbone = towers(dinov2, tmp_path, weights="random")
    assert backbone.text.context == (38 if kind in ("roberta", "mpnet") else 40)
    texts = backbone.tokenize(["a b", "abcdef gh"])
    short, long = backbone.encode_texts(texts), backbone.encode_texts(functional.pad(texts, (0, 5), value=-1))
    torch.testing.assert_close(short.values[short.mask], long.values[long.mask])
    torch.testing.assert_close(short.values[0, :5], backbone.encode_texts(texts[:1, :5]).values[0])
    backbone.save_assets(tmp_path / "saved")
    config = backbone.config.model_copy(update={"spec": "towers:gone,too"})
    again = load_backbone(config, assets=tmp_path / "saved")  # needs no checkpoint
    again.load_state_dict(backbone.state_dict())
    assert torch.equal(again.encode_texts(again.tokenize(["a b", "abcdef gh"])).values, short.values)
    photos = random_photos(2, 30)
    assert torch.equal(again.encode_images(photos).values, backbone.encode_images(photos).values)
    assert again.provenance() == backbone.provenance()


def test_what_is_not_two_towers_is_refused(dinov2: Path, bert: Path, tmp_path: Path) -> None:
    for spec in ("towers:", "towers:a", "towers:a,b,c", "towers:a,"):
        with pytest.raises(UsageError, match="two towers"):
            load(spec)
    with pytest.raises(UsageError, match="not an image transformer"):
        towers(bert, bert)
    transformers.T5Config(d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2, vocab_size=50).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="encoder alone"):
        towers(dinov2, tmp_path, weights="random")


SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "towers" / "dinov2-small"


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data/towers/dinov2-small beside the checkout")
@torch.no_grad()
def test_real_dinov2(bert: Path) -> None:
    backbone, photos = load(f"towers:{SHARED},{bert}", image_output="norm"), random_photos(1, 224)
    assert (backbone.image_dim, backbone.transform.size) == (384, 224)
    expected = auto(SHARED)(pixel_values=backbone.transform.normalize(photos)).last_hidden_state
    torch.testing.assert_close(backbone.encode_images(photos).values, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_the_convolution_in_value_and_gradient(bias: bool) -> None:
    conv = nn.Conv2d(3, 10, 4, stride=4, bias=bias).double()
    product = PatchProduct(3, 10, 4, stride=4, bias=bias).double()
    product.load_state_dict(conv.state_dict())
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(product(x), conv(x))
    gradients = [torch.autograd.grad(m(x).square().sum(), [x, *m.parameters()]) for m in (conv, product)]
    torch.testing.assert_close(gradients[1], gradients[0])


def test_patches_are_cut_by_products_and_other_convolutions_stay(dinov2: Path, bert: Path) -> None:
    convs = [
        nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 4, stride=2), nn.Conv2d(3, 4, 1),
        nn.Conv2d(3, 4, 2, 2, padding=1), nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.Conv2d(3, 4, (2, 4), stride=(2, 4)), nn.Conv2d(3, 4, 2, 2, dilation=2),
    ]  # fmt: skip
    model = nn.ModuleList(convs)
    use_products(model)
    assert {type(conv) for conv in model} == {nn.Conv2d}
    kinds = {type(m) for m in towers(dinov2, bert).image.modules() if isinstance(m, nn.Conv2d)}
    assert kinds == {PatchProduct}
