"""Loss tolerance against autograd and the printed formulas."""

import pytest
import torch
from torch.nn import functional

from vacsr.evaluate.tolerance import Tolerance, loss_tolerance, tolerance_summary


def example(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, labels (one to three captions an image) and some false negatives among the rest."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    labelled = torch.arange(4)[:, None] == image
    missed = (torch.rand(4, 7, generator=generator) < 0.3) & ~labelled
    return torch.randn(4, 7, generator=generator, dtype=torch.float64), labelled, missed


@pytest.mark.parametrize("seed", range(3))
def test_contrastive_against_autograd(seed: int) -> None:
    """The paper's definition: gradients of −log softmax with one positive beside all unlabelled captions."""
    score, labelled, missed = example(seed)
    found = loss_tolerance(score, labelled, missed, kind="softmax", scale=1 / 0.3)
    assert bool((found.r >= 0).all()), "a softmax never pushes harder than it pulls"
    for image in range(4):
        values = []
        for positive in labelled[image].nonzero().flatten().tolist():
            row = score[image].clone().requires_grad_()
            kept = [positive, *(~labelled[image]).nonzero().flatten().tolist()]
            functional.cross_entropy(row[kept][None] / 0.3, torch.tensor([0])).backward()
            assert row.grad is not None
            values.append(abs(float(row.grad[positive])) - abs(float(row.grad[missed[image]].sum())))
        assert float(found.r[image]) == pytest.approx(sum(values) / len(values))


@pytest.mark.parametrize("seed", range(3))
def test_sigmoid_against_autograd(seed: int) -> None:
    score, labelled, missed = example(seed)
    found = loss_tolerance(score, labelled, missed, kind="logistic", scale=-3.0 if seed else 3.0, bias=-0.5)
    for image in range(4):
        row = score[image].clone().requires_grad_()
        logit = (-3.0 if seed else 3.0) * row - 0.5
        functional.binary_cross_entropy_with_logits(logit, labelled[image].double(), reduction="sum").backward()
        assert row.grad is not None
        pull = row.grad[labelled[image]].abs().mean()
        assert float(found.r[image]) == pytest.approx(float(pull - row.grad[missed[image]].sum().abs()))


def test_large_scores_stay_finite() -> None:
    score, labelled, missed = example(0)
    assert bool(loss_tolerance(1e4 * score, labelled, missed, kind="softmax", scale=100.0).r.isfinite().all())


def test_summary_by_hand() -> None:
    """Of five images four have labelled captions, and three of these false negatives; r = 0 is not below 0."""
    nan = torch.nan
    found = Tolerance(torch.tensor([1.0, 2.0, 4.0, nan, 3.0]), torch.tensor([3.0, 1.0, 0.0, nan, 3.0]))
    missed = torch.tensor([[True, True], [True, False], [False, False], [True, True], [True, False]])
    assert tolerance_summary(found, missed) == pytest.approx({
        "mean": (-2 + 1 + 4 + 0) / 4, "mean_with_false_negatives": -1 / 3, "negative_share": 100 / 3,
        "kept_share": 100 * -1 / 6, "images_with_false_negatives": 3, "false_negatives": 6,
    })  # fmt: skip


def test_an_image_without_captions_has_none() -> None:
    score, labelled, missed = example(0)
    labelled[3] = False
    for kind in ("softmax", "logistic"):
        found = loss_tolerance(score, labelled, missed, kind=kind, scale=1.0)  # type: ignore[arg-type]
        assert found.r.isnan().tolist() == found.push.isnan().tolist() == [False, False, False, True]
