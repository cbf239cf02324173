"""Graded and preference tests, against scipy and a bootstrap that resamples rows one by one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy import stats
from torch import Tensor

from vacsr.config import EvaluateConfig
from vacsr.data import PairSet, load_pairs
from vacsr.errors import DataError, ShapeMismatch, UsageError
from vacsr.evaluate.agreement import read_judgments
from vacsr.evaluate.grades import drawn_taus, graded_agreement, human_tau, preference_accuracy
from vacsr.evaluate.pair_files import (
    join_vectors,
    named_file,
    read_caption_list,
    read_caption_vectors,
    read_preferences,
    read_rival,
)
from vacsr.evaluate.pair_tests import PairTests, grades_result, pair_values, preferences_result
from vacsr.evaluate.report import config_judgments
from vacsr.evaluate.score_files import MatrixScores
from vacsr.evaluate.significance import image_draws

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
IMAGES, PAIRS, RATERS = 12, 60, 3


@pytest.fixture
def rated() -> dict[str, Any]:
    """Scores with ties, ratings of which some are missing, own captions, and the image of each pair."""
    rng = np.random.default_rng(0)
    ratings = rng.integers(1, 5, (PAIRS, RATERS)).astype(float)
    ratings[rng.random(ratings.shape) < 0.1] = np.nan
    ratings[:, 0] = np.where(np.isnan(ratings).all(axis=1), 2.0, ratings[:, 0])
    score = np.round(np.nanmean(ratings, axis=1) + rng.normal(size=PAIRS), 1)
    return {
        "score": score, "ratings": ratings, "images": rng.integers(0, IMAGES, PAIRS), "own": rng.random(PAIRS) < 0.2,
    }  # fmt: skip


def resampled(x: Any, y: Any, image: Any, times: Any, variant: str) -> list[float]:
    """Plainly: the rows of each image, as often as the image was drawn, through scipy."""
    taus = []
    for draw in times:
        rows = [row for row in range(len(x)) for _ in range(int(draw[image[row]]))]
        taus.append(100 * stats.kendalltau(x[rows], y[rows], variant=variant).statistic)
    return taus


@pytest.mark.parametrize("variant", ["b", "c"])
def test_drawn_taus_are_scipys_on_the_drawn_rows(rated: dict[str, Any], variant: Literal["b", "c"]) -> None:
    times = image_draws(IMAGES, draws=20, generator=np.random.default_rng(1))
    assert (times.sum(axis=1) == IMAGES).all()
    x, y, image = rated["score"], np.nan_to_num(rated["ratings"][:, 1], nan=1.0), rated["images"]
    expected = resampled(x, y, image, times, variant)
    np.testing.assert_allclose(drawn_taus(x, y, image=image, times=times, variant=variant), expected, atol=1e-9)


@pytest.mark.parametrize("variant", ["b", "c"])
def test_graded_agreement(rated: dict[str, Any], variant: Literal["b", "c"]) -> None:
    """τ in both forms with their intervals, Spearman, the human ceiling, and a rival on the pairs that it scored."""
    score, ratings, images, own = (rated[name] for name in ("score", "ratings", "images", "own"))
    rival = np.where(np.arange(PAIRS) < 40, np.random.default_rng(2).normal(size=PAIRS), np.nan)
    result = graded_agreement(
        score, ratings, images=images, own=own, variant=variant, rivals={"other": rival}, draws=50, seed=3
    )
    rows = [(n, rating) for n in range(PAIRS) for rating in ratings[n] if not own[n] and rating == rating]
    number, rating = (np.array(column) for column in zip(*rows, strict=True))
    mean = np.nanmean(ratings, axis=1)
    tau = {
        "tau_published": stats.kendalltau(score[number], rating, variant=variant).statistic,
        "tau": stats.kendalltau(score, mean, variant=variant).statistic,
        "spearman": stats.spearmanr(score, mean).statistic,
    }
    assert {name: result[name] for name in tau} == pytest.approx({name: 100 * value for name, value in tau.items()})
    times = image_draws(IMAGES, draws=50, generator=np.random.default_rng(3))
    drawn = resampled(score[number], rating, images[number], times, variant)
    ends = result["tau_published_low"], result["tau_published_high"]
    assert ends == pytest.approx(np.quantile(drawn, [0.025, 0.975]))
    ceiling, weights = [], []
    for rater in range(RATERS):
        others = np.delete(ratings, rater, axis=1)
        both = [n for n in range(PAIRS) if not own[n] and ratings[n, rater] > 0 and (others[n] > 0).any()]
        ceiling.append(stats.kendalltau(np.nanmean(others[both], 1), ratings[both, rater], variant=variant).statistic)
        weights.append(len(both))
    assert result["human_tau"] == pytest.approx(100 * np.average(ceiling, weights=weights))
    assert (result["pairs"], result["images"]) == (PAIRS, len(set(images)))
    common = number < 40
    x, y, z, image = score[number][common], rival[number][common], rating[common], images[number][common]
    beside = result["rivals"]["other"]
    assert beside["tau_published"] == pytest.approx(100 * stats.kendalltau(y, z, variant=variant).statistic)
    assert beside["ours"] == pytest.approx(100 * stats.kendalltau(x, z, variant=variant).statistic)
    difference = np.subtract(resampled(x, z, image, times, variant), resampled(y, z, image, times, variant))
    assert (beside["low"], beside["high"]) == pytest.approx(np.quantile(difference, [0.025, 0.975]))
    assert beside["difference"] == pytest.approx(beside["ours"] - beside["tau_published"])
    assert beside["pairs"] == len(set(number[common]))


def test_one_rating_has_no_ceiling_and_own_captions_alone_no_published_form() -> None:
    result = graded_agreement([0.1, 0.9], [1.0, 2.0], images=["a", "b"], own=[True, True], draws=5)
    assert result["human_tau"] is None
    assert human_tau(np.ones((3, 1))) is None
    assert np.isnan([result["tau_published"], result["tau_published_low"]]).all()


def test_preference_accuracy() -> None:
    rng = np.random.default_rng(4)
    better, worse, images = rng.integers(0, 4, 40), rng.integers(0, 4, 40), rng.integers(0, 9, 40)
    kinds = rng.choice(["add", "swap"], 40)
    other = rng.normal(size=(2, 40))
    other[0, 30:] = np.nan
    result = preference_accuracy(
        better, worse, images=images, kinds=kinds, rivals={"other": (other[0], other[1])}, draws=200, seed=5
    )
    right = np.array([1.0 if x > y else 0.5 if x == y else 0.0 for x, y in zip(better, worse, strict=True)])
    assert result["accuracy"] == pytest.approx(100 * right.mean())
    for kind, part in result["kinds"].items():
        rows = kinds == kind
        assert part["accuracy"] == pytest.approx(100 * right[rows].mean())
        assert part["pairs"] == rows.sum()
    assert result["mean_of_kinds"] == pytest.approx(np.mean([part["accuracy"] for part in result["kinds"].values()]))
    names = np.unique(images)
    times = image_draws(len(names), draws=200, generator=np.random.default_rng(5))
    drawn = []
    for draw in times:
        rows = [
            row
            for name, many in zip(names, draw, strict=True)
            for row in np.flatnonzero(images == name)
            for _ in range(int(many))
        ]
        drawn.append(100 * right[rows].mean())
    assert (result["low"], result["high"]) == pytest.approx(np.quantile(drawn, [0.025, 0.975]))
    rival = result["rivals"]["other"]
    assert rival["pairs"] == 30
    assert rival["difference"] == pytest.approx(rival["ours"] - rival["accuracy"])


class Products:
    """Scores that are dot products of vectors, with words that have vectors of their own, or none."""

    def __init__(self, images: Tensor, texts: Tensor, words: dict[str, Tensor] | None = None) -> None:
        self.images, self.texts, self.words = images, texts, words
        self.scores = MatrixScores(images @ texts.T)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scores, name)

    def against(self, texts: Tensor | Sequence[str]) -> Products | None:
        if not isinstance(texts, Tensor):
            if self.words is None:
                return None
            texts = torch.stack([self.words[text] for text in texts])
        return Products(self.images, texts, self.words)


@pytest.fixture
def pairs() -> PairSet:
    generator = torch.Generator().manual_seed(0)
    images, texts = torch.randn(3, 4, generator=generator), torch.randn(4, 4, generator=generator)
    ids, captions = ("a", "b", "c"), ("one", "two", "three", "four")
    return PairSet(images, texts, ids, ("a#0", "a#1", "b#0", "c#0"), torch.tensor([0, 0, 1, 2]), captions)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_captions_are_looked_up_in_the_data_then_in_vectors_then_embedded(pairs: PairSet, tmp_path: Path) -> None:
    save_file({"text": torch.eye(4)[:2].half(), "caption_id": torch.tensor([7, 8])}, tmp_path / "ids.safetensors")
    save_file({"text": torch.eye(4)[2:3]}, tmp_path / "texts.safetensors")
    write(tmp_path / "texts-captions.jsonl", json.dumps({"caption": "five"}))
    vectors = join_vectors([read_caption_vectors(tmp_path / f"{name}.safetensors") for name in ("ids", "texts")])
    spoken = Products(pairs.images, pairs.texts, {"six": torch.ones(4)})
    ids, texts = ["a#0", "x", "8", "y", "z", "a#0"], ["?", "two", "eight", "five", "six", "one"]
    images = ["b", "b", "a", "a", "c", "unknown"]
    expected = [
        pairs.images[1] @ pairs.texts[0], pairs.images[1] @ pairs.texts[1], pairs.images[0, 1], pairs.images[0, 2],
        pairs.images[2].sum(), torch.nan,
    ]  # fmt: skip
    found = pair_values(spoken, pairs, images, ids=ids, texts=texts, captions=vectors)["score"]
    np.testing.assert_allclose(found, np.array([float(value) for value in expected]), rtol=1e-5)
    silent = pair_values(Products(pairs.images, pairs.texts), pairs, images, ids=ids, texts=texts)["score"]
    assert np.isnan(silent).tolist() == [False, False, True, True, True, True]
    nameless = pair_values(spoken, pairs, images, ids=ids, texts=None, captions=vectors)["score"]
    assert np.isnan(nameless).tolist() == [False, True, False, True, True, True], "an id is never embedded as words"


def test_results_by_name(pairs: PairSet, tmp_path: Path) -> None:
    """A CSV file with one row per rating, own captions known by label, a rival, and preferences by text."""
    lines = ["image,caption,grade", "a,one,4", "a,one,5", "a,three,3", "a,four,1", "b,one,2", "b,two,1", "c,nowhere,3"]
    judged = read_judgments(write(tmp_path / "my.grades.csv", "\n".join(lines)))
    assert (judged.kind, judged.name, len(judged)) == ("graded", "my-grades", 6)
    assert judged.ratings[0].tolist() == [4, 5]
    rival = write(tmp_path / "rival.tsv", "image\tcaption\tscore\na\tthree\t0.5\na\tfour\t0.1\nb\tone\t0.3\n")
    given = read_preferences(
        write(tmp_path / "p.tsv", "kind\timage\tcaption\tnegative_caption\nadd\ta\tone\tfour\nadd\tb\tone\tnowhere\n")
    )
    tests = PairTests(preferences=(given,), rivals={"other": read_rival(rival)})
    scores = Products(pairs.images, pairs.texts)
    with pytest.warns(UserWarning, match="1 of 6 pairs are left out.*--captions FILE"):
        (result,) = grades_result(scores, pairs, [judged], tests).values()
    assert (result["pairs"], result["left_out"], result["pairs_published"]) == (5, 1, 4)
    score = (pairs.images @ pairs.texts.T).numpy()
    grades, own_left_out = [4.5, 3, 1, 2, 1], slice(1, None)
    values = [score[0, 0], score[0, 2], score[0, 3], score[1, 0], score[1, 1]]
    assert result["tau"] == pytest.approx(100 * stats.kendalltau(values, grades, variant="c").statistic)
    tau = stats.kendalltau(values[own_left_out], grades[own_left_out], variant="c").statistic
    assert result["tau_published"] == pytest.approx(100 * tau)
    assert result["rivals"]["other"]["pairs"] == 3
    assert set(result["auroc_false_negative"]) == {"score"}
    with pytest.warns(UserWarning, match="p: 1 of 2 pairs"):
        (preferred,) = preferences_result(scores, pairs, tests).values()
    assert preferred["accuracy"] == (100.0 if score[0, 0] > score[0, 3] else 0.0)
    assert (preferred["pairs"], preferred["left_out"]) == (1, 1)
    lost = read_judgments(write(tmp_path / "lost.tsv", "image\tcaption\tshare\na\tnowhere\t0.5\n"))
    with pytest.warns(UserWarning, match="--captions FILE"):
        assert grades_result(scores, pairs, [lost], PairTests()) == {}


def test_an_empty_rating_is_missing(tmp_path: Path) -> None:
    judged = read_judgments(write(tmp_path / "g.csv", "image,caption,rating_1,rating_2\na,x,1,\nb,y,2,4\n"))
    np.testing.assert_array_equal(judged.ratings, [[1, np.nan], [2, 4]])


def test_two_files_need_two_names() -> None:
    with pytest.raises(UsageError, match="NAME="):
        config_judgments(EvaluateConfig(judgments=("dev/grades.tsv", "test/grades.tsv")))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    save_file({"text": torch.ones(2, 3)}, tmp_path / "nameless.safetensors")
    with pytest.raises(DataError, match="does not name its captions"):
        read_caption_vectors(tmp_path / "nameless.safetensors")
    write(tmp_path / "nameless-captions.jsonl", json.dumps({"caption": "one"}))
    with pytest.raises(ShapeMismatch, match="2 vectors and 1 names"):
        read_caption_vectors(tmp_path / "nameless.safetensors")
    with pytest.raises(DataError, match="score"):
        read_rival(write(tmp_path / "r.tsv", "image\tcaption\na\tb\n"))
    with pytest.raises(DataError, match="worse or negative_caption"):
        read_preferences(write(tmp_path / "r.tsv", "image\tcaption\na\tb\n"))
    assert named_file("fleur=a.tsv") == ("fleur", Path("a.tsv"))
    assert read_caption_list(write(tmp_path / "c.txt", "one\ntwo\none\n")) == ["one", "two"]


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")
def test_real_files() -> None:
    """FLEUR against the experts, as `fleur-expert.tsv` has it; CxC's grades and SugarCrepe's captions are all found."""
    flickr, coco = SHARED / "flickr8k", SHARED / "coco"
    judged, fleur = read_judgments(flickr / "judgments-expert.tsv"), read_rival(flickr / "fleur-expert.tsv")
    score = np.array([fleur.get(key, np.nan) for key in zip(judged.image_ids, judged.caption_ids, strict=True)])
    part = judged.take(np.flatnonzero(~np.isnan(score)).tolist())
    result = graded_agreement(
        score[~np.isnan(score)], part.ratings, images=part.image_ids, own=part.same_image, draws=100
    )
    assert result["pairs_published"] == 1427
    assert 50 < result["tau_published_low"] < result["tau_published"] < result["human_tau"]
    pairs = load_pairs(
        f"features:{coco}/features-clipb16-minilm.safetensors,captions={coco}/captions.json", split="test"
    )
    grades, vectors = (
        read_judgments(coco / "cxc-grades.tsv"),
        read_caption_vectors(coco / "cxc-text-minilm.safetensors"),
    )
    assert (len(grades), int(grades.same_image.sum()), grades.kind) == (4541, 2560, "graded")
    features = torch.nn.functional.normalize(pairs.images[:, :384], dim=1)  # any product will do
    found = grades_result(Products(features, pairs.texts), pairs, [grades], PairTests(captions=vectors))["cxc-grades"]
    assert (found["pairs"], found["left_out"], found["pairs_published"], found["images"]) == (4541, 0, 1981, 512)
    given = read_preferences(coco / "sugarcrepe.tsv")
    assert (len(given.image_ids), len(set(given.kinds))) == (5759, 7)
