"""The engine against plain loops, and what it promises at which size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from vacsr.config import BackboneConfig, HeadConfig
from vacsr.data import PairSet, load_pairs
from vacsr.errors import ProvenanceMismatch, ShapeMismatch, UsageError
from vacsr.methods.pcmepp import PcmeppConfig
from vacsr.methods.vacsr import VacsrConfig
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer
from vacsr.search.calibrate import CalibrateSettings, calibrate, search_lists
from vacsr.search.calibration import Calibration
from vacsr.search.engine import Searcher
from vacsr.search.index import Hits
from vacsr.search.ondemand import OnDemand
from vacsr.search.provenance import embedding_provenance
from vacsr.search.rerank import Abstain, Ranked, Scored


class Shelf:
    """The plainest index, of what a search needs."""

    exact = True
    sources = ()

    def __init__(self, ids: Sequence[str], vectors: torch.Tensor, provenance: str) -> None:
        self.ids, self.vectors, self.provenance, self.dim = list(ids), vectors, provenance, vectors.shape[1]
        self.holds = provenance.partition(":")[0]

    def __len__(self) -> int:
        return len(self.ids)

    def search(self, queries: torch.Tensor, k: int) -> Hits:
        """By inner product."""
        found = (queries @ self.vectors.T).sort(dim=1, descending=True, stable=True)
        near = found.indices[:, :k]
        ids = [[self.ids[place] for place in row] for row in near.tolist()]
        return Hits(ids, found.values[:, :k], self.vectors[near], [[{"n": p} for p in row] for row in near.tolist()])


def build(method: VacsrConfig | PcmeppConfig, pairs: PairSet, seed: int = 0) -> PairScorer:
    config = BackboneConfig(spec="features:", head=HeadConfig(dim=16))
    dims = {"image_dim": pairs.images.shape[1], "text_dim": pairs.texts.shape[1]}
    return PairScorer(MatchingModel.build(method, config, fit=pairs, seed=seed, **dims), device="cpu")


@pytest.fixture(scope="module")
def pairs() -> PairSet:
    found = load_pairs("synthetic:images=120,seed=3", split="train")
    assert isinstance(found, PairSet)
    return found


@pytest.fixture(scope="module")
def scorer(pairs: PairSet) -> PairScorer:
    return build(VacsrConfig(), pairs)


@pytest.fixture(scope="module")
def calibration(scorer: PairScorer, pairs: PairSet) -> Calibration:
    return calibrate(scorer, pairs, CalibrateSettings(candidates=20, depth=8))


def with_threshold(calibration: Calibration, threshold: float | None) -> Calibration:
    rule = calibration.t2i.answer.model_copy(update={"threshold": threshold})
    return calibration.model_copy(update={"t2i": calibration.t2i.model_copy(update={"answer": rule})})


def images(scorer: PairScorer, pairs: PairSet) -> Shelf:
    return Shelf(pairs.image_ids, scorer.embed_images(pairs.images).mean, embedding_provenance(scorer.model))


def texts(scorer: PairScorer, pairs: PairSet) -> Shelf:
    held = scorer.embed_texts(pairs.texts).mean
    return Shelf(pairs.caption_ids, held, embedding_provenance(scorer.model, "texts"))


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_hits_are_the_nearest_by_cosine_in_order_of_score(direction: str, scorer: PairScorer, pairs: PairSet) -> None:
    shelf = (images if direction == "t2i" else texts)(scorer, pairs)
    searcher = Searcher(scorer, shelf)
    assert searcher.direction == direction
    ask = searcher.search_texts if direction == "t2i" else searcher.search_images
    asked = (pairs.texts if direction == "t2i" else pairs.images)[:5]
    matrix = scorer.score_set(pairs)
    for query, found in enumerate(ask(asked, k=7)):
        scores = matrix.score[:, query] if direction == "t2i" else matrix.score[query]
        cosine = matrix.images.mean @ matrix.texts.mean.T
        cosine = cosine[:, query] if direction == "t2i" else cosine[query]
        near = cosine.argsort(descending=True)[:200].tolist()
        best = sorted(near, key=lambda place, by=scores: -float(by[place]))[:7]
        assert [hit.id for hit in found.hits] == [shelf.ids[place] for place in best]
        np.testing.assert_allclose([hit.score for hit in found.hits], scores[best], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose([hit.cosine for hit in found.hits], cosine[best], atol=1e-5)
        np.testing.assert_allclose([hit.grade for hit in found.hits], scores[best].sigmoid(), rtol=1e-4)
        rows, cols = (best, [query] * 7) if direction == "t2i" else ([query] * 7, best)
        sigma = matrix.uncertainty(torch.tensor(rows), torch.tensor(cols))
        np.testing.assert_allclose([hit.uncertainty for hit in found.hits], sigma, rtol=1e-4)
        assert [hit.metadata["n"] for hit in found.hits] == best
        assert found.answered
        assert (found.promised, found.calibrated, found.confidence) == (False, False, None)


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_searches_see_the_lists_that_calibration_saw(
    direction: str, scorer: PairScorer, pairs: PairSet, calibration: Calibration
) -> None:
    """So the confidence of a query is the same in both, which is what the promise rests on."""
    lists = search_lists(scorer, pairs, CalibrateSettings(candidates=20, depth=8))[direction]  # type: ignore[index]
    fitted = calibration.of(direction)  # type: ignore[arg-type]
    shelf = (images if direction == "t2i" else texts)(scorer, pairs)
    searcher = Searcher(scorer, shelf, calibration)
    if direction == "t2i":
        found = searcher.search_texts(pairs.texts, policy="abstain")
    else:
        found = searcher.search_images(pairs.images, policy="abstain")
    here, there = sorted(one.confidence or 0 for one in found), sorted(fitted.answer.of(lists).tolist())
    np.testing.assert_allclose(here, there, rtol=1e-3)
    np.testing.assert_allclose(
        [hit.grade for hit in found[0].hits], fitted.grades.apply([hit.score for hit in found[0].hits])
    )
    many = searcher.search_texts if direction == "t2i" else searcher.search_images
    asked = pairs.texts[:1] if direction == "t2i" else pairs.images[:1]
    assert many(asked, k=50)[0].confidence == pytest.approx(found[0].confidence)  # whatever k is
    assert [hit.id for hit in many(asked, k=50)[0].hits[:10]] == [hit.id for hit in found[0].hits]


def test_a_promise_is_for_the_size_it_was_fitted_at(
    scorer: PairScorer, pairs: PairSet, calibration: Calibration
) -> None:
    one, sure = pairs.texts[:1], with_threshold(calibration, 0.0)
    for count, promised in ((120, True), (96, True), (95, False), (10, False)):
        shelf = images(scorer, pairs.subset(range(count)))
        found = Searcher(scorer, shelf, sure).search_texts(one, policy="abstain")[0]
        assert (found.answered, found.promised) == (True, promised)
        assert ("no promise at this size" in found.note) is not promised
        assert found.index_size == count
        for policy in ("score", "lcb", "missed"):  # their grades do not hold either, and they promise nothing
            found = Searcher(scorer, shelf, sure).search_texts(one, policy=policy)[0]
            assert ("grades and confidence" in found.note) is not promised
            assert not found.promised


def test_what_is_not_answered_is_not_promised(scorer: PairScorer, pairs: PairSet, calibration: Calibration) -> None:
    shelf, one = images(scorer, pairs), pairs.texts[:1]
    for threshold in (None, 2.0):
        searcher = Searcher(scorer, shelf, with_threshold(calibration, threshold))
        found = searcher.search_texts(one, policy="abstain")[0]
        assert (found.answered, found.promised, found.note) == (False, False, "")
    searcher = Searcher(scorer, shelf, with_threshold(calibration, 0.5))
    own = Abstain(with_threshold(calibration, 0.0).t2i.answer)  # a threshold that nobody certified
    found = searcher.search_texts(one, policy=own)[0]
    assert (found.answered, found.promised) == (True, False)


def test_an_index_that_may_miss_the_nearest_has_no_promise(
    scorer: PairScorer, pairs: PairSet, calibration: Calibration
) -> None:
    shelf, sure = images(scorer, pairs), with_threshold(calibration, 0.0)
    shelf.exact = False
    found = Searcher(scorer, shelf, sure).search_texts(pairs.texts[:1], policy="abstain")[0]
    assert (found.answered, found.promised) == (True, False)
    assert "exact:FOLDER" in found.note
    assert Searcher(scorer, shelf, sure).search_texts(pairs.texts[:1])[0].note == ""


def test_probably_also_is_never_the_first(scorer: PairScorer, pairs: PairSet, calibration: Calibration) -> None:
    low = calibration.t2i.model_copy(update={"missed": calibration.t2i.missed.model_copy(update={"floor": -1e9})})
    searcher = Searcher(scorer, images(scorer, pairs), calibration.model_copy(update={"t2i": low}))
    for policy in ("score", "lcb", "abstain", "missed"):
        found = searcher.search_texts(pairs.texts[:1], k=10, policy=policy)[0]
        assert [hit.probably_also for hit in found.hits] == [False] + [True] * 7 + [False] * 2  # depth is 8
        assert found.probably_also == [hit.id for hit in found.hits[1:8]]
        assert found.to_json()["probably_also"] == found.probably_also
        assert found.to_json()["hits"][0]["rank"] == 1


@pytest.mark.parametrize("ask_own_kind", [False, True])
def test_only_what_is_shown_is_read(scorer: PairScorer, pairs: PairSet, ask_own_kind: bool) -> None:
    shelf, read = images(scorer, pairs), list[tuple[str, object]]()

    class Recorded(Shelf):
        def search(self, queries: torch.Tensor, k: int) -> Hits:
            """As the other, and what is read of it is noted."""
            plain = super().search(queries, k)

            def noted(what: str, row: Sequence[object]) -> OnDemand[Any]:
                return OnDemand(lambda place: (read.append((what, row[place])), row[place])[1], range(len(row)))

            ids, metadata = ([noted(what, row) for row in getattr(plain, what)] for what in ("ids", "metadata"))
            return plain._replace(ids=ids, metadata=metadata)

    searcher = Searcher(scorer, Recorded(shelf.ids, shelf.vectors, shelf.provenance))
    if ask_own_kind:
        found = searcher.search_images(pairs.images[:3], k=7)
    else:
        found = searcher.search_texts(pairs.texts[:3], k=7)
    shown = [hit for one in found for hit in one.hits]
    assert len(read) == 2 * 3 * 7
    assert [name for what, name in read if what == "ids"] == [hit.id for hit in shown]
    assert [facts for what, facts in read if what == "metadata"] == [hit.metadata for hit in shown]


def test_a_policy_of_ones_own(scorer: PairScorer, pairs: PairSet) -> None:
    class Backwards:
        name = "backwards"

        def apply(self, scored: Scored) -> Ranked:
            """Worst first."""
            return Ranked(np.arange(len(scored.ids))[::-1])

    searcher = Searcher(scorer, images(scorer, pairs))
    found = searcher.search_texts(pairs.texts[:1], k=60, policy=Backwards())[0]
    scores = [hit.score for hit in found.hits]
    assert scores == sorted(scores)
    assert (found.policy, found.promised) == ("backwards", False)


def test_one_item_is_an_answer_that_nobody_vouches_for(
    scorer: PairScorer, pairs: PairSet, calibration: Calibration
) -> None:
    searcher = Searcher(scorer, images(scorer, pairs.subset([0])), calibration)
    found = searcher.search_texts(pairs.texts[:1], policy="abstain")[0]
    assert len(found.hits) == 1
    assert (found.answered, found.confidence) == (False, None)


@pytest.mark.parametrize("way", ["i2i", "t2t"])
def test_its_own_kind_is_found_by_cosine_alone(
    way: str, scorer: PairScorer, pairs: PairSet, calibration: Calibration
) -> None:
    shelf = (images if way == "i2i" else texts)(scorer, pairs)
    searcher = Searcher(scorer, shelf, calibration)
    asked = (pairs.images if way == "i2i" else pairs.texts)[3:6]
    ask = searcher.search_images if way == "i2i" else searcher.search_texts
    for query, found in enumerate(ask(asked, k=7)):
        mine = shelf.vectors[3 + query]
        near = sorted(range(len(shelf)), key=lambda row, mine=mine: -float(shelf.vectors[row] @ mine))[:7]
        assert [hit.id for hit in found.hits] == [shelf.ids[row] for row in near]
        np.testing.assert_allclose([hit.cosine for hit in found.hits], shelf.vectors[near] @ mine, atol=1e-5)
        assert [hit.rank for hit in found.hits] == list(range(1, 8))
        assert found.hits[0].cosine == pytest.approx(1, abs=1e-5)  # itself
        assert {(hit.score, hit.grade, hit.uncertainty, hit.probably_also) for hit in found.hits} == {
            (None, None, None, False)
        }
        assert (found.direction, found.graded, found.answered, found.promised) == (way, False, True, False)
        assert (found.calibrated, found.confidence, found.reason) == (False, None, "")
        assert "no grade, no uncertainty, no promise" in found.note
    for policy in ("lcb", "abstain", "missed", "nonsense"):
        with pytest.raises(UsageError, match="leave the policy out"):
            ask(asked, policy=policy)


def test_another_index_of_the_same_model_can_take_its_place(scorer: PairScorer, pairs: PairSet) -> None:
    searcher = Searcher(scorer, images(scorer, pairs))
    searcher.use(images(scorer, pairs.subset([4])))
    assert [hit.id for hit in searcher.search_texts(pairs.texts[:1])[0].hits] == [pairs.image_ids[4]]
    for wrong in (texts(scorer, pairs), images(build(VacsrConfig(), pairs, seed=1), pairs)):
        with pytest.raises(ProvenanceMismatch):
            searcher.use(wrong)
    assert len(searcher.index) == 1


def test_what_cannot_be_searched_is_refused(scorer: PairScorer, pairs: PairSet) -> None:
    photos = Searcher(scorer, images(scorer, pairs))
    with pytest.raises(UsageError, match="k is 0"):
        photos.search_texts(pairs.texts[:1], k=0)
    with pytest.raises(ProvenanceMismatch):
        Searcher(build(VacsrConfig(), pairs, seed=1), images(scorer, pairs))
    with pytest.raises(ShapeMismatch):
        Searcher(scorer, Shelf(["a"], torch.ones(1, 3), ""))
    with pytest.raises(UsageError, match="variance"):
        Searcher(build(PcmeppConfig(), pairs), images(scorer, pairs))
    empty = Shelf([], torch.empty(0, 16), embedding_provenance(scorer.model))
    with pytest.raises(UsageError, match="empty"):
        Searcher(scorer, empty).search_texts(pairs.texts[:1])
