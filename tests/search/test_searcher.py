"""The searcher against plain loops, what it guarantees at which size, and `vacsr search`."""

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
from vacsr.search.calibrate import CalibrateSettings, Calibration, calibrate
from vacsr.search.galleries import Labelled, simulated_lists
from vacsr.search.index import LazyList
from vacsr.search.policies import POLICIES, Policy, Ranked, Scored
from vacsr.search.searcher import Results


class Shelf:
    """The plainest index, of what a search needs; it notes which ids and metadata are read."""

    exact = True
    sources = ()
    where = ""

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


def with_cutoffs(calibration: Calibration, cutoff: float | None, set_cutoff: float | None = None) -> Calibration:
    """That were certified at every size which was searched."""
    assert calibration.t2i is not None
    both = {"cutoff": cutoff, "set_cutoff": set_cutoff}
    rows = tuple(row.model_copy(update=both) for row in calibration.t2i.sizes)
    changed = calibration.t2i.model_copy(update={"sizes": rows, "certified": rows[-1].size})
    return calibration.model_copy(update={"t2i": changed})


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
        assert (result.answered, result.guaranteed, result.calibrated, result.confident) == (True, False, False, None)


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
def test_grades_are_those_of_the_calibration(
    direction: Direction, scorer: PairScorer, pairs: PairSet, calibration: Calibration
) -> None:
    """So a hit has the same grade in both, which is what the guarantee rests on."""
    *_, lists = simulated_lists(scorer, Labelled.of(scorer, pairs), candidates=20, seed=0, direction=direction)
    fitted = calibration.of(direction)
    assert fitted is not None
    searcher = Searcher(scorer, (images if direction == "t2i" else texts)(scorer, pairs), calibration)
    grade = fitted.model.apply(lists.score)
    results = ask(searcher, pairs, slice(None))
    for row in range(0, len(results), 9):
        np.testing.assert_allclose([hit.grade for hit in results[row].hits], grade[row, :10], rtol=1e-3)
    (many,) = ask(searcher, pairs, slice(1), k=50)
    assert [hit.grade for hit in many.hits[:10]] == pytest.approx([hit.grade for hit in results[0].hits])
    assert {hit.grade for hit in many.hits[20:]} == {0.0}, "what is beyond the candidates is no match"


def test_confident_hits_and_answer_sets(scorer: PairScorer, pairs: PairSet, calibration: Calibration) -> None:
    shelf, one = images(scorer, pairs), pairs.texts[:1]
    (plain,) = Searcher(scorer, shelf, calibration).search_texts(one, k=10)
    grades = [hit.grade or 0.0 for hit in plain.hits]
    searcher = Searcher(scorer, shelf, with_cutoffs(calibration, grades[2], grades[4]))
    (every,) = searcher.search_texts(one, k=4)
    assert [hit.confident for hit in every.hits] == [True, True, True, False]
    assert (every.confident, every.answer_set, every.cutoff, every.answered) == (3, 5, grades[2], True)
    assert (every.summary, every.guaranteed, every.note) == ("3 confident matches", True, "")
    assert (every.precision, every.confidence, every.coverage) == (0.9, 0.9, 0.9)
    (sure,) = searcher.search_texts(one, k=10, policy="confident")
    assert [hit.id for hit in sure.hits] == [hit.id for hit in every.hits[:3]]
    (none,) = Searcher(scorer, shelf, with_cutoffs(calibration, 2.0, grades[4])).search_texts(one, policy="confident")
    assert (none.hits, none.answered, none.confident, bool(none.reason)) == ((), False, 0, True)
    assert none.summary == "no confident match; probably one of the first 5 hits (90%)"
    (first,) = Searcher(scorer, shelf, with_cutoffs(calibration, None, grades[0])).search_texts(one)
    assert (first.answer_set, first.summary) == (1, "no confident match; probably the first hit (90%)")
    (unlikely,) = Searcher(scorer, shelf, with_cutoffs(calibration, None, 2.0)).search_texts(one)
    assert (unlikely.answer_set, unlikely.summary) == (0, "no confident match")
    (nothing,) = Searcher(scorer, shelf, with_cutoffs(calibration, None)).search_texts(one)
    assert (nothing.answer_set, nothing.summary) == (None, "no confident match")
    assert [one.guaranteed for one in (none, first, unlikely, nothing)] == [True, True, True, False]


