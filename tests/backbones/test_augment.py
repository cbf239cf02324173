"""Augmentation: crops, dropped tokens and words, mixup and cutmix; every draw by position and step."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from vacsr.backbones.augment import (
    Mixture,
    blend,
    change_words,
    draw_boxes,
    draw_mixture,
    drop_image_tokens,
    mixed_labels,
)
from vacsr.config import AugmentConfig, MixConfig
from vacsr.noise import RowNoise, Stream

START, END, MASK = 100, 101, 102
VOCABULARY: Any = {"special": torch.tensor([START, END]), "ordinary": torch.arange(200, 300), "mask": MASK}
MANY = 20_000


def noise(rows: Tensor | int, *, step: int = 0, stream: Stream = Stream.IMAGE) -> RowNoise:
    return RowNoise(0, torch.tensor(step), torch.arange(rows) if isinstance(rows, int) else rows, stream)


def near(share: Tensor | float, expected: float, *, trials: int) -> bool:
    """Within four standard errors of a proportion."""
    return abs(float(share) - expected) < 4 * (max(expected * (1 - expected), 1e-9) / trials) ** 0.5


def test_boxes_lie_within_the_photo_and_cover_the_asked_range() -> None:
    boxes = draw_boxes(noise(MANY), AugmentConfig(crop=(0.6, 1.0), flip=0.3), height=50, width=80)
    for start, side, total in ((boxes.top, boxes.height, 50), (boxes.left, boxes.width, 80)):
        assert torch.equal(side, side.round())
        assert torch.equal(start, start.round())
        assert int(start.min()) == 0
        assert int((start + side).max()) == total
        assert (side.min(), side.max()) == (round(0.6 * total), total)
        free = total - side
        assert (start[free > 0] / free[free > 0]).mean() - 0.5 < 0.02
    assert (boxes.height / 50 - boxes.width / 80).abs().max() <= 0.5 / 50 + 0.5 / 80
    assert near(boxes.flip.float().mean(), 0.3, trials=MANY)
    whole = draw_boxes(noise(50), AugmentConfig(crop=(1.0, 1.0), flip=0.0), height=7, width=9)
    assert torch.stack(whole).unique(dim=1).flatten().tolist() == [0, 0, 7, 9, 0]


def test_image_tokens_go_at_the_rate_of_their_own_u() -> None:
    kept = drop_image_tokens(torch.ones(MANY, 40, dtype=torch.bool), noise(MANY), rate=0.2)
    untouched = kept.all(dim=1).float().mean()
    assert 0.2 < untouched < 0.25  # u ≤ 0.2, and the few others that lost none
    # E[p·u; u > p] = p(1 − p²)/2
    assert near((~kept).float().mean(), 0.2 * (1 - 0.04) / 2, trials=MANY)
    assert (~kept[:, 0]).any()


def test_a_photo_never_loses_all_its_tokens() -> None:
    mask = torch.ones(5_000, 2, dtype=torch.bool)
    mask[:, 1] = torch.arange(5_000) % 2 == 0
    kept = drop_image_tokens(mask, noise(5_000), rate=0.95)
    assert kept.any(dim=1).all()
    assert (kept <= mask).all()
    assert torch.equal(drop_image_tokens(mask, noise(5_000), rate=0.0), mask)


def caption(length: int, *, padded: int = 0) -> Tensor:
    words = torch.arange(length) % 50
    return torch.cat((torch.tensor([START]), words, torch.tensor([END]), torch.full((padded,), -1))).int()


def test_words_are_masked_replaced_and_dropped_as_often_as_asked() -> None:
    rows, length = 2_000, 50
    texts = caption(length).expand(rows, -1)
    changed = change_words(texts, noise(rows), AugmentConfig(), **VOCABULARY)
    total = rows * length
    assert near((changed == MASK).sum() / total, 0.2 * 0.5, trials=total)
    assert near(((changed >= 200) & (changed < 300)).sum() / total, 0.2 * 0.1, trials=total)
    assert near((changed < 0).sum() / total, 0.2 * 0.4, trials=total)
    assert changed[(changed >= 200)].unique().numel() == 100
    assert changed.dtype == texts.dtype


def test_start_and_end_stay_and_the_rest_keeps_its_order() -> None:
    texts = caption(30, padded=5).expand(500, -1)
    changed = change_words(texts, noise(500), AugmentConfig(text_tokens=0.6, text_mask=0.0), **VOCABULARY)
    for row in changed.tolist():
        real = [token for token in row if token >= 0]
        assert row == real + [-1] * (len(row) - len(real))
        assert (real[0], real[-1]) == (START, END)
        words = [token for token in real if token < 50]
        assert words == sorted(words)


def test_a_row_without_start_and_end_is_never_emptied() -> None:
    texts = torch.tensor([[7, -1, -1]]).expand(400, -1)
    changed = change_words(texts, noise(400), AugmentConfig(text_tokens=0.9, text_mask=0, text_random=0), **VOCABULARY)
    assert torch.equal(changed, texts)
    whole = caption(5, padded=2).expand(3, -1)
    assert change_words(whole, noise(3), AugmentConfig(text_tokens=0.0), **VOCABULARY) is whole


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.integers(0, 9))
def test_a_rows_draws_depend_on_neither_the_other_rows_nor_their_padding(rows: list[int], padded: int) -> None:
    config, positions = AugmentConfig(text_tokens=0.5), torch.tensor(rows)
    texts = torch.stack([caption(10)] * 8)
    whole = change_words(texts, noise(8), config, **VOCABULARY)
    wider = torch.nn.functional.pad(texts[positions], (0, padded), value=-1)
    part = change_words(wider, noise(positions), config, **VOCABULARY)
    assert torch.equal(part, torch.nn.functional.pad(whole[positions], (0, padded), value=-1))
    mask = torch.ones(8, 30, dtype=torch.bool)
    kinds: list[Callable[[RowNoise], Sequence[Tensor]]] = [
        lambda n: [change_words(texts[: len(n.rows)], n, config, **VOCABULARY)],
        lambda n: [drop_image_tokens(mask[: len(n.rows)], n, rate=0.3)],
        lambda n: draw_boxes(n, config, height=40, width=40),
        lambda n: draw_mixture(n, MixConfig(share=0.5), side=16),
    ]
    for kind in kinds:
        first, own, later = (
            torch.cat([column.view(len(n.rows), -1).double() for column in kind(n)], dim=1)
            for n in (noise(8), noise(positions), noise(8, step=1))
        )
        assert torch.equal(first[positions], own)
        assert not torch.equal(first, later)


@pytest.mark.parametrize("alpha", [1, 2, 5])
def test_weights_are_beta_draws(alpha: int) -> None:
    weight = draw_mixture(noise(40_000), MixConfig(share=1.0, alpha=alpha)).weight
    assert stats.kstest(weight.numpy(), stats.beta(alpha, alpha).cdf).statistic < 0.01


def test_so_many_are_mixed_and_so_many_cut() -> None:
    mixture = draw_mixture(noise(MANY), MixConfig(share=0.25, cutmix=0.4), side=32)
    mixed = mixture.weight < 1
    assert mixed.double().mean().item() == pytest.approx(0.25, abs=0.02)
    assert mixture.cut.double().sum().item() / mixed.double().sum().item() == pytest.approx(0.4, abs=0.03)
    assert not draw_mixture(noise(100), MixConfig(share=1.0)).cut.any(), "features have no rectangles"
    assert (draw_mixture(noise(100), MixConfig(share=0.0), side=8).weight == 1).all()


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(1, 12), st.integers(0, 99))
def test_pixels_pixel_by_pixel(side: int, step: int) -> None:
    mixture = draw_mixture(noise(6, step=step), MixConfig(share=0.8), side=side)
    generator = torch.Generator().manual_seed(step)
    images, partners = torch.rand(2, 6, 3, side, side, generator=generator)
    mixed = blend(images, partners, mixture)
    for n in range(6):
        own, (top, bottom, left, right) = mixture.weight[n].item(), mixture.box[n].tolist()
        pasted = 0
        for y in range(side):
            for x in range(side):
                inside = top <= y < bottom and left <= x < right
                pasted += inside
                blended = own * images[n, :, y, x] + (1 - own) * partners[n, :, y, x]
                cut = partners[n, :, y, x] if inside else images[n, :, y, x]
                expected = cut if mixture.cut[n] else blended
                torch.testing.assert_close(mixed[n, :, y, x], expected, atol=1e-6, rtol=1e-6)
        if mixture.cut[n]:
            assert own == pytest.approx(1 - pasted / side**2, abs=1e-6), "the label goes by what is seen"


def test_what_is_not_mixed_stays_as_it_is() -> None:
    images = torch.randn(4, 7)
    mixture = Mixture(torch.tensor([1.0, 0.25, 1.0, 1.0]), torch.zeros(4, dtype=torch.bool), torch.zeros(4, 4).long())
    mixed = blend(images, images.flip(0), mixture)
    assert torch.equal(mixed[[0, 2, 3]], images[[0, 2, 3]])
    torch.testing.assert_close(mixed[1], 0.25 * images[1] + 0.75 * images[2])
    labels = mixed_labels(torch.eye(4), torch.tensor([0.8, 1.0, 0.5, 0.1]))
    expected = [[0.8, 0, 0, 0.2], [0, 1.0, 0, 0], [0, 0.5, 0.5, 0], [0.9, 0, 0, 0.1]]
    torch.testing.assert_close(labels, torch.tensor(expected))
