"""How sharply a loss over cosines bends in one item's embedding: its Gauss–Newton matrix, summed over a batch.

A row's loss is a function of the cosines c_j of one un-normalised embedding f with unit vectors t_j. With u = f/‖f‖ its
Gauss–Newton matrix by f is JᵀMJ: M is the loss's second derivative by the cosines, J = T(I − uuᵀ)/‖f‖ the cosines'
first derivative by f.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class CosineCurvature(NamedTuple):
    """M of each row, as diag(single_i) − joint_i·joint_iᵀ. [R, C] each"""

    single: Tensor
    joint: Tensor


class Likelihood(NamedTuple):
    """How cosines give labels a probability: a softmax of scale·cos over rows and columns, or σ(scale·cos + bias)."""

    kind: Literal["softmax", "logistic"]
    scale: float
    bias: float = 0.0

    def curvature(self, cosine: Tensor) -> CosineCurvature:
        """Second derivative of the batch's loss, summed over rows, by the cosines of one row each. [R, C] -> [R, C]

        The softmax loss is the mean of both directions; a cosine takes part in its row's softmax with all others of
        the row, and alone in its column's. Neither depends on the labels.
        """
        if self.kind == "logistic":
            chance = torch.sigmoid(self.scale * cosine + self.bias)
            return CosineCurvature(self.scale**2 * chance * (1.0 - chance), torch.zeros_like(cosine))
        row, column = (torch.softmax(self.scale * cosine, dim=dim) for dim in (1, 0))
        half = 0.5 * self.scale**2
        return CosineCurvature(half * (row + column * (1.0 - column)), half**0.5 * row)


def output_curvature(own: Tensor, other: Tensor, likelihood: Likelihood) -> Tensor:
    """Σ_i JᵢᵀMᵢJᵢ of the rows' embeddings, without a matrix per row. [R, d] un-normalised, [C, d] unit -> [d, d]

    A row of J is (t_j − c_j·u)/‖f‖. Its products are multiplied out, so that each sum over i and j is one matrix
    product.
    """
    unit = functional.normalize(own, dim=1)
    cosine = unit @ other.T
    single, joint = likelihood.curvature(cosine)
    length = own.norm(dim=1, keepdim=True)
    single, joint = single / length.square(), joint / length
    cross = other.T @ (single * cosine).T @ unit
    turned = joint @ other - (joint * cosine).sum(dim=1, keepdim=True) * unit  # J_iᵀ joint_i
    total: Tensor = (
        other.T @ (single.sum(dim=0).unsqueeze(1) * other)
        - (cross + cross.T)
        + unit.T @ ((single * cosine.square()).sum(dim=1, keepdim=True) * unit)
        - turned.T @ turned
    )
    return total