@pytest.mark.parametrize("policy", ["score", "confident"])
def test_a_plain_threshold(policy: str, scorer: PairScorer, pairs: PairSet, calibration: Calibration) -> None:
    searcher = Searcher(scorer, images(scorer, pairs), with_cutoffs(calibration, 0.0))
    every = searcher.search_texts(pairs.texts[:1], k=10)[0].hits
    least = every[3].grade or 0.0
    (some,) = searcher.search_texts(pairs.texts[:1], k=10, policy=policy, min_grade=least)
    assert some.hits == every[:4]
    with pytest.raises(UsageError, match="--min-grade"):
        searcher.search_images(pairs.images[:1], min_grade=0.5)


@pytest.mark.parametrize(
    ("count", "certified", "exact", "said"),
    [
        (120, 120, True, ""), (10, 120, True, ""), (119, 60, True, "certified with up to 60"),
        (120, 120, False, "exact:FOLDER"), (50, 60, True, ""),
    ],
)  # fmt: skip
def test_where_a_calibration_holds(
    count: int, certified: int, exact: bool, said: str, scorer: PairScorer, pairs: PairSet, calibration: Calibration
) -> None:
    fitted = with_cutoffs(calibration, 0.0)
    assert fitted.t2i is not None
    fitted = fitted.model_copy(update={"t2i": fitted.t2i.model_copy(update={"certified": certified})})
    shelf = images(scorer, pairs.subset(range(count)))
    shelf.exact = exact
    (result,) = Searcher(scorer, shelf, fitted).search_texts(pairs.texts[:1])
    assert (result.guaranteed, result.index_size, bool(result.note)) == (not said, count, bool(said))
    assert said in result.note


def test_beyond_what_was_checked_grades_come_with_a_warning(
    scorer: PairScorer, pairs: PairSet, calibration: Calibration
) -> None:
    few = calibrate(scorer, pairs.subset(range(60)), CalibrateSettings(candidates=20))
    (result,) = Searcher(scorer, images(scorer, pairs), few).search_texts(pairs.texts[:1])
    assert not result.guaranteed
    assert "up to 60 items, and the index holds 120" in result.note
    assert "vacsr calibrate" in result.note
    assert result.answer_set is None
    (result,) = Searcher(scorer, images(scorer, pairs.subset([0])), calibration).search_texts(pairs.texts[:1])
    assert result.hits[0].grade == pytest.approx(0.0, abs=0.9), "with nothing to compare with nobody is sure"


def test_a_method_that_only_ranks_has_no_grade(pairs: PairSet) -> None:
    """Until a calibration gives it one."""
    ranks = build(InfoNCEConfig(), pairs)
    shelf = images(ranks, pairs)
    (result,) = Searcher(ranks, shelf).search_texts(pairs.texts[:1])
    assert {hit.grade for hit in result.hits} == {None}
    assert [hit.score for hit in result.hits] == pytest.approx([hit.cosine for hit in result.hits], abs=1e-5)
    with pytest.raises(UsageError, match="vacsr calibrate"):
        Searcher(ranks, shelf).search_texts(pairs.texts[:1], min_grade=0.5)
    fitted = calibrate(ranks, pairs, CalibrateSettings(candidates=20))
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
    assert (result.policy, result.guaranteed) == ("backwards", False)


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
        ungraded = {(hit.score, hit.grade, hit.uncertainty, hit.confident) for hit in result.hits}
        assert ungraded == {(None, None, None, False)}
        assert (result.direction, result.scored, result.answered, result.guaranteed) == (way, False, True, False)
        assert (result.calibrated, result.confident, result.reason) == (False, None, "")
        assert "no grade, no uncertainty, no guarantee" in result.note
    for policy in ("confident", "nonsense"):
        with pytest.raises(UsageError, match="leave both out"):
            search(asked, policy=policy)


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("model", {"temperature": 0.0}), ("model", {"odds_weight": -1.0}), ("model", {"bias": "x"}),
        (None, {"sizes": []}), (None, {"candidates": 0}), (None, {"nonsense": 1}),
    ],
)  # fmt: skip
def test_a_changed_calibration_is_a_data_error(
    part: str | None, values: dict[str, Any], scorer: PairScorer, pairs: PairSet, calibration: Calibration,
    tmp_path: Path,
) -> None:  # fmt: skip
    scorer.model.save_pretrained(tmp_path)
    stored = calibration.model_dump(mode="json")
    (stored["t2i"] if part is None else stored["t2i"][part]).update(values)
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
    assert "warning:" not in answer.err, "nothing is to be warned of"
    written = json.loads(out.read_text())
    assert [hit["rank"] for hit in written["hits"]] == [1, 2, 3]
    head, *lines = [line.split("\t") for line in answer.out.splitlines()]
    assert head == ["rank", "id", "grade", "σ", "score", "cosine", "note"]
    for hit, line in zip(written["hits"], lines, strict=True):
        assert line[:2] == [str(hit["rank"]), hit["id"]]
        assert line[2:6] == [f"{hit[name]:.3f}" for name in ("grade", "uncertainty", "score", "cosine")]
    assert (written["answered"], written["precision"], written["policy"]) == (True, None, "score")
    assert vacsr("search", towers, *words, "--policy", "confident").refused(2, "vacsr calibrate")
    assert vacsr("search", towers, *words, "--policy", "abstain").refused(2, "was removed")
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


