"""COCO's protocols against the package that the field uses, run on the same scores."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vacsr.data import load_pairs
from vacsr.errors import DataError, MissingExtra
from vacsr.evaluate import protocols
from vacsr.evaluate.metrics import METRICS, retrieval_result
from vacsr.evaluate.protocols import (
    FOLDS,
    CocoTest,
    coco_galleries,
    coco_owners,
    coco_test,
    fitting_protocols,
    part_gallery,
    protocol_galleries,
)
from vacsr.evaluate.report import evaluate_scores
from vacsr.evaluate.score_files import MatrixIds, MatrixScores
from vacsr.evaluate.significance import contributions

eccv_caption = pytest.importorskip("eccv_caption")
SHARED = Path(__file__).resolve().parents[3] / "shared"
KINDS = ("random", "perfect", "adversarial", "tied", "constant")
EACH = 6  # images in a fold of the small world
PROTOCOLS = {"coco-1k": ("coco", FOLDS), "coco-5k": ("coco", 1), "cxc": ("cxc", 1), "eccv": ("eccv", 1)}


def draw_scores(kind: str, owner: Tensor, *, images: int) -> Tensor:
    """Scores of one kind. owner [M], the row of each caption's image -> [N, M]"""
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    scores = torch.randn(images, len(owner), generator=generator)
    own = owner, torch.arange(len(owner))
    if kind == "perfect":
        scores[own] += 50
    elif kind == "adversarial":
        scores[own] -= 50
    elif kind == "tied":
        scores = scores.round().clamp(-1, 1)
        scores[own] = 1
    elif kind == "constant":
        scores.zero_()
    else:
        scores[own] += 2
    return scores


def theirs(metrics: Any, scores: Tensor, pairs: MatrixIds) -> dict[str, dict[str, float]]:
    """The package's own metrics in percent, from full rankings in the order (−score, index)."""
    ids = pairs.image_ids, pairs.caption_ids
    images, words = (np.array([int(name) for name in names], dtype=object) for names in ids)

    def rankings(queries: Any, items: Any, rows: Tensor) -> dict[int, list[int]]:
        ordered = (items[np.argsort(-row.numpy(), kind="stable")].tolist() for row in rows)
        return dict(zip(queries, ordered, strict=True))

    both = rankings(images, words, scores), rankings(words, images, scores.T)
    recalls = ("coco_1k_recalls", "coco_5k_recalls", "cxc_recalls")
    found = metrics.compute_all_metrics(*both, (*recalls, "eccv_map_at_r", "eccv_rprecision"))
    found |= metrics.compute_all_metrics(*both, ("eccv_recalls",))
    return {name: {way: 100 * float(value) for way, value in ways.items()} for name, ways in found.items()}


def check_same(ours: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Mapping[str, float]]) -> None:
    """Every metric that the package computes."""
    compared = 0
    for name, ways in expected.items():
        source, _, metric = name.rpartition("_r") if name[-1].isdigit() else name.partition("_")
        key = {"rprecision": "r_precision"}.get(metric, f"r{metric}" if metric.isdigit() else metric)
        for way, value in ways.items():
            assert ours[source.replace("_", "-")][way][key] == pytest.approx(value, abs=1e-9), (name, way)
            compared += 1
    assert compared == 2 * (4 * 3 + 2)


