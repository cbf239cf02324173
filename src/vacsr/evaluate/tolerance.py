"""Loss tolerance r_i (the paper's section 2): how hard a loss pulls an image's labelled captions towards it, less how
hard it pushes its false negatives away. Below 0 the push has won, and what is alike is driven apart.

An image may have several labelled captions: each in turn is the positive beside all unlabelled captions, and r_i is the
mean over them.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """Of each image; NaN for one without a labelled caption. [I] each"""

    pull: Tensor  # |∂L/∂S| of the positive
    push: Tensor  # |Σ ∂L/∂S| of the false negatives

    @property
    def r(self) -> Tensor:
        """Pull less push. [I]"""
        return self.pull - self.push


def loss_tolerance(
    score: Tensor,
    labelled: Tensor,
    false_negative: Tensor,
    *,
    kind: Literal["softmax", "logistic"],
    scale: float,
    bias: float = 0.0,
) -> Tolerance:
    """Of a loss that is a softmax over scale·S, or a σ(scale·S + bias) of every pair. [I, T] each -> [I]

    Softmax, over the positive and all unlabelled captions: r = scale·Σ_{true negatives} softmax. Logistic, with
    P = σ(a·S + b): r = |a|·[(1 − P_ii) − Σ_{false negatives} P_ij].
    """
    logit = scale * score.double() + bias
    if kind == "softmax":
        others = logit.masked_fill(labelled, -torch.inf).logsumexp(dim=1, keepdim=True)
        wrong = logit.masked_fill(~false_negative, -torch.inf).logsumexp(dim=1, keepdim=True)
        total = torch.logaddexp(logit, others)  # of every caption as if it were the positive
        pull, push = -torch.expm1(logit - total), (wrong - total).exp()
    else:
        probability = torch.sigmoid(logit)
        pull, push = 1 - probability, (probability * false_negative).sum(dim=1, keepdim=True).expand_as(probability)
    positives = labelled.sum(dim=1)
    return Tolerance(*(abs(scale) * ((part * labelled).sum(dim=1) / positives) for part in (pull, push)))


def tolerance_summary(tolerance: Tolerance, false_negative: Tensor) -> dict[str, float]:
    """Means and shares over images. false_negative [I, T]

    ``mean`` is r over all images. Over those with false negatives: ``mean_with_false_negatives``, ``negative_share``
    (percent with r < 0) and ``kept_share`` (percent of the pull that the push leaves, comparable across loss scales).
    """
    evaluated = ~tolerance.pull.isnan()
    some = evaluated & false_negative.any(dim=1)
    r, pull = tolerance.r[some], tolerance.pull[some]
    return {
        "mean": float(tolerance.r[evaluated].mean()),
        "mean_with_false_negatives": float(r.mean()),
        "negative_share": 100 * float((r < 0).double().mean()),
        "kept_share": 100 * float(r.mean() / pull.mean()),
        "images_with_false_negatives": int(some.sum()),
        "false_negatives": int(false_negative.sum()),
    }
