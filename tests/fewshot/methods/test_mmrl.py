"""MMRL's tokens, features and loss against a plain reference, and who is scored by what."""

import pytest
import torch
from torch import Tensor

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
    named = dict(method.named_parameters())

    def before(depth: int, x: Tensor) -> Tensor:
        index = depth - (blocks - layers)
        if index < 0:
            return x
        mapped = named["tokens"] @ named[f"{side}_maps.{index}.weight"].T + named[f"{side}_maps.{index}.bias"]
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
        weight, bias = (w[f"clip.backbone.image.model.post_layernorm.{name}"] for name in ("weight", "bias"))
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
    close(method.predict(pixels, method.prepare(CLASSES))[0], mixed)
    others = Features(method, pixels, OTHERS, layers=layers)
    close(method.predict(pixels, method.prepare(OTHERS))[0], 100 * others.of_class @ others.texts.T)


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


def test_which_class_lists_both_features_score() -> None:
    """That of training is known by its names in order; photos of another domain are not trained on."""
    method, names = build(), CLASSES.names
    changes = ({}, {"template": "a {}"}, {"shifted": True}, {"names": names[::-1]}, {"names": names[:2]})
    assert tuple(method.prepare(CLASSES._replace(**change))[1] for change in changes) == (1, 1, 0, 0, 0)


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
