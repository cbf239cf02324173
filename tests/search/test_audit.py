"""The audit: agreement against slow loops, noise that is found, and lists that hold what they say."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from vacsr.data import PairSet, load_pairs
from vacsr.data.noise import apply_noise, derange_captions
from vacsr.errors import UsageError
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer
from vacsr.search.audit import (
    DUPLICATE,
    audit,
    caption_sums,
    find_duplicates,
    find_neighbours,
    own_agreement,
    prototypes,
    signals,
)


@pytest.fixture
def trained(models: dict[str, Path]) -> PairScorer:
    return PairScorer.from_pretrained(models["features"], device="cpu")


@pytest.fixture
def data(features: str) -> PairSet:
    loaded = load_pairs(features, split="train")
    assert isinstance(loaded, PairSet)
    return loaded


def vectors(images: int, captions: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    v, t = (normalize(torch.randn(n, 6, generator=generator), dim=1) for n in (images, captions))
    owner = torch.randint(images, (captions,), generator=generator)
    return v, t, owner, torch.rand(captions, generator=generator)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 1000))
def test_own_agreement_leaves_the_caption_out(images: int, captions: int, seed: int) -> None:
    v, t, owner, weight = vectors(images, captions, seed)
    agreement = own_agreement(v, t, owner, weight=weight, sums=caption_sums(t, owner, weight, images=images))
    for col in range(captions):
        rest = v[owner[col]].double().numpy().copy()
        for other in range(captions):
            if other != col and owner[other] == owner[col]:
                rest += float(weight[other]) * t[other].double().numpy()
        expected = rest @ t[col].double().numpy() / np.linalg.norm(rest)
        assert float(agreement[col]) == pytest.approx(expected, abs=2e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 1000), st.sampled_from([1, 30, 1 << 20]))
def test_neighbours_are_those_of_the_whole_matrix(images: int, captions: int, seed: int, elements: int) -> None:
    v, t, owner, weight = vectors(images, captions, seed)
    p = prototypes(v, caption_sums(t, owner, weight, images=images))
    near = find_neighbours(p, t, owner, captions=2, elements=elements)
    matrix = (p @ t.T).double()
    matrix[owner, torch.arange(captions)] = -math.inf
    for col in range(captions):
        best = float(matrix[:, col].max())
        assert float(near.image_agreement[col]) == pytest.approx(best, abs=1e-6)
        assert int(near.image[col]) == (-1 if best == -math.inf else int(matrix[:, col].argmax()))
    for row in range(images):
        expected = sorted(matrix[row].tolist(), reverse=True)[:2]
        assert near.caption_agreement[row].tolist() == pytest.approx(expected, abs=1e-6)


def test_moved_captions_are_found(models: dict[str, Path], data: PairSet) -> None:
    noise = derange_captions(data.caption_image, ratio=0.1, seed=0)
    moved = set((noise.assignment != noise.original).nonzero().flatten().tolist())
    report = audit(MatchingModel.from_pretrained(models["features"]), apply_noise(data, noise), top=len(moved))
    assert len(moved & {pair.col for pair in report.wrong}) >= 0.7 * len(moved)
    values = [pair.suspicion for pair in report.wrong]
    assert values == sorted(values, reverse=True)
    count, rows = report.wrong_count, report.rows
    assert count is not None
    assert count.low <= len(moved) <= count.high
    assert int(rows.is_wrong.sum()) == count.value == pytest.approx(float(rows.wrong_probability.sum()), abs=3)
    order = rows.suspicion.argsort(descending=True, stable=True)
    assert rows.is_wrong[order[: count.value]].all()
    assert (rows.wrong_probability[order].diff() <= 0).all()
    assert order[:5].tolist() == [pair.col for pair in report.wrong[:5]]
    first = report.wrong[0]
    better = (int(part[first.col]) for part in (rows.image, rows.better_row, rows.better_col))
    assert tuple(better) == (first.row, first.better_row, first.better_col)
    assert len(report.to_frame("rows")) == len(data)


def test_what_is_said_of_a_pair_is_what_the_model_says(trained: PairScorer, data: PairSet) -> None:
    scores, seen = trained.score_set(data), list[tuple[int, int]]()
    report = audit(trained, data, top=7, min_grade=0.0, progress=lambda done, of: seen.append((done, of)))
    assert seen[-1] == (40, 40)
    every = signals(scores, data.caption_image)
    assert every.wrong is not None
    for pair in report.wrong:
        assert pair.row == int(data.caption_image[pair.col])
        assert pair.known.score == pytest.approx(float(scores.score[pair.row, pair.col]), abs=1e-4)
        assert pair.better_image is not None
        assert pair.better_row not in (None, pair.row)
        cosine = float(scores.images.mean[pair.row] @ scores.texts.mean[pair.col])
        elsewhere = min(1.0, 10 * every.wrong.share) * pair.better_image.agreement
        expected = elsewhere - pair.known.agreement - 2 * every.wrong.share * cosine
        assert pair.suspicion == pytest.approx(expected, abs=1e-5)
        assert pair.better_col is not None
        assert int(data.caption_image[pair.better_col]) != pair.row
    for match in report.missing:
        assert match.row != match.own_row == int(data.caption_image[match.col])
        sigma = scores.uncertainty(torch.tensor([match.row]), torch.tensor([match.col]))
        assert match.known.uncertainty == pytest.approx(float(sigma), abs=1e-5)
        assert match.own.agreement == pytest.approx(float(every.own[match.col]), abs=1e-6)
    best = every.near.caption_agreement.flatten().sort(descending=True).values[:7]
    assert [match.known.agreement for match in report.missing] == pytest.approx(best.tolist())


def test_lists_are_limited(trained: PairScorer, data: PairSet) -> None:
    """By ``top``, by five captions of one image, and by the least grade."""
    report = audit(trained, data, top=1, min_grade=0.0)
    assert (len(report.wrong), len(report.missing)) == (1, 1)
    everything = audit(trained, data, top=10_000, min_grade=0.0)
    assert len(everything.wrong) == everything.labelled == len(data) == 120
    assert np.bincount([match.row for match in everything.missing]).tolist() == [5] * 40
    assert everything.missing[:1] == report.missing
    least = everything.missing[3].known.grade
    graded = audit(trained, data, top=10_000, min_grade=least)
    assert graded.missing == tuple(one for one in everything.missing if one.known.grade >= least)
    assert (graded.min_grade, audit(trained, data, top=5, min_grade=1.0).missing) == (least, ())
    usual = audit(trained, data)
    grades = [pair.known.grade for pair in everything.wrong]
    assert usual.min_grade == usual.usual_grade == everything.usual_grade
    assert sum(grade >= usual.usual_grade for grade in grades) == 0.75 * len(grades)


@pytest.mark.parametrize("limits", [{"top": 0}, {"min_grade": 2.0}, {"min_grade": -0.1}])
def test_limits_that_are_refused(limits: dict[str, float], trained: PairScorer, data: PairSet) -> None:
    with pytest.raises(UsageError, match="top=200"):
        audit(trained, data, **limits)  # type: ignore[arg-type]


def test_one_image_has_no_other(trained: PairScorer, data: PairSet) -> None:
    report = audit(trained, data.subset([3]), min_grade=0.0)
    assert len(report.wrong) == 3
    assert all(pair.better_row is pair.better_image is pair.better_col is None for pair in report.wrong)
    assert report.missing == ()
    assert report.wrong_count is None
    assert not report.rows.is_wrong.any()
    assert report.rows.better_row.tolist() == report.rows.better_col.tolist() == [-1] * 3


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.integers(0, 1000), st.integers(1, 9))
def test_duplicates_are_those_of_the_whole_matrix(images: int, seed: int, top: int) -> None:
    v = normalize(torch.randn(images, 2, generator=torch.Generator().manual_seed(seed)), dim=1)
    found = find_duplicates(v, top=top, limit=0.9)
    pairs = [(float(v[i] @ v[j]), i, j) for i in range(images) for j in range(i + 1, images)]
    near = sorted((one for one in pairs if one[0] >= 0.9), key=lambda one: -one[0])[:top]
    assert [one.cosine for one in found] == pytest.approx([min(cosine, 1.0) for cosine, *_ in near], abs=1e-6)
    assert all(one.row < one.other_row and float(v[one.row] @ v[one.other_row]) >= 0.9 for one in found)


def test_duplicates_begin_at_the_limit() -> None:
    images = torch.tensor([[1.0, 0.0], [0.5, 0.75**0.5], [-1.0, 0.0]])
    assert [one[:2] for one in find_duplicates(images, top=9, limit=0.5)] == [(0, 1)]
    near = torch.tensor([[1.0, 0.0], *([cosine, (1 - cosine**2) ** 0.5] for cosine in (DUPLICATE + 0.005, 0.985))])
    assert (0, 1) in (found := {one[:2] for one in find_duplicates(near, top=9)})
    assert (0, 2) not in found
