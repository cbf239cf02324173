from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vacsr.methods import Embedding
from vacsr.methods.pcmepp import Pcmepp, PcmeppConfig, with_pseudo_positives
from vacsr.objective import PairBlock

from .cases import assert_same, block, gaussians


def bce(logit: Tensor, y: float) -> Tensor:
    p = 1 / (1 + (-logit).exp())
    return -(y * p.log() + (1 - y) * (1 - p).log())


def reference(method: Pcmepp, v: Embedding, t: Embedding, pairs: PairBlock) -> Tensor:
    """Loops over pairs; of several equal labels the row's own pair is the one to beat."""
    assert v.log_var is not None
    assert t.log_var is not None
    c, count = method.config, len(v.mean)
    labels = pairs.relevance.double() if pairs.targets is None else pairs.targets
    y = [[float(labels[i, j]) * (1 - 2 * c.smoothing) + c.smoothing for j in range(count)] for i in range(count)]
    logit: dict[tuple[int, int], Tensor] = {}
    for i in range(count):
        for j in range(count):
            csd = ((v.mean[i] - t.mean[j]) ** 2).sum() + v.log_var[i].exp().sum() + t.log_var[j].exp().sum()
            logit[i, j] = method.affine[1] - method.affine[0] * csd
    total = torch.zeros((), dtype=torch.float64)
    for i in range(count):
        for j in range(count):
            row = max(range(count), key=lambda k: (round(y[i][k], 9), k == i))
            column = max(range(count), key=lambda k: (round(y[k][j], 9), k == j))
            i2t = y[i][row] if logit[i, j] >= logit[i, row] else y[i][j]
            t2i = y[column][j] if logit[i, j] >= logit[column, j] else y[i][j]
            pseudo = bce(logit[i, j], i2t) + bce(logit[i, j], t2i)
            total = total + 2 * bce(logit[i, j], y[i][j]) + c.pseudo_weight * pseudo
    total = total / (count**2 if c.reduction == "mean" else count)
    for x in (v, t):
        assert x.log_var is not None
        total = total - c.vib_weight * 0.5 * (1 + x.log_var - x.mean**2 - x.log_var.exp()).mean()
    return total


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(1, 5), st.booleans(), st.sampled_from(["mean", "rows"]), st.integers(0, 99))
def test_the_loss_and_its_gradient_pair_by_pair(size: int, mixed: bool, reduction: str, seed: int) -> None:
    """The gradient too: pseudo-positives are labels, through which nothing flows back."""
    fields = {"scale": 2.0, "shift": 1.0, "vib_weight": 0.3, "pseudo_weight": 0.7, "smoothing": 0.05}
    method = Pcmepp(PcmeppConfig.model_validate({**fields, "reduction": reduction}), dim=8).double()
    v, t, pairs = gaussians(seed, size), gaussians(seed + 1, size), block([n % 3 for n in range(size)])
    if mixed:  # rows with their partners, by random amounts
        own = torch.rand(size, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        y = pairs.relevance.double()
        pairs = replace(pairs, targets=own * y + (1 - own) * y.flip(0))
    leaves = [x for x in (v.mean, v.log_var, t.mean, t.log_var, method.affine) if x is not None]
    assert_same(method.loss(v, t, pairs).total, reference(method, v, t, pairs), leaves, atol=1e-8, rtol=1e-6)


def test_pseudo_positives_beat_the_positive_or_equal_it() -> None:
    logit = torch.tensor([[1.0, 2.0, 1.0, 0.0], [5.0, 4.0, 3.0, 6.0]], requires_grad=True)
    target = torch.tensor([[0.9, 0.0, 0.1, 0.2], [0.0, 0.7, 0.0, 0.0]])
    own = torch.tensor([[True, False, False, False], [False, True, False, False]])
    labels = with_pseudo_positives(logit, target, own)
    assert torch.equal(labels, torch.tensor([[0.9, 0.9, 0.9, 0.2], [0.7, 0.7, 0.0, 0.7]]))
    assert not labels.requires_grad, "the scores only choose"
    equal = with_pseudo_positives(logit[:1], torch.tensor([[1.0, 1.0, 0.0, 0.0]]), own[:1])
    assert torch.equal(equal, torch.tensor([[1.0, 1.0, 1.0, 0.0]])), "the own pair is the one to beat"
    other = with_pseudo_positives(logit[:1], torch.tensor([[0.3, 0.6, 0.0, 0.0]]), own[:1])
    assert torch.equal(other, torch.tensor([[0.3, 0.6, 0.0, 0.0]])), "a stronger partner is"
