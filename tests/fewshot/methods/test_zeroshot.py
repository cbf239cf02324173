"""Zero-shot CLIP, and what the base of all methods does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vacsr.errors import DataError
from vacsr.fewshot.methods import ClassSet, ShotBatch, build_fewshot
from vacsr.fewshot.methods.base import ZeroshotConfig, drawn_from
from vacsr.fewshot.methods.coop import CoopConfig

from .plain_clip import photos, plain_image, plain_text, small_clip

CLASSES = ClassSet(("cat", "night_heron", "x"), "a {}, seen from afar.")


def test_logits_are_a_hundred_cosines() -> None:
    clip, pixels = small_clip(), photos(2)
    method = build_fewshot(clip, ZeroshotConfig(), classes=CLASSES, generator=torch.Generator())
    images, texts = plain_image(clip, pixels), plain_text(clip, clip.tokens(CLASSES.prompts()))
    expected = torch.tensor([[100.0 * float((v * t).sum()) for t in texts] for v in images], dtype=torch.float64)
    logits = method.logits(pixels, method.prepare(CLASSES))
    torch.testing.assert_close(logits, expected)
    terms = method.loss(ShotBatch(pixels, torch.tensor([2, 0])), CLASSES)
    manual = [-float(torch.log_softmax(row, 0)[label]) for row, label in zip(expected, (2, 0), strict=True)]
    assert float(terms.total) == pytest.approx(sum(manual) / 2)
    assert (method.trains, method.trainable_count(), method.param_groups(), method.weights()) == (False, 0, [], {})
    assert method.predict(pixels, method.prepare(CLASSES))[1] is None


def test_saved_weights_must_be_those_that_learn() -> None:
    method = build_fewshot(small_clip(), CoopConfig(), classes=CLASSES, generator=torch.Generator())
    saved = method.weights()
    with pytest.raises(DataError, match="nothing as context"):
        method.load_weights({})
    with pytest.raises(DataError, match="the method expects nothing"):
        method.load_weights({**saved, "other": torch.zeros(1)})
    with pytest.raises(DataError, match=r"\[3, 24\] as context"):
        method.load_weights({"context": saved["context"][:3]})


def test_modules_draw_from_the_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    made = []
    for seed in (0, 0, 1):
        with drawn_from(torch.Generator().manual_seed(seed)):
            made.append(nn.Linear(4, 4).weight)
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    assert torch.equal(before, torch.get_rng_state())


def test_towers_never_train() -> None:
    method = build_fewshot(small_clip(), CoopConfig(), classes=CLASSES, generator=torch.Generator()).train()
    assert method.training
    assert not any(module.training for module in method.clip.modules())
