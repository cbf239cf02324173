"""A Gaussian around the weights of one trained linear layer, from the curvature of its loss: a Laplace approximation.

The precision Σ_i x_i x_iᵀ ⊗ H_i + λI of the weights is replaced by the Kronecker product (A + √λ·I) ⊗ (B + √λ·I), with
A = Σ x xᵀ/√N over the layer's inputs (a 1 added for the bias), B = Σ H/√N over the loss's curvature in its outputs, and
λ the precision of a zero-mean Gaussian prior. The output at x has the covariance xᵀ(A + √λ·I)⁻¹x · (B + √λ·I)⁻¹.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vacsr.errors import DataError

_GRID = torch.linspace(-8.0, 12.0, 801, dtype=torch.float64)  # log10 of the precisions tried


class KroneckerFactors(NamedTuple):
    """Of one layer with h inputs and d outputs."""

    inputs: Tensor
    """A [h+1, h+1] float64"""
    outputs: Tensor
    """B [d, d] float64"""


@dataclass(frozen=True, eq=False)
class LayerPosterior:
    """The layer's weights are normal around the trained ones."""

    factors: KroneckerFactors
    precision: float
    """λ of the prior."""

    @cached_property
    def _whitening(self) -> Tensor:
        """R with RᵀR = (A + √λ·I)⁻¹. [h+1, h+1]"""
        lower = torch.linalg.cholesky(_damped(self.factors.inputs, self.precision))
        root: Tensor = torch.linalg.solve_triangular(lower, torch.eye(len(lower)).to(lower), upper=False)
        return root

    @cached_property
    def _output_variance(self) -> Tensor:
        """The diagonal of (B + √λ·I)⁻¹. [d]"""
        covariance: Tensor = torch.linalg.inv(_damped(self.factors.outputs, self.precision))
        return covariance.diagonal()

    def variance(self, inputs: Tensor) -> Tensor:
        """Of each output at these inputs of the layer. [N, h] -> [N, d] float64"""
        spread = (with_one(inputs) @ self._whitening.to(inputs.device).T).square().sum(dim=1, keepdim=True)
        return spread * self._output_variance.to(inputs.device)


def with_one(inputs: Tensor) -> Tensor:
    """Inputs as a layer with a bias sees them. [N, h] -> [N, h+1] float64"""
    return torch.cat([inputs.double(), torch.ones(len(inputs), 1).to(inputs.device, torch.float64)], dim=1)


def likeliest_precision(factors: KroneckerFactors, layer: nn.Linear) -> float:
    """λ that maximises the Laplace approximation of the marginal likelihood of the training data.

    Up to a constant, 2·log p = P·log λ − λ‖W‖² − d·log|A + √λ·I| − (h+1)·log|B + √λ·I| with P = (h+1)·d weights. Only
    training data enter, so no other label is spent on the choice.
    """
    a, b = (torch.linalg.eigvalsh(matrix.cpu()).clamp(min=0.0) for matrix in factors)
    if not (torch.isfinite(a).all() and torch.isfinite(b).all() and b.max() > 0.0):
        raise DataError("the loss has no curvature at these weights — train the model first, on finite features")
    grid = 10.0**_GRID
    log_det = len(b) * _log_det(a, grid) + len(a) * _log_det(b, grid)
    size = sum(float(p.detach().double().square().sum()) for p in layer.parameters())
    evidence = len(a) * len(b) * grid.log() - grid * size - log_det
    return float(grid[evidence.argmax()])


def _log_det(eigenvalues: Tensor, grid: Tensor) -> Tensor:
    """log|M + √λ·I| at each λ. [n], [G] -> [G]"""
    return (eigenvalues + grid.sqrt().unsqueeze(1)).log().sum(dim=1)


def _damped(matrix: Tensor, precision: float) -> Tensor:
    return torch.add(matrix, torch.eye(len(matrix)).to(matrix), alpha=precision**0.5)
