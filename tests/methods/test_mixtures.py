import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vacsr.methods.mixtures import clean_by_betas, clean_by_gaussians, falling, rescaled, two_means


def two_heaps(seed: int, *, low: float = 0.2, high: float = 0.7, counts: tuple[int, int] = (60, 40)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    heaps = [0.06 * torch.randn(n, generator=generator) + at for n, at in zip(counts, (low, high), strict=True)]
    return rescaled(torch.cat(heaps))


def slow_gaussians(x: list[float], labels: list[int], *, steps: int, tolerance: float, floor: float) -> list[float]:
    """EM written out: the probability of the component with the smaller mean."""
    weight = [[1.0 - k, float(k)] for k in labels]
    before = -math.inf
    for step in range(steps + 1):
        total = [sum(w[k] for w in weight) for k in (0, 1)]
        mean = [sum(w[k] * a for w, a in zip(weight, x, strict=True)) / total[k] for k in (0, 1)]
        spread = [
            sum(w[k] * (a - mean[k]) ** 2 for w, a in zip(weight, x, strict=True)) / total[k] + floor for k in (0, 1)
        ]
        joint = [[total[k] / len(x) * stats.norm.pdf(a, mean[k], spread[k] ** 0.5) for k in (0, 1)] for a in x]
        weight = [[j[0] / sum(j), j[1] / sum(j)] for j in joint]
        likelihood = sum(math.log(sum(j)) for j in joint) / len(x)
        # the step that finds too small a gain still updates the components once
        if step < steps and abs(likelihood - before) < tolerance:
            steps = step + 1
        elif step == steps:
            break
        before = likelihood
    small = 0 if mean[0] <= mean[1] else 1
    return [w[small] for w in weight]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 999), st.sampled_from([0.25, 0.4, 0.7]), st.integers(1, 12), st.sampled_from([1e-3, 1e-2, 0.1]))
def test_gaussians_are_em_written_out(seed: int, high: float, steps: int, tolerance: float) -> None:
    x = two_heaps(seed, high=high, counts=(20, 15))
    labels = two_means(x)[:, 1].long().tolist()
    clean = clean_by_gaussians(x, steps=steps, tolerance=tolerance, floor=5e-4)
    expected = slow_gaussians(x.tolist(), labels, steps=steps, tolerance=tolerance, floor=5e-4)
    np.testing.assert_allclose(clean.numpy(), expected, atol=1e-9)


def test_components_that_change_places_keep_their_meaning() -> None:
    """EM may carry the component that began at small values past the other one: clean is the smaller mean."""
    x = torch.tensor([0.5, 0.5, 0.6, 0.5, 0.6, 0.0, 0.8, 0.6, 1.0], dtype=torch.float64)
    clean = clean_by_gaussians(x, steps=100, tolerance=0.0)
    expected = slow_gaussians(x.tolist(), two_means(x)[:, 1].long().tolist(), steps=100, tolerance=0.0, floor=5e-4)
    np.testing.assert_allclose(clean.numpy(), expected, atol=1e-6)
    assert clean[0] > 0.5 > clean[5]


def test_two_means_is_where_lloyd_stops() -> None:
    x = two_heaps(5)
    belongs = two_means(x).argmax(dim=1)
    means = torch.stack([x[belongs == k].mean() for k in (0, 1)])
    assert torch.equal(belongs, (x.unsqueeze(1) - means).abs().argmin(dim=1))


def slow_betas(x: list[float], steps: int) -> list[float]:
    """EM with scipy's densities: the probability of the component that began at small values."""
    inside = np.clip(np.array(x), 1e-4, 1 - 1e-4)
    share, shapes = [0.5, 0.5], [(1.0, 2.0), (2.0, 1.0)]
    for _ in range(steps):
        weight = np.array([s * stats.beta.pdf(inside, *shape) for s, shape in zip(share, shapes, strict=True)])
        weight = np.maximum(weight, 1e-12)
        weight = weight / weight.sum(axis=0)
        shapes = []
        for part in weight:
            mean = np.average(inside, weights=part)
            variance = np.average((inside - mean) ** 2, weights=part)
            alpha = mean * (mean * (1 - mean) / variance - 1)
            shapes.append((alpha, alpha * (1 - mean) / mean))
        share = list(weight.sum(axis=1) / weight.sum())
    joint = np.array([s * stats.beta.pdf(inside, *shape) for s, shape in zip(share, shapes, strict=True)])
    return list(joint[0] / (joint.sum(axis=0) + 1e-12))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(0, 999), st.integers(0, 12))
def test_betas_are_em_with_scipys_densities(seed: int, steps: int) -> None:
    x = two_heaps(seed)
    clean = clean_by_betas(x, steps=steps)
    np.testing.assert_allclose(clean.numpy(), slow_betas(x.tolist(), steps), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("fit", [clean_by_gaussians, clean_by_betas])
def test_degenerate_losses_give_probabilities(fit: Any) -> None:
    """Equal ones are all clean: a method that trains on clean pairs must not lose all of them."""
    assert rescaled(torch.tensor([3.0, 1.0, 5.0])).tolist() == [0.5, 0.0, 1.0]
    assert bool((fit(rescaled(torch.full((50,), 0.3))) > 0.99).all())
    for values in ([0.0] * 8 + [1.0], [0.0, 1.0]):
        clean = fit(rescaled(torch.tensor(values)))
        assert bool(((clean >= 0) & (clean <= 1)).all()), clean


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=9, unique_by=lambda pair: pair[0]))
def test_a_falling_probability_falls(points: list[tuple[float, float]]) -> None:
    x, p = (torch.tensor(column, dtype=torch.float64) for column in zip(*points, strict=True))
    peak = x[p == p.max()].min()  # the first of equal peaks
    for at, value in zip(x, falling(p, x), strict=True):
        expected = p.max() if at <= peak else p[(x >= peak) & (x <= at)].min()
        assert value == expected
