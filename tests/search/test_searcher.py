"""The searcher against plain loops, what it guarantees at which size, and `vacsr search`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vacsr import BackboneConfig, HeadConfig, TrainConfig, fit
from vacsr.data import PairSet, PhotoSet, load_pairs
from vacsr.errors import DataError, ProvenanceMismatch, ShapeMismatch, UsageError
from vacsr.methods.infonce import InfoNCEConfig
from vacsr.methods.pcmepp import PcmeppConfig
from vacsr.methods.vacsr import VacsrConfig
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer
from vacsr.scoring.topk import Direction
from vacsr.search import Hits, Searcher, embedding_provenance, open_index
from vacsr.search.calibrate import CalibrateSettings, Calibration, calibrate, search_lists
from vacsr.search.index import LazyList
from vacsr.search.policies import NO_ANSWER, POLICIES, Abstain, Policy, Ranked, Scored
from vacsr.search.probabilities import Isotonic, Logistic
from vacsr.search.searcher import Results


class Shelf:
    """The plainest index, of what a search needs; it notes which ids and metadata are read."""

    exact = True
    sources = ()

    def __init__(self, ids: Sequence[str], vectors: torch.Tensor, provenance: str) -> None:
        self.ids, self.vectors, self.provenance, self.dim = list(ids), vectors, provenance, vectors.shape[1]
        self.reads: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return len(self.ids)

    def search(self, queries: torch.Tensor, k: int) -> Hits:
        found = (queries @ self.vectors.T).sort(dim=1, descending=True, stable=True)
        near = found.indices[:, :k]
        ids = [LazyList(lambda row: self._read("id", row, self.ids[row]), rows) for rows in near.tolist()]
        metadata = [LazyList(lambda row: self._read("metadata", row, {"n": row}), rows) for rows in near.tolist()]
        return Hits(ids, found.values[:, :k], self.vectors[near], metadata)

    def _read(self, kind: str, row: int, value: Any) -> Any:
        self.reads.append((kind, row))
        return value


def build(method: VacsrConfig | PcmeppConfig | InfoNCEConfig, pairs: PairSet, seed: int = 0) -> PairScorer:
    config = BackboneConfig(spec="features:", head=HeadConfig(dim=16))
    dims = {"image_dim": pairs.images.shape[1], "text_dim": pairs.texts.shape[1]}
    return PairScorer(MatchingModel.build(method, config, fit=pairs, seed=seed, **dims), device="cpu")


def images(scorer: PairScorer, pairs: PairSet) -> Shelf:
    return Shelf(pairs.image_ids, scorer.embed_images(pairs.images).mean, embedding_provenance(scorer.model))


def texts(scorer: PairScorer, pairs: PairSet) -> Shelf:
    held = scorer.embed_texts(pairs.texts).mean
    return Shelf(pairs.caption_ids, held, embedding_provenance(scorer.model, "texts"))


def ask(searcher: Searcher, pairs: PairSet, rows: slice, **options: Any) -> list[Results]:
    if searcher.direction == "t2i":
        return searcher.search_texts(pairs.texts[rows], **options)
    return searcher.search_images(pairs.images[rows], **options)


def with_t2i(calibration: Calibration, **values: Any) -> Calibration:
    return calibration.model_copy(update={"t2i": calibration.t2i.model_copy(update=values)})


def with_threshold(calibration: Calibration, threshold: float | None) -> Calibration:
    return with_t2i(calibration, answer=calibration.t2i.answer.model_copy(update={"threshold": threshold}))


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_hits_are_the_nearest_by_cosine_in_order_of_score(direction: str, scorer: PairScorer, pairs: PairSet) -> None:
    shelf = (images if direction == "t2i" else texts)(scorer, pairs)
    searcher, matrix = Searcher(scorer, shelf), scorer.score_set(pairs)
    assert searcher.direction == direction
    cosines = matrix.images.mean @ matrix.texts.mean.T
    for query, result in enumerate(ask(searcher, pairs, slice(5), k=7)):
        scores, cosine = (part[:, query] if direction == "t2i" else part[query] for part in (matrix.score, cosines))
        near = cosine.argsort(descending=True)[:200].tolist()
        best = sorted(near, key=lambda row, by=scores: -float(by[row]))[:7]
        assert [hit.id for hit in result.hits] == [shelf.ids[row] for row in best]
        assert [hit.metadata["n"] for hit in result.hits] == best
        rows, cols = (best, [query] * 7) if direction == "t2i" else ([query] * 7, best)
        sigma = matrix.uncertainty(torch.tensor(rows), torch.tensor(cols))
        grade = scores[best].sigmoid()
        expected = {"score": scores[best], "cosine": cosine[best], "grade": grade, "uncertainty": sigma}
        for name, values in expected.items():
            np.testing.assert_allclose([getattr(hit, name) for hit in result.hits], values, rtol=1e-4, atol=1e-5)
        assert (result.answered, result.promised, result.calibrated, result.confidence) == (True, False, False, None)


def test_hits_of_an_ensemble_say_how_much_its_members_disagree(pairs: PairSet) -> None:
    ensemble = build(InfoNCEConfig(members=2), pairs)
    shelf, matrix = images(ensemble, pairs), ensemble.score_set(pairs)
    (result,) = Searcher(ensemble, shelf).search_texts(pairs.texts[3:4], k=4)
    rows = torch.tensor([hit.metadata["n"] for hit in result.hits])
    expected = matrix.disagreement(rows, torch.full_like(rows, 3))
    assert expected is not None
    np.testing.assert_allclose([hit.disagreement for hit in result.hits], expected, rtol=1e-4, atol=1e-6)
    assert [hit.uncertainty for hit in result.hits] == [None] * 4


def test_a_notebook_shows_hits_as_a_table(scorer: PairScorer, pairs: PairSet) -> None:
    shelf = images(scorer, pairs)
    shelf.ids = [f"<{name}>" for name in shelf.ids]
    (result,) = Searcher(scorer, shelf).search_texts(pairs.texts[:1], k=2)
    shown = result._repr_html_()
    assert shown.startswith("<table><tr><th>rank</th><th>id</th>")
    assert f"<tr><td>1</td><td>&lt;{result.hits[0].id[1:-1]}&gt;</td><td>" in shown
    assert shown.count("<tr>") == 3


def test_more_hits_than_candidates_follow_by_cosine_then_score(scorer: PairScorer, pairs: PairSet) -> None:
    """200 are scored together; those beyond come after them, ordered among themselves."""
    searcher, matrix = Searcher(scorer, texts(scorer, pairs)), scorer.score_set(pairs)
    (result,) = searcher.search_images(pairs.images[:1], k=250)
    near = (matrix.images.mean @ matrix.texts.mean.T)[0].argsort(descending=True, stable=True)[:250].tolist()
    parts = [sorted(part, key=lambda row: -float(matrix.score[0, row])) for part in (near[:200], near[200:])]
    assert [hit.id for hit in result.hits] == [pairs.caption_ids[row] for part in parts for row in part]
    assert [hit.rank for hit in result.hits] == list(range(1, 251))
    assert all(hit.uncertainty is not None for hit in result.hits), "as many as are shown, beyond the usual depth"


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_confidence_is_that_of_the_calibration(
    direction: Direction, scorer: PairScorer, pairs: PairSet, calibration: Calibration
) -> None:
    """So the confidence of a query is the same in both, which is what the guarantee rests on."""
    lists = search_lists(scorer, pairs, CalibrateSettings(candidates=20, depth=8))[direction]
    fitted = calibration.of(direction)
    searcher = Searcher(scorer, (images if direction == "t2i" else texts)(scorer, pairs), calibration)
    results = ask(searcher, pairs, slice(None), policy="abstain")
    here, there = sorted(one.confidence or 0 for one in results), sorted(fitted.answer.outcomes(lists).value.tolist())
    np.testing.assert_allclose(here, there, rtol=1e-3)
    hits = results[0].hits
    np.testing.assert_allclose([hit.grade for hit in hits], fitted.grades.apply([hit.score for hit in hits]))
    (many,) = ask(searcher, pairs, slice(1), k=50)
    assert many.confidence == pytest.approx(results[0].confidence)  # whatever k is
    assert [hit.id for hit in many.hits[:10]] == [hit.id for hit in hits]


def test_a_confidence_is_from_the_depth_of_the_fit(
    scorer: PairScorer, pairs: PairSet, calibration: Calibration
) -> None:
    by_sigma = Logistic(mean=(0.0,), scale=(1.0,), weight=(9.0,), bias=0.0)
    answer = calibration.t2i.answer.model_copy(update={"signals": ("sigma5",), "logistic": by_sigma})
    searcher = Searcher(scorer, images(scorer, pairs), with_t2i(calibration, depth=2, answer=answer))
    few, many = (ask(searcher, pairs, slice(1), k=k)[0].confidence for k in (1, 10))
    assert few == many


@pytest.mark.parametrize(("count", "promised"), [(120, True), (96, True), (95, False), (10, False)])
def test_a_guarantee_is_for_its_size(
    count: int, promised: bool, scorer: PairScorer, pairs: PairSet, calibration: Calibration
) -> None:
    searcher = Searcher(scorer, images(scorer, pairs.subset(range(count))), with_threshold(calibration, 0.0))
    (result,) = searcher.search_texts(pairs.texts[:1], policy="abstain")
    assert (result.answered, result.promised, result.index_size) == (True, promised, count)
    assert ("no guarantee at this size" in result.note) is not promised
    (result,) = searcher.search_texts(pairs.texts[:1])
    assert ("grades and confidence" in result.note) is not promised, "grades do not hold either"
    assert not result.promised


def test_what_is_not_certified_is_not_promised(scorer: PairScorer, pairs: PairSet, calibration: Calibration) -> None:
    shelf, one = images(scorer, pairs), pairs.texts[:1]
    for threshold in (None, 2.0):
        searcher = Searcher(scorer, shelf, with_threshold(calibration, threshold))
        (result,) = searcher.search_texts(one, policy="abstain")
        assert (result.answered, result.promised, result.note) == (False, False, "")
    own = Abstain(with_threshold(calibration, 0.0).t2i.answer)  # a threshold that nobody certified
    (result,) = Searcher(scorer, shelf, with_threshold(calibration, 0.5)).search_texts(one, policy=own)
    assert (result.answered, result.promised) == (True, False)
    shelf.exact = False  # it may miss the nearest
    searcher = Searcher(scorer, shelf, with_threshold(calibration, 0.0))
    (result,) = searcher.search_texts(one, policy="abstain")
    assert (result.answered, result.promised, "exact:FOLDER" in result.note) == (True, False, True)
    assert searcher.search_texts(one)[0].note == ""
    (result,) = Searcher(scorer, images(scorer, pairs.subset([0])), calibration).search_texts(one, policy="abstain")
    assert (len(result.hits), result.answered, result.confidence) == (1, False, None), "nothing to compare with"


def test_what_is_probably_also_a_match(scorer: PairScorer, pairs: PairSet, calibration: Calibration) -> None:
    shelf = images(scorer, pairs)

    def marked(grade: float, **values: Any) -> Results:
        """With this grade for all."""
        flat = calibration.t2i.grades.model_copy(update={"kind": "isotonic", "isotonic": Isotonic(x=(0,), y=(grade,))})
        fitted = with_t2i(calibration, grades=flat, **{"also_floor": -1e9, **values})
        (result,) = Searcher(scorer, shelf, fitted).search_texts(pairs.texts[:1], k=10, policy="abstain")
        assert result.to_dict()["probably_also"] == [hit.id for hit in result.hits if hit.probably_also]
        return result

    result = marked(0.5)
    assert [hit.probably_also for hit in result.hits] == [False] + [True] * 7 + [False] * 2  # depth is 8
    floor = result.hits[2].score
    assert [hit.probably_also for hit in marked(0.5, also_floor=floor).hits[:4]] == [False, True, True, False]
    assert marked(0.5, gallery=1000).probably_also == result.probably_also, "fewer items err less often"
    assert marked(0.49).probably_also == marked(0.5, gallery=100).probably_also == []


def test_a_method_that_only_ranks_has_no_grade(pairs: PairSet) -> None:
    """Until a calibration gives it one."""
    ranks = build(InfoNCEConfig(), pairs)
    shelf = images(ranks, pairs)
    (result,) = Searcher(ranks, shelf).search_texts(pairs.texts[:1])
    assert {hit.grade for hit in result.hits} == {None}
    assert [hit.score for hit in result.hits] == pytest.approx([hit.cosine for hit in result.hits], abs=1e-5)
    fitted = calibrate(ranks, pairs, CalibrateSettings(candidates=20, depth=8))
    assert (fitted.t2i.ece_own, fitted.i2t.ece_own) == (None, None)
    (result,) = Searcher(ranks, shelf, Calibration(**fitted.model_dump(mode="json"))).search_texts(pairs.texts[:1])
    assert all(hit.grade is not None and 0 < hit.grade < 1 for hit in result.hits)


@pytest.mark.parametrize("own_kind", [False, True])
def test_only_what_is_shown_is_read(scorer: PairScorer, pairs: PairSet, own_kind: bool) -> None:
    shelf = images(scorer, pairs)
    searcher = Searcher(scorer, shelf)
    results = searcher.search_images(pairs.images[:3], k=7) if own_kind else searcher.search_texts(pairs.texts[:3], k=7)
    shown = [hit.metadata["n"] for one in results for hit in one.hits]
    assert sorted(shelf.reads) == sorted([("id", row) for row in shown] + [("metadata", row) for row in shown])


def test_a_policy_of_ones_own(scorer: PairScorer, pairs: PairSet) -> None:
    class Backwards(Policy):
        name = "backwards"

        def apply(self, scored: Scored) -> Ranked:
            """Worst first."""
            return Ranked(np.arange(len(scored.ids))[::-1])

    (result,) = Searcher(scorer, images(scorer, pairs)).search_texts(pairs.texts[:1], k=60, policy=Backwards())
    scores = [hit.score for hit in result.hits]
    assert scores == sorted(scores)
    assert (result.policy, result.promised) == ("backwards", False)


@pytest.mark.parametrize("way", ["i2i", "t2t"])
def test_its_own_kind_is_found_by_cosine(
    way: str, scorer: PairScorer, pairs: PairSet, calibration: Calibration
) -> None:
    shelf = (images if way == "i2i" else texts)(scorer, pairs)
    searcher = Searcher(scorer, shelf, calibration)
    search = searcher.search_images if way == "i2i" else searcher.search_texts
    asked = (pairs.images if way == "i2i" else pairs.texts)[3:6]
    for query, result in enumerate(search(asked, k=7)):
        cosine = shelf.vectors @ shelf.vectors[3 + query]
        near = sorted(range(len(shelf)), key=lambda row, by=cosine: -float(by[row]))[:7]
        assert [(hit.rank, hit.id) for hit in result.hits] == [(n, shelf.ids[row]) for n, row in enumerate(near, 1)]
        np.testing.assert_allclose([hit.cosine for hit in result.hits], cosine[near], atol=1e-5)
        ungraded = {(hit.score, hit.grade, hit.uncertainty, hit.probably_also) for hit in result.hits}
        assert ungraded == {(None, None, None, False)}
        assert (result.direction, result.scored, result.answered, result.promised) == (way, False, True, False)
        assert (result.calibrated, result.confidence, result.reason) == (False, None, "")
        assert "no grade, no uncertainty, no guarantee" in result.note
    for policy in ("abstain", "nonsense"):
        with pytest.raises(UsageError, match="leave the policy out"):
            search(asked, policy=policy)


@pytest.mark.parametrize(
    ("part", "values"),
    [
        (("answer", "logistic"), {"weight": [1.0] * 99}), (("answer", "logistic"), {"mean": []}),
        (("answer",), {"signals": ["nonsense"]}), (("grades", "isotonic"), {"x": [], "y": []}),
        (("grades", "isotonic"), {"y": [0.5]}), ((), {"candidates": 0}), ((), {"depth": "x"}),
    ],
)  # fmt: skip
def test_a_changed_calibration_is_a_data_error(
    part: tuple[str, ...], values: dict[str, Any], scorer: PairScorer, pairs: PairSet, calibration: Calibration,
    tmp_path: Path,
) -> None:  # fmt: skip
    scorer.model.save_pretrained(tmp_path)
    stored = calibration.model_dump(mode="json")
    stored["t2i"]["grades"]["kind"] = "isotonic"
    inner = stored["t2i"]
    for name in part:
        inner = inner[name]
    inner.update(values)
    (tmp_path / "search.json").write_text(json.dumps(stored))
    with pytest.raises(DataError, match="vacsr calibrate"):
        Searcher.from_pretrained(tmp_path, images(scorer, pairs), device="cpu").search_texts(pairs.texts[:1])


def test_what_cannot_be_searched_is_refused(scorer: PairScorer, pairs: PairSet) -> None:
    with pytest.raises(UsageError, match="k is 0"):
        Searcher(scorer, images(scorer, pairs)).search_texts(pairs.texts[:1], k=0)
    with pytest.raises(ProvenanceMismatch):
        Searcher(build(VacsrConfig(), pairs, seed=1), images(scorer, pairs))
    with pytest.raises(ShapeMismatch):
        Searcher(scorer, Shelf(["a"], torch.ones(1, 3), ""))
    with pytest.raises(UsageError, match="variance"):
        Searcher(build(PcmeppConfig(), pairs), images(scorer, pairs))
    with pytest.raises(UsageError, match="empty"):
        Searcher(scorer, Shelf([], torch.empty(0, 16), "")).search_texts(pairs.texts[:1])


Models = dict[str, Path]
Command = Callable[..., Any]
"""The fixture `vacsr` of conftest.py."""
SCENES = "scenes:images=40,held_out=120,per_image=2,size=32"
CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Towers, and in the same folder an index of the dev split's photos, and one of its captions."""
    folder, data = tmp_path_factory.mktemp("towers"), load_pairs(SCENES, split="dev")
    tiny = BackboneConfig(spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32", head=HeadConfig(dim=8))
    plan = TrainConfig(epochs=1, batch_size=16, device="cpu")
    fit("vacsr", load_pairs(SCENES, split="train"), plan, backbone=tiny).model.save_pretrained(folder)
    scores = PairScorer.from_pretrained(folder, device="cpu").score_set(data)
    for kind, ids, vectors in (
        ("images", data.image_ids, scores.images.mean), ("texts", data.caption_ids, scores.texts.mean),
    ):  # fmt: skip
        provenance = embedding_provenance(scores.scorer.model, kind)
        index = open_index(f"exact:{folder / kind}", dim=8, provenance=provenance, create=True)
        index.add(ids, vectors)
        index.close()
    return folder


@pytest.fixture
def towers(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "towers"))


