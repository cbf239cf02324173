from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from vacsr.methods import Embedding
from vacsr.methods.bicro import Bicro, BicroConfig
from vacsr.methods.mixtures import clean_by_betas, clean_by_gaussians, rescaled
from vacsr.methods.ncr import ALL, WARMUP, split_networks
from vacsr.objective import same_image

from .cases import block, both_networks, unit

MARGIN = 0.2


def slow_labels(v: Tensor, t: Tensor, trust: list[list[float]], anchors: float, *, margin: float) -> list[list[float]]:
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
    """In float32 also under autocast."""
    v, t = both_networks(seed, size)
    method = Bicro(BicroConfig(margin=margin, anchors=anchors, threshold=0.5), dim=8)
    trust = torch.rand(2, size, generator=torch.Generator().manual_seed(seed))
    trust[:, 0] = 0.9  # an anchor is needed
    arguments = split_networks(v, t), trust, same_image(torch.arange(size), torch.arange(size))
    labels = method.labels(*arguments)
    expected = torch.tensor(slow_labels(v, t, trust.tolist(), anchors, margin=margin))
    torch.testing.assert_close(labels, expected, atol=1e-4, rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(method.labels(*arguments), labels)


def test_anchors_keep_their_label_and_wrong_pairs_lose_it() -> None:
    """Of two captions of one image the nearest anchor by image is a tie: an anchor still answers for itself."""
    images = torch.tensor([0, 0, 0, *range(1, 10), *range(10, 14)])
    photos = unit(4, 14, 8)[images]
    words = functional.normalize(photos + 0.1 * unit(5, 16, 8), dim=-1)
    words[12:] = photos[12:].roll(1, dims=0)  # the captions of four pairs are swapped
    v, t = (torch.cat((x, x), dim=-1) / 2**0.5 for x in (photos, words))
    trust = torch.tensor([0.95] * 12 + [0.1] * 4).expand(2, -1)
    labels = Bicro(BicroConfig(anchors=1.0), dim=8).labels(split_networks(v, t), trust, same_image(images, images))
    torch.testing.assert_close(labels[:, :12], torch.ones(2, 12), atol=1e-6, rtol=0)
    assert float(labels[:, 12:].mean()) < 0.5


@pytest.mark.parametrize(("mixture", "fit"), [("beta", clean_by_betas), ("gaussian", clean_by_gaussians)])
def test_the_chosen_mixture_never_trusts_a_larger_loss_more(mixture: Any, fit: Any) -> None:
    loss = rescaled(torch.rand(80, generator=torch.Generator().manual_seed(0)).pow(3))
    clean, plain = Bicro(BicroConfig(mixture=mixture), dim=8).probability(loss), fit(loss)
    assert bool((clean[loss.argsort()].diff() <= 0).all())
    assert clean.max() == plain.max()
    larger = loss > loss[plain.argmax()]
    assert bool((clean[larger] <= plain[larger]).all())


def test_warm_up_trains_on_the_smallest_losses() -> None:
    v, t = both_networks(2, 10)
    method, whole = (Bicro(BicroConfig(warmup_keep=share), dim=8) for share in (0.3, 1.0))
    loss = torch.tensor([[5.0, 1.0, 4.0, 0.5, 3.0, 9.0, 2.0, 8.0, 7.0, 6.0], list(range(10))])
    chosen = [row.nonzero().squeeze(1).tolist() for row in method.warmup_weights(loss)]
    assert chosen == [[1, 3, 6], [0, 1, 2]]
    few, all_of_them = (m.loss(Embedding(v), Embedding(t), block(range(10))).total for m in (method, whole))
    assert 0 < float(few) < 0.3 * float(all_of_them)


def test_without_a_clean_pair_the_best_ones_stand_in() -> None:
    v, t = both_networks(3, 12)
    method, captions = Bicro(BicroConfig(), dim=8), torch.arange(12)
    method.fit(None, captions)
    method.clean.fill_(0.1)
    for stage in (ALL, WARMUP):
        method.stage.fill_(stage)
        terms = method.loss(Embedding(v), Embedding(t), block(captions, captions=captions))
        assert terms.total.item() == pytest.approx(terms.parts["hinge" if stage == ALL else "warmup"].item())
        assert terms.parts["trusted"].item() == 0


@pytest.mark.parametrize("discard", [True, False])
def test_pairs_whose_label_became_0_are_left_out_or_keep_a_hinge_without_margin(discard: bool) -> None:
    v, t = both_networks(5, 12)
    method, captions = Bicro(BicroConfig(discard=discard, label_threshold=1.0), dim=8), torch.arange(12)
    method.fit(None, captions)  # no label survives the threshold
    method.stage.fill_(ALL)
    total = method.loss(Embedding(v), Embedding(t), block(captions, captions=captions)).total.item()
    score = split_networks(v, t).score
    own, apart = score.diagonal(dim1=1, dim2=2), score - 9.0 * torch.eye(12)
    plain = (apart.amax(dim=2) - own).clamp_min(0.0) + (apart.amax(dim=1) - own).clamp_min(0.0)
    assert total == (0 if discard else pytest.approx(plain.mean(dim=1).sum().item(), rel=1e-5))
