from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from vacsr.methods import Bicro, Embedding
from vacsr.methods.bicro import BicroConfig
from vacsr.methods.mixtures import clean_by_betas, clean_by_gaussians, rescaled
from vacsr.methods.ncr import ALL, WARMUP, split_networks
from vacsr.pairwise import batch_block, same_image

MARGIN = 0.2


def both_networks(seed: int, size: int, dim: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(2, size, dim, generator=generator)
    sides = [base + 0.6 * torch.randn(2, size, dim, generator=generator) for _ in range(2)]
    v, t = (torch.cat(list(functional.normalize(x, dim=-1)), dim=-1) / 2**0.5 for x in sides)
    return v, t


def slow_labels(
    v: Tensor, t: Tensor, trust: list[list[float]], anchors: float, *, margin: float = MARGIN
) -> list[list[float]]:
    """Labels one pair at a time; ``trust``: what each network is told of the pairs. All images differ."""
    size, d = len(v), v.shape[1] // 2
    labels: list[list[float]] = []
    for k in (0, 1):
        other = slice((1 - k) * d, (1 - k) * d + d)
        images, texts = (2**0.5 * x[:, other] for x in (v, t))
        quality = []
        for i in range(size):
            own = float(images[i] @ texts[i])
            cost = sum(max(0.0, margin + float(images[i] @ texts[j]) - own) for j in range(size) if j != i) / size
            cost += sum(max(0.0, margin + float(images[j] @ texts[i]) - own) for j in range(size) if j != i) / size
            quality.append(min(margin, max(0.0, margin - cost / 2)))
        clean = [i for i in range(size) if trust[k][i] > 0.5]
        chosen = sorted(clean, key=lambda i: -quality[i])[: int(size * anchors) + 1]
        row = []
        for i in range(size):
            y = 0.0
            for side in (images, texts):
                a = max(chosen, key=lambda j: float(side[i] @ side[j]))
                x, z = float(images[i] @ images[a]), float(texts[i] @ texts[a])
                y += 0.5 * (max(0.0, min(x, z)) / max(x, z, 1e-6))
            y = 0.5 + 0.5 * y if i in clean else y
            row.append(y if y > 0.5 else 0.0)
        labels.append(row)
    return labels


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 999), st.integers(3, 14), st.sampled_from([0.1, 0.4]), st.sampled_from([MARGIN, 3.0]))
def test_labels_are_those_written_out(seed: int, size: int, anchors: float, margin: float) -> None:
    v, t = both_networks(seed, size)
    method = Bicro(BicroConfig(margin=margin, anchors=anchors, threshold=0.5), dim=8)
    trust = torch.rand(2, size, generator=torch.Generator().manual_seed(seed))
    trust[:, 0] = 0.9  # an anchor is needed
    places = torch.arange(size)
    found = method.labels(split_networks(v, t), trust, same_image(places, places))
    torch.testing.assert_close(
        found, torch.tensor(slow_labels(v, t, trust.tolist(), anchors, margin=margin)), atol=1e-4, rtol=0
    )


def test_anchors_keep_their_label_and_wrong_pairs_lose_it() -> None:
    """Twelve right pairs and four whose captions were swapped: right ones stay near 1, wrong ones fall to 0."""
    generator = torch.Generator().manual_seed(4)
    things = functional.normalize(torch.randn(16, 8, generator=generator), dim=-1)
    words = things.clone()
    words[12:] = things[12:].roll(1, dims=0)
    v, t = (torch.cat((x, x), dim=-1) / 2**0.5 for x in (things, words))
    trust = torch.tensor([0.95] * 12 + [0.1] * 4).expand(2, -1)
    places = torch.arange(16)
    method = Bicro(BicroConfig(anchors=1.0), dim=8)
    found = method.labels(split_networks(v, t), trust, same_image(places, places))
    torch.testing.assert_close(found[:, :12], torch.ones(2, 12), atol=1e-4, rtol=0)
    assert float(found[:, 12:].mean()) < 0.5