def test_search_by_text(vacsr: Command, towers: Path, tmp_path: Path) -> None:
    out, words = tmp_path / "found.json", ("--index", f"exact:{towers / 'images'}", "--text", "a red circle", *CPU)
    answer = vacsr("search", towers, *words, "-k", 3, "--json", out)
    assert answer.code == 0, answer.err
    written = json.loads(out.read_text())
    assert [hit["rank"] for hit in written["hits"]] == [1, 2, 3]
    head, *lines = [line.split("\t") for line in answer.out.splitlines()]
    assert head == ["rank", "id", "grade", "σ", "score", "cosine", "note"]
    for hit, line in zip(written["hits"], lines, strict=True):
        assert line[:2] == [str(hit["rank"]), hit["id"]]
        assert line[2:6] == [f"{hit[name]:.3f}" for name in ("grade", "uncertainty", "score", "cosine")]
    assert (written["answered"], written["calibrated"], written["policy"]) == (True, False, "score")
    assert vacsr("search", towers, *words, "--policy", "abstain").refused(2, "vacsr calibrate")
    assert vacsr("search", towers, *words, "--policy", "best").refused(2, "use one of score")
    assert "|".join(POLICIES) in vacsr("search", "--help").out


@pytest.mark.parametrize("terminal", [True, False])
def test_a_hit_is_one_whole_line_whatever_its_id(
    vacsr: Command, towers: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    index, name = open_index(f"exact:{towers / 'images'}"), "a\nb\x1b[2J\x9bc" + 200 * "x"
    with closing(index):
        index.delete([known for known, _ in index.records()])
        index.add([name], torch.ones(1, 8))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: terminal, raising=False)
    answer = vacsr("search", towers, "--index", f"exact:{towers / 'images'}", "--text", "a dog", *CPU)
    head, line = answer.out.splitlines()
    assert f"a b [2J c{200 * 'x'}" in ([part.strip() for part in line.split("  ")] if terminal else line.split("\t"))
    assert head.split()[:2] == ["rank", "id"]


