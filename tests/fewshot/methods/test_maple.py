"""MaPLe against a plain CLIP whose tokens are exchanged one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from vacsr.errors import UsageError
from vacsr.fewshot.methods.base import ClassSet, ShotBatch
from vacsr.fewshot.methods.clip import ClipModel
from vacsr.fewshot.methods.maple import DeepPrompts, Maple, MapleConfig

from .plain_clip import assert_same_gradients, photos, plain_image, plain_text, small_clip, tiny_clip
from .plain_maple import plain_prompts, prompt_rows

CLASSES = ClassSet(("night_heron", "cat", "plum"), "{} texture.")
OTHERS = ClassSet(("oak", "old_oak"))
LABELS = torch.tensor([2, 0])


def maple(clip: ClipModel | None = None, *, seed: int = 0, **fields: int | str) -> Maple:
    """With prompts large enough to show in the output."""
    clip, generator = clip or small_clip(), torch.Generator().manual_seed(seed)
    method = Maple(clip, MapleConfig(**fields), classes=CLASSES, generator=generator)
    for parameter in method.trainable().values():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return method


def plain_logits(method: Maple, pixels: Tensor, classes: ClassSet) -> Tensor:
    clip, plain = method.clip, plain_prompts(method)
    return 100.0 * plain_image(clip, pixels, plain.image) @ plain_text(clip, prompt_rows(clip, classes), plain.text).T


@pytest.mark.parametrize(("tokens", "depth"), [(2, 2), (2, 9), (4, 1), (1, 3)])
def test_logits_are_the_plain_ones_for_any_classes(tokens: int, depth: int) -> None:
    method, pixels = maple(tokens=tokens, depth=depth), photos(2)
    assert len(method.prompts.tokens) == min(depth, 3)
    for classes in (CLASSES, OTHERS):
        prepared = method.prepare(classes)
        assert not prepared.requires_grad
        logits = method.logits(pixels, prepared)
        torch.testing.assert_close(logits, plain_logits(method, pixels, classes), rtol=1e-8, atol=1e-7)


@pytest.mark.parametrize(("image_blocks", "text_blocks"), [(3, 1), (2, 3)])
def test_the_shallower_tower_bounds_the_depth(image_blocks: int, text_blocks: int) -> None:
    method, pixels = maple(small_clip(image_blocks=image_blocks, text_blocks=text_blocks)), photos(1)
    assert len(method.prompts.tokens) == min(image_blocks, text_blocks)
    logits = method.logits(pixels, method.prepare(CLASSES))
    torch.testing.assert_close(logits, plain_logits(method, pixels, CLASSES), rtol=1e-8, atol=1e-7)


def test_loss_and_gradients_are_the_plain_ones() -> None:
    method, pixels = maple(depth=2), photos(2)
    terms = method.loss(ShotBatch(pixels, LABELS), CLASSES)
    logits = plain_logits(method, pixels, CLASSES)
    plain = sum(logits[i].exp().sum().log() - logits[i, int(label)] for i, label in enumerate(LABELS)) / 2
    assert float(terms.parts["ce"]) == float(terms.total.detach())
    assert_same_gradients(method, terms.total, plain)


def test_as_many_numbers_as_published() -> None:
    """3.55 M on ViT-B/16: nine maps 512 → 768, nine pairs of tokens."""
    prompts = DeepPrompts(torch.zeros(2, 512), depth=9, image_width=768, generator=torch.Generator())
    assert sum(p.numel() for p in prompts.parameters()) == 9 * (512 * 768 + 768 + 2 * 512) == 3_555_072
    assert MapleConfig() == MapleConfig(tokens=2, depth=9, context="a photo of a")


def test_text_starts_as_the_words_it_replaces() -> None:
    clip = small_clip()
    method = Maple(clip, MapleConfig(depth=1), classes=CLASSES, generator=torch.Generator().manual_seed(0))
    expected = clip.text(prompt_rows(clip, CLASSES))
    torch.testing.assert_close(method.prepare(CLASSES), expected, rtol=0, atol=0)
    deep = Maple(clip, MapleConfig(), classes=CLASSES, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(deep.prepare(CLASSES), expected)
    fresh = torch.stack(list(deep.prompts.tokens)[1:])
    assert 0.01 < fresh.std() < 0.03
    first, second, third = (layer.weight for layer in deep.prompts.maps)
    assert torch.equal(second, third)
    assert not torch.equal(first, second)
    assert second.data_ptr() != third.data_ptr()
    assert first.abs().max() <= 24**-0.5


def test_half_precision_of_the_towers() -> None:
    method, pixels = maple(small_clip(dtype=torch.float32)), photos(2, dtype=torch.float32)
    exact = method.image_features(pixels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = method.image_features(pixels)
        rough = method.loss(ShotBatch(pixels, LABELS), CLASSES).total
    assert features.dtype == rough.dtype == torch.float32
    assert 0.99 < float((features * exact).sum(dim=1).min().detach()) < 1.0
    rough.backward()
    assert all(parameter.grad is not None for parameter in method.trainable().values())


def test_more_tokens_than_words() -> None:
    assert len(maple(tokens=12).prompts.tokens[0]) == 12  # a tokenizer of bytes
    with pytest.raises(UsageError, match=r"method\.tokens is 13, 'a photo of a' has 12 tokens — set method\.tokens to"):
        maple(tokens=13)


def test_another_context() -> None:
    method = maple(context="{odd} words", tokens=1)
    text = plain_prompts(method).text
    rows = method.clip.tokens([f"{{odd}} words {name.replace('_', ' ')}." for name in CLASSES.names])
    torch.testing.assert_close(method.prepare(CLASSES), plain_text(method.clip, rows, text), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("depth", [9, 3])
def test_tiny_towers(depth: int) -> None:
    """The blocks called one by one, without hooks."""
    clip = tiny_clip()
    method, pixels = maple(clip, depth=depth), photos(2)
    texts = list(method.prompts.tokens)
    images = [layer(tokens) for layer, tokens in zip(method.prompts.maps, texts, strict=True)]
    assert len(texts) == min(depth, 4)
    tower = clip.backbone.image
    x = (
        torch.cat((tower.start.expand(2, 1, -1), tower.stem(pixels).flatten(2).transpose(1, 2)), dim=1)
        + tower.positions
    )
    x = torch.cat((x, torch.zeros(2, 2, 16, dtype=x.dtype)), dim=1)
    for number, block in enumerate(tower.layers):
        if number < len(images):
            x[:, -2:] = images[number]
        x = block(x)
    seen = functional.normalize(clip.image_map(tower.norm(x[:, 0])), dim=-1)
    tower, sentences = clip.backbone.text, []
    for row in prompt_rows(clip, CLASSES):
        ids = row[row >= 0]
        y = tower.words(ids)
        y = torch.cat((y[:1], texts[0], y[3:])) + tower.positions[: len(ids)]
        for number, block in enumerate(tower.layers):
            y = torch.cat((y[:1], texts[number], y[3:])) if 0 < number < len(texts) else y
            y = block(y[None])[0]
        sentences.append(functional.normalize(clip.text_map(tower.norm(y[-1])), dim=-1))
    logits = method.logits(pixels, method.prepare(CLASSES))
    torch.testing.assert_close(logits, 20.0 * seen @ torch.stack(sentences).T, rtol=1e-8, atol=1e-8)
