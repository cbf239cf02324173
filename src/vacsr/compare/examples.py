"""Example queries for a page: trained runs answer queries that labels and judgments choose, never scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vacsr.compare.results import RunRecord
from vacsr.config.io import read_recipe
from vacsr.data import PairSet, PhotoSet, load_pairs
from vacsr.data.scenes import EASY_BELOW
from vacsr.errors import UsageError
from vacsr.evaluate.agreement import Judgments, read_judgments
from vacsr.evaluate.truth import Truth, scene_truth
from vacsr.pages.examples import Answer, Examples, Interval, Known, Picture, Query, RowAnswers, photo_uri
from vacsr.scoring import PairScorer, PairScores
from vacsr.train.data import read_split

Direction = Literal["i2t", "t2i"]
Pairs = PairSet | PhotoSet
INTERVALS = 8
SAMPLE = 40_000
"""Unlabelled pairs among which intervals choose, as many as in the paper; all labelled pairs are added."""
SIDE = 176
"""Of a picture in the file, in pixels."""
_ANSWERS = 5
_EXACT = (0, 1, 2, 4, 7, 12)  # unlabelled matches of the captions asked, where the truth is known
_MATCH = {"expert": 3.0, "crowd": 0.5}  # grades from which a judged pair matches: of 1 to 4, or the share of "yes"
_PARTLY = {"expert": 2.0, "crowd": 0.25}


class ExamplePlan(NamedTuple):
    """What to show of some runs; the first row is also shown by intervals of its grade."""

    setting: str
    rows: Sequence[str]
    photos: str = ""
    """SPEC of the photos where runs read cached features or small photos, such as `flickr8k:DIR`."""
    split: str = "test"
    captions: int = 5
    images: int = 3


class Verdicts(NamedTuple):
    """What is known of each pair."""

    known: Known
    judge: Callable[[int, int], tuple[str, str]]
    """Frame and badge of image row and caption column."""
    unlabelled: Tensor
    """Known matches without a label, by image and caption. [P, 2] int64"""


class Material(NamedTuple):
    """Loaded runs and the data they are asked about."""

    pairs: Pairs
    verdicts: Verdicts
    photos: PhotoSet | None
    scores: Mapping[str, PairScores]


def make_examples(runs: Sequence[RunRecord], plan: ExamplePlan, *, device: str = "auto") -> Examples | None:
    """Queries with answers, and pairs by grade; None where no run of the plan still has its model."""
    material = load_material(runs, plan, device=device)
    return None if material is None else examples_of(material, plan)


def examples_of(material: Material, plan: ExamplePlan) -> Examples:
    """The same from loaded runs."""
    shown = _Shown(material)
    rows = tuple(material.scores)
    return Examples(
        plan.setting,
        plan.split,
        rows,
        material.verdicts.known,
        tuple(shown.query(direction, index) for direction, index in choose_queries(material, plan)),
        tuple(shown.intervals(rows[0], generator=torch.Generator().manual_seed(0))),
        SAMPLE,
    )


def load_material(runs: Sequence[RunRecord], plan: ExamplePlan, *, device: str = "auto") -> Material | None:
    """The first seed of every row that still has its model; None where none has."""
    folders: dict[str, Path] = {}
    for run in sorted(runs, key=lambda run: run.seed, reverse=True):
        if run.setting == plan.setting and run.folder and (run.folder / "model" / "config.json").is_file():
            folders[run.row] = run.folder
    folders = {row: folders[row] for row in plan.rows if row in folders}
    if not folders:
        return None
    recipes = {row: read_recipe(folder / "config.yaml") for row, folder in folders.items()}
    pairs = {row: read_split(recipe.data, plan.split) for row, recipe in recipes.items()}
    first = next(iter(pairs.values()))
    for row, other in pairs.items():
        if (other.image_ids, other.caption_ids) != (first.image_ids, first.caption_ids):
            message = f"'{row}' and '{next(iter(pairs))}' were run on other images or captions"
            raise UsageError(f"{message} — show rows of the same data beside each other")
    scores = {
        row: PairScorer.from_pretrained(folder, device=device).score_set(pairs[row]) for row, folder in folders.items()
    }
    recipe = next(iter(recipes.values()))
    truth = scene_truth(recipe.data.pairs, first)
    if truth is None:
        judgments = [read_judgments(Path(path).expanduser()) for path in recipe.evaluate.judgments]
        verdicts = judged_verdicts(first, judgments)
    else:
        verdicts = exact_verdicts(truth)
    return Material(first, verdicts, _photos(pairs.values(), plan), scores)


def _photos(sets: Iterable[Pairs], plan: ExamplePlan) -> PhotoSet | None:
    """The photos that the plan names, or else those that a run itself reads."""
    if not plan.photos:
        return next((pairs for pairs in sets if isinstance(pairs, PhotoSet)), None)
    named = load_pairs(plan.photos, split=plan.split)
    if isinstance(named, PhotoSet):
        return named
    raise UsageError(f"{plan.photos} are features, expected photos — give e.g. flickr8k:DIR")


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
    images = {name: row for row, name in enumerate(pairs.image_ids)}
    captions = {name: col for col, name in enumerate(pairs.caption_ids)}
    known: dict[tuple[int, int], tuple[str, str]] = {}
    for judged in sorted(judgments, key=lambda one: one.kind):  # experts come last and overwrite the crowd
        for image, caption, grade in zip(judged.image_ids, judged.caption_ids, judged.grades, strict=True):
            if image in images and caption in captions:
                known[images[image], captions[caption]] = _judgment(judged.kind, float(grade))
    kind: Known = "judged" if known else "labels"
    known |= {(row, col): ("official", "labelled match") for col, row in enumerate(pairs.caption_image.tolist())}
    unlabelled = [pair for pair, (kind, _) in known.items() if kind == "unlabelled"]
    matches = torch.tensor(unlabelled, dtype=torch.int64).reshape(-1, 2)
    return Verdicts(kind, lambda row, col: known.get((row, col), ("unknown", "no label")), matches)


def _judgment(kind: str, grade: float) -> tuple[str, str]:
    badge = f"experts: {grade:.1f} of 4" if kind == "expert" else f"{grade:.0%} say yes"
    if grade >= _MATCH[kind]:
        return "unlabelled", badge
    return "partly" if grade >= _PARTLY[kind] else "wrong", badge


def choose_queries(material: Material, plan: ExamplePlan) -> list[tuple[Direction, int]]:
    """Captions, then images, by how many unlabelled matches are known; where none is, evenly over the split."""
    pairs, known = material.pairs, material.verdicts.unlabelled
    images, captions = len(pairs.image_ids), len(pairs.caption_ids)
    by_image = torch.bincount(known[:, 0], minlength=images).tolist()
    by_caption = torch.bincount(known[:, 1], minlength=captions).tolist()
    rows, owners = list(range(images)), pairs.caption_image.tolist()
    if material.verdicts.known == "exact":
        cols = choose(by_caption, _EXACT[: plan.captions], groups=owners)
        chosen = _evenly(rows, plan.images)
    elif len(known):
        cols = choose(by_caption, _falling(max(by_caption), plan.captions), groups=owners)
        chosen = choose(by_image, _falling(max(by_image), plan.images), groups=rows)
    else:
        first = [owners.index(row) for row in dict.fromkeys(owners)]
        cols, chosen = _evenly(first, plan.captions), _evenly(rows, plan.images)
    return [*(("t2i", col) for col in cols), *(("i2t", row) for row in chosen)]


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


class _Shown:
    """Turns pairs of loaded data into what a page shows; every photo is encoded once."""

    def __init__(self, material: Material) -> None:
        self.material = material
        photos = material.photos
        self._photo_row = {} if photos is None else {name: row for row, name in enumerate(photos.image_ids)}
        self._pictures: dict[int, Picture] = {}

    def picture(self, row: int) -> Picture:
        if row not in self._pictures:
            pairs, photos = self.material.pairs, self.material.photos
            image_id, uri = pairs.image_ids[row], ""
            if photos is not None and image_id in self._photo_row:
                uri = photo_uri(photos.photos.open(self._photo_row[image_id], side=SIDE), side=SIDE)
            cols = (pairs.caption_image == row).nonzero().flatten().tolist()
            self._pictures[row] = Picture(image_id, self.caption(cols[0]) if cols else image_id, uri)
        return self._pictures[row]

    def caption(self, col: int) -> str:
        pairs = self.material.pairs
        return pairs.caption_ids[col] if pairs.captions is None else pairs.captions[col]

    def answers(self, scores: PairScores, rows: Tensor, cols: Tensor, *, pictures: bool) -> list[Answer]:
        """Pairs with their verdict, grade and σ. [P], [P]"""
        scored = scores.at(rows, cols)
        sigmas = [None] * len(rows) if scored.uncertainty is None else scored.uncertainty.tolist()
        pairs = zip(rows.tolist(), cols.tolist(), scored.grade.tolist(), sigmas, strict=True)
        return [
            Answer(
                self.picture(row) if pictures else None,
                self.caption(col),
                *self.material.verdicts.judge(row, col),
                grade,
                sigma,
            )
            for row, col, grade, sigma in pairs
        ]

    def query(self, direction: Direction, index: int) -> Query:
        """A query with the best answers of every row."""
        pairs = self.material.pairs
        rows = torch.arange(len(pairs.image_ids)) if direction == "t2i" else torch.tensor([index])
        cols = torch.arange(len(pairs.caption_ids)) if direction == "i2t" else torch.tensor([index])
        rows, cols = (grid.flatten() for grid in torch.meshgrid(rows, cols, indexing="ij"))
        answered = []
        for name, scores in self.material.scores.items():
            score = scores.score_of(rows, cols).cpu()
            order = score.argsort(descending=True, stable=True)
            labelled = pairs.caption_image[cols[order]] == rows[order]
            best = order[:_ANSWERS]
            answers = self.answers(scores, rows[best], cols[best], pictures=direction == "t2i")
            answered.append(RowAnswers(name, int(labelled.int().argmax()) + 1, tuple(answers)))
        unlabelled = int((self.material.verdicts.unlabelled[:, 1 if direction == "t2i" else 0] == index).sum())
        if direction == "t2i":
            return Query(pairs.caption_ids[index], self.caption(index), None, unlabelled, tuple(answered))
        return Query(pairs.image_ids[index], "", self.picture(index), unlabelled, tuple(answered))

    def intervals(self, row: str, *, generator: torch.Generator) -> Iterator[Interval]:
        """Grade a sample of pairs by one row and draw a pair from each interval of the grades it gives."""
        scores = self.material.scores[row]
        rows, cols = sample_pairs(self.material.pairs, SAMPLE, generator=generator)
        grades = scores.at(rows, cols).grade.cpu()
        edges = interval_edges(grades)
        numbers = interval_of(grades, edges)
        for number, (low, high) in enumerate(pairwise(edges.tolist())):
            inside = (numbers == number).nonzero().flatten()
            if not len(inside):
                yield Interval(low, high, 0, None)
                continue
            drawn = inside[torch.randint(len(inside), (1,), generator=generator)]
            (answer,) = self.answers(scores, rows[drawn], cols[drawn], pictures=True)
            yield Interval(low, high, len(inside), answer._replace(grade=float(grades[drawn])))


def interval_edges(grades: Tensor) -> Tensor:
    """Eight equal intervals from the lowest grade to the highest; one where these are the same. [P] -> [9] or [2]

    Models differ in how much of [0, 1] they use, so fixed intervals could leave most empty.

    >>> interval_edges(torch.tensor([0.25, 0.0, 2.0])).tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]
    """
    low, high = float(grades.min()), float(grades.max())
    return torch.linspace(low, high, 2 if low == high else INTERVALS + 1, dtype=torch.float64)


def interval_of(grades: Tensor, edges: Tensor) -> Tensor:
    """The interval of each grade; one on an edge is in the upper. [P], [E] -> [P] int64

    >>> interval_of(torch.tensor([0.0, 0.124, 0.125, 1.0]), torch.linspace(0, 1, 9)).tolist()
    [0, 0, 1, 7]
    """
    return torch.bucketize(grades.to(edges.dtype), edges[1:-1], right=True)


def sample_pairs(pairs: Pairs, number: int, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """All labelled pairs and up to ``number`` others, each once. -> rows [P], columns [P]"""
    images, captions = len(pairs.image_ids), len(pairs.caption_ids)
    labelled = pairs.caption_image.cpu() * captions + torch.arange(captions)
    drawn = torch.unique(torch.randint(images * captions, (number,), generator=generator))
    both = torch.cat((labelled, drawn[~torch.isin(drawn, labelled)]))
    return both // captions, both % captions
