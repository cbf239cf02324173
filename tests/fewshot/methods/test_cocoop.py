"""CoCoOp against a plain one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vacsr.fewshot.methods import ClassSet, ShotBatch, build_fewshot
from vacsr.fewshot.methods.cocoop import Cocoop, CocoopConfig

from .plain_clip import Plain, photos, plain_image, plain_sentence, small_clip

CLASSES = ClassSet(("cat", "night_heron"), "{} texture.")
OTHERS = ClassSet(("dog", "x", "red car"))


def built(chunk: int = 2048, *, reduction: int = 4) -> Cocoop:
    config = CocoopConfig(context="a", chunk=chunk, reduction=reduction)
    method = build_fewshot(small_clip(), config, classes=CLASSES, generator=torch.Generator().manual_seed(0))
    assert isinstance(method, Cocoop)
    return method


def plain_logits(method: Cocoop, pixels: Tensor, names: tuple[str, ...]) -> Tensor:
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


def test_the_network_has_clips_sizes() -> None:
    method = built(reduction=16)
    assert [tuple(p.shape) for p in method.meta.parameters()] == [(1, 16), (1,), (24, 1), (24,)]
    same, other = (
        built(),
        build_fewshot(
            small_clip(),
            CocoopConfig(context="a", reduction=4),
            classes=CLASSES,
            generator=torch.Generator().manual_seed(1),
        ),
    )
    assert torch.equal(same.weights()["meta.0.weight"], built().weights()["meta.0.weight"])
    assert not torch.equal(same.weights()["meta.0.weight"], other.weights()["meta.0.weight"])


@pytest.mark.parametrize("chunk", [2048, 4, 1])
def test_loss_gradients_and_logits_are_the_plain_ones(chunk: int) -> None:
    method, pixels, labels = built(chunk), photos(3), torch.tensor([0, 1, 1])
    loss = method.loss(ShotBatch(pixels, labels), CLASSES).total
    logits = plain_logits(method, pixels, CLASSES.names)
    expected = -torch.log_softmax(logits, dim=1)[torch.arange(3), labels].mean()
    torch.testing.assert_close(loss, expected)
    learned = list(method.trainable().values())
    ours, theirs = torch.autograd.grad(loss, learned), torch.autograd.grad(expected, learned)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
        assert float(one.abs().max()) > 0
    torch.testing.assert_close(method.logits(pixels, method.prepare(CLASSES)), logits.detach())


def test_other_classes_at_test_time() -> None:
    method, pixels = built(), photos(2)
    logits = method.logits(pixels, method.prepare(OTHERS))
    torch.testing.assert_close(logits, plain_logits(method, pixels, OTHERS.names).detach())
