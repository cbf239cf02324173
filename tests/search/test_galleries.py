"""Labelled queries in galleries of many sizes, beside plain loops over all scores."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vacsr.data import PairSet
from vacsr.errors import DataError
from vacsr.scoring import PairScorer
from vacsr.scoring.topk import DIRECTIONS, Direction
from vacsr.search.fill import fill_index
from vacsr.search.galleries import Labelled, Lists, searched_lists, simulated_lists, spread_over
from vacsr.search.index import VectorIndex, embedding_provenance, open_index

WIDTH = 30


def plain(scorer: PairScorer, pairs: PairSet, direction: Direction) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Score, cosine and image of all items for each query. [Q, N], [Q, N], [N]"""
    scores, owner = scorer.score_set(pairs), pairs.caption_image.numpy()
    score, cosine = scores.score.numpy(), (scores.images.mean @ scores.texts.mean.T).numpy()
    rows = np.arange(len(pairs.image_ids))
    return (score, cosine, owner) if direction == "i2t" else (score.T, cosine.T, rows)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_largest_gallery_is_a_search_of_everything(
    direction: Direction, scorer: PairScorer, pairs: PairSet
) -> None:
    *_, lists = simulated_lists(scorer, Labelled.of(scorer, pairs), candidates=WIDTH, seed=0, direction=direction)
    score, cosine, image = plain(scorer, pairs, direction)
    asked = np.arange(len(pairs.image_ids)) if direction == "i2t" else pairs.caption_image.numpy()
    assert (lists.size, lists.image.tolist()) == (score.shape[1], asked.tolist())
    for row in range(0, len(score), 7):
        near = np.argsort(-cosine[row], kind="stable")[:WIDTH]
        best = near[np.argsort(-score[row, near], kind="stable")]
        np.testing.assert_allclose(lists.score[row], score[row, best], rtol=1e-4, atol=1e-5)
        assert lists.right[row].tolist() == (image[best] == asked[row]).tolist()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_smaller_galleries_keep_ones_own_image_and_a_random_part_of_the_others(
    direction: Direction, scorer: PairScorer, pairs: PairSet
) -> None:
    every = [*simulated_lists(scorer, Labelled.of(scorer, pairs), candidates=1000, seed=0, direction=direction)]
    captions = 1 if direction == "t2i" else 5
    assert [part.size // captions for part in every] == [30, 48, 76, 120]
    score = plain(scorer, pairs, direction)[0]
    for part in every:
        assert part.score.shape == (len(score), part.size)
        assert (part.right.sum(1) == captions).all(), "what is right is always there"
        assert (np.diff(part.score, axis=1) <= 0).all()
        for row in range(0, len(score), 50):
            assert np.isin(part.score[row].astype(np.float32), score[row]).all()
    ranks = [part.right.argmax(1).mean() for part in every]
    shares = [(part.size - captions) / (every[-1].size - captions) for part in every]
    np.testing.assert_allclose(ranks, [share * ranks[-1] for share in shares], rtol=0.2)


def test_galleries_are_drawn_by_the_seed(scorer: PairScorer, pairs: PairSet) -> None:
    first, again, other = (
        next(simulated_lists(scorer, Labelled.of(scorer, pairs), candidates=5, seed=seed, direction="t2i"))
        for seed in (0, 0, 1)
    )
    assert np.array_equal(first.score, again.score)
    assert not np.array_equal(first.score, other.score)


def test_lists_without_matches_keep_their_order() -> None:
    score = np.array([[4.0, 3.0, 2.0, 1.0], [8.0, 7.0, 6.0, 5.0]])
    right = np.array([[True, False, True, False], [False, True, False, False]])
    rest = Lists(score, right, np.arange(2), 4).without_matches()
    assert rest.score.tolist() == [[3.0, 1.0], [8.0, 6.0]]
    assert not rest.right.any()


def filled(folder: Path, scorer: PairScorer, pairs: PairSet, *, texts: bool) -> VectorIndex:
    kind = "texts" if texts else "images"
    provenance = embedding_provenance(scorer.model, kind)
    index = open_index(f"exact:{folder}", dim=scorer.model.dim, provenance=provenance, create=True)
    fill_index(index, scorer, pairs, source="here", texts=texts)
    return index


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_index_of_the_labelled_items_is_their_largest_gallery(
    direction: Direction, scorer: PairScorer, pairs: PairSet, tmp_path: Path
) -> None:
    index = filled(tmp_path / "index", scorer, pairs, texts=direction == "i2t")
    labelled = Labelled.of(scorer, pairs)
    lists, own = searched_lists(scorer, labelled, index, candidates=WIDTH, seed=0, direction=direction)
    *_, expected = simulated_lists(scorer, labelled, candidates=WIDTH, seed=0, direction=direction)
    assert own
    assert lists.size == expected.size
    np.testing.assert_allclose(lists.score[:, :10], expected.score[:, :10], rtol=1e-4, atol=1e-5)
    assert np.array_equal(lists.right[:, :10], expected.right[:, :10])


def test_labelled_images_are_searched_as_if_an_index_of_others_held_them(
    scorer: PairScorer, pairs: PairSet, tmp_path: Path
) -> None:
    labelled, others = pairs.subset(range(50)), pairs.subset(range(50, 120))
    index = filled(tmp_path / "index", scorer, others, texts=False)
    lists, own = searched_lists(scorer, Labelled.of(scorer, labelled), index, candidates=20, seed=0, direction="t2i")
    assert not own
    assert (lists.size, lists.score.shape) == (70, (250, 21))
    scores = scorer.score_set(pairs)
    cosine = (scores.texts.mean @ scores.images.mean.T).numpy()
    for row in range(0, 250, 9):
        image = int(labelled.caption_image[row])
        near = 50 + np.argsort(-cosine[row, 50:], kind="stable")[:20]
        inside = cosine[row, image] >= cosine[row, near[-1]]
        items = torch.tensor([*near.tolist(), *([image] if inside else [])])
        value = scores.score_of(items, torch.full((len(items),), row)).sort(descending=True).values
        np.testing.assert_allclose(lists.score[row, : len(value)], value, rtol=1e-4, atol=1e-5)
        assert lists.right[row].sum() == int(inside)


def test_an_index_of_next_to_nothing_is_refused(scorer: PairScorer, pairs: PairSet, tmp_path: Path) -> None:
    index = filled(tmp_path / "index", scorer, pairs.subset(range(5)), texts=False)
    with pytest.raises(DataError, match="without --index"):
        searched_lists(scorer, Labelled.of(scorer, pairs), index, candidates=20, seed=0, direction="t2i")
    enough = filled(tmp_path / "enough", scorer, pairs.subset(range(20)), texts=False)
    labelled = Labelled.of(scorer, pairs)
    assert searched_lists(scorer, labelled, enough, candidates=20, seed=0, direction="t2i")[0].size == 20


def test_queries_are_spread_over_the_images() -> None:
    image = np.repeat(np.arange(10), np.arange(1, 11))
    rng = np.random.default_rng(0)
    assert sorted(image[spread_over(image, 10, rng)].tolist()) == [*range(10)]
    counts = np.bincount(image[spread_over(image, 25, rng)], minlength=10)
    assert (np.minimum(np.arange(1, 11), 2) <= counts).all()
    assert counts.max() <= 3
    assert spread_over(image, 1000, rng).tolist() == [*range(55)]