class Small:
    """Thirty images of COCO's test list in five folds, with matches made up for CxC and ECCV Caption."""

    def __init__(self, folder: Path) -> None:
        real, draw = coco_test(), np.random.default_rng(0)
        step = len(real.captions) // FOLDS
        self.captions = [name for fold in range(FOLDS) for name in real.captions[fold * step :][: 5 * EACH]]
        owner = {name: real.image_of(name) for name in self.captions}
        self.images = list(dict.fromkeys(owner.values()))
        own = {image: [name for name in self.captions if owner[name] == image] for image in self.images}
        self.metrics = eccv_caption.Metrics()
        self.metrics.coco_ids = np.array(self.captions)
        matches: dict[Any, Any] = {"coco": {"i2t": own, "t2i": {name: [image] for name, image in owner.items()}}}
        for source, asked in (("cxc", 140), ("eccv", 40)):
            t2i = {name: [owner[name], *self._some(draw, self.images, 4)] for name in self.captions[:asked]}
            i2t = {name: own[name][:3] + self._some(draw, self.captions, 12) for name in self.images[: asked // 5]}
            matches[source] = {"i2t": i2t, "t2i": t2i}
        matches["eccv"]["i2t"][self.images[0]] += [999_999, 999_999]  # as in the real file, not in the test list
        matches["eccv"]["i2t"][self.images[1]] = [999_998, 999_999]
        for source, found in matches.items():
            files = [folder / f"{source}-{way}.json" for way in ("i2t", "t2i")]
            for file, way in zip(files, ("i2t", "t2i"), strict=True):
                file.write_text(json.dumps(found[way]), encoding="utf-8")
            getattr(self.metrics, f"set_{source}_gts")(*map(str, files))
        self.known = CocoTest(tuple(self.captions), matches)

    @staticmethod
    def _some(draw: np.random.Generator, names: list[int], most: int) -> list[int]:
        """Repeats are allowed: the package takes sets."""
        return [int(name) for name in draw.choice(names, draw.integers(0, most))]

    def pairs(self, *, further: int = 0) -> MatrixIds:
        """The data in an order of their own, with some images and captions more."""
        draw = np.random.default_rng(1)
        images = [str(name) for name in draw.permutation(self.images + list(range(further)))]
        words = [str(name) for name in draw.permutation(self.captions + list(range(further)))]
        owner = {str(name): str(self.known.image_of(name)) for name in self.captions}
        rows = [images.index(owner.get(name, images[0])) for name in words]
        return MatrixIds(tuple(images), tuple(words), torch.tensor(rows), split="test")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("small"))


class Blocks(MatrixScores):
    """In blocks that do not divide the galleries."""

    def blocks(self) -> Iterator[Tensor]:
        return iter(self.score.split(7))


def ours(scores: Tensor, pairs: MatrixIds, known: CocoTest) -> dict[str, dict[str, Any]]:
    results = {}
    for name, (source, folds) in PROTOCOLS.items():
        parts = coco_galleries(pairs, source=source, folds=folds, known=known)  # type: ignore[arg-type]
        results[name] = retrieval_result([part.ranks(Blocks(scores)) for part in parts])
    return results


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_small_world_has_the_packages_metrics(
    small: Small, kind: str, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if streamed:
        monkeypatch.setattr(protocols, "_MATRIX", 1)
    pairs = small.pairs()
    scores = draw_scores(kind, pairs.caption_image, images=len(pairs.image_ids))
    check_same(ours(scores, pairs, small.known), theirs(small.metrics, scores, pairs))


@pytest.mark.parametrize("kind", ["random", "tied"])
def test_further_data_are_not_in_the_galleries(small: Small, kind: str) -> None:
    pairs, fewer = small.pairs(further=7), small.pairs()
    scores = draw_scores(kind, pairs.caption_image, images=len(pairs.image_ids))
    rows = [row for row, name in enumerate(pairs.image_ids) if name in fewer.image_ids]
    cols = [col for col, name in enumerate(pairs.caption_ids) if name in fewer.caption_ids]
    ids = tuple(pairs.image_ids[row] for row in rows), tuple(pairs.caption_ids[col] for col in cols)
    expected = theirs(small.metrics, scores[rows][:, cols], MatrixIds(*ids, fewer.caption_image))
    check_same(ours(scores, pairs, small.known), expected)


def test_the_uncertainty_of_folds_is_that_of_their_queries(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each query's best answer within its fold, found by a plain loop."""
    monkeypatch.setattr(protocols, "coco_test", lambda: small.known)
    pairs = small.pairs()
    scores = draw_scores("random", pairs.caption_image, images=30)
    sigma = torch.rand(scores.shape, generator=torch.Generator().manual_seed(9))
    report = evaluate_scores(MatrixScores(scores, sigma), pairs, protocols=["coco-1k"])
    ((result,), (outcomes,)) = report.results, report.outcomes
    fold = {str(name): small.captions.index(name) // (5 * EACH) for name in small.captions}
    spread, wrong = [], []
    for col, name in enumerate(pairs.caption_ids):
        owner = int(pairs.caption_image[col])
        rivals = [row for row in range(30) if any(fold[c] == fold[name] for c in captions_of(pairs, row))]
        order = sorted(rivals, key=lambda row: (-float(scores[row, col]), row))
        spread.append(float(sigma[order[0], col]))
        wrong.append(order[0] != owner)
    assert outcomes.t2i["r1"].tolist() == [1 - miss for miss in wrong]
    hits = 1 - np.array(wrong)[np.argsort(spread)]
    risk = (1 - hits).cumsum() / np.arange(1, len(hits) + 1)
    assert result["uncertainty"]["aurc_t2i"] == pytest.approx(100 * risk.mean())
    means = [part.mean() for part in np.array_split(hits, 10)]
    assert result["uncertainty"]["bins_t2i"]["r1"] == pytest.approx(means)
    assert result["uncertainty"]["risk_t2i"]["risk"][-1] == pytest.approx(100 * np.mean(wrong))


@pytest.mark.parametrize("kind", ["random", "tied"])
@pytest.mark.parametrize("further", [0, 7])
def test_what_queries_add_is_what_is_reported(
    small: Small, kind: str, further: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every metric that is a mean over queries, in every protocol, folds too."""
    monkeypatch.setattr(protocols, "coco_test", lambda: small.known)
    pairs = small.pairs(further=further)
    scores = draw_scores(kind, pairs.caption_image, images=len(pairs.image_ids))
    report = evaluate_scores(MatrixScores(scores), pairs, protocols=["flickr", *PROTOCOLS])
    for result, outcomes in zip(report.results, report.outcomes, strict=True):
        for name in METRICS:
            means = {way: float(result[way][name]) for way in ("i2t", "t2i")}
            for way, expected in {**means, "mean": sum(means.values()) / 2}.items():
                added = contributions(outcomes, f"test/{result['protocol']}.{way}.{name}")
                assert added is not None
                total = sum(float(np.nanmean(values)) for values in added.values())
                assert total == pytest.approx(expected, abs=1e-9), (result["protocol"], way, name)


def captions_of(pairs: MatrixIds, row: int) -> list[str]:
    return [name for name, owner in zip(pairs.caption_ids, pairs.caption_image.tolist(), strict=True) if owner == row]


@pytest.fixture(scope="module")
def whole() -> MatrixIds:
    """All of COCO's test list in an order of its own."""
    known, draw = coco_test(), np.random.default_rng(2)
    images = tuple(str(name) for name in draw.permutation([known.image_of(name) for name in known.captions[::5]]))
    words, owners = tuple(str(name) for name in draw.permutation(known.captions)), coco_owners()
    rows = {name: row for row, name in enumerate(images)}
    return MatrixIds(images, words, torch.tensor([rows[owners[word]] for word in words]), split="test")


def test_the_real_galleries_have_the_published_sizes(whole: MatrixIds) -> None:
    found = protocol_galleries(list(PROTOCOLS), whole)
    asked = {name: [(int((p.i2t.relevant > 0).sum()), int((p.t2i.relevant > 0).sum())) for p in parts]
             for name, parts in found.items()}  # fmt: skip
    assert asked == {
        "coco-1k": [(1000, 5000)] * 5, "coco-5k": [(5000, 25000)], "cxc": [(5000, 24972)], "eccv": [(1261, 1332)]
    }  # fmt: skip
    assert [(part.i2t.num_queries, part.t2i.num_queries) for part in found["coco-1k"]] == [(1000, 5000)] * 5
    (eccv,) = found["eccv"]
    assert eccv.whole
    assert eccv.i2t.absent is not None
    assert int(eccv.i2t.relevant.sum()) == 22550 == len(eccv.i2t.query) + int(eccv.i2t.absent.sum())
    assert (int(eccv.i2t.relevant[eccv.i2t.relevant > 0].min()), int(eccv.i2t.relevant.max())) == (6, 48)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_real_test_list_has_the_packages_metrics(whole: MatrixIds) -> None:
    """All kinds of scores in one matrix, since the package takes its time: every fourth image has one kind."""
    scores = torch.empty(5000, len(whole.caption_image))
    for first, kind in enumerate(KINDS[:4]):
        scores[first::4] = draw_scores(kind, whole.caption_image, images=5000)[first::4]
    report = evaluate_scores(MatrixScores(scores), whole, protocols=list(PROTOCOLS))
    results = {result["protocol"]: result for result in report.results}
    recalls = [results["coco-1k"][way][key] for way in ("i2t", "t2i") for key in ("r1", "r5", "r10")]
    assert results["coco-1k"]["rsum"] == pytest.approx(sum(recalls))
    check_same(results, theirs(eccv_caption.Metrics(), scores, whole))


def test_data_without_some_of_the_test_list(small: Small) -> None:
    pairs = small.pairs()
    gone = str(small.captions[7])
    kept = [row for row, name in enumerate(pairs.caption_ids) if name != gone]
    fewer = MatrixIds(pairs.image_ids, tuple(pairs.caption_ids[row] for row in kept), pairs.caption_image[kept])
    with pytest.raises(DataError, match=f"1 of COCO's 150 test captions, first '{gone}'"):
        coco_galleries(fewer, source="coco", known=small.known)
    none = MatrixIds(("a",), ("a#0",), torch.tensor([0]))
    with pytest.raises(DataError, match=f"30 of COCO's 30 test images, first '{small.images[0]}'.*flickr"):
        coco_galleries(none, source="eccv", known=small.known)


def test_a_part_counts_the_matches_inside_it(small: Small) -> None:
    """Some of the images under names of their own, with a caption from elsewhere; against a plain loop."""
    pairs, matches = small.pairs(further=3), small.known.matches
    kept = [col for col, row in enumerate(pairs.caption_image.tolist()) if row % 3]
    some = replace(
        pairs,
        image_ids=tuple(f"photo-{name}" for name in pairs.image_ids),
        caption_ids=tuple(pairs.caption_ids[col] for col in kept),
        caption_image=pairs.caption_image[kept],
    )
    scores = draw_scores("random", some.caption_image, images=len(some.image_ids))
    listed = [(int(name), col) for col, name in enumerate(some.caption_ids) if int(name) in set(small.captions)]
    images = {small.known.image_of(name): int(some.caption_image[col]) for name, col in listed}
    for source in ("cxc", "eccv"):
        (part,) = part_gallery(some, source=source, known=small.known)  # type: ignore[arg-type]
        assert (len(part.images), len(part.captions)) == (len(images), len(listed))
        assert sorted(images.values()) == part.images.tolist()
        result = retrieval_result([part.ranks(Blocks(scores))])["t2i"]
        hits = []
        for name, col in listed:
            inside = [images[image] for image in matches[source]["t2i"].get(name, ()) if image in images]  # type: ignore[index]
            best = max(images.values(), key=lambda row: float(scores[row, col]))
            hits += [best in inside] if inside else []
        assert (result["r1"], result["queries"]) == (pytest.approx(100 * np.mean(hits)), len(hits))
    (whole,) = part_gallery(small.pairs(), source="eccv", known=small.known)
    assert whole.whole
    assert int(whole.i2t.relevant[0]) == int(whole.i2t.count[0]), "a match that is nowhere does not count"


def test_parts_that_are_refused(small: Small) -> None:
    none = MatrixIds(("a",), ("a#0",), torch.tensor([0]))
    with pytest.raises(DataError, match=r"none of COCO's test captions.*'a#0'"):
        part_gallery(none, source="eccv", known=small.known)
    torn = MatrixIds(("a", "b"), tuple(map(str, small.captions[:2])), torch.tensor([0, 1]))
    with pytest.raises(DataError, match="another image"):
        part_gallery(torn, source="cxc", known=small.known)


@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "data/coco").is_dir(), reason="needs ../shared/data/coco")
def test_the_part_of_coco_has_these_queries() -> None:
    pairs = load_pairs(f"coco:{SHARED}/data/coco", split="test")
    asked = {}
    for name, (part,) in protocol_galleries(["cxc-part", "eccv-part"], pairs).items():
        assert part.whole
        asked[name] = [int((side.relevant > 0).sum()) for side in (part.i2t, part.t2i)]
    assert asked == {"cxc-part": [512, 2557], "eccv-part": [123, 125]}


def test_protocols_that_fit(whole: MatrixIds) -> None:
    none = MatrixIds(("a",), ("a#0",), torch.tensor([0]))
    assert fitting_protocols(["eccv", "gone", "coco-1k"], whole) == ("eccv", "coco-1k")
    assert fitting_protocols(["eccv"], none) == ("flickr",)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "eccv_caption", None)
    with pytest.raises(MissingExtra, match=r"pip install 'vacsr\[eval\]'"):
        protocols.coco_test.__wrapped__()
