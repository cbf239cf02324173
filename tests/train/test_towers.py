"""When towers rest and how the loss rises, against plain lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vacsr.config import TowersConfig
from vacsr.train.callbacks import frozen_towers, loss_warmup


def plan(image: int, text: int, *, image_lr: float = 0.1, text_lr: float = 0.1, ramp: bool = True) -> TowersConfig:
    return TowersConfig(freeze_image=image, freeze_text=text, image_lr=image_lr, text_lr=text_lr, ramp=ramp)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TowersConfig(), [{"image"}, {"image"}, set(), set()]),
        (plan(0, 0), [set(), set(), set(), set()]),
        (plan(1, 3), [{"image", "text"}, {"text"}, {"text"}, set()]),
        (plan(1, 0, image_lr=0.0), [{"image"}] * 4),
        (plan(0, 0, image_lr=0.0, text_lr=0.0), [{"image", "text"}] * 4),
    ],
)
def test_which_towers_rest(config: TowersConfig, expected: list[set[str]]) -> None:
    assert [set(frozen_towers(epoch, config)) for epoch in range(4)] == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TowersConfig(), [1, 1, 1, 1, 0.5, 1, 1, 1]),  # two steps an epoch: the third wakes the image tower
        (plan(0, 0), [1] * 8),
        (plan(1, 2), [1, 1, 0.5, 1, 0.5, 1, 1, 1]),
        (plan(2, 0, ramp=False), [1] * 8),
        (plan(2, 0, image_lr=0.0), [1] * 8),  # never wakes
        (plan(9, 9), [1] * 8),
    ],
)
def test_the_ramp(config: TowersConfig, expected: list[float]) -> None:
    assert [loss_warmup(step, steps_per_epoch=2, config=config) for step in range(8)] == expected


@given(st.integers(0, 4), st.integers(0, 4), st.integers(1, 9))
def test_the_ramp_grows_to_one_within_an_epoch(image: int, text: int, steps: int) -> None:
    config = plan(image, text)
    for epoch in range(6):
        values = [loss_warmup(epoch * steps + place, steps_per_epoch=steps, config=config) for place in range(steps)]
        assert values[-1] == 1.0
        assert all(value > 0 for value in values)
        wakes = epoch > 0 and epoch in (image, text)
        assert values == ([(place + 1) / steps for place in range(steps)] if wakes else [1.0] * steps)
