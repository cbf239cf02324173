"""Example queries for a page: trained runs answer queries that labels and judgments choose, never scores."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.compare.results import GalleryConfig
from vacsr.config.io import read_recipe
from vacsr.data import PairSet, PhotoSet, load_pairs, read_split
from vacsr.data.scenes import EASY_BELOW
from vacsr.errors import UsageError
from vacsr.evaluate.agreement import MATCH, Judgments
from vacsr.evaluate.report import config_judgments
from vacsr.evaluate.truth import Truth, scene_truth
from vacsr.pages.curves import RunRecord
from vacsr.pages.examples import Answer, Examples, Interval, Known, Picture, Query, RowAnswers, photo_uri
from vacsr.scoring import PairScorer, PairScores
from vacsr.scoring.topk import Direction

Pairs = PairSet | PhotoSet
INTERVALS = 8
SAMPLE = 40_000  # unlabelled pairs among which intervals choose, as many as in the paper; all labelled pairs are added
SIDE = 176  # of a picture in the file, in pixels
_ANSWERS = 5
_EXACT = (0, 1, 2, 4, 7, 12)  # unlabelled matches of the captions asked, where the truth is known
_PARTLY = {"expert": 2.0, "crowd": 0.25}  # grades from which a judged pair is partly right


class Verdicts(NamedTuple):
    """What is known of each pair."""

    known: Known
    judge: Callable[[int, int], tuple[str, str]]  # frame and badge of image row and caption column
    unlabelled: Tensor  # known matches without a label, by image and caption. [P, 2] int64


@dataclass(frozen=True)
class Material:
    """Loaded runs and the data they are asked about, as a page shows them."""

    pairs: Pairs
    verdicts: Verdicts
    photos: PhotoSet | None
    scores: Mapping[str, PairScores]
    _pictures: dict[int, Picture] = field(default_factory=dict)  # every photo is encoded once

    def picture(self, row: int) -> Picture:
        if row not in self._pictures:
            image_id, uri = self.pairs.image_ids[row], ""
            if self.photos is not None and image_id in self.photos.image_ids:
                photo = self.photos.photos.open(self.photos.image_ids.index(image_id), side=SIDE)
                uri = photo_uri(photo, side=SIDE)
            cols = (self.pairs.caption_image == row).nonzero().flatten().tolist()
            self._pictures[row] = Picture(image_id, self.pairs.words(cols[0]) if cols else image_id, uri)
        return self._pictures[row]

    def answers(self, scores: PairScores, rows: Tensor, cols: Tensor, *, pictures: bool) -> list[Answer]:
        """Pairs with their verdict, grade and σ. [P], [P]"""
        scored = scores.at(rows, cols)
        sigmas = [None] * len(rows) if scored.uncertainty is None else scored.uncertainty.tolist()
        grades = [None] * len(rows) if scored.grade is None else scored.grade.tolist()
        answers = []
        for row, col, *known in zip(rows.tolist(), cols.tolist(), grades, sigmas, scored.score.tolist(), strict=True):
            picture = self.picture(row) if pictures else None
            answers.append(Answer(picture, self.pairs.words(col), *self.verdicts.judge(row, col), *known))
        return answers

    def query(self, direction: Direction, index: int) -> Query:
        """A query with the best answers of every row."""
        rows = torch.arange(len(self.pairs.image_ids)) if direction == "t2i" else torch.tensor([index])
        cols = torch.arange(len(self.pairs.caption_ids)) if direction == "i2t" else torch.tensor([index])
        rows, cols = (grid.flatten() for grid in torch.meshgrid(rows, cols, indexing="ij"))
        answered = []
        for name, scores in self.scores.items():
            score = scores.score_of(rows, cols).cpu()
            order = score.argsort(descending=True, stable=True)
            labelled = self.pairs.caption_image[cols[order]] == rows[order]
            best = order[:_ANSWERS]
            answers = self.answers(scores, rows[best], cols[best], pictures=direction == "t2i")
            answered.append(RowAnswers(name, int(labelled.int().argmax()) + 1, tuple(answers)))
        unlabelled = int((self.verdicts.unlabelled[:, 1 if direction == "t2i" else 0] == index).sum())
        if direction == "t2i":
            return Query(self.pairs.caption_ids[index], self.pairs.words(index), None, unlabelled, tuple(answered))
        return Query(self.pairs.image_ids[index], "", self.picture(index), unlabelled, tuple(answered))

    def intervals(self, row: str, *, generator: torch.Generator) -> Iterator[Interval]:
        """Grade a sample of pairs by one row and draw a pair from each interval of the grades it gives, if any."""
        scores = self.scores[row]
        rows, cols = sample_pairs(self.pairs, SAMPLE, generator=generator)
        graded = scores.at(rows, cols).grade
        if graded is None:
            return
        grades = graded.cpu()
        edges = interval_edges(grades)
        numbers = torch.bucketize(grades.to(edges.dtype), edges[1:-1], right=True)  # on an edge: the upper interval
        for number, (low, high) in enumerate(pairwise(edges.tolist())):
            inside = (numbers == number).nonzero().flatten()
            if not len(inside):
                yield Interval(low, high, 0, None)
                continue
            drawn = inside[torch.randint(len(inside), (1,), generator=generator)]
            (answer,) = self.answers(scores, rows[drawn], cols[drawn], pictures=True)
            yield Interval(low, high, len(inside), answer._replace(grade=float(grades[drawn])))


def load_material(
    runs: Sequence[RunRecord], gallery: GalleryConfig, *, split: str = "test", device: str = "auto"
) -> Material | None:
    """The first seed of every row that still has its model; None where none has."""
    folders: dict[str, Path] = {}
    for run in sorted(runs, key=lambda run: run.seed, reverse=True):
        if run.setting == gallery.setting and run.folder and (run.folder / "model" / "config.json").is_file():
            folders[run.row] = run.folder
    folders = {row: folders[row] for row in gallery.rows if row in folders}
    if not folders:
        return None
    recipes = {row: read_recipe(folder / "config.yaml") for row, folder in folders.items()}
    pairs = {row: read_split(recipe.data, split) for row, recipe in recipes.items()}
    recipe, first = next(iter(recipes.values())), next(iter(pairs.values()))
    for row, other in pairs.items():
        if (other.image_ids, other.caption_ids) != (first.image_ids, first.caption_ids):
            message = f"'{row}' and '{next(iter(pairs))}' were run on other images or captions"
            raise UsageError(f"{message} — show rows of the same data beside each other")
    photos = next((one for one in pairs.values() if isinstance(one, PhotoSet)), None)
    if gallery.photos:
        named = load_pairs(gallery.photos, split=split)
        if not isinstance(named, PhotoSet):
            raise UsageError(f"{gallery.photos} are features, expected photos — give e.g. flickr8k:DIR")
        photos = named
    truth = scene_truth(recipe.data.pairs, first)
    verdicts = judged_verdicts(first, config_judgments(recipe.evaluate)) if truth is None else exact_verdicts(truth)
    scores = {
        row: PairScorer.from_pretrained(folder, device=device).score_set(pairs[row]) for row, folder in folders.items()
    }
    return Material(first, verdicts, photos, scores)


def examples_of(material: Material, setting: str, *, captions: int = 5, images: int = 3) -> Examples:
    """Queries by captions and images with the answers of every row, and pairs by interval of the first row's grade."""
    rows = tuple(material.scores)
    queries = choose_queries(material.pairs, material.verdicts, captions=captions, images=images)
    shown = tuple(material.query(direction, index) for direction, index in queries)
    intervals = tuple(material.intervals(rows[0], generator=torch.Generator().manual_seed(0)))
    return Examples(setting, material.pairs.split, rows, material.verdicts.known, shown, intervals, SAMPLE)


