"""CoOp and CoCoOp against plain ones, and the start at zero-shot CLIP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from vacsr.config import BackboneConfig
from vacsr.errors import UsageError
from vacsr.fewshot.methods import ClassSet, ShotBatch, build_fewshot
from vacsr.fewshot.methods.base import ZeroshotConfig
from vacsr.fewshot.methods.clip import ClipModel
from vacsr.fewshot.methods.coop import Cocoop, CocoopConfig, Coop, CoopConfig
from vacsr.methods.infonce import InfoNCEConfig

from .plain_clip import Plain, assert_same_gradients, photos, plain_image, plain_sentence, small_clip, trained_tiny

CLASSES = ClassSet(("cat", "night_heron"), "{} texture.")
OTHERS = ClassSet(("dog", "x", "red car"))
WORDS = "a photo of a"


def moved(seed: int = 0) -> Coop:
    """CoOp whose context has learned something."""
    method = build_fewshot(small_clip(), CoopConfig(), classes=CLASSES, generator=torch.Generator())
    assert isinstance(method, Coop)
    draw = torch.randn(method.context.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    method.context.data += 0.3 * draw
    return method


def plain_logits(method: Coop, pixels: Tensor, names: tuple[str, ...]) -> Tensor:
    """Byte by byte: start, the context in place of the words, the name, a full stop, the end."""
    clip, context = method.clip, method.context
    put = Plain(words=lambda x: torch.cat((x[:1], context, x[1 + len(context) :])))
    texts = []
    for name in names:
        ids = [298, *f"{WORDS} {name.replace('_', ' ')}.".encode(), 299]
        texts.append(plain_sentence(clip, ids, put))
    return 100.0 * plain_image(clip, pixels) @ torch.stack(texts).T


def test_one_vector_per_token_of_the_words() -> None:
    method = build_fewshot(small_clip(), CoopConfig(), classes=CLASSES, generator=torch.Generator())
    assert method.weights()["context"].shape == (len(WORDS), 24)  # the tokens of this tokenizer are bytes
    short = build_fewshot(small_clip(), CoopConfig(context="an"), classes=CLASSES, generator=torch.Generator())
    assert short.trainable_count() == 2 * 24


def test_loss_gradient_and_logits_are_the_plain_ones() -> None:
    method, pixels, labels = moved(), photos(3), torch.tensor([0, 1, 1])
    loss = method.loss(ShotBatch(pixels, labels), CLASSES).total
    logits = plain_logits(method, pixels, CLASSES.names)
    expected = -torch.log_softmax(logits, dim=1)[torch.arange(3), labels].mean()
    assert_same_gradients(method, loss, expected)
    torch.testing.assert_close(method.logits(pixels, method.prepare(CLASSES)), logits.detach())


def test_other_classes_at_test_time() -> None:
    method, pixels = moved(), photos(2)
    logits = method.logits(pixels, method.prepare(OTHERS))
    torch.testing.assert_close(logits, plain_logits(method, pixels, OTHERS.names).detach())
    assert not logits.requires_grad


def test_it_starts_at_zero_shot_clip_exactly() -> None:
    clip, pixels, generator = small_clip(dtype=torch.float32), photos(3, dtype=torch.float32), torch.Generator()
    classes = ClassSet(("cat", "night_heron", "dog"), "a photo of a {}.")
    coop = build_fewshot(clip, CoopConfig(), classes=classes, generator=generator)
    zero = build_fewshot(clip, ZeroshotConfig(), classes=classes, generator=generator)
    assert torch.equal(coop.logits(pixels, coop.prepare(classes)), zero.logits(pixels, zero.prepare(classes)))


def test_it_starts_at_a_trained_runs_own_predictions(tmp_path: Path) -> None:
    trained_tiny(tmp_path, InfoNCEConfig(scale=20.0))
    clip, pixels = ClipModel.from_config(BackboneConfig(start=str(tmp_path))), photos(3, dtype=torch.float32)
    classes = ClassSet(("red dog", "cats"), "a photo of a {}.")
    coop = build_fewshot(clip, CoopConfig(), classes=classes, generator=torch.Generator())
    zero = build_fewshot(clip, ZeroshotConfig(), classes=classes, generator=torch.Generator())
    assert torch.equal(zero.logits(pixels, zero.prepare(classes)), coop.logits(pixels, coop.prepare(classes)))
    coop = build_fewshot(clip, CoopConfig(), classes=classes, generator=torch.Generator())
    coop.loss(ShotBatch(pixels, torch.tensor([0, 1, 1])), classes).total.backward()
    assert coop.trainable_count() == 4 * 32  # four words
    gradient = coop.trainable()["context"].grad
    assert gradient is not None
    assert gradient.abs().max(dim=1).values.min() > 0


def test_a_context_must_leave_room_for_the_class() -> None:
    method = build_fewshot(small_clip(), CoopConfig(context="x" * 60), classes=CLASSES, generator=torch.Generator())
    with pytest.raises(UsageError, match="within 48 tokens"):
        method.prepare(CLASSES)


# --------------------------------------------------------------------------------------------------------------- CoCoOp


def cocoop(chunk: int = 2048, *, reduction: int = 4) -> Cocoop:
    config = CocoopConfig(context="a", chunk=chunk, reduction=reduction)
    method = build_fewshot(small_clip(), config, classes=CLASSES, generator=torch.Generator().manual_seed(0))
    assert isinstance(method, Cocoop)
    return method


def plain_cocoop_logits(method: Cocoop, pixels: Tensor, names: tuple[str, ...]) -> Tensor:
    """Photo by photo and class by class."""
    w = dict(method.named_parameters())
    rows = []
    for image in plain_image(method.clip, pixels):
        middle = (w["meta.0.weight"] @ image + w["meta.0.bias"]).clamp(min=0)
        context = w["context"] + w["meta.2.weight"] @ middle + w["meta.2.bias"]
        put = Plain(words=lambda x, context=context: torch.cat((x[:1], context, x[1 + len(context) :])))
        sentences = ([298, *f"a {name.replace('_', ' ')}.".encode(), 299] for name in names)
        rows.append(torch.stack([100.0 * image @ plain_sentence(method.clip, ids, put) for ids in sentences]))
    return torch.stack(rows)


def test_cocoop_network_has_clips_sizes() -> None:
    method = cocoop(reduction=16)
    assert [tuple(p.shape) for p in method.meta.parameters()] == [(1, 16), (1,), (24, 1), (24,)]


@pytest.mark.parametrize("chunk", [2048, 4, 1])
def test_cocoop_loss_gradients_and_logits(chunk: int) -> None:
    method, pixels, labels = cocoop(chunk), photos(3), torch.tensor([0, 1, 1])
    loss = method.loss(ShotBatch(pixels, labels), CLASSES).total
    logits = plain_cocoop_logits(method, pixels, CLASSES.names)
    expected = -torch.log_softmax(logits, dim=1)[torch.arange(3), labels].mean()
    assert_same_gradients(method, loss, expected)
    torch.testing.assert_close(method.logits(pixels, method.prepare(CLASSES)), logits.detach())


def test_cocoop_other_classes() -> None:
    method, pixels = cocoop(), photos(2)
    logits = method.logits(pixels, method.prepare(OTHERS))
    torch.testing.assert_close(logits, plain_cocoop_logits(method, pixels, OTHERS.names).detach())
