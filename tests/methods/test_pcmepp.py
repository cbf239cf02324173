from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vacsr.config.io import method_config
from vacsr.methods import Embedding, Pcmepp
from vacsr.methods.pcmepp import PcmeppConfig, closed_form_distance, smooth, with_pseudo_positives
from vacsr.pairwise import PairBlock, batch_block


def items(count: int, dim: int = 3, *, seed: int = 0) -> Embedding:
    mean, log_var = torch.randn(2, count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mean = torch.nn.functional.normalize(mean, dim=-1)
    return Embedding(mean.requires_grad_(), (0.5 * log_var - 2).requires_grad_())


def pcmepp(**fields: Any) -> Pcmepp:
    return Pcmepp(PcmeppConfig(**{"reduction": "mean", **fields}), dim=8).double()


def soft(block: PairBlock, seed: int) -> PairBlock:
    """Rows mixed with their partners by random amounts."""
    own = torch.rand(len(block.relevance), 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    y = block.relevance.double()
    return replace(block, targets=own * y + (1 - own) * y.flip(0))


def bce(logit: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    p = 1 / (1 + (-logit).exp())
    return -(y * p.log() + (1 - y) * (1 - p).log())


def reference(method: Pcmepp, v: Embedding, t: Embedding, block: PairBlock) -> torch.Tensor:
    """Loops over pairs; of several equal labels the row's own pair is the one to beat."""
    assert v.log_var is not None
    assert t.log_var is not None
    c, count = method.config, len(v.mean)
    labels = block.relevance.double() if block.targets is None else block.targets
    y = [[float(labels[i, j]) * (1 - 2 * c.smoothing) + c.smoothing for j in range(count)] for i in range(count)]
    logit: dict[tuple[int, int], torch.Tensor] = {}
    for i in range(count):
        for j in range(count):
            csd = ((v.mean[i] - t.mean[j]) ** 2).sum() + v.log_var[i].exp().sum() + t.log_var[j].exp().sum()
            logit[i, j] = method.affine[1] - method.affine[0] * csd
    divisor = count**2 if c.reduction == "mean" else count
    total = torch.zeros((), dtype=torch.float64)
    for i in range(count):
        for j in range(count):
            total = total + 2 * bce(logit[i, j], torch.tensor(y[i][j])) / divisor
            row = max(range(count), key=lambda k: (round(y[i][k], 9), k == i))
            column = max(range(count), key=lambda k: (round(y[k][j], 9), k == j))
            i2t = y[i][row] if logit[i, j] >= logit[i, row] else y[i][j]
            t2i = y[column][j] if logit[i, j] >= logit[column, j] else y[i][j]
            both = bce(logit[i, j], torch.tensor(i2t)) + bce(logit[i, j], torch.tensor(t2i))
            total = total + c.pseudo_weight * both / divisor
    for x in (v, t):
        assert x.log_var is not None
        total = total - c.vib_weight * 0.5 * (1 + x.log_var - x.mean**2 - x.log_var.exp()).mean()
    return total


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(1, 5), st.booleans(), st.sampled_from(["mean", "rows"]), st.integers(0, 99))
def test_the_loss_and_its_gradient_pair_by_pair(size: int, mixed: bool, reduction: str, seed: int) -> None:
    method = pcmepp(scale=2.0, shift=1.0, vib_weight=0.3, pseudo_weight=0.7, smoothing=0.05, reduction=reduction)
    v, t = items(size, seed=seed), items(size, seed=seed + 1)
    block = batch_block(torch.arange(size).remainder(3), seed=0, step=0)
    block = soft(block, seed) if mixed else block
    terms, expected = method.loss(v, t, block), reference(method, v, t, block)
    torch.testing.assert_close(terms.total, expected, atol=1e-8, rtol=1e-6)
    leaves = [v.mean, v.log_var, t.mean, t.log_var, method.affine]
    for ours, theirs in zip(
        torch.autograd.grad(terms.total, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=1e-5)


def test_the_gradient_numerically() -> None:
    method, block = pcmepp(scale=2.0, vib_weight=0.1), batch_block(torch.arange(3), seed=0, step=0)
    v, t = items(3, seed=1), items(3, seed=2)

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        return method.loss(Embedding(tensors[0], tensors[1]), Embedding(tensors[2], tensors[3]), block).total

    assert torch.autograd.gradcheck(loss, (v.mean, v.log_var, t.mean, t.log_var))


def test_pseudo_positives_beat_the_positive_or_equal_it() -> None:
    logit = torch.tensor([[1.0, 2.0, 1.0, 0.0], [5.0, 4.0, 3.0, 6.0]])
    target = torch.tensor([[0.9, 0.0, 0.1, 0.2], [0.0, 0.7, 0.0, 0.0]])
    own = torch.tensor([[True, False, False, False], [False, True, False, False]])
    found = with_pseudo_positives(logit, target, own)
    assert torch.equal(found, torch.tensor([[0.9, 0.9, 0.9, 0.2], [0.7, 0.7, 0.0, 0.7]]))
    equal = with_pseudo_positives(logit[:1], torch.tensor([[1.0, 1.0, 0.0, 0.0]]), own[:1])
    assert torch.equal(equal, torch.tensor([[1.0, 1.0, 1.0, 0.0]])), "the own pair is the one to beat"
    other = with_pseudo_positives(logit[:1], torch.tensor([[0.3, 0.6, 0.0, 0.0]]), own[:1])
    assert torch.equal(other, torch.tensor([[0.3, 0.6, 0.0, 0.0]])), "a stronger partner is"


def test_smoothing_moves_both_ends() -> None:
    torch.testing.assert_close(smooth(torch.tensor([0.0, 0.3, 1.0]), 0.1), torch.tensor([0.1, 0.34, 0.9]))


def test_the_distance_is_the_expected_squared_distance_of_samples() -> None:
    v, t = items(2, seed=1), items(3, seed=2)
    assert v.log_var is not None
    assert t.log_var is not None
    generator = torch.Generator().manual_seed(0)
    drawn = [
        x.mean + (x.log_var / 2).exp() * torch.randn(40_000, *x.mean.shape, generator=generator)  # type: ignore[operator]
        for x in (v, t)
    ]
    mean = (drawn[0][:, :, None] - drawn[1][:, None]).square().sum(-1).mean(0)
    torch.testing.assert_close(closed_form_distance(v, t), mean, rtol=0.02, atol=0.01)


def test_score_grade_uncertainty_and_parameters() -> None:
    method, v, t = pcmepp(scale=2.0, shift=3.0), items(3, seed=1), items(3, seed=2)
    score = method.score(v, t)
    torch.testing.assert_close(score, -closed_form_distance(v, t))
    grade = method.grade(score)
    torch.testing.assert_close(grade, torch.sigmoid(3.0 + 2.0 * score))
    assert ((grade > 0) & (grade < 1)).all()
    assert v.log_var is not None
    assert t.log_var is not None
    torch.testing.assert_close(method.uncertainty(v, t), v.log_var.exp().sum(1) + t.log_var.exp().sum(1))
    (group,) = method.param_groups()
    assert group.params == [method.affine]
    assert not group.decay
    assert not method.pairwise


def test_the_papers_settings() -> None:
    config: Any = method_config("pcmepp-paper")
    assert (config.scale, config.shift, config.vib_weight, config.pseudo_weight) == (5.0, 5.0, 1e-4, 0.1)
    assert (config.smoothing, config.reduction) == (1e-4, "mean")
    assert (config.mix.share, config.mix.alpha, config.mix.cutmix) == (0.25, 2, 0.5)
