from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.backbones.augment import Mixture, blend, draw_mixture, mixed_labels
from vacsr.config import MixConfig
from vacsr.noise import RowNoise, Stream


def noise(rows: torch.Tensor, step: int = 0) -> RowNoise:
    return RowNoise(3, torch.tensor(step), rows, Stream.IMAGE)


@pytest.mark.parametrize("alpha", [1, 2, 5])
def test_own_parts_are_beta_draws(alpha: int) -> None:
    own = draw_mixture(noise(torch.arange(40_000)), MixConfig(share=1.0, alpha=alpha)).weight.double()
    exact = torch.distributions.Beta(torch.tensor(float(alpha)), torch.tensor(float(alpha)))
    assert own.mean().item() == pytest.approx(0.5, abs=0.01)
    assert own.var().item() == pytest.approx(exact.variance.item(), rel=0.05)
    grid = torch.linspace(0, 1, 10_001, dtype=torch.float64)[1:-1]
    mass = torch.cumsum(grid ** (alpha - 1) * (1 - grid) ** (alpha - 1), dim=0)
    for point in (0.1, 0.3, 0.7):
        expected = (mass[int(point * 10_000)] / mass[-1]).item()
        assert (own < point).double().mean().item() == pytest.approx(expected, abs=0.01)


def test_so_many_are_mixed_and_so_many_cut() -> None:
    mixture = draw_mixture(noise(torch.arange(20_000)), MixConfig(share=0.25, cutmix=0.4), side=32)
    mixed = mixture.weight < 1
    assert mixed.double().mean().item() == pytest.approx(0.25, abs=0.02)
    assert mixture.cut.double().sum().item() / mixed.double().sum().item() == pytest.approx(0.4, abs=0.03)
    assert not draw_mixture(noise(torch.arange(100)), MixConfig(share=1.0)).cut.any(), "features have no rectangles"
    assert (draw_mixture(noise(torch.arange(100)), MixConfig(share=0.0), side=8).weight == 1).all()


def test_draws_go_by_place_and_step() -> None:
    whole = draw_mixture(noise(torch.arange(50)), MixConfig(share=0.5), side=16)
    part = draw_mixture(noise(torch.tensor([7, 3])), MixConfig(share=0.5), side=16)
    for all_of_it, some in zip(whole, part, strict=True):
        assert torch.equal(all_of_it[[7, 3]], some)
    assert not torch.equal(draw_mixture(noise(torch.arange(50), step=1), MixConfig(share=0.5)).weight, whole.weight)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(1, 12), st.integers(0, 99))
def test_pixels_pixel_by_pixel(side: int, step: int) -> None:
    mixture = draw_mixture(noise(torch.arange(6), step), MixConfig(share=0.8), side=side)
    generator = torch.Generator().manual_seed(step)
    images, partners = torch.rand(2, 6, 3, side, side, generator=generator)
    found = blend(images, partners, mixture)
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
                torch.testing.assert_close(found[n, :, y, x], expected, atol=1e-6, rtol=1e-6)
        if mixture.cut[n]:
            assert own == pytest.approx(1 - pasted / side**2, abs=1e-6), "the label goes by what is seen"


def test_what_is_not_mixed_stays_as_it_is() -> None:
    images = torch.randn(4, 7)
    mixture = Mixture(torch.tensor([1.0, 0.25, 1.0, 1.0]), torch.zeros(4, dtype=torch.bool), torch.zeros(4, 4).long())
    found = blend(images, images.flip(0), mixture)
    assert torch.equal(found[[0, 2, 3]], images[[0, 2, 3]])
    torch.testing.assert_close(found[1], 0.25 * images[1] + 0.75 * images[2])


def test_labels_are_mixed_with_the_partners() -> None:
    labels = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    found = mixed_labels(labels, torch.tensor([1.0, 0.3, 0.6]))
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]))
    other = mixed_labels(torch.eye(4), torch.tensor([0.8, 1.0, 0.5, 0.1]))
    expected = [[0.8, 0, 0, 0.2], [0, 1.0, 0, 0], [0, 0.5, 0.5, 0], [0.9, 0, 0, 0.1]]
    torch.testing.assert_close(other, torch.tensor(expected))