def exact_verdicts(truth: Truth) -> Verdicts:
    """For a generated world, where the grade of every pair is known."""

    def judge(row: int, col: int) -> tuple[str, str]:
        if truth.labelled[row, col]:
            return "official", "labelled match"
        if truth.relevant[row, col]:
            return "unlabelled", "true, unlabelled"
        share = float(truth.grades[row, col])
        return "partly" if share >= EASY_BELOW else "wrong", f"{share:.0%} true"

    return Verdicts("exact", judge, truth.false_negative.nonzero())


def judged_verdicts(pairs: Pairs, judgments: Sequence[Judgments]) -> Verdicts:
    """For data of which people judged some pairs: labels first, then experts, then the crowd."""
    known: dict[tuple[int, int], tuple[str, str]] = {}
    kinds = [one for one in judgments if one.kind in _PARTLY]
    for judged in sorted(kinds, key=lambda one: one.kind):  # experts come last and overwrite the crowd
        part, rows, cols = judged.within(pairs)
        for row, col, grade in zip(rows.tolist(), cols.tolist(), part.grades.tolist(), strict=True):
            badge = f"experts: {grade:.1f} of 4" if part.kind == "expert" else f"{grade:.0%} say yes"
            partly = "partly" if grade >= _PARTLY[part.kind] else "wrong"
            known[row, col] = ("unlabelled" if grade >= MATCH[part.kind] else partly, badge)
    kind: Known = "judged" if known else "labels"
    known |= {(row, col): ("official", "labelled match") for col, row in enumerate(pairs.caption_image.tolist())}
    unlabelled = [pair for pair, (kind, _) in known.items() if kind == "unlabelled"]
    matches = torch.tensor(unlabelled, dtype=torch.int64).reshape(-1, 2)
    return Verdicts(kind, lambda row, col: known.get((row, col), ("unknown", "no label")), matches)


