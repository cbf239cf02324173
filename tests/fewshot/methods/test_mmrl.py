"""MMRL's tokens, features and loss against a plain reference, and who is scored by what."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vacsr.config import BackboneConfig
from vacsr.fewshot.methods.base import ClassSet, ShotBatch
from vacsr.fewshot.methods.clip import ClipModel
from vacsr.fewshot.methods.mmrl import Mmrl, MmrlConfig

from .plain_clip import (
    Plain,
    assert_same_gradients,
    norm,
    photos,
    plain_finish,
    plain_image,
    plain_image_tokens,
    plain_text,
    small_clip,
    tiny_clip,
    unit,
)

CLASSES = ClassSet(("red_fox", "cat", "a boat"), template="{} texture.")
OTHERS = ClassSet(("tree", "cat"), template="{} texture.")
TOKENS, BLOCKS = 3, (4, 3)


def build(clip: ClipModel | None = None, *, seed: int = 0, **fields: object) -> Mmrl:
    settings = {"layers": 2, "tokens": TOKENS, "rep_dim": 6, "consistency": 0.4, **fields}
    clip = small_clip(image_blocks=BLOCKS[0], text_blocks=BLOCKS[1]) if clip is None else clip
    generator = torch.Generator().manual_seed(seed)
    method = Mmrl(clip, MmrlConfig.model_validate(settings), classes=CLASSES, generator=generator)
    with torch.no_grad():  # layers start alike, and near nothing: tell them apart
        for parameter in (method.tokens, *method.image_maps.parameters(), *method.text_maps.parameters()):
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator)
    return method.to(next(clip.parameters()).dtype)


def plain_edits(method: Mmrl, side: str, *, blocks: int, layers: int) -> Plain:
    """Tokens after the first one, by their saved names, in the last ``layers`` of ``blocks``."""
    own = dict(method.named_parameters())

    def before(depth: int, x: Tensor) -> Tensor:
        index = depth - (blocks - layers)
        if index < 0:
            return x
        mapped = own["tokens"] @ own[f"{side}_maps.{index}.weight"].T + own[f"{side}_maps.{index}.bias"]
        rest = x[1:] if index == 0 else x[1 + TOKENS :]
        return torch.cat([x[:1], mapped, rest])

    return Plain(before=before)


class Features:
    """Everything the loss compares, written out."""

    def __init__(self, method: Mmrl, pixels: Tensor, classes: ClassSet, *, layers: int = 2) -> None:
        clip, w = method.clip, dict(method.named_parameters())
        image, text = (
            plain_edits(method, side, blocks=blocks, layers=layers)
            for side, blocks in zip(("image", "text"), BLOCKS, strict=True)
        )
        last = [plain_image_tokens(clip, photo, image) for photo in pixels]
        self.of_class = torch.stack([unit(plain_finish(clip, "image", tokens[0])) for tokens in last])
        weight, bias = (
            w["clip.backbone.image.model.post_layernorm.weight"],
            w["clip.backbone.image.model.post_layernorm.bias"],
        )
        means = [sum(norm(tokens[1 + i], weight, bias) for i in range(TOKENS)) / TOKENS for tokens in last]
        projection = next(p for name, p in w.items() if name.startswith("projection."))
        self.of_rep = torch.stack([unit(projection @ mean) for mean in means])
        ids = clip.tokens([f"{name.replace('_', ' ')} texture." for name in classes.names])
        self.texts = plain_text(clip, ids, text, shift=TOKENS)
        self.frozen_images, self.frozen_texts = plain_image(clip, pixels), plain_text(clip, ids)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("wanted", "layers"), [(2, 2), (1, 1), (7, 3)])
def test_logits_are_the_plain_ones(wanted: int, layers: int) -> None:
    method, pixels = build(layers=wanted), photos(2)
    assert len(method.image_maps) == len(method.text_maps) == layers
    plain = Features(method, pixels, CLASSES, layers=layers)
    mixed = 70 * plain.of_class @ plain.texts.T + 30 * plain.of_rep @ plain.texts.T
    close(method.logits(pixels, method.prepare(CLASSES)), mixed)
    others = Features(method, pixels, OTHERS, layers=layers)
    close(method.logits(pixels, method.prepare(OTHERS)), 100 * others.of_class @ others.texts.T)


def test_the_loss_is_the_plain_one_and_so_are_its_gradients() -> None:
    method, pixels, labels = build(class_weight=0.6), photos(2), (2, 0)
    plain = Features(method, pixels, CLASSES)

    def cross_entropy(features: Tensor) -> Tensor:
        rows = 100 * features @ plain.texts.T
        return sum((row.exp().sum().log() - row[y] for row, y in zip(rows, labels, strict=True)), torch.tensor(0.0)) / 2

    by_hand = {
        "ce": cross_entropy(plain.of_class),
        "ce_rep": cross_entropy(plain.of_rep),
        "image": 1 - (plain.of_class * plain.frozen_images).sum() / 2,
        "text": 1 - (plain.texts * plain.frozen_texts).sum() / 3,
    }
    total = 0.6 * by_hand["ce"] + 0.4 * by_hand["ce_rep"] + 0.4 * by_hand["image"] + 0.4 * by_hand["text"]
    loss = method.loss(ShotBatch(pixels, torch.tensor(labels)), CLASSES)
    assert loss.parts.keys() == by_hand.keys()
    for name, part in by_hand.items():
        close(loss.parts[name], part.detach())
    assert_same_gradients(method, loss.total, total)


def test_without_mixing_of_tokens_insertion_leaves_zero_shot() -> None:
    """Where the upper blocks attend to nothing, the inserted tokens touch no other and the end is found again."""
    clip = small_clip(image_blocks=BLOCKS[0], text_blocks=BLOCKS[1])
    for tower in (clip.backbone.image, clip.backbone.text):
        for block in tower.blocks()[-2:]:
            nn.init.zeros_(block.self_attn.out_proj.weight)
    method, pixels = build(clip), photos(3)
    close(method.both_features(pixels)[0], clip.image(pixels))
    close(method.prepare(CLASSES)[0], clip.text(clip.tokens(CLASSES.prompts())))
    parts = method.loss(ShotBatch(pixels, torch.tensor([0, 1, 2])), CLASSES).parts
    close(parts["image"], torch.zeros_like(parts["image"]))
    close(parts["text"], torch.zeros_like(parts["text"]))


@pytest.mark.parametrize(("rule", "trained", "other"), [("always", True, True), ("never", False, False)])
def test_what_is_mixed_can_be_said(rule: str, trained: bool, other: bool) -> None:
    method, pixels = build(mixed=rule), photos(2)
    (texts, mixed), (_, others_mixed) = method.prepare(CLASSES), method.prepare(OTHERS)
    assert (mixed, others_mixed) == (trained, other)
    alone = method.logits(pixels, (texts, False))
    assert method.logits(pixels, method.prepare(CLASSES)).allclose(alone) != trained


def test_the_class_list_of_training_is_known_by_its_names_in_order() -> None:
    method = build()
    assert method.prepare(CLASSES._replace(template="a {}"))[1]
    assert not method.prepare(CLASSES._replace(shifted=True))[1]  # another domain
    assert not method.prepare(CLASSES._replace(names=CLASSES.names[::-1]))[1]
    assert not method.prepare(CLASSES._replace(names=CLASSES.names[:2]))[1]


def test_the_published_start() -> None:
    config = MmrlConfig(tokens=64, rep_dim=64, layers=3)
    first = Mmrl(small_clip(), config, classes=CLASSES, generator=torch.Generator().manual_seed(0))
    assert float(first.tokens.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(first.projection.weight.detach().std()) == pytest.approx(32**-0.5, rel=0.15)
    for maps in (first.image_maps, first.text_maps):
        assert float(maps[0].weight.detach().abs().max()) == pytest.approx(64**-0.5, rel=0.02)  # torch's own bound
        for layer in maps[1:]:
            assert layer.weight.equal(maps[0].weight)
            assert layer.weight is not maps[0].weight


def test_the_projection_may_start_as_a_copy_of_the_towers() -> None:
    method, pixels = build(projection="clip"), photos(2)
    own = method.clip.backbone.image.projection.weight
    (copy,) = method.projection.parameters()
    assert copy.equal(own)
    assert copy is not own
    assert copy.requires_grad
    assert not own.requires_grad
    close(method.both_features(pixels)[1], Features(method, pixels, CLASSES).of_rep)


def closed_form(image: int, text: int, *, dim: int, rep_dim: int, layers: int, tokens: int) -> int:
    """Tokens, maps with their biases, and a projection without."""
    return tokens * rep_dim + layers * (rep_dim + 1) * (image + text) + image * dim


def test_how_many_numbers_learn() -> None:
    small = closed_form(32, 24, dim=16, rep_dim=6, layers=2, tokens=TOKENS)
    assert build().trainable_count() == build(projection="clip").trainable_count() == small
    with torch.device("meta"):
        clip = ClipModel.from_config(BackboneConfig(spec="clip:vit-b16", weights="random"))
    method = Mmrl(clip, MmrlConfig(), classes=CLASSES, generator=torch.Generator())
    assert method.trainable_count() == closed_form(768, 512, dim=512, rep_dim=512, layers=7, tokens=5) == 4_992_256


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("start", ["random", "clip"])
def test_tiny_towers(pooling: str, start: str) -> None:
    method, pixels = build(tiny_clip(text_depth=3, pooling=pooling), layers=7, projection=start), photos(2)
    tower, text = method.clip.backbone.image, method.clip.backbone.text

    def run(tokens: Tensor, *, blocks: nn.ModuleList, maps: nn.ModuleList) -> Tensor:
        for depth, block in enumerate(blocks):
            index = depth - (len(blocks) - 3)
            if index >= 0:
                rest = tokens[:, 1:] if index == 0 else tokens[:, 1 + TOKENS :]
                inserted = torch.stack([maps[index](method.tokens)] * len(tokens))
                tokens = torch.cat((tokens[:, :1], inserted, rest), dim=1)
            tokens = block(tokens)
        return tokens

    def pooled(tokens: Tensor, index: int) -> Tensor:
        return tokens[:, index] if pooling == "cls" else tokens.mean(dim=1)

    patches = tower.stem(pixels).flatten(2).transpose(1, 2)
    first = torch.cat((tower.start.expand(2, 1, -1), patches), dim=1) + tower.positions
    image = tower.norm(run(first, blocks=tower.layers, maps=method.image_maps))
    of_class = nn.functional.normalize(method.clip.image_map(pooled(image, 0)), dim=1)
    of_rep = nn.functional.normalize(method.projection(image[:, 1 : 1 + TOKENS].mean(dim=1)), dim=1)
    features = []
    for name in ("red fox", "cat", "a boat"):  # one by one: no padding
        ids = method.clip.tokens([f"{name} texture."])
        words = text.words(ids) + text.positions[: ids.shape[1]]
        last = text.norm(run(words, blocks=text.layers, maps=method.text_maps))
        features.append(nn.functional.normalize(method.clip.text_map(pooled(last, -1)), dim=1))
    expected = 20 * (0.7 * of_class + 0.3 * of_rep) @ torch.cat(features).T
    close(method.logits(pixels, method.prepare(CLASSES)), expected)
