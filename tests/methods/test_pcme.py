from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.config.io import method_config
from vacsr.errors import UsageError
from vacsr.methods import Embedding, Pcme
from vacsr.methods.base import take
from vacsr.methods.pcme import PcmeConfig, normal_draws, samples, scoring_noise, squared_distances
from vacsr.noise import RowNoise, Stream
from vacsr.pairwise import batch_block


def items(count: int, dim: int = 3, *, seed: int = 0) -> Embedding:
    mean, log_var = torch.randn(2, count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mean = torch.nn.functional.normalize(mean, dim=-1)
    return Embedding(mean.requires_grad_(), (0.5 * log_var - 1).requires_grad_())


def pcme(**fields: Any) -> Pcme:
    return Pcme(PcmeConfig(**{"samples": 2, **fields}), dim=8).double()


def noise(rows: torch.Tensor, step: int = 3) -> RowNoise:
    return RowNoise(7, torch.tensor(step), rows, Stream.IMAGE_SAMPLES)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 9), st.integers(0, 99))
def test_squared_distances_are_those_of_torch(rows: int, cols: int, dim: int, seed: int) -> None:
    x, y = (torch.randn(count, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + count))
            for count in (rows, cols))  # fmt: skip
    torch.testing.assert_close(squared_distances(x, y), torch.cdist(x, y).square())
    assert squared_distances(100 * x.float(), 100 * x.float()).min() >= 0, "rounding gives no negative distance"


def test_means_alone_are_refused() -> None:
    with pytest.raises(UsageError, match=r"MatchingModel\.build"):
        pcme().uncertainty(Embedding(torch.ones(1, 2)), Embedding(torch.ones(1, 2)))


def test_draws_are_standard_normal_and_go_by_position() -> None:
    draws = normal_draws(noise(torch.arange(2000)), 51)
    assert draws.shape == (2000, 51)
    assert draws.mean().abs() < 0.01
    assert abs(draws.std().item() - 1) < 0.01
    assert abs((draws**4).mean().item() - 3) < 0.1
    correlation = torch.corrcoef(draws.T) - torch.eye(51)
    assert correlation.abs().max() < 0.12, "lanes share no bits"
    assert torch.equal(normal_draws(noise(torch.tensor([5, 1999])), 51), draws[[5, 1999]])
    assert not torch.equal(normal_draws(noise(torch.arange(2000), step=4), 51), draws)


def test_samples_have_the_items_mean_and_deviation() -> None:
    x = items(2, 4)
    assert x.log_var is not None
    drawn = samples(x, noise(torch.arange(2)), count=20_000)
    assert drawn.shape == (2, 20_000, 4)
    torch.testing.assert_close(drawn.mean(dim=1), x.mean, atol=0.03, rtol=0)
    torch.testing.assert_close(drawn.var(dim=1), x.log_var.exp(), atol=0, rtol=0.05)