def test_anchors_of_one_image_all_have_label_1() -> None:
    """Of two captions of the same image the nearest anchor by image is a tie; an anchor answers for itself."""
    generator = torch.Generator().manual_seed(1)
    images = torch.tensor([0, 0, 0, 1, 2, 3])
    things = functional.normalize(torch.randn(4, 8, generator=generator), dim=-1)[images]
    words = functional.normalize(things + 0.25 * torch.randn(6, 8, generator=generator), dim=-1)
    v, t = (torch.cat((x, x), dim=-1) / 2**0.5 for x in (things, words))
    method = Bicro(BicroConfig(anchors=1.0), dim=8)
    trust = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.9, 0.1]).expand(2, -1)
    found = method.labels(split_networks(v, t), trust, same_image(images, images))
    torch.testing.assert_close(found[:, :5], torch.ones(2, 5), atol=1e-6, rtol=0)
    assert float(found[:, 5].max()) < 1


def test_labels_are_those_of_float32_also_under_autocast() -> None:
    v, t = both_networks(5, 16, dim=64)
    method, places = Bicro(BicroConfig(anchors=0.3), dim=8), torch.arange(16)
    trust = torch.rand(2, 16, generator=torch.Generator().manual_seed(5))
    halves, relevance = split_networks(v, t), same_image(places, places)
    plain = method.labels(halves, trust, relevance)
    with torch.autocast("cpu", torch.bfloat16):
        found = method.labels(halves, trust, relevance)
    assert found.dtype == torch.float32
    assert torch.equal(found, plain)


@pytest.mark.parametrize(("mixture", "fit"), [("beta", clean_by_betas), ("gaussian", clean_by_gaussians)])
def test_the_chosen_mixture_never_trusts_a_larger_loss_more(mixture: Any, fit: Any) -> None:
    loss = rescaled(torch.rand(80, generator=torch.Generator().manual_seed(0)).pow(3))
    found = Bicro(BicroConfig(mixture=mixture), dim=8).probability(loss)
    assert bool((found[loss.argsort()].diff() <= 0).all())
    plain = fit(loss)
    assert found.max() == plain.max()
    assert bool((found[loss > loss[plain.argmax()]] <= plain[loss > loss[plain.argmax()]]).all())


def test_warm_up_trains_on_the_smallest_losses() -> None:
    v, t = both_networks(2, 10)
    method = Bicro(BicroConfig(warmup_keep=0.3), dim=8)
    loss = torch.tensor([[5.0, 1.0, 4.0, 0.5, 3.0, 9.0, 2.0, 8.0, 7.0, 6.0], list(range(10))])
    kept = [row.nonzero().squeeze(1).tolist() for row in method.warmup_weights(loss)]
    assert kept == [[1, 3, 6], [0, 1, 2]]
    whole = Bicro(BicroConfig(warmup_keep=1.0), dim=8)
    pairs = batch_block(torch.arange(10), seed=0, step=0)
    few, all_of_them = (m.loss(Embedding(v), Embedding(t), pairs).total for m in (method, whole))
    assert 0 < float(few) < 0.3 * float(all_of_them)


def test_without_a_clean_pair_the_best_ones_stand_in() -> None:
    v, t = both_networks(3, 12)
    method = Bicro(BicroConfig(), dim=8)
    method.fit(None, torch.arange(12))
    method.clean.fill_(0.1)
    method.stage.fill_(ALL)
    captions = torch.arange(12)
    terms = method.loss(Embedding(v), Embedding(t), batch_block(captions, seed=0, step=0, captions=captions))
    assert bool(terms.total.isfinite())
    assert terms.parts["trusted"].item() == 0
    method.stage.fill_(WARMUP)
    again = method.loss(Embedding(v), Embedding(t), batch_block(captions, seed=0, step=0, captions=captions))
    assert again.total.item() == pytest.approx(again.parts["warmup"].item())


def test_pairs_whose_label_became_0_are_left_out_or_keep_a_hinge_without_margin() -> None:
    v, t = both_networks(5, 12)
    captions = torch.arange(12)
    pairs = batch_block(captions, seed=0, step=0, captions=captions)
    totals = {}
    for discard in (True, False):
        method = Bicro(BicroConfig(discard=discard, label_threshold=1.0), dim=8)  # no label survives
        method.fit(None, captions)
        method.stage.fill_(ALL)
        totals[discard] = method.loss(Embedding(v), Embedding(t), pairs).total.item()
    halves = split_networks(v, t)
    own = halves.score.diagonal(dim1=1, dim2=2)
    apart = halves.score - 9.0 * torch.eye(12)
    plain = (apart.amax(dim=2) - own).clamp_min(0.0) + (apart.amax(dim=1) - own).clamp_min(0.0)
    assert totals[True] == 0
    assert totals[False] == pytest.approx(plain.mean(dim=1).sum().item(), rel=1e-5)
