"""Agreement with exact grades, against plain references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.data import load_pairs
from vacsr.data.scenes import PairKinds, holds, load_scenes, pair_kinds
from vacsr.data.spec import parse_spec
from vacsr.errors import DataError, ShapeMismatch
from vacsr.evaluate import galleries
from vacsr.evaluate.exact import (
    exact_metrics,
    exact_truth,
    false_negatives_above,
    scene_truth,
    spread,
    truth_facts,
    values_by_kind,
)
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer, PairScores

IMAGES, EACH = 12, 3
CAPTION_IMAGE = torch.arange(IMAGES).repeat_interleave(EACH)


def random_scores(method: str) -> PairScores:
    config = BackboneConfig(image_scaling="none", text_scaling="none", head=HeadConfig(dim=8))
    model = MatchingModel.build(method_config(method), config, image_dim=6, text_dim=5, seed=3)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(IMAGES, 6, generator=generator)
    texts = torch.randn(IMAGES * EACH, 5, generator=generator)
    return PairScorer(model, device="cpu").score_all(images, texts)


@pytest.fixture
def grades() -> Tensor:
    """Thirds, with 1 for each labelled pair."""
    found = torch.randint(0, 4, (IMAGES, IMAGES * EACH), generator=torch.Generator().manual_seed(0)) / 3
    found[CAPTION_IMAGE, torch.arange(IMAGES * EACH)] = 1.0
    return found


def plain_map_at_r(scores: np.ndarray, relevant: np.ndarray) -> float:
    values = []
    for score, truth in zip(scores, relevant, strict=True):
        if not truth.any():
            continue
        hits = truth[np.argsort(-score, kind="stable")][: truth.sum()]
        values.append(np.mean(hits * np.cumsum(hits) / np.arange(1, len(hits) + 1)))
    return 100 * float(np.mean(values))


@pytest.mark.parametrize("method", ["vacsr", "sigmoid"])
def test_every_figure_equals_its_plain_form(method: str, grades: Tensor) -> None:
    scores, truth = random_scores(method), exact_truth(grades, CAPTION_IMAGE)
    found = exact_metrics(scores, truth)
    score, relevant = scores.score.numpy(), grades.numpy() == 1
    assert found.map_at_r_i2t == pytest.approx(plain_map_at_r(score, relevant))
    assert found.map_at_r_t2i == pytest.approx(plain_map_at_r(score.T, relevant.T))
    assert found.map_at_r == pytest.approx((found.map_at_r_i2t + found.map_at_r_t2i) / 2)
    assert found.tau_b == pytest.approx(100 * stats.kendalltau(score.ravel(), grades.numpy().ravel()).statistic)
    unlabelled = torch.arange(IMAGES)[:, None] != CAPTION_IMAGE
    missed = (grades == 1)[unlabelled].int()
    ranked = torch.tensor(stats.rankdata(scores.score[unlabelled])) / 1000  # torchmetrics takes (0, 1) only
    assert found.auroc_false_negative_score == pytest.approx(100 * float(binary_auroc(ranked, missed)), abs=1e-3)
    if method == "sigmoid":
        assert found.auroc_false_negative is None
    else:
        sigma = scores.uncertainty(*unlabelled.nonzero().unbind(1))
        assert sigma is not None
        ranked = torch.tensor(stats.rankdata(sigma)) / 1000
        assert found.auroc_false_negative == pytest.approx(100 * float(binary_auroc(ranked, missed)), abs=1e-3)


def test_a_sample_is_drawn_by_the_seed(grades: Tensor) -> None:
    scores, truth = random_scores("sigmoid"), exact_truth(grades, CAPTION_IMAGE)
    first, again = (exact_metrics(scores, truth, pairs=100, seed=1) for _ in range(2))
    other, whole = exact_metrics(scores, truth, pairs=100, seed=2), exact_metrics(scores, truth)
    assert first == again
    assert first.tau_b != other.tau_b
    assert first.map_at_r == other.map_at_r == whole.map_at_r


def test_facts_count_what_the_labels_leave_out() -> None:
    truth = exact_truth(torch.tensor([[1.0, 1.0, 0.5], [0.0, 1.0, 1.0]]), torch.tensor([0, 1, 1]))
    facts = truth_facts(truth)
    assert (facts.images, facts.captions, facts.false_negatives) == (2, 3, 1)
    assert facts.images_per_caption == pytest.approx(4 / 3)
    assert facts.false_negative_share == pytest.approx(100 / 3)
    assert facts.unlabelled_share == pytest.approx(25.0)


def test_a_grade_a_rounding_below_one_is_relevant() -> None:
    third = torch.tensor(1.0) / 3
    assert exact_truth((third + third + third - 1e-7).view(1, 1), torch.tensor([0])).relevant.all()


def test_grades_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeMismatch, match=r"\[N, 3\]"):
        exact_truth(torch.ones(2, 2), torch.tensor([0, 1, 1]))
    for bad in (1.5, -0.1, float("nan")):
        with pytest.raises(DataError, match="0 to 1"):
            exact_truth(torch.full((1, 1), bad), torch.tensor([0]))


@pytest.mark.parametrize("method", ["vacsr", "sigmoid"])
def test_values_by_kind_are_those_of_the_kind(method: str, grades: Tensor) -> None:
    scores, kinds = random_scores(method), pair_kinds(grades, CAPTION_IMAGE)
    found = values_by_kind(scores, kinds)
    assert tuple(found) == PairKinds._fields
    for name, mask in kinds._asdict().items():
        assert found[name].total == int(mask.sum()) > 0
        assert torch.equal(found[name].score, scores.score[mask])
        sigma = scores.uncertainty(*mask.nonzero().unbind(1))
        assert (found[name].uncertainty is None) == (sigma is None) == (method == "sigmoid")
        if sigma is not None:
            torch.testing.assert_close(found[name].uncertainty, sigma)


def test_a_large_kind_is_sampled_by_the_seed(grades: Tensor) -> None:
    scores, kinds = random_scores("sigmoid"), pair_kinds(grades, CAPTION_IMAGE)
    first, again, other = (values_by_kind(scores, kinds, pairs=10, seed=seed)["easy"] for seed in (1, 1, 2))
    assert len(first.score) == 10
    assert first.total == int(kinds.easy.sum())
    assert torch.equal(first.score, again.score)
    assert not torch.equal(first.score, other.score)
    assert set(first.score.tolist()) <= set(scores.score[kinds.easy].tolist())


def test_false_negatives_above_counts_the_comparisons() -> None:
    generator = torch.Generator().manual_seed(0)
    values = {
        name: torch.randint(0, 9, (size,), generator=generator).float()
        for name, size in (("positives", 7), ("false_negatives", 11), ("hard", 13))
    }
    found = false_negatives_above(values)
    assert tuple(found) == ("positives", "hard")
    for name, share in found.items():
        wins = [(a > b) + 0.5 * (a == b) for a in values["false_negatives"].tolist() for b in values[name].tolist()]
        assert share == pytest.approx(100 * np.mean(wins))
    assert np.isnan(false_negatives_above({**values, "hard": torch.empty(0)})["hard"])


def test_a_spread_is_numpys() -> None:
    values = torch.randn(101, generator=torch.Generator().manual_seed(1))
    expected = [values.double().mean().item(), *np.quantile(values.double().numpy(), (0.25, 0.5, 0.75))]
    assert list(spread(values)) == pytest.approx(expected)
    assert np.isnan(spread(torch.empty(0))).all()


SCENES = "scenes:images=12,held_out=5,per_image=2,size=32"


@pytest.mark.parametrize("split", ["test", "all"])
def test_the_truth_of_scenes_is_fact_by_fact(split: str) -> None:
    world = load_scenes(parse_spec(SCENES).with_options({"split": split}))
    truth = scene_truth(SCENES, world.pairs)
    assert truth is not None
    for row, scene in enumerate(world.scenes):
        for col, said in enumerate(world.statements):
            share = sum(holds(fact, scene) for fact in said.facts) / len(said.facts)
            assert float(truth.grades[row, col]) == pytest.approx(share)
    assert truth.labelled.sum(0).tolist() == [1] * len(world.statements)


def test_the_truth_of_some_scenes_is_part_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that were held out from training keep their names, though they are called dev."""
    pairs = load_pairs(SCENES, split="train")
    part = pairs.split_images(0.4, seed=1).dev
    every, some = scene_truth(SCENES, pairs), scene_truth(SCENES, part)
    assert every is not None
    assert some is not None
    rows = [pairs.image_ids.index(name) for name in part.image_ids]
    cols = [pairs.caption_ids.index(name) for name in part.caption_ids]
    assert torch.equal(some.grades, every.grades[rows][:, cols])
    assert torch.equal(some.labelled, every.labelled[rows][:, cols])
    monkeypatch.setattr(galleries, "_MATRIX", 1)
    assert scene_truth(SCENES, part) is None, "too many pairs to grade them all"


def test_other_data_have_no_exact_truth() -> None:
    spec = "synthetic:images=4,per_image=2"
    assert scene_truth(spec, load_pairs(spec, split="train")) is None
