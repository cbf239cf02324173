"""Queries and their best answers by trained runs. Which queries is decided by labels and judgments, not by scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.config import Recipe
from vacsr.config.io import read_recipe
from vacsr.data import PairSet, PhotoSet, load_pairs
from vacsr.errors import UsageError
from vacsr.evaluate.exact import scene_truth
from vacsr.evaluate.judgments import read_judgments
from vacsr.report.curves import Direction
from vacsr.report.records import RunRecord, runs_of
from vacsr.report.verdicts import ExactVerdicts, JudgedVerdicts, Verdict, Verdicts
from vacsr.scoring import PairScorer, PairScores
from vacsr.train.data import read_split

_EXACT = (0, 1, 2, 4, 7, 12)  # unlabelled matches of the captions asked for, where the truth is known
_FEW = 5


class Gallery(NamedTuple):
    """What to show of some runs; the first row is also shown by intervals of its grade."""

    setting: str
    rows: Sequence[str]
    """Put beside each other, in this order."""
    photos: str = ""
    """SPEC of the photos where runs read cached features, such as `flickr8k:DIR`; without it ids stand for photos."""
    split: str = "test"
    captions: int = 5
    """Captions asked for their images."""
    images: int = 3
    """Images asked for their captions."""


class Answer(NamedTuple):
    """One retrieved image or caption."""

    place: int
    """Row of the image, or column of the caption."""
    verdict: Verdict
    grade: float
    uncertainty: float | None


class Query(NamedTuple):
    """A caption or an image, and what each row answers."""

    direction: Direction
    place: int
    """Column of the caption, or row of the image."""
    unlabelled: int
    """Matches that are known and carry no label."""
    answers: dict[str, tuple[Answer, ...]]
    official: dict[str, int]
    """By row: the rank of the labelled match, of several the best."""


class Material(NamedTuple):
    """Loaded runs and what they are asked about."""

    pairs: PairSet | PhotoSet
    verdicts: Verdicts
    photos: PhotoSet | None
    scores: Mapping[str, PairScores]


def load_material(runs: Sequence[RunRecord], plan: Gallery, *, device: str = "auto") -> Material | None:
    """The first seed of every row that still has its model; None where none has."""
    found: dict[str, Path] = {}
    for row in plan.rows:
        kept = [run.folder for run in runs_of(runs, row=row, setting=plan.setting) if _has_model(run.folder)]
        if kept and kept[0] is not None:
            found[row] = kept[0]
    if not found:
        return None
    recipes = {row: read_recipe(folder / "config.yaml") for row, folder in found.items()}
    pairs = {row: read_split(recipe.data, plan.split) for row, recipe in recipes.items()}
    first = next(iter(pairs.values()))
    for row, others in pairs.items():
        if (others.image_ids, others.caption_ids) != (first.image_ids, first.caption_ids):
            message = f"'{row}' and '{next(iter(pairs))}' were run on other images or captions"
            raise UsageError(f"{message} — show rows of the same data beside each other")
    scores = {
        row: PairScorer.from_pretrained(folder, device=device).score_set(pairs[row]) for row, folder in found.items()
    }
    verdicts = _verdicts(next(iter(recipes.values())), first)
    return Material(first, verdicts, _photos(pairs.values(), plan), scores)


def _has_model(folder: Path | None) -> bool:
    return folder is not None and (folder / "model" / "config.json").is_file()


def _photos(sets: Iterable[PairSet | PhotoSet], plan: Gallery) -> PhotoSet | None:
    """What a run itself reads, or the photos that were named."""
    own = next((pairs for pairs in sets if isinstance(pairs, PhotoSet)), None)
    if own is not None or not plan.photos:
        return own
    named = load_pairs(plan.photos, split=plan.split)
    if isinstance(named, PhotoSet):
        return named
    raise UsageError(f"{plan.photos} are features, expected photos — give e.g. flickr8k:DIR")


def _verdicts(recipe: Recipe, pairs: PairSet | PhotoSet) -> Verdicts:
    truth = scene_truth(recipe.data.pairs, pairs)
    if truth is not None:
        return ExactVerdicts(truth)
    return JudgedVerdicts(pairs, [read_judgments(Path(path).expanduser()) for path in recipe.evaluate.judgments])


def choose(counts: Sequence[int], targets: Sequence[int], *, groups: Sequence[int]) -> list[int]:
    """For each target the first place whose count is nearest to it, one place of a group.

    >>> choose([0, 0, 2, 1, 3], [3, 3, 0], groups=[0, 1, 2, 2, 3])
    [4, 2, 0]
    """
    chosen: list[int] = []
    taken: set[int] = set()
    for target in targets:
        left = [place for place in range(len(counts)) if groups[place] not in taken]
        if left:
            chosen.append(min(left, key=lambda place: (abs(counts[place] - target), place)))
            taken.add(groups[chosen[-1]])
    return chosen


def choose_queries(material: Material, plan: Gallery) -> list[tuple[Direction, int]]:
    """Captions, then images, by how many unlabelled matches are known; where none is, evenly over the split."""
    pairs, known = material.pairs, material.verdicts.unlabelled()
    images, captions = len(pairs.image_ids), len(pairs.caption_ids)
    by_image = torch.bincount(known[:, 0], minlength=images).tolist()
    by_caption = torch.bincount(known[:, 1], minlength=captions).tolist()
    rows, own = list(range(images)), pairs.caption_image.tolist()
    if isinstance(material.verdicts, ExactVerdicts):
        cols = choose(by_caption, _EXACT[: plan.captions], groups=own)
        shown = _evenly(rows, plan.images)
    elif len(known):
        cols = choose(by_caption, _falling(max(by_caption), plan.captions), groups=own)
        shown = choose(by_image, _falling(max(by_image), plan.images), groups=rows)
    else:
        first = [own.index(row) for row in dict.fromkeys(own)]
        cols, shown = _evenly(first, plan.captions), _evenly(rows, plan.images)
    return [*(("t2i", col) for col in cols), *(("i2t", row) for row in shown)]


def _falling(most: int, number: int) -> list[int]:
    """From the most unlabelled matches down to one, in even steps.

    >>> _falling(13, 4)
    [13, 9, 5, 1]
    """
    return torch.linspace(most, 1, number).round().long().tolist()


def _evenly(places: Sequence[int], number: int) -> list[int]:
    number = min(number, len(places))
    return [places[at * len(places) // number] for at in range(number)]


def ask(material: Material, plan: Gallery) -> list[Query]:
    """Put every chosen query to every row."""
    known = material.verdicts.unlabelled()
    found = []
    for direction, place in choose_queries(material, plan):
        side = 1 if direction == "t2i" else 0
        query = Query(direction, place, int((known[:, side] == place).sum()), {}, {})
        for row, scores in material.scores.items():
            _answer(query, row, scores, material)
        found.append(query)
    return found


def _answer(query: Query, row: str, scores: PairScores, material: Material) -> None:
    """The best answers of one row, and where the labelled match came."""
    rows, cols = _every(query, material.pairs)
    score = scores.scorer.score_at(scores, rows=rows, cols=cols).score.cpu()
    order = score.argsort(descending=True, stable=True)
    labelled = material.pairs.caption_image[cols[order]] == rows[order]
    query.official[row] = int(labelled.int().argmax()) + 1
    rows, cols = rows[order][:_FEW], cols[order][:_FEW]
    best = scores.scorer.score_at(scores, rows=rows, cols=cols)
    sigmas = [None] * len(rows) if best.uncertainty is None else best.uncertainty.tolist()
    places = zip(rows.tolist(), cols.tolist(), best.grade.tolist(), sigmas, strict=True)
    query.answers[row] = tuple(
        Answer(i if query.direction == "t2i" else j, material.verdicts.of(i, j), grade, sigma)
        for i, j, grade, sigma in places
    )


def _every(query: Query, pairs: PairSet | PhotoSet) -> tuple[Tensor, Tensor]:
    """Rows and columns of all pairs that a query has. [P], [P]"""
    if query.direction == "t2i":
        rows = torch.arange(len(pairs.image_ids))
        return rows, torch.full_like(rows, query.place)
    cols = torch.arange(len(pairs.caption_ids))
    return torch.full_like(cols, query.place), cols
