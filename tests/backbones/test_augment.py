from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vacsr.backbones.augment import change_words, draw_boxes, drop_image_tokens
from vacsr.config import AugmentConfig
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


def test_no_crop_is_the_whole_photo() -> None:
    boxes = draw_boxes(noise(50), AugmentConfig(crop=(1.0, 1.0), flip=0.0), height=7, width=9)
    assert torch.equal(boxes.top + boxes.left, torch.zeros(50))
    assert torch.equal(boxes.height * boxes.width, torch.full((50,), 63.0))
    assert not boxes.flip.any()


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
    assert not kept.all()
    assert torch.equal(drop_image_tokens(mask, noise(5_000), rate=0.0), mask)


def caption(length: int, *, padded: int = 0) -> Tensor:
    words = torch.arange(length) % 50
    return torch.cat((torch.tensor([START]), words, torch.tensor([END]), torch.full((padded,), -1))).int()


def test_words_are_masked_replaced_and_dropped_as_often_as_asked() -> None:
    rows, length = 2_000, 50
    texts = caption(length).expand(rows, -1)
    got = change_words(texts, noise(rows), AugmentConfig(), **VOCABULARY)
    total = rows * length
    assert near((got == MASK).sum() / total, 0.2 * 0.5, trials=total)
    assert near(((got >= 200) & (got < 300)).sum() / total, 0.2 * 0.1, trials=total)
    assert near((got < 0).sum() / total, 0.2 * 0.4, trials=total)
    assert got[(got >= 200)].unique().numel() == 100
    assert got.dtype == texts.dtype


def test_start_and_end_stay_and_the_rest_keeps_its_order() -> None:
    texts = caption(30, padded=5).expand(500, -1)
    got = change_words(texts, noise(500), AugmentConfig(text_tokens=0.6, text_mask=0.0), **VOCABULARY)
    for row in got.tolist():
        real = [token for token in row if token >= 0]
        assert row == real + [-1] * (len(row) - len(real))
        assert (real[0], real[-1]) == (START, END)
        words = [token for token in real if token < 50]
        assert words == sorted(words)


def test_a_row_without_start_and_end_is_never_emptied() -> None:
    texts = torch.tensor([[7, -1, -1]]).expand(400, -1)
    got = change_words(texts, noise(400), AugmentConfig(text_tokens=0.9, text_mask=0, text_random=0), **VOCABULARY)
    assert torch.equal(got, texts)


def test_without_a_rate_nothing_changes() -> None:
    texts = caption(5, padded=2).expand(3, -1)
    assert change_words(texts, noise(3), AugmentConfig(text_tokens=0.0), **VOCABULARY) is texts


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.integers(0, 9))
def test_a_rows_draws_depend_on_neither_the_other_rows_nor_their_padding(rows: list[int], padded: int) -> None:
    config, places = AugmentConfig(text_tokens=0.5), torch.tensor(rows)
    texts = torch.stack([caption(10)] * 8)
    whole = change_words(texts, noise(8), config, **VOCABULARY)
    wider = torch.nn.functional.pad(texts[places], (0, padded), value=-1)
    part = change_words(wider, noise(places), config, **VOCABULARY)
    assert torch.equal(part, torch.nn.functional.pad(whole[places], (0, padded), value=-1))
    mask = torch.ones(8, 30, dtype=torch.bool)
    assert torch.equal(
        drop_image_tokens(mask[places], noise(places), rate=0.3), drop_image_tokens(mask, noise(8), rate=0.3)[places]
    )
    boxes, alone = (draw_boxes(noise(r), config, height=40, width=40) for r in (8, places))
    assert all(torch.equal(column[places], own) for column, own in zip(boxes, alone, strict=True))


def test_steps_draw_anew() -> None:
    mask = torch.ones(50, 30, dtype=torch.bool)
    first, second = (drop_image_tokens(mask, noise(50, step=step), rate=0.5) for step in (0, 1))
    assert not torch.equal(first, second)
    texts = torch.stack([caption(10)] * 8)
    got = [change_words(texts, noise(8, step=step), AugmentConfig(text_tokens=0.5), **VOCABULARY) for step in (0, 1)]
    assert not torch.equal(*got)