def test_an_abstention_is_said_plainly(vacsr: Command, towers: Path, tmp_path: Path) -> None:
    fit_to = ("calibrate", towers, "--pairs", SCENES, "--candidates", 30, "--risk", 0.01, *CPU)
    assert vacsr(*fit_to).code == 0
    out, index = tmp_path / "found.json", f"exact:{towers / 'images'}"
    query = ("search", towers, "--index", index, "--text", "a red circle", "--json", out, *CPU)
    answer = vacsr(*query, "--policy", "abstain")
    assert answer.code == 0, answer.err
    assert answer.out.startswith(f"# {NO_ANSWER}")
    assert "no guarantee" not in answer.err
    written = json.loads(out.read_text())
    assert written["answered"] is False
    shown = {hit["id"] for hit in written["hits"]}
    open_index(index).delete([name for name in load_pairs(SCENES, split="dev").image_ids if name not in shown])
    smaller = vacsr(*query, "--policy", "abstain").err
    assert "warning: no guarantee at this size: the index holds 10" in smaller
    assert "warning: grades and confidence are off" in vacsr(*query).err


def test_a_guarantee_is_printed_with_its_conditions(vacsr: Command, towers: Path) -> None:
    assert vacsr("calibrate", towers, "--pairs", SCENES, "--candidates", 30, *CPU).code == 0
    stored = json.loads((towers / "search.json").read_text())
    stored["t2i"]["answer"].update(threshold=0.0, risk=0.125, confidence=0.9999)
    (towers / "search.json").write_text(json.dumps(stored))
    query = ("search", towers, "--index", f"exact:{towers / 'images'}", "--text", "a red circle", *CPU)
    answer = vacsr(*query, "--policy", "abstain")
    assert "at most 12.5% of such answers are wrong, with 99.99% confidence, if a match is in the index" in answer.out
    assert "guaranteed" not in vacsr(*query).out


