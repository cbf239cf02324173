"""How many labels are wrong: known mixtures, and intervals that hold."""

import pytest
import torch
from torch import Tensor

from vacsr.search.wrong_share import WrongShare

IMAGES, EACH = 400, 5


def mixture(share: float, *, shift: float, width: float, seed: int) -> tuple[WrongShare, Tensor, Tensor]:
    """Right labels are a Gaussian on the scale of artanh; wrong ones are unrelated pairs, shifted and widened."""
    generator = torch.Generator().manual_seed(seed)
    owner = torch.arange(IMAGES * EACH) // EACH
    wrong = torch.rand(len(owner), generator=generator) < share
    right = 1.0 + 0.2 * torch.randn(len(owner), generator=generator)
    unrelated = 0.15 * torch.randn(3 * len(owner), generator=generator)
    moved = 0.15 * (shift + width * torch.randn(len(owner), generator=generator))
    return WrongShare.fit(torch.where(wrong, moved, right).tanh(), unrelated.tanh()), wrong, owner


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 0.5])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_the_interval_has_the_true_number(share: float, shift: float) -> None:
    """Also where training has pulled wrong pairs together."""
    for seed in range(3):
        fit, wrong, owner = mixture(share, shift=shift, width=1.0, seed=seed)
        count = fit.estimate(owner, IMAGES)
        assert count.low <= int(wrong.sum()) <= count.high <= len(owner)
        assert count.low <= count.value <= count.high
        assert fit.share == pytest.approx(float(wrong.float().mean()), abs=0.03)
        assert not count.at_least
        if share:
            chance = fit.probability()
            assert float(chance[wrong].mean()) > 0.8 > 0.2 > float(chance[~wrong].mean())


def test_wrong_labels_that_look_alike_give_a_least_number() -> None:
    fit, wrong, owner = mixture(0.3, shift=1.5, width=1.75, seed=0)
    count = fit.estimate(owner, IMAGES)
    assert count.at_least
    assert count.low <= int(wrong.sum()) <= count.high == len(owner)
    assert "at least" in str(count)


def test_a_higher_confidence_gives_a_wider_interval() -> None:
    fit, _, owner = mixture(0.2, shift=0.5, width=1.0, seed=1)
    narrow, wide = (fit.estimate(owner, IMAGES, confidence=level) for level in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_the_bins_hold_all_agreements_whatever_their_sign() -> None:
    own, unrelated = torch.linspace(-0.7, -0.2, 50), torch.linspace(-0.9, -0.5, 50)
    at = WrongShare.fit(own, unrelated).at
    assert (at[0], at[-1]) == pytest.approx((-1.6, -0.08), abs=0.02)  # a tenth of the range more on each side


def test_a_model_that_cannot_tell_them_apart_says_so() -> None:
    generator = torch.Generator().manual_seed(0)
    own, unrelated = (0.2 * torch.randn(count, generator=generator) for count in (1000, 3000))
    fit = WrongShare.fit((own + 0.2).tanh(), unrelated.tanh())
    count = fit.estimate(torch.arange(1000) // 5, 200)
    assert (count.low, count.high) == (0, 1000)
    assert fit.overlap() > 0.5