def choose_queries(pairs: Pairs, verdicts: Verdicts, *, captions: int, images: int) -> list[tuple[Direction, int]]:
    """Captions, then images, by how many unlabelled matches are known; where none is, evenly over the split."""
    by_image = torch.bincount(verdicts.unlabelled[:, 0], minlength=len(pairs.image_ids)).tolist()
    by_caption = torch.bincount(verdicts.unlabelled[:, 1], minlength=len(pairs.caption_ids)).tolist()
    every_row, owners = list(range(len(pairs.image_ids))), pairs.caption_image.tolist()
    rows = _evenly(every_row, images)
    if verdicts.known == "exact":
        cols = choose(by_caption, _EXACT[:captions], groups=owners)
    elif len(verdicts.unlabelled):
        cols = choose(by_caption, _falling(max(by_caption), captions), groups=owners)
        rows = choose(by_image, _falling(max(by_image), images), groups=every_row)
    else:
        cols = _evenly([owners.index(row) for row in dict.fromkeys(owners)], captions)
    return [*(("t2i", col) for col in cols), *(("i2t", row) for row in rows)]


def choose(counts: Sequence[int], targets: Sequence[int], *, groups: Sequence[int]) -> list[int]:
    """For each target the first index whose count is nearest to it, one index per group.

    >>> choose([0, 0, 2, 1, 3], [3, 3, 0], groups=[0, 1, 2, 2, 3])
    [4, 2, 0]
    """
    chosen: list[int] = []
    taken: set[int] = set()
    for target in targets:
        left = [index for index in range(len(counts)) if groups[index] not in taken]
        if left:
            chosen.append(min(left, key=lambda index: (abs(counts[index] - target), index)))
            taken.add(groups[chosen[-1]])
    return chosen


def _falling(most: int, number: int) -> list[int]:
    """From the most unlabelled matches down to one, in even steps.

    >>> _falling(13, 4)
    [13, 9, 5, 1]
    """
    return torch.linspace(most, 1, number).round().long().tolist()


def _evenly(indices: Sequence[int], number: int) -> list[int]:
    number = min(number, len(indices))
    return [indices[at * len(indices) // number] for at in range(number)]


def interval_edges(grades: Tensor) -> Tensor:
    """Eight equal intervals from the lowest grade to the highest; one where these are the same. [P] -> [9] or [2]

    Models differ in how much of [0, 1] they use, so fixed intervals could leave most empty.

    >>> interval_edges(torch.tensor([0.25, 0.0, 2.0])).tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]
    """
    low, high = float(grades.min()), float(grades.max())
    return torch.linspace(low, high, 2 if low == high else INTERVALS + 1, dtype=torch.float64)


def sample_pairs(pairs: Pairs, number: int, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """All labelled pairs and up to ``number`` others, each once. -> rows [P], columns [P]"""
    images, captions = len(pairs.image_ids), len(pairs.caption_ids)
    labelled = pairs.caption_image.cpu() * captions + torch.arange(captions)
    drawn = torch.unique(torch.randint(images * captions, (number,), generator=generator))
    both = torch.cat((labelled, drawn[~torch.isin(drawn, labelled)]))
    return both // captions, both % captions
