from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vacsr.methods import Embedding
from vacsr.methods.base import SetEmbeddings, TrainingView
from vacsr.methods.ncr import ALL, CLEAN, WARMUP, Ncr, NcrConfig, split_networks

from .cases import block, both_networks, unit

MARGIN = 0.2


def studied(captions: int, *, stage: int, seed: int = 0) -> Ncr:
    method = Ncr(NcrConfig(margin=MARGIN, warmup=0.35, noisy_from=0.5), dim=8)
    method.fit(None, torch.zeros(captions, dtype=torch.int64))
    method.clean.copy_(torch.rand(2, captions, generator=torch.Generator().manual_seed(seed)))
    method.stage.fill_(stage)
    return method


def slow_loss(v: Tensor, t: Tensor, ids: list[int], clean: list[list[float]], stage: int) -> float:
    """NCR's loss of a batch, one pair at a time. ``clean``: each network's own probabilities."""
    size, d = len(ids), v.shape[1] // 2
    score = [[[2.0 * float(v[i, k * d : k * d + d] @ t[j, k * d : k * d + d]) for j in range(size)]
              for i in range(size)] for k in (0, 1)]  # fmt: skip

    def costs(k: int, i: int, margin: float) -> tuple[list[float], list[float]]:
        others = [j for j in range(size) if ids[j] != ids[i]]
        own = score[k][i][i]
        return (
            [max(0.0, margin + score[k][i][j] - own) for j in others],
            [max(0.0, margin + score[k][j][i] - own) for j in others],
        )

    def mean_cost(k: int, i: int) -> float:
        rows, cols = costs(k, i, MARGIN)
        return sum(rows) / size + sum(cols) / size

    if stage == WARMUP:
        return sum(mean_cost(k, i) for k in (0, 1) for i in range(size)) / size
    guess: list[list[float]] = []
    for k in (0, 1):
        p = [min(MARGIN, max(0.0, MARGIN - mean_cost(k, i) / 2)) for i in range(size)]
        best = sorted(p)[-(size // 10 + 1) :]
        scale = max(sum(best) / len(best), 1e-8)
        guess.append([min(1.0, x / scale) for x in p])
    total = 0.0
    for k in (0, 1):
        for i in range(size):
            trust = clean[1 - k][i]  # of the other network
            if trust > 0.5:
                y = trust + (1 - trust) * guess[k][i]
            elif stage == ALL:
                y = (guess[0][i] + guess[1][i]) / 2
            else:
                continue
            rows, cols = costs(k, i, MARGIN * (10**y - 1) / 9)
            total += max([0.0, *rows]) + max([0.0, *cols])
    return total / size


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 99), st.integers(2, 12), st.sampled_from([WARMUP, CLEAN, ALL]))
def test_the_loss_is_the_one_written_out(seed: int, size: int, stage: int) -> None:
    v, t = both_networks(seed, size)
    method = studied(30, stage=stage, seed=seed)
    captions = torch.randperm(30, generator=torch.Generator().manual_seed(seed))[:size]
    ids = torch.arange(size) // 2 * (size % 2) + torch.arange(size) * (1 - size % 2)  # odd sizes share images
    total = method.loss(Embedding(v), Embedding(t), block(ids, captions=captions)).total
    expected = slow_loss(v, t, ids.tolist(), method.clean[:, captions].tolist(), stage)
    assert total.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_no_gradient_goes_through_the_labels() -> None:
    """With labels held still the gradient is the hinge's: compare with differences of the loss at fixed labels."""
    v, t = both_networks(3, 6)
    method, captions = studied(6, stage=ALL), torch.arange(6)
    pairs = block(captions, captions=captions)
    leaf = v.clone().requires_grad_()
    (grad,) = torch.autograd.grad(method.loss(Embedding(leaf), Embedding(t), pairs).total, leaf)
    labels = method.labels(split_networks(v, t), method.clean.flip(0), pairs.relevance)
    method.labels = lambda *_: labels  # type: ignore[method-assign]
    step = 1e-2 * torch.randn(v.shape, generator=torch.Generator().manual_seed(1), dtype=v.dtype)
    up, down = (method.loss(Embedding(v + sign * 1e-2 * step), Embedding(t), pairs).total for sign in (1, -1))
    assert float((up - down) / 2e-2) == pytest.approx(float((grad * step).sum()), rel=1e-2, abs=1e-6)


def test_outside_of_training_it_is_the_warm_up() -> None:
    v, t = both_networks(1, 5)
    total = Ncr(NcrConfig(), dim=8).loss(Embedding(v), Embedding(t), block(range(5))).total
    assert total.item() == pytest.approx(slow_loss(v, t, list(range(5)), [], WARMUP), rel=1e-5)


def view(epoch: int, *, epochs: int = 20) -> TrainingView:
    """Twenty images with two captions each; the captions of the second half are of other images."""
    image = torch.arange(40) // 2
    images = torch.cat(list(unit(0, 2, 20, 64)), dim=-1) / 2**0.5
    source = torch.cat((image[:20], image[20:].roll(5)))
    return TrainingView(epoch, epochs, 0, 8, image, lambda: SetEmbeddings(images, images[source]))


@pytest.mark.parametrize(
    ("warmup", "noisy_from", "epochs", "stages"),
    [(0.35, 0.5, 20, {0: WARMUP, 6: WARMUP, 7: CLEAN, 13: CLEAN, 14: ALL, 19: ALL}),
     (0.2, 0.5, 10, {1: WARMUP, 2: CLEAN, 5: CLEAN, 6: ALL}),  # half of the eight epochs after warm-up is four
     (0.1, 1.0, 20, {1: WARMUP, 19: CLEAN})],
)  # fmt: skip
def test_stages(warmup: float, noisy_from: float, epochs: int, stages: dict[int, int]) -> None:
    method = Ncr(NcrConfig(warmup=warmup, noisy_from=noisy_from), dim=8)
    for epoch, stage in stages.items():
        method.fit(None, torch.zeros(40, dtype=torch.int64))
        method.start_epoch(view(epoch, epochs=epochs))
        assert method.stage.item() == stage, epoch
        assert bool((method.clean == 1).all()) == (stage == WARMUP)


def test_wrong_captions_are_found() -> None:
    method = studied(40, stage=WARMUP)
    method.start_epoch(view(10))
    assert bool((method.clean[:, :20] > 0.5).all())
    assert bool((method.clean[:, 20:] < 0.5).all())


@pytest.mark.parametrize("batch", [8, 12])
def test_caption_losses_are_those_of_the_groups(batch: int) -> None:
    """A batch of 12 leaves a group that is filled up; there only the rest of the captions counts."""
    look = replace(view(3), batch_size=batch)
    images, texts = look.embed()
    losses = look.caption_losses(look.embed(), studied(40, stage=WARMUP), at_once=2 * batch**2)
    left = 40
    for group in look.groups().tolist():
        counted, left = group[:left], left - batch
        for k in (0, 1):
            half = slice(64 * k, 64 * k + 64)
            for c in counted:
                own, total = 2 * float(images[c // 2, half] @ texts[c, half]), 0.0
                for o in group:
                    if o // 2 != c // 2:
                        total += max(0.0, MARGIN + 2 * float(images[c // 2, half] @ texts[o, half]) - own) / batch
                        total += max(0.0, MARGIN + 2 * float(images[o // 2, half] @ texts[c, half]) - own) / batch
                assert losses[k, c].item() == pytest.approx(total, abs=1e-5)
