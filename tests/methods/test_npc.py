import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vacsr.methods import Embedding
from vacsr.methods.base import SetEmbeddings, TrainingView
from vacsr.methods.mixtures import clean_by_gaussians, rescaled
from vacsr.methods.npc import Npc, NpcConfig, nearest_in_bank, pair_weights
from vacsr.objective import same_image

from .cases import block, unit


def slow_losses(v: Tensor, t: Tensor, ids: list[int], scale: float) -> list[float]:
    losses = []
    for i in range(len(ids)):
        own = [j for j in range(len(ids)) if ids[j] == ids[i]]
        total = 0.0
        for logits in (scale * (v[i] @ t.T), scale * (t[i] @ v.T)):
            whole = sum(math.exp(x) for x in logits.tolist())
            total -= sum(math.log(math.exp(float(logits[j])) / whole) for j in own) / len(own)
        losses.append(total / 2)
    return losses


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 99), st.integers(2, 8), st.floats(1, 20))
def test_losses_and_their_weighted_mean_are_those_written_out(seed: int, size: int, scale: float) -> None:
    v, t = unit(seed, 2, size, 5)
    ids = torch.arange(size) // 2
    method = Npc(NpcConfig(scale=scale), dim=8)
    method.fit(None, torch.zeros(20, dtype=torch.int64))
    method.weight.copy_(torch.rand(20, generator=torch.Generator().manual_seed(seed)))
    captions = torch.arange(3, 3 + size)
    expected = slow_losses(v, t, ids.tolist(), scale)
    losses = method.pair_losses(Embedding(v), Embedding(t), same_image(ids, ids))
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    terms = method.loss(Embedding(v), Embedding(t), block(ids, captions=captions))
    weighted = sum(w * x for w, x in zip(method.weight[captions].tolist(), expected, strict=True)) / size
    assert terms.total.item() == pytest.approx(weighted, rel=1e-4)
    plain = Npc(NpcConfig(scale=scale), dim=8).loss(Embedding(v), Embedding(t), block(ids))
    assert plain.total.item() == pytest.approx(sum(expected) / size, rel=1e-4)


def test_a_pair_that_hurts_its_neighbours_weighs_less() -> None:
    """A well learned neighbour's loss rounds to 0, before and after; a step that spoils it still counts."""
    before = torch.tensor([[2.0, 1.0, 1.0, 0.0, 0.0], [2.0, 1.0, 1.0, 0.0, 2.0]])
    after = torch.tensor([[1.0, 4.0, 1.0, 0.0, 0.5], [4.0, 2.0, 1.0, 0.0, 4.0]])
    # ratios ½(2 + ½), ½(¼ + ½), ½(1 + 1), ½(0/0 + 0/0) and ½(0 + ½)
    expected = torch.tensor([1.0, math.tanh(0.375), 1.0, 1.0, math.tanh(0.25)])
    torch.testing.assert_close(pair_weights(before, after), expected, atol=1e-5, rtol=0)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 999), st.integers(2, 9), st.floats(0.0, 1.0))
def test_neighbours_by_brute_force(seed: int, images: int, threshold: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = 3 * images
    image = torch.randint(images, (count,), generator=generator)
    clean = torch.rand(count, generator=generator)
    embedded = SetEmbeddings(unit(seed, images, 4), unit(seed + 1, count, 4))
    by_image, by_text = nearest_in_bank(embedded, image, clean, threshold=threshold)
    bank = [c for c in range(count) if clean[c] > threshold] or [int(clean.argmax())]
    for c in range(count):
        if c in bank:
            assert (by_image[c], by_text[c]) == (c, c)
            continue
        assert by_text[c] == max(bank, key=lambda b: float(embedded.texts[c] @ embedded.texts[b]))
        own = [b for b in bank if image[b] == image[c]]
        closest = max(
            {int(image[b]) for b in bank}, key=lambda i: float(embedded.images[image[c]] @ embedded.images[i])
        )
        among = own or [b for b in bank if image[b] == closest]
        assert by_image[c] == max(among, key=lambda b: float(clean[b]))


def world(epoch: int) -> TrainingView:
    """Thirty images with two captions each; the last twenty captions are of other images."""
    image, photos = torch.arange(60) // 2, unit(0, 30, 64)
    source = torch.cat((image[:40], image[40:].roll(5)))
    return TrainingView(epoch, 10, 0, 12, image, lambda: SetEmbeddings(photos, photos[source]))


@pytest.mark.parametrize("refresh", [True, False])
def test_the_bank_holds_right_captions_and_is_rebuilt_only_if_asked(refresh: bool) -> None:
    method = Npc(NpcConfig(warmup=0.2, refresh=refresh), dim=8)
    method.fit(None, world(0).caption_image)
    method.start_epoch(world(1))
    assert method.ready.item() == 0
    assert torch.equal(method.nearest[1], torch.arange(60))
    method.start_epoch(world(2))
    assert method.ready.item() == 1
    assert bool((method.clean[:40] > 0.9).all())
    assert bool((method.clean[40:] < 0.1).all())
    assert bool((method.nearest < 40).all())
    method.clean.zero_()
    method.start_epoch(world(3))
    assert bool(method.clean.any()) == refresh


def test_weights_stay_1_and_the_bank_silent_before_there_is_a_bank() -> None:
    method = Npc(NpcConfig(bank_weight=3.0), dim=8)
    method.fit(None, torch.zeros(6, dtype=torch.int64))
    old = torch.tensor([[1.0, 2.0], [3.0, 2.0]], requires_grad=True)
    new = torch.tensor([[2.0, 2.0], [9.0, 2.0]])
    captions = torch.tensor([4, 1])
    assert method.weigh(captions, old, new).item() == 0
    assert method.weight.tolist() == [1.0] * 6
    method.ready.fill_(1.0)
    gain = method.weigh(captions, old, new)
    assert gain.item() == pytest.approx(3.0 * (1.5 + 2.5))
    assert method.weight.tolist() == pytest.approx([1, 1, 1, 1, math.tanh(0.5 * (0.5 + 1 / 3)), 1])
    gain.backward()
    assert old.grad is not None
    assert old.grad.tolist() == [[1.5, 1.5], [1.5, 1.5]]


def test_the_mixture_is_fitted_to_rescaled_or_raw_losses() -> None:
    view, clean = world(2), []
    for rescale in (True, False):
        method = Npc(NpcConfig(warmup=0.2, rescale=rescale), dim=8)
        method.fit(None, view.caption_image)
        method.start_epoch(view)
        losses = view.caption_losses(view.embed(), method).double()
        clean.append(clean_by_gaussians(rescaled(losses) if rescale else losses, steps=100))
        torch.testing.assert_close(method.clean, clean[-1].float())
    assert not torch.allclose(*clean, atol=1e-3), "the floor of the variances weighs less on raw losses"
