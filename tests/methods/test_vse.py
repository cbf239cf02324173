from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from vacsr.config.io import method_config
from vacsr.methods import Embedding, Vse
from vacsr.methods.vse import VseConfig
from vacsr.pairwise import PairBlock, batch_block


def case(seed: int, size: int, dim: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    v, t = functional.normalize(torch.randn(2, size, dim, generator=torch.Generator().manual_seed(seed)), dim=-1)
    return v.requires_grad_(), t.requires_grad_()


def block(ids: list[int], epoch: int | None = None) -> PairBlock:
    number = None if epoch is None else torch.tensor(epoch)
    return batch_block(torch.tensor(ids), seed=0, step=0, epoch=number)


def reference(v: torch.Tensor, t: torch.Tensor, ids: list[int], *, margin: float, every: bool) -> torch.Tensor:
    """Pair by pair."""
    total = torch.zeros((), dtype=torch.float64)
    for i, own in enumerate(ids):
        others = [j for j, other in enumerate(ids) if other != own]
        score = (v[i].double() * t[i].double()).sum()
        for costs in (
            [margin + (v[i].double() * t[j].double()).sum() - score for j in others],
            [margin + (v[j].double() * t[i].double()).sum() - score for j in others],
        ):
            kept = [cost.clamp_min(0.0) for cost in costs]
            total = total + (sum(kept) if every else max(kept, default=0.0))
    return total


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 7), st.floats(0.05, 1.5), st.booleans(), st.integers(0, 99))
def test_it_is_the_hinge_pair_by_pair(size: int, margin: float, warm: bool, seed: int) -> None:
    ids = [number % 4 for number in range(size)]
    method, (v, t) = Vse(VseConfig(margin=margin, warmup_epochs=3), dim=8), case(seed, size)
    terms = method.loss(Embedding(v), Embedding(t), block(ids, epoch=2 if warm else 3))
    expected = reference(v, t, ids, margin=margin, every=warm)
    torch.testing.assert_close(terms.total.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(terms.parts["i2t"] + terms.parts["t2i"], terms.total.detach())
    if expected.requires_grad and expected > 0:
        for ours, theirs in zip(
            torch.autograd.grad(terms.total, [v, t]), torch.autograd.grad(expected, [v, t]), strict=True
        ):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_other_captions_of_the_image_are_no_negatives() -> None:
    method, (v, t) = Vse(VseConfig(margin=2.5, warmup_epochs=0), dim=8), case(1, 2)
    assert method.loss(Embedding(v), Embedding(t), block([3, 3])).total == 0
    assert method.loss(Embedding(v), Embedding(t), block([3, 4])).total > 0


def test_outside_of_training_the_hardest_count() -> None:
    method, (v, t) = Vse(VseConfig(), dim=8), case(2, 6)
    ids = list(range(6))
    found = method.loss(Embedding(v), Embedding(t), block(ids)).total
    torch.testing.assert_close(found, method.loss(Embedding(v), Embedding(t), block(ids, epoch=1)).total)
    assert found < method.loss(Embedding(v), Embedding(t), block(ids, epoch=0)).total


@pytest.mark.parametrize("epoch", [0, 1])
def test_mean_divides_by_the_batch(epoch: int) -> None:
    v, t = case(3, 5)
    ids = list(range(5))
    whole, mean = (
        Vse(VseConfig(reduction=kind), dim=8).loss(Embedding(v), Embedding(t), block(ids, epoch)).total
        for kind in ("sum", "mean")
    )
    torch.testing.assert_close(mean, whole / 5)


def test_score_grade_and_parameters() -> None:
    method, (v, t) = Vse(VseConfig(), dim=8), case(0, 3)
    score = method.score(Embedding(v), Embedding(t))
    torch.testing.assert_close(score, v @ t.T)
    grade = method.grade(score)
    assert ((grade > 0) & (grade < 1)).all()
    assert torch.equal(grade.argsort(dim=1), score.argsort(dim=1))
    assert method.uncertainty(Embedding(v), Embedding(t)) is None
    assert method.param_groups() == list(method.parameters()) == []
    assert not method.pairwise


def test_the_papers_settings() -> None:
    config: Any = method_config("vse-paper")
    assert (config.margin, config.warmup_epochs, config.reduction) == (0.2, 2, "sum")
