"""Example queries against plain sorting of the whole score matrix, what is said of each pair, and grade intervals."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vacsr.compare.examples import (
    SAMPLE,
    Material,
    choose_queries,
    examples_of,
    interval_edges,
    judged_verdicts,
    load_material,
    sample_pairs,
)
from vacsr.compare.results import GalleryConfig
from vacsr.data import PairSet, PhotoSet, load_pairs
from vacsr.data.formats import parse_spec
from vacsr.data.photos import ArrayPhotos
from vacsr.data.scenes import load_scenes, scene_grades
from vacsr.errors import UsageError
from vacsr.evaluate.agreement import Judgments
from vacsr.pages.curves import RunRecord
from vacsr.pages.examples import Examples, Interval

GALLERY = GalleryConfig(setting="clean", rows=("vacsr", "infonce"))
PAIRS = load_pairs("synthetic:images=8,held_out=6", split="test")


def loaded(runs: list[RunRecord], gallery: GalleryConfig = GALLERY) -> Material:
    material = load_material(runs, gallery, device="cpu")
    assert material is not None
    return material


def judged(pairs: PairSet | PhotoSet, kind: str, grades: dict[tuple[int, int], float]) -> Judgments:
    places = list(grades)
    values = np.array([grades[place] for place in places])
    return Judgments(
        kind,  # type: ignore[arg-type]
        tuple(pairs.image_ids[row] for row, _ in places),
        tuple(pairs.caption_ids[col] for _, col in places),
        np.repeat(values[:, None], 3 if kind == "expert" else 1, axis=1),
        np.array([int(pairs.caption_image[col]) == row for row, col in places]),
    )


def test_answers_are_the_best_by_score(feature_runs: list[RunRecord]) -> None:
    material = loaded(feature_runs)
    pairs, owners = material.pairs, material.pairs.caption_image.tolist()
    assert pairs.captions is not None
    shown = examples_of(material, "clean", captions=4, images=2)
    assert [query.picture is None for query in shown.queries] == [True] * 4 + [False] * 2
    for query in shown.queries:
        assert [row.row for row in query.rows] == ["vacsr", "infonce"]
        for row in query.rows:
            score = material.scores[row.row].score
            if query.picture is None:
                col = pairs.caption_ids.index(query.query_id)
                line, right = score[:, col].tolist(), [owners[col]]
                names = [pairs.image_ids[at] for at in range(len(line))]
                answered = [answer.picture.image_id for answer in row.answers if answer.picture is not None]
            else:
                image = pairs.image_ids.index(query.query_id)
                line, right = score[image].tolist(), [at for at, owner in enumerate(owners) if owner == image]
                names = list(pairs.captions)
                answered = [answer.text for answer in row.answers]
            order = sorted(range(len(line)), key=lambda at: (-line[at], at))
            assert answered == [names[at] for at in order[:5]]
            assert row.rank == min(order.index(at) for at in right) + 1
            assert [answer.kind == "official" for answer in row.answers] == [at in right for at in order[:5]]
            assert [answer.score for answer in row.answers] == pytest.approx([line[at] for at in order[:5]], abs=1e-5)
            if row.row == "infonce":
                assert {(answer.uncertainty, answer.grade) for answer in row.answers} == {(None, None)}
            else:
                assert all(answer.uncertainty is not None and 0 <= answer.grade <= 1 for answer in row.answers)


def test_without_judgments_queries_are_spread_evenly(feature_runs: list[RunRecord]) -> None:
    material = loaded(feature_runs)
    chosen = choose_queries(material.pairs, material.verdicts, captions=4, images=2)
    owners = [int(material.pairs.caption_image[index]) for direction, index in chosen if direction == "t2i"]
    assert owners == [0, 6, 12, 18]  # one caption per image, evenly over the split


def test_judged_queries_come_from_the_most_matches_down(feature_runs: list[RunRecord]) -> None:
    material = loaded(feature_runs)
    other = [col for col in range(len(material.pairs.caption_ids)) if int(material.pairs.caption_image[col]) > 3]
    grades = {(0, other[0]): 3.0, (1, other[0]): 4.0, (2, other[0]): 3.3, (0, other[7]): 3.0, (1, other[7]): 1.0}
    verdicts = judged_verdicts(material.pairs, [judged(material.pairs, "expert", grades)])
    chosen = choose_queries(material.pairs, verdicts, captions=2, images=1)
    assert chosen == [("t2i", other[0]), ("t2i", other[7]), ("i2t", 0)]


def test_labels_come_before_experts_and_experts_before_the_crowd() -> None:
    own, other = (int((PAIRS.caption_image == row).nonzero()[0]) for row in (0, 1))
    crowd = judged(PAIRS, "crowd", {(0, own): 0.0, (0, other): 1.0, (2, other): 0.4, (3, other): 0.1})
    expert = judged(PAIRS, "expert", {(0, other): 1.3, (4, other): 2.5})
    for order in ([crowd, expert], [expert, crowd]):
        verdicts = judged_verdicts(PAIRS, order)
        assert [verdicts.judge(row, other) for row in (0, 2, 3, 4, 5)] == [
            ("wrong", "experts: 1.3 of 4"),
            ("partly", "40% say yes"),
            ("wrong", "10% say yes"),
            ("partly", "experts: 2.5 of 4"),
            ("unknown", "no label"),
        ]
        assert verdicts.judge(0, own)[0] == "official"
        assert verdicts.unlabelled.tolist() == []
    assert judged_verdicts(PAIRS, [crowd]).unlabelled.tolist() == [[0, other]]
    assert (judged_verdicts(PAIRS, [crowd]).known, judged_verdicts(PAIRS, []).known) == ("judged", "labels")


def test_scenes_are_judged_by_the_truth(scene_run: RunRecord) -> None:
    material = loaded([scene_run])
    world = load_scenes(parse_spec("scenes:images=24,held_out=12,per_image=2,size=32,split=test"))
    grades = scene_grades(world)
    shown = examples_of(material, "clean")
    for query in shown.queries:
        if query.picture is not None:
            continue
        col = world.pairs.caption_ids.index(query.query_id)
        assert query.unlabelled == int((grades[:, col] > 1 - 1e-6).sum()) - 1
        for answer in query.rows[0].answers:
            assert answer.picture is not None
            assert answer.picture.uri.startswith("data:image/")
            share = float(grades[world.pairs.image_ids.index(answer.picture.image_id), col])
            if answer.kind in ("official", "unlabelled"):
                assert share == pytest.approx(1.0)
            else:
                assert answer.kind == ("partly" if share >= 0.25 else "wrong")
                assert answer.badge == f"{share:.0%} true"


def test_runs_without_models_give_no_examples(feature_runs: list[RunRecord], tmp_path: Path) -> None:
    assert load_material([run._replace(folder=None) for run in feature_runs], GALLERY) is None
    assert load_material([run._replace(folder=tmp_path) for run in feature_runs], GALLERY) is None
    assert list(loaded([feature_runs[0]]).scores) == ["vacsr"]


def test_the_first_seed_is_asked(feature_runs: list[RunRecord]) -> None:
    vacsr, infonce = feature_runs
    scores = loaded([infonce._replace(row="vacsr", seed=1), vacsr]).scores["vacsr"]
    assert scores.scorer.model.method.config.name == "vacsr"


def test_runs_of_other_data_are_not_put_beside_each_other(feature_runs: list[RunRecord], scene_run: RunRecord) -> None:
    with pytest.raises(UsageError, match="same data"):
        load_material([feature_runs[0], scene_run._replace(row="infonce")], GALLERY, device="cpu")
    with pytest.raises(UsageError, match="expected photos"):
        load_material(feature_runs, GALLERY.model_copy(update={"photos": "synthetic:"}), device="cpu")


def test_photos_are_shown_where_they_are_known(feature_runs: list[RunRecord]) -> None:
    material = loaded(feature_runs)
    ids, words = material.pairs.image_ids, material.pairs.captions
    assert words is not None
    pixels = np.full((2, 20, 30, 3), 90, dtype=np.uint8)
    photos = PhotoSet(ArrayPhotos(pixels, ids[1::-1]), ids[1::-1], ("a", "b"), ("a", "b"), torch.tensor([0, 1]))
    shown = examples_of(replace(material, photos=photos), "clean")
    pictures = [a.picture for q in shown.queries for row in q.rows for a in row.answers if a.picture is not None]
    assert {bool(picture.uri) for picture in pictures if picture.image_id in ids[:2]} <= {True}
    assert {bool(picture.uri) for picture in pictures if picture.image_id not in ids[:2]} == {False}
    first = {ids[row]: words[int((material.pairs.caption_image == row).nonzero()[0])] for row in range(len(ids))}
    assert all(picture.alt == first[picture.image_id] for picture in pictures)


def test_the_sample_has_every_labelled_pair_and_no_pair_twice() -> None:
    rows, cols = sample_pairs(PAIRS, 50, generator=torch.Generator().manual_seed(0))
    places = list(zip(rows.tolist(), cols.tolist(), strict=True))
    assert len(set(places)) == len(places) <= len(PAIRS.caption_ids) + 50
    assert {(row, col) for col, row in enumerate(PAIRS.caption_image.tolist())} <= set(places)


GRADES = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40)


@settings(deadline=None, max_examples=200)
@given(GRADES)
@example([0.1])
@example([0.5, 0.5 + 2**-24])
@example([0.0, 1e-45])
def test_the_ends_of_intervals_ascend_and_read_differently(grades: list[float]) -> None:
    values = torch.tensor(grades)
    ends = interval_edges(values).tolist()
    assert (ends[0], ends[-1]) == (float(values.min()), float(values.max()))
    if ends[0] == ends[-1]:
        assert len(ends) == 2
        return
    assert len(ends) == 9
    intervals = tuple(Interval(low, high, 1, None) for low, high in pairwise(ends))
    texts = [Examples("", "", (), "labels", (), intervals, 0).grade_text(end) for end in ends]
    assert len(set(texts)) == 9
    assert [float(text) for text in texts] == sorted(map(float, texts))


class Scored:
    """A model that gives each pair the grade it is told to."""

    def __init__(self, every: torch.Tensor) -> None:
        self.every = every

    def score_of(self, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
        return self.every[rows, cols]

    def at(self, rows: torch.Tensor, cols: torch.Tensor) -> Any:
        return SimpleNamespace(score=self.every[rows, cols], grade=self.every[rows, cols], uncertainty=None)


@settings(deadline=None, max_examples=30)
@given(GRADES)
def test_an_example_lies_in_its_interval(grades: list[float]) -> None:
    images, captions = len(PAIRS.image_ids), len(PAIRS.caption_ids)
    every = torch.tensor(grades).repeat(images * captions)[: images * captions].reshape(images, captions)
    scores: Any = {"mine": Scored(every)}
    material = Material(PAIRS, judged_verdicts(PAIRS, []), None, scores)
    shown = examples_of(material, "clean", captions=1, images=1)
    assert shown == examples_of(material, "clean", captions=1, images=1)
    assert shown.sample == SAMPLE
    assert captions <= sum(interval.pairs for interval in shown.intervals) <= every.numel()
    assert shown.intervals[0].example is not None
    assert shown.intervals[-1].example is not None
    for interval in shown.intervals:
        assert (interval.example is None) == (interval.pairs == 0)
        if interval.example is not None:
            assert interval.example.picture is not None
            assert interval.low <= interval.example.grade <= interval.high
            row = PAIRS.image_ids.index(interval.example.picture.image_id)
            assert interval.example.grade in every[row].tolist()