def probability(zv: torch.Tensor, zt: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of one pair: mean over all samples of e^l/(e^l + e^−l). [J, d], [J, d] -> 0-d"""
    found = []
    for x in zv:
        for y in zt:
            logit = b - a * (x - y).square().sum().sqrt()
            found.append(logit.exp() / (logit.exp() + (-logit).exp()))
    return torch.stack(found).mean()


def reference(method: Pcme, v: Embedding, t: Embedding, ids: list[int], *, step: int) -> torch.Tensor:
    """Loops over pairs and samples, times two, and the divergences from their definition."""
    assert v.log_var is not None
    assert t.log_var is not None
    count, dim, config = len(ids), v.mean.shape[1], method.config
    places = torch.arange(count)
    drawn = [
        normal_draws(RowNoise(5, torch.tensor(step), places, stream), config.samples * dim).double()
        for stream in (Stream.IMAGE_SAMPLES, Stream.TEXT_SAMPLES)
    ]
    total = torch.zeros((), dtype=torch.float64)
    for i in range(count):
        zv = v.mean[i] + (v.log_var[i] / 2).exp() * drawn[0][i].view(-1, dim)
        for j in range(count):
            zt = t.mean[j] + (t.log_var[j] / 2).exp() * drawn[1][j].view(-1, dim)
            p = probability(zv, zt, method.affine[0], method.affine[1])
            total = total - 2 * (p if ids[i] == ids[j] else 1 - p).log()
    for x in (v, t):
        assert x.log_var is not None
        total = total - config.vib_weight * 0.5 * (1 + x.log_var - x.mean**2 - x.log_var.exp()).mean()
    return total


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.floats(0.5, 4), st.floats(-2, 4), st.integers(0, 99))
def test_the_loss_and_its_gradient_pair_by_pair(size: int, scale: float, shift: float, seed: int) -> None:
    ids = [number % 3 for number in range(size)]
    method, v, t = pcme(scale=scale, shift=shift, vib_weight=0.3), items(size, seed=seed), items(size, seed=seed + 1)
    terms = method.loss(v, t, batch_block(torch.tensor(ids), seed=5, step=seed))
    expected = reference(method, v, t, ids, step=seed)
    torch.testing.assert_close(terms.total, expected, atol=1e-8, rtol=1e-6)
    leaves = [v.mean, v.log_var, t.mean, t.log_var, method.affine]
    for ours, theirs in zip(
        torch.autograd.grad(terms.total, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=1e-5)


@pytest.mark.parametrize("reduction", ["sum", "rows", "mean"])
def test_blocks_of_rows_add_up_to_the_batch(reduction: str) -> None:
    method, v, t = pcme(reduction=reduction, vib_weight=0.2), items(6, seed=1), items(6, seed=2)
    block = batch_block(torch.tensor([0, 0, 1, 2, 3, 3]), seed=5, step=3)
    whole = method.loss(v, t, block)
    parts = [method.loss(take(v, rows), t, block.rows(rows)) for rows in (slice(0, 2), slice(2, 6))]
    torch.testing.assert_close(parts[0].total + parts[1].total, whole.total)
    for name in ("match", "vib"):
        torch.testing.assert_close(parts[0].parts[name] + parts[1].parts[name], whole.parts[name])
    divisor = {"sum": 1, "rows": 6, "mean": 36}[reduction]
    plain = pcme(vib_weight=0.2).loss(v, t, block).parts["match"]
    torch.testing.assert_close(whole.parts["match"], plain / divisor)


def test_the_bottleneck_may_be_a_sum() -> None:
    """Over all items and dimensions, as a plain sum of both sides' divergences."""
    v, t, block = items(5, seed=1), items(5, seed=2), batch_block(torch.arange(5), seed=5, step=3)
    terms = pcme(vib_weight=1e-2, vib_reduction="sum").loss(v, t, block)
    normal = torch.distributions.Normal(0.0, 1.0)
    expected = sum(
        torch.distributions.kl_divergence(torch.distributions.Normal(x.mean, (0.5 * x.log_var).exp()), normal).sum()
        for x in (v, t)
    )
    torch.testing.assert_close(terms.parts["vib"], expected.detach())
    torch.testing.assert_close(terms.total, terms.parts["match"] + 1e-2 * expected)
    parts = [pcme(vib_reduction="sum").loss(take(v, rows), t, block.rows(rows)) for rows in (slice(0, 2), slice(2, 5))]
    torch.testing.assert_close(parts[0].parts["vib"] + parts[1].parts["vib"], expected.detach())


def test_far_away_pairs_stay_finite() -> None:
    """exp of a logit of −1000 is 0 in any precision; its logarithm is not."""
    method = Pcme(PcmeConfig(scale=500.0, samples=2), dim=8)
    v, t = (Embedding(x.mean.detach().float(), x.log_var) for x in (items(4, seed=1), items(4, seed=2)))
    v, t = (Embedding(x.mean.requires_grad_(), torch.full((4, 3), -2.0, requires_grad=True)) for x in (v, t))
    total = method.loss(v, t, batch_block(torch.arange(4), seed=0, step=0)).total
    gradients = torch.autograd.grad(total, [v.mean, v.log_var, t.mean, t.log_var, method.affine])
    assert total.isfinite()
    assert all(bool(g.isfinite().all()) for g in gradients)


def test_items_in_the_same_place_have_a_gradient() -> None:
    """The root of 0 has none; a pair without any spread must not break the run."""
    method, mean = Pcme(PcmeConfig(samples=2), dim=8), torch.ones(2, 3, requires_grad=True)
    x = Embedding(mean, torch.full((2, 3), -200.0))
    (grad,) = torch.autograd.grad(method.loss(x, x, batch_block(torch.arange(2), seed=0, step=0)).total, [mean])
    assert grad.isfinite().all()


def test_the_score_is_the_logit_of_the_mean_match_probability() -> None:
    method, v, t = pcme(samples=3), items(4, seed=1), items(5, seed=2)
    assert v.log_var is not None
    assert t.log_var is not None
    grade = method.grade(method.score(v, t))
    draws = [
        normal_draws(scoring_noise(stream, v.mean.device), 9).double().view(3, 3)
        for stream in (Stream.IMAGE_SAMPLES, Stream.TEXT_SAMPLES)
    ]
    assert not torch.equal(draws[0], draws[1]), "images and texts have draws of their own"
    for i in range(4):
        for j in range(5):
            zv = v.mean[i] + (v.log_var[i] / 2).exp() * draws[0]
            zt = t.mean[j] + (t.log_var[j] / 2).exp() * draws[1]
            expected = probability(zv, zt, method.affine[0], method.affine[1])
            torch.testing.assert_close(grade[i, j], expected)


def test_scores_do_not_depend_on_who_else_is_scored() -> None:
    method, v, t = pcme(), items(7, seed=1), items(6, seed=2)
    whole = method.score(v, t)
    alone = method.score(take(v, slice(3, 5)), take(t, slice(2, 3)))
    torch.testing.assert_close(alone, whole[3:5, 2:3])
    method.at_once = 2 * 6 * 4  # two images at a time
    torch.testing.assert_close(method.score(v, t), whole)
    assert method.score(take(v, slice(0, 0)), t).shape == (0, 6)


def test_sure_and_hopeless_pairs_keep_their_order() -> None:
    method = Pcme(PcmeConfig(scale=40.0, shift=40.0, samples=2), dim=8)
    angle = torch.linspace(0.0, math.pi, 9)
    v = Embedding(torch.tensor([[1.0, 0.0]]), torch.full((1, 2), -20.0))
    t = Embedding(torch.stack((angle.cos(), angle.sin()), dim=1), torch.full((9, 2), -20.0))
    score = method.score(v, t)[0]
    assert (score.diff() < 0).all(), "probabilities would round to 1 and 0"
    assert torch.equal(method.grade(score), score.sigmoid())


def test_uncertainty_and_parameters() -> None:
    method, v, t = pcme(), items(3, seed=1), items(3, seed=2)
    assert v.log_var is not None
    assert t.log_var is not None
    torch.testing.assert_close(method.uncertainty(v, t), v.log_var.exp().sum(1) + t.log_var.exp().sum(1))
    (group,) = method.param_groups()
    assert group.params == [method.affine]
    assert not group.decay
    assert pcme(learnable=False).param_groups() == []
    assert method.pairwise


def test_the_papers_settings() -> None:
    config: Any = method_config("pcme-paper")
    assert (config.samples, config.scale, config.shift, config.vib_weight) == (8, 5.0, 5.0, 1e-3)
    assert config.reduction == "sum"