def test_what_a_calibration_says_is_printed_first(vacsr: Command, towers: Path, tmp_path: Path) -> None:
    index, out = f"exact:{towers / 'images'}", tmp_path / "found.json"
    assert vacsr("calibrate", towers, "--pairs", SCENES, "--candidates", 30, *CPU).code == 0
    query = ("search", towers, "--index", index, "--text", "a red circle", "--json", out, *CPU)
    answer = vacsr(*query, "--policy", "confident")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("# no confident match")
    written = json.loads(out.read_text())
    assert (written["answered"], written["hits"], written["confident"]) == (False, [], 0)
    stored = json.loads((towers / "search.json").read_text())
    stored["t2i"].update(certified=120, sizes=[{**row, "cutoff": 0.0} for row in stored["t2i"]["sizes"]])
    stored.update(precision=0.875, confidence=0.9999)
    (towers / "search.json").write_text(json.dumps(stored))
    answer = vacsr(*query, "-k", 2)
    first, promise, _, *hits = answer.out.splitlines()
    assert first == f"# {json.loads(out.read_text())['confident']} confident matches"
    assert "at least 87.5% are right, with 99.99% confidence, if a match is in the index" in promise
    assert [line.split("\t")[-1] for line in hits] == ["confident", "confident"]


def test_a_calibration_for_an_index_lies_beside_it(vacsr: Command, towers: Path, tmp_path: Path) -> None:
    index, query = f"exact:{towers / 'images'}", ("--text", "a red circle", *CPU)
    fit_to = ("calibrate", towers, "--pairs", SCENES, "--candidates", 30, *CPU)
    answer = vacsr(*fit_to, "--index", index)
    assert answer.code == 0, answer.err
    assert "own captions" in answer.out, "the index holds the photos of the labelled pairs"
    assert (towers / "images" / "search.json").is_file()
    assert not (towers / "search.json").exists()
    assert vacsr(*fit_to, "--out", tmp_path / "other.json", "--precision", 0.8).code == 0
    found = vacsr("search", towers, "--index", index, "--json", tmp_path / "a", *query)
    other = ("--calibration", tmp_path / "other.json", "--json", tmp_path / "b")
    assert vacsr("search", towers, "--index", index, *query, *other).code == 0, found.err
    assert [json.loads((tmp_path / name).read_text())["precision"] for name in "ab"] == [0.9, 0.8]
    assert vacsr(*fit_to, "--index", f"exact:{tmp_path / 'none'}").refused(4, "index add")


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
    assert vacsr(*similar, "--policy", "confident").refused(2, "search with an image")


def test_refused_searches(vacsr: Command, towers: Path, models: Models, features: str, tmp_path: Path) -> None:
    query = ("search", towers, "--index", f"exact:{towers / 'images'}", *CPU)
    assert vacsr(*query).refused(2, "--text")
    assert vacsr(*query, "--text", "a", "--image", "b.png").refused(2, "either")
    assert vacsr(*query, "--text", "a", "-k", 0).refused(2, "k is 0")
    assert vacsr(*query, "--image", tmp_path / "photo.png").refused(4, "photo.png")
    assert vacsr("search", models["towers"], *query[2:], "--text", "a").refused(4, "another model", "vacsr index add")
    own = f"exact:{tmp_path / 'features'}"
    assert vacsr("index", "add", own, "--run", models["features"], "--pairs", features, *CPU).code == 0
    assert vacsr("search", models["features"], "--index", own, "--text", "a", *CPU).refused(2, "vacsr embed")
    assert vacsr("search", towers, "--index", f"exact:{tmp_path / 'none'}", "--text", "a", *CPU).refused(4, "index add")
