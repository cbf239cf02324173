"""Queries and answers against plain sorting of the whole score matrix, and what is said of each pair."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from vacsr.data import PairSet, PhotoSet, load_pairs
from vacsr.data.photos import ArrayPhotos
from vacsr.data.scenes import load_scenes, scene_grades
from vacsr.data.spec import parse_spec
from vacsr.errors import UsageError
from vacsr.evaluate.judgments import Judgments
from vacsr.report.gallery import Gallery, Material, ask, choose, choose_queries, load_material
from vacsr.report.intervals import SAMPLE, pick_intervals, sample_pairs
from vacsr.report.pictures import Pictures
from vacsr.report.records import RunRecord
from vacsr.report.verdicts import JudgedVerdicts

PLAN = Gallery("clean", ("vacsr", "infonce"), captions=4, images=2)


def loaded(runs: list[RunRecord], plan: Gallery = PLAN) -> Material:
    material = load_material(runs, plan, device="cpu")
    assert material is not None
    return material


def judged(pairs: PairSet | PhotoSet, kind: str, grades: dict[tuple[int, int], float]) -> Judgments:
    places = list(grades)
    values = np.array([grades[place] for place in places])
    return Judgments(
        kind,  # type: ignore[arg-type]
        tuple(pairs.image_ids[row] for row, _ in places),
        tuple(pairs.caption_ids[col] for _, col in places),
        values,
        np.repeat(values[:, None], 3, axis=1) if kind == "expert" else None,
        np.array([int(pairs.caption_image[col]) == row for row, col in places]),
    )


def test_answers_are_the_best_by_score(feature_runs: list[RunRecord]) -> None:
    material = loaded(feature_runs)
    queries = ask(material, PLAN)
    assert Counter(query.direction for query in queries) == {"t2i": 4, "i2t": 2}
    owner = material.pairs.caption_image.tolist()
    for query in queries:
        assert list(query.answers) == ["vacsr", "infonce"]
        for row, answers in query.answers.items():
            score = material.scores[row].score
            line = (score[:, query.place] if query.direction == "t2i" else score[query.place]).tolist()
            order = sorted(range(len(line)), key=lambda at: (-line[at], at))
            assert [answer.place for answer in answers] == order[:5]
            right = [
                at
                for at in order
                if (owner[query.place] == at if query.direction == "t2i" else owner[at] == query.place)
            ]
            assert query.official[row] == order.index(right[0]) + 1
            assert all((answer.verdict.kind == "official") == (answer.place in right) for answer in answers)
            assert all((answer.uncertainty is None) == (row == "infonce") for answer in answers)
            assert all(0 <= answer.grade <= 1 for answer in answers)


def test_a_dot_lies_between_the_ends_of_its_own_method(feature_runs: list[RunRecord]) -> None:
    """Two methods whose σ are of other sizes: each fills its own range, over all queries of the page."""
    material = loaded(feature_runs)
    sizes = {"vacsr": (0.6, 0.7), "infonce": (0.02, 0.05)}
    made, given = torch.Generator().manual_seed(0), []
    queries = []
    for query in ask(material, PLAN):
        answers = {}
        for row, (low, high) in sizes.items():
            sigmas = (low + (high - low) * torch.rand(len(query.answers[row]), generator=made)).tolist()
            answers[row] = tuple(a._replace(uncertainty=s) for a, s in zip(query.answers[row], sigmas, strict=True))
            given += [(row, sigma) for sigma in sigmas]
        queries.append(query._replace(answers=answers))
    pattern = (
        r'σ</span><span class="track"[^>]*><span style="width:([\d.]+)%"></span></span><span class="value">([\d.]+)<'
    )
    shown = re.findall(pattern, Pictures(material).queries(queries))
    assert [value for _, value in shown] == [f"{sigma:.3f}" for _, sigma in given]
    for row in sizes:
        own = [sigma for name, sigma in given if name == row]
        places = [float(width) for (width, _), (name, _) in zip(shown, given, strict=True) if name == row]
        assert places == pytest.approx([100 * (s - min(own)) / (max(own) - min(own)) for s in own], abs=0.06)
        assert (min(places), max(places)) == (0.0, 100.0)


def test_queries_do_not_depend_on_scores(feature_runs: list[RunRecord]) -> None:
    material = loaded(feature_runs)
    chosen = choose_queries(material, PLAN)
    owners = [int(material.pairs.caption_image[place]) for direction, place in chosen if direction == "t2i"]
    assert len(set(owners)) == 4  # one caption of an image, evenly over the split
    assert owners == [0, 6, 12, 18]
    assert choose_queries(material._replace(scores={}), PLAN) == chosen


def test_judged_queries_come_from_the_most_matches_down(feature_runs: list[RunRecord]) -> None:
    material = loaded(feature_runs)
    other = [col for col in range(len(material.pairs.caption_ids)) if int(material.pairs.caption_image[col]) > 3]
    grades = {(0, other[0]): 3.0, (1, other[0]): 4.0, (2, other[0]): 3.3, (0, other[7]): 3.0, (1, other[7]): 1.0}
    verdicts = JudgedVerdicts(material.pairs, [judged(material.pairs, "expert", grades)])
    chosen = choose_queries(material._replace(verdicts=verdicts), PLAN._replace(captions=2, images=1))
    assert chosen == [("t2i", other[0]), ("t2i", other[7]), ("i2t", 0)]


def test_experts_are_heard_before_the_crowd_and_labels_before_both(feature_runs: list[RunRecord]) -> None:
    pairs = loaded(feature_runs).pairs
    own = int((pairs.caption_image == 0).nonzero()[0])
    other = int((pairs.caption_image == 1).nonzero()[0])
    crowd = judged(pairs, "crowd", {(0, own): 0.0, (0, other): 1.0, (2, other): 0.4, (3, other): 0.1})
    expert = judged(pairs, "expert", {(0, other): 1.3, (4, other): 2.5})
    for order in ([crowd, expert], [expert, crowd]):
        verdicts = JudgedVerdicts(pairs, order)
        found = [verdicts.of(row, other)[:2] for row in (0, 2, 3, 4, 5)]
        assert found == [
            ("wrong", "experts: 1.3 of 4"),
            ("partly", "40% say yes"),
            ("wrong", "10% say yes"),
            ("partly", "experts: 2.5 of 4"),
            ("unknown", "no label"),
        ]
        assert verdicts.of(0, own).kind == "official"
        assert verdicts.unlabelled().tolist() == []
    assert JudgedVerdicts(pairs, [crowd]).unlabelled().tolist() == [[0, other]]
    assert {meaning.kind for meaning in JudgedVerdicts(pairs, []).meanings} == {"official", "unknown"}


def test_scenes_are_judged_by_the_truth(scene_run: RunRecord) -> None:
    plan = PLAN._replace(rows=("vacsr",))
    material = loaded([scene_run], plan)
    world = load_scenes(parse_spec("scenes:images=24,held_out=12,per_image=2,size=32,split=test"))
    grades = scene_grades(world)
    kinds = {"official": 1.0, "unlabelled": 1.0}
    for query in ask(material, plan):
        for answer in query.answers["vacsr"]:
            place = (answer.place, query.place) if query.direction == "t2i" else (query.place, answer.place)
            share = float(grades[place])
            kind = answer.verdict.kind
            if kind in kinds:
                assert share == pytest.approx(1.0)
            else:
                assert kind == ("partly" if share >= 0.25 else "wrong")
                assert answer.verdict.words == f"{share:.0%} true"
    assert isinstance(material.photos, PhotoSet)
    assert "data:image/" in Pictures(material).queries(ask(material, plan))


def test_runs_without_models_give_no_material(feature_runs: list[RunRecord], tmp_path: Path) -> None:
    assert load_material([run._replace(folder=None) for run in feature_runs], PLAN) is None
    assert load_material([run._replace(folder=tmp_path) for run in feature_runs], PLAN) is None
    assert list(loaded([feature_runs[0]]).scores) == ["vacsr"]


def test_runs_of_other_data_are_not_put_beside_each_other(feature_runs: list[RunRecord], scene_run: RunRecord) -> None:
    runs = [feature_runs[0], scene_run._replace(row="infonce")]
    with pytest.raises(UsageError, match=r"'infonce' and 'vacsr'.*same data"):
        load_material(runs, PLAN, device="cpu")


def test_photos_must_be_photos(feature_runs: list[RunRecord]) -> None:
    with pytest.raises(UsageError, match="expected photos"):
        load_material(feature_runs, PLAN._replace(photos="synthetic:"), device="cpu")


def test_choose_takes_one_of_a_group_and_stops_when_all_are_taken() -> None:
    assert choose([5, 5, 1], [5, 5, 5], groups=[0, 0, 1]) == [0, 2]


def test_pairs_of_an_interval_have_grades_in_it(feature_runs: list[RunRecord]) -> None:
    material = loaded(feature_runs)
    found = pick_intervals(material, "vacsr", generator=torch.Generator().manual_seed(1))
    again = pick_intervals(material, "vacsr", generator=torch.Generator().manual_seed(1))
    assert found == again
    every = material.scores["vacsr"].scorer.model.method.grade(material.scores["vacsr"].score)
    rows, cols = sample_pairs(material.pairs, SAMPLE, generator=torch.Generator().manual_seed(1))
    graded = every[rows, cols]
    ends = (found[0].low, found[-1].high)
    assert ends == pytest.approx((float(graded.min()), float(graded.max())), abs=1e-5)
    assert sum(interval.pairs for interval in found) == len(rows)
    assert len(found) == 8
    assert found[0].chosen is not None
    assert found[-1].chosen is not None
    for interval in found:
        if interval.chosen is not None:
            assert interval.low <= interval.chosen.grade <= interval.high
            assert interval.chosen.grade == pytest.approx(
                float(every[interval.chosen.row, interval.chosen.col]), abs=1e-5
            )
        else:
            assert interval.pairs == 0


def test_the_sample_holds_every_labelled_pair_and_no_pair_twice() -> None:
    pairs = load_pairs("synthetic:images=8,held_out=6", split="test")
    rows, cols = sample_pairs(pairs, 50, generator=torch.Generator().manual_seed(0))
    places = list(zip(rows.tolist(), cols.tolist(), strict=True))
    assert len(set(places)) == len(places)
    assert {(row, col) for col, row in enumerate(pairs.caption_image.tolist())} <= set(places)
    assert len(places) <= len(pairs.caption_ids) + 50


def test_photos_stand_where_they_are_known_and_ids_elsewhere(feature_runs: list[RunRecord]) -> None:
    material = loaded(feature_runs)
    ids, words = material.pairs.image_ids, material.pairs.captions
    assert words is not None
    pixels = np.full((2, 20, 30, 3), 90, dtype=np.uint8)
    photos = PhotoSet(ArrayPhotos(pixels, ids[1::-1]), ids[1::-1], ("a", "b"), ("a", "b"), torch.tensor([0, 1]))
    drawn = Pictures(material._replace(photos=photos))
    own = words[int((material.pairs.caption_image == 1).nonzero()[0])]
    assert f'alt="{own}"' in drawn.photo(1)
    assert "data:image/" in drawn.photo(0)
    assert f"{words[int((material.pairs.caption_image == 2).nonzero()[0])]} <small>{ids[2]}</small>" in drawn.photo(2)
    assert drawn.photo(0) is drawn.photo(0)
