"""Loss tolerance r_i (the paper's section 2): how hard a loss pulls an image's labelled captions towards it, less how
hard it pushes its false negatives away. Below 0 the push has won, and what is alike is driven apart.

An image may have several labelled captions: each in turn is the positive beside all unlabelled captions, and r_i is the
mean over them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.errors import ShapeMismatch


class Tolerance(NamedTuple):
    """Of each image; NaN for one without a labelled caption. [I] each"""

    pull: Tensor
    """|∂L/∂S| of the positive."""
    push: Tensor
    """|Σ ∂L/∂S| of the false negatives."""

    @property
    def r(self) -> Tensor:
        """Pull less push. [I]"""
        return self.pull - self.push


class ToleranceFigures(NamedTuple):
    """What is reported of a split."""

    mean: float
    """r over all images."""
    mean_with_false_negatives: float
    """r over images that have false negatives; NaN where none has."""
    negative_share: float
    """Percent of these with r < 0."""
    kept_share: float
    """Percent of their pull that the push leaves, which losses of different scales can be compared by."""
    images_with_false_negatives: int
    false_negatives: int


def contrastive_tolerance(score: Tensor, labelled: Tensor, false_negative: Tensor, *, temperature: float) -> Tolerance:
    """Softmax over the positive and all unlabelled captions: r = (1/τ)·Σ_{true negatives} softmax. [I, T] each -> [I]

    >>> score, labelled = torch.zeros(1, 4), torch.tensor([[True, False, False, False]])
    >>> contrastive_tolerance(score, labelled, torch.tensor([[False, True, False, False]]), temperature=0.5).r
    tensor([1.], dtype=torch.float64)
    """
    _check(score, labelled, false_negative)
    logit = score.double() / temperature
    others = logit.masked_fill(labelled, -torch.inf).logsumexp(dim=1, keepdim=True)
    wrong = logit.masked_fill(~false_negative, -torch.inf).logsumexp(dim=1, keepdim=True)
    total = torch.logaddexp(logit, others)  # of every caption as if it were the positive
    pull = -torch.expm1(logit - total) / temperature
    push = (wrong - total).exp() / temperature
    return Tolerance(_over_positives(pull, labelled), _over_positives(push, labelled))


def sigmoid_tolerance(
    score: Tensor, labelled: Tensor, false_negative: Tensor, *, scale: float, bias: float
) -> Tolerance:
    """P = σ(a·S+b), every pair by itself: r = |a|·[(1−P_ii) − Σ_{false negatives} P_ij]. [I, T] each -> [I]

    >>> score, labelled = torch.zeros(1, 3), torch.tensor([[True, False, False]])
    >>> sigmoid_tolerance(score, labelled, ~labelled, scale=2.0, bias=0.0).r
    tensor([-1.], dtype=torch.float64)
    """
    _check(score, labelled, false_negative)
    probability = torch.sigmoid(scale * score.double() + bias)
    size = abs(scale)
    pull = _over_positives(size * (1 - probability), labelled)
    push = size * (probability * false_negative).sum(dim=1)
    return Tolerance(pull, push.masked_fill(pull.isnan(), torch.nan))


def tolerance_figures(found: Tolerance, false_negative: Tensor) -> ToleranceFigures:
    """Means and shares over images. false_negative [I, T]"""
    asked = ~found.pull.isnan()
    some = asked & false_negative.any(dim=1)
    r, pull = found.r[some], found.pull[some]
    return ToleranceFigures(
        mean=float(found.r[asked].mean()),
        mean_with_false_negatives=float(r.mean()),
        negative_share=100 * float((r < 0).double().mean()),
        kept_share=100 * float(r.mean() / pull.mean()),
        images_with_false_negatives=int(some.sum()),
        false_negatives=int(false_negative.sum()),
    )


def _over_positives(value: Tensor, labelled: Tensor) -> Tensor:
    """Mean over an image's labelled captions. [I, T] -> [I]"""
    return (value * labelled).sum(dim=1) / labelled.sum(dim=1)


def _check(score: Tensor, labelled: Tensor, false_negative: Tensor) -> None:
    shapes = [list(tensor.shape) for tensor in (score, labelled, false_negative)]
    if score.ndim != 2 or shapes[1:] != [shapes[0], shapes[0]]:
        raise ShapeMismatch(f"scores, labels and false negatives are {shapes} — pass three matrices [images, captions]")
    if bool((labelled & false_negative).any()):
        raise ShapeMismatch("a labelled pair is marked as a false negative — pass unlabelled pairs only")
