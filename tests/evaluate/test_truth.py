"""Agreement with the exact truth of generated data, against scipy and plain loops."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.data import load_pairs
from vacsr.data.formats import parse_spec
from vacsr.data.scenes import load_scenes
from vacsr.data.scenes.facts import SceneTable
from vacsr.evaluate import protocols
from vacsr.evaluate.truth import (
    exact_metrics,
    exact_truth,
    scene_truth,
    truth_facts,
)
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer, PairScores

IMAGES, EACH = 12, 3
CAPTION_IMAGE = torch.arange(IMAGES).repeat_interleave(EACH)
SCENES = "scenes:images=12,held_out=5,per_image=2,size=32"


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
    drawn = torch.randint(0, 4, (IMAGES, IMAGES * EACH), generator=torch.Generator().manual_seed(0)) / 3
    drawn[CAPTION_IMAGE, torch.arange(IMAGES * EACH)] = 1.0
    return drawn


def above(higher: Any, lower: Any) -> float:
    """AUROC times 100 by counting."""
    return float(100 * np.mean([(a > b) + 0.5 * (a == b) for a in higher for b in lower]))


@pytest.mark.parametrize("method", ["vacsr", "sigmoid"])
def test_metrics_equal_their_plain_form(method: str, grades: Tensor, plain_metrics: Any) -> None:
    scores, relevant = random_scores(method), grades == 1
    metrics = exact_metrics(scores, exact_truth(grades, CAPTION_IMAGE))
    directions = {"i2t": (scores.score, relevant), "t2i": (scores.score.T, relevant.T)}
    expected = {
        name: 100 * np.mean([plain_metrics(s, r)["map_at_r"] for s, r in zip(*both, strict=True) if r.any()])
        for name, both in directions.items()
    }
    assert (metrics["map_at_r_i2t"], metrics["map_at_r_t2i"]) == pytest.approx(tuple(expected.values()))
    assert metrics["map_at_r"] == pytest.approx(sum(expected.values()) / 2)
    tau = stats.kendalltau(scores.score.numpy().ravel(), grades.numpy().ravel()).statistic
    assert metrics["tau_b"] == pytest.approx(100 * tau)
    unlabelled = torch.arange(IMAGES)[:, None] != CAPTION_IMAGE
    missed = relevant[unlabelled]
    score = scores.score[unlabelled]
    assert metrics["auroc_false_negative_score"] == pytest.approx(above(score[missed], score[~missed]))
    sigma = scores.uncertainty(*unlabelled.nonzero().unbind(1))
    assert (sigma is None) == (metrics["auroc_false_negative"] is None) == (method == "sigmoid")
    if sigma is not None:
        assert metrics["auroc_false_negative"] == pytest.approx(above(sigma[missed], sigma[~missed]))


def test_a_sample_is_drawn_by_the_seed(grades: Tensor) -> None:
    scores, truth = random_scores("sigmoid"), exact_truth(grades, CAPTION_IMAGE)
    first, again, other = (exact_metrics(scores, truth, pairs=100, seed=seed) for seed in (1, 1, 2))
    assert first["tau_b"] == again["tau_b"] != other["tau_b"]
    assert exact_metrics(scores, truth, pairs=100) == exact_metrics(scores, truth, pairs=100, seed=0)
    assert first["map_at_r"] == other["map_at_r"] == exact_metrics(scores, truth)["map_at_r"]


def test_facts_count_what_the_labels_miss() -> None:
    truth = exact_truth(torch.tensor([[1.0, 1.0, 0.5], [0.0, 1.0, 1.0]]), torch.tensor([0, 1, 1]))
    assert truth_facts(truth) == pytest.approx({
        "images": 2, "captions": 3, "images_per_caption": 4 / 3, "false_negatives": 1,
        "false_negative_share": 100 / 3, "unlabelled_share": 25.0,
    })  # fmt: skip


def test_a_grade_a_rounding_below_one_is_relevant() -> None:
    third = torch.tensor(1.0) / 3
    assert exact_truth((third + third + third - 1e-7).view(1, 1), torch.tensor([0])).relevant.all()


@pytest.mark.parametrize("split", ["test", "all"])
def test_the_truth_of_scenes_is_fact_by_fact(split: str) -> None:
    world = load_scenes(parse_spec(SCENES).with_options({"split": split}))
    truth = scene_truth(SCENES, world.pairs)
    assert truth is not None
    table = SceneTable(world.scenes)
    for col, said in enumerate(world.statements):
        share = np.mean([table.true(fact) for fact in said.facts], axis=0)
        assert truth.grades[:, col].tolist() == pytest.approx(share.tolist())
    assert truth.labelled.sum(0).tolist() == [1] * len(world.statements)


def test_the_truth_of_some_scenes_is_part_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that were held out from training keep their names, though their split is called dev."""
    pairs = load_pairs(SCENES, split="train")
    _, part = pairs.split_images(0.4, seed=1)
    every, some = scene_truth(SCENES, pairs), scene_truth(SCENES, part)
    assert every is not None
    assert some is not None
    rows = [pairs.image_ids.index(name) for name in part.image_ids]
    cols = [pairs.caption_ids.index(name) for name in part.caption_ids]
    assert torch.equal(some.grades, every.grades[rows][:, cols])
    assert torch.equal(some.labelled, every.labelled[rows][:, cols])
    assert scene_truth("synthetic:images=4", load_pairs("synthetic:images=4", split="train")) is None
    monkeypatch.setattr(protocols, "_MATRIX", 1)
    assert scene_truth(SCENES, part) is None, "too many pairs to grade them all"