def test_search_by_image_and_similar_ones(vacsr: Command, towers: Path, tmp_path: Path) -> None:
    data, scorer = load_pairs(SCENES, split="dev"), PairScorer.from_pretrained(towers, device="cpu")
    assert isinstance(data, PhotoSet)
    photo = tmp_path / "photo.png"
    data.photos.open(7).save(photo)
    by_image, words = ("search", towers, "--image", photo, *CPU, "--index"), f"exact:{towers / 'texts'}"
    answer = vacsr(*by_image, words, "-k", 2)
    best = scorer.score_all([photo], data.captions).score[0].argmax()
    assert f"\t{data.caption_ids[int(best)]}\t" in answer.out, answer.err
    answer = vacsr(*by_image, f"exact:{towers / 'images'}", "-k", 3)
    lines = answer.out.splitlines()
    assert lines[0] == "# similar images, by cosine alone: no grade, no uncertainty, no guarantee"
    assert lines[1].split() == ["rank", "id", "cosine", "note"]
    assert lines[2].split() == ["1", data.image_ids[7], "1.000"]
    similar = ("search", towers, "--index", words, "--text", "a dog", *CPU)
    assert vacsr(*similar).out.startswith("# similar texts, by cosine alone")
    assert vacsr(*similar, "--policy", "abstain").refused(2, "search with an image")


def test_refused_searches(vacsr: Command, towers: Path, models: Models, features: str, tmp_path: Path) -> None:
    query = ("search", towers, "--index", f"exact:{towers / 'images'}", *CPU)
    assert vacsr(*query).refused(2, "--text")
    assert vacsr(*query, "--text", "a", "--image", "b.png").refused(2, "either")
    assert vacsr(*query, "--text", "a", "-k", 0).refused(2, "k is 0")
    assert vacsr(*query, "--image", tmp_path / "photo.png").refused(4, "photo.png")
    assert vacsr("search", models["towers"], *query[2:], "--text", "a").refused(4, "fill another")
    own = f"exact:{tmp_path / 'features'}"
    assert vacsr("index", "add", own, "--run", models["features"], "--pairs", features, *CPU).code == 0
    assert vacsr("search", models["features"], "--index", own, "--text", "a", *CPU).refused(2, "vacsr embed")
    assert vacsr("search", towers, "--index", f"exact:{tmp_path / 'none'}", "--text", "a", *CPU).refused(4, "index add")
