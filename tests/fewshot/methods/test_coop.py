"""CoOp and CoCoOp against plain ones, and the start at zero-shot CLIP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vacsr.config import BackboneConfig
from vacsr.errors import UsageError
from vacsr.fewshot.methods import ClassSet, FewshotMethod, ShotBatch, build_fewshot
from vacsr.fewshot.methods.base import ZeroshotConfig
from vacsr.fewshot.methods.clip import ClipModel
from vacsr.fewshot.methods.prompts import CocoopConfig, CoopConfig
from vacsr.methods.infonce import InfoNCEConfig

from .plain_clip import Plain, assert_same_gradients, photos, plain_image, plain_sentence, small_clip, trained_tiny

CLASSES = ClassSet(("cat", "night_heron"), "{} texture.")
OTHERS = ClassSet(("dog", "x", "red car"))


def build(config: Any, clip: ClipModel | None = None, classes: ClassSet = CLASSES) -> Any:
    return build_fewshot(clip or small_clip(), config, classes=classes, generator=torch.Generator().manual_seed(0))


def moved(config: CoopConfig) -> Any:
    """A method whose context has learned something."""
    method = build(config)
    draw = torch.randn(method.context.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    method.context.data += 0.3 * draw
    return method


def plain_logits(method: Any, pixels: Tensor, names: tuple[str, ...]) -> Tensor:
    """Photo by photo and class by class: start, the context in place of its words, the name, a full stop, the end."""
    w = dict(method.named_parameters())
    rows = []
    for image in plain_image(method.clip, pixels):
        context = w["context"]
        if "meta.0.weight" in w:
            middle = (w["meta.0.weight"] @ image + w["meta.0.bias"]).clamp(min=0)
            context = context + w["meta.2.weight"] @ middle + w["meta.2.bias"]
        put = Plain(words=lambda x, context=context: torch.cat((x[:1], context, x[1 + len(context) :])))
        words = [f"{method.config.context} {name.replace('_', ' ')}." for name in names]
        texts = [plain_sentence(method.clip, [298, *sentence.encode(), 299], put) for sentence in words]
        rows.append(torch.stack([100.0 * image @ text for text in texts]))
    return torch.stack(rows)


CONFIGS = [CoopConfig(), *(CocoopConfig(context="a", chunk=chunk, reduction=4) for chunk in (2048, 4, 1))]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_loss_gradients_and_logits_are_the_plain_ones(config: CoopConfig) -> None:
    method, pixels, labels = moved(config), photos(3), torch.tensor([0, 1, 1])
    loss = method.loss(ShotBatch(pixels, labels), CLASSES).total
    logits = plain_logits(method, pixels, CLASSES.names)
    expected = -torch.log_softmax(logits, dim=1)[torch.arange(3), labels].mean()
    assert_same_gradients(method, loss, expected)
    torch.testing.assert_close(method.logits(pixels, method.prepare(CLASSES)), logits.detach())
    others = method.logits(pixels, method.prepare(OTHERS))
    torch.testing.assert_close(others, plain_logits(method, pixels, OTHERS.names).detach())
    assert not others.requires_grad


@pytest.mark.parametrize("tiny", [False, True])
def test_it_starts_at_zero_shot_clip_exactly(tmp_path: Path, tiny: bool) -> None:
    clip, pixels = small_clip(dtype=torch.float32), photos(3, dtype=torch.float32)
    classes = ClassSet(("red dog", "cats"), "a photo of a {}.")
    if tiny:
        trained_tiny(tmp_path, InfoNCEConfig(scale=20.0))
        clip = ClipModel.from_config(BackboneConfig(start=str(tmp_path)))

    def logits(method: FewshotMethod) -> Tensor:
        return method.logits(pixels, method.prepare(classes))

    zero = logits(build(ZeroshotConfig(), clip, classes))
    coop = build(CoopConfig(), clip, classes)
    assert torch.equal(logits(coop), zero)
    coop.loss(ShotBatch(pixels, torch.tensor([0, 1, 1])), classes).total.backward()
    assert float(coop.context.grad.abs().max(dim=1).values.min()) > 0


def test_a_context_must_leave_room_for_the_class() -> None:
    method = build(CoopConfig(context="x" * 60))
    with pytest.raises(UsageError, match="within 48 tokens"):
        method.prepare(CLASSES)
