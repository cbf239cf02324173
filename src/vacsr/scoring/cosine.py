"""Mean and variance of the cosine of two Gaussian vectors, in closed form."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Gaussians(NamedTuple):
    """Independent normal vectors with diagonal covariance, one a row."""

    mean: Tensor  # [N, d]
    variance: Tensor  # [N, d]

    def squared_norm(self) -> Tensor:
        """E‖x‖² = ‖mean‖² + Σ variance. [N]"""
        return self.mean.square().sum(dim=-1) + self.variance.sum(dim=-1)


class Moments(NamedTuple):
    """Of one number per pair. [N] each"""

    mean: Tensor
    variance: Tensor


def dot_moments(x: Gaussians, y: Gaussians) -> Moments:
    """Of xᵀy for aligned rows, exact: E = μᵀν, Var = Σ v·w + v·ν² + w·μ². [N, d], [N, d] -> [N]"""
    spread = x.variance * (y.variance + y.mean.square()) + y.variance * x.mean.square()
    return Moments((x.mean * y.mean).sum(dim=-1), spread.sum(dim=-1))


def cosine_moments(x: Gaussians, y: Gaussians) -> Moments:
    """Of the cosine for aligned rows, each norm held at the root of its expected square. [N, d], [N, d] -> [N]

    The moments of xᵀy/√(E‖x‖²·E‖y‖²), exactly. Its variance is almost the same whatever the angle: it is a sum over
    the two vectors' own noise.
    """
    dot = dot_moments(x, y)
    scale = x.squared_norm() * y.squared_norm()
    return Moments(dot.mean / scale.sqrt(), dot.variance / scale)


def coupled_cosine_moments(x: Gaussians, y: Gaussians) -> Moments:
    """The same, with norms that vary together with the numerator, to first order. [N, d], [N, d] -> [N]

    Noise along a vector makes it longer and its products larger by the same factor, so it does not turn the vector and
    cancels: the closer two vectors are, the less their cosine varies. With n = E‖x‖², m = E‖y‖² and c = μᵀν, the
    deviation of xᵀy − ½c(‖x‖²/n + ‖y‖²/m) has variance
    Σ v(ν − cμ/n)² + Σ w(μ − cν/m)² + Σ vw + ½c²(Σ v²/n² + Σ w²/m²), over n·m for the cosine.
    """
    n, m = x.squared_norm().unsqueeze(-1), y.squared_norm().unsqueeze(-1)
    dot = (x.mean * y.mean).sum(dim=-1, keepdim=True)
    linear = x.variance * (y.mean - dot * x.mean / n).square() + y.variance * (x.mean - dot * y.mean / m).square()
    lengths = 0.5 * dot.square() * ((x.variance / n).square() + (y.variance / m).square())
    spread = (linear + x.variance * y.variance + lengths).sum(dim=-1)
    scale = (n * m).squeeze(-1)
    return Moments(dot.squeeze(-1) / scale.sqrt(), spread / scale)
