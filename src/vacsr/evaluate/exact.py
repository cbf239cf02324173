"""Retrieval against the exact truth: data whose every pair has a known grade, not only its labelled matches.

A pair is relevant where its grade is 1. A relevant pair without a label is a false negative of the labels. What a
method says of false negatives is compared with what it says of the other kinds of pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.data.labelled import LabelledPairs
from vacsr.data.scenes import PairKinds, load_scenes, scene_grades
from vacsr.data.spec import parse_spec
from vacsr.errors import DataError, ShapeMismatch
from vacsr.evaluate.galleries import fits_in_memory
from vacsr.evaluate.judgments import kendall_tau
from vacsr.evaluate.metrics import map_at_r
from vacsr.evaluate.ranks import Positives, stream_positive_ranks
from vacsr.evaluate.scored import Scores
from vacsr.evaluate.uncertainty import auroc

_ROUNDING = 1e-6  # a grade this close to 1 is 1
_PAIRS = 1 << 20  # pairs that τ and AUROC look at; of more, a seeded sample


class Truth(NamedTuple):
    """The grade of every pair, and which pairs are labelled; on the CPU. Build one with :func:`exact_truth`."""

    grades: Tensor
    """[N, M] in [0, 1]"""
    labelled: Tensor
    """[N, M] bool"""

    @property
    def relevant(self) -> Tensor:
        """Pairs of grade 1. [N, M] bool"""
        return self.grades >= 1 - _ROUNDING

    @property
    def false_negative(self) -> Tensor:
        """Relevant, but without a label. [N, M] bool"""
        return self.relevant & ~self.labelled


class TruthFacts(NamedTuple):
    """How much the labels leave out; shares in percent."""

    images: int
    captions: int
    images_per_caption: float
    """Mean number of images that a caption is true of, its own included."""
    false_negatives: int
    false_negative_share: float
    """False negatives among the unlabelled pairs."""
    unlabelled_share: float
    """False negatives among the relevant pairs."""


class ExactMetrics(NamedTuple):
    """Agreement with the truth; times 100, NaN where undefined."""

    map_at_r: float
    """mAP@R on all relevant pairs, mean of both directions."""
    map_at_r_i2t: float
    map_at_r_t2i: float
    tau_b: float
    """Kendall's τ-b of scores and grades."""
    auroc_false_negative_score: float
    """Does a high score tell false negatives from the other unlabelled pairs?"""
    auroc_false_negative: float | None
    """Does a high uncertainty? Below 50 a low one does. None where the method has none."""


def exact_truth(grades: Tensor, caption_image: Tensor) -> Truth:
    """The truth of a data set from its grades [N, M] and the image row of each caption [M].

    >>> exact_truth(torch.tensor([[1.0, 1.0], [0.5, 1.0]]), torch.tensor([0, 1])).false_negative
    tensor([[False,  True],
            [False, False]])
    """
    if grades.ndim != 2 or grades.shape[1] != len(caption_image):
        expected = f"[N, {len(caption_image)}]"
        raise ShapeMismatch(
            f"grades are {list(grades.shape)}, expected {expected} — one row an image, one column a caption"
        )
    if not bool(((grades >= 0) & (grades <= 1 + _ROUNDING)).all()):  # also refuses NaN
        raise DataError("grades leave 0 to 1 or hold NaN — scale them to the share that is true")
    labelled = torch.arange(len(grades))[:, None] == caption_image.cpu()
    return Truth(grades.cpu(), labelled)


def scene_truth(spec: str, pairs: LabelledPairs) -> Truth | None:
    """The truth of pairs that a ``scenes:`` SPEC gave, also of some of its images; None for other data.

    None, too, where the grades of all pairs would not fit into memory.
    """
    parsed = parse_spec(spec)
    if parsed.scheme != "scenes" or not fits_in_memory(pairs):
        return None
    parts = {name.rpartition("-")[0] for name in pairs.image_ids}
    world = load_scenes(parsed.with_options({"split": parts.pop() if len(parts) == 1 else "all"}))
    images = {name: row for row, name in enumerate(world.pairs.image_ids)}
    captions = {name: row for row, name in enumerate(world.pairs.caption_ids)}
    scenes = tuple(world.scenes[images[name]] for name in pairs.image_ids)
    statements = tuple(world.statements[captions[name]] for name in pairs.caption_ids)
    return exact_truth(scene_grades(world._replace(scenes=scenes, statements=statements)), pairs.caption_image)


def truth_facts(truth: Truth) -> TruthFacts:
    """Count what the labels leave out."""
    relevant, missed = int(truth.relevant.sum()), int(truth.false_negative.sum())
    images, captions = truth.grades.shape
    return TruthFacts(
        images=images,
        captions=captions,
        images_per_caption=relevant / captions,
        false_negatives=missed,
        false_negative_share=100 * missed / max(1, int((~truth.labelled).sum())),
        unlabelled_share=100 * missed / max(1, relevant),
    )


def exact_metrics(scores: Scores, truth: Truth, *, pairs: int = _PAIRS, seed: int = 0) -> ExactMetrics:
    """Compare scores with the truth. τ and AUROC look at ``pairs`` pairs at most, drawn by ``seed``."""
    ranks = stream_positive_ranks(scores.blocks, Positives.from_matrix(truth.relevant))
    i2t, t2i = 100 * map_at_r(ranks.i2t), 100 * map_at_r(ranks.t2i)
    score = scores.score.cpu()  # of the size of the grades, which are at hand as a whole
    every = _draw(torch.ones_like(truth.labelled), pairs, seed=seed)
    unlabelled = _draw(~truth.labelled, pairs, seed=seed)
    missed = truth.false_negative[unlabelled]
    sigma = scores.uncertainty(*unlabelled)
    return ExactMetrics(
        map_at_r=(i2t + t2i) / 2,
        map_at_r_i2t=i2t,
        map_at_r_t2i=t2i,
        tau_b=100 * kendall_tau(score[every], truth.grades[every]),
        auroc_false_negative_score=100 * auroc(score[unlabelled], missed),
        auroc_false_negative=None if sigma is None else 100 * auroc(sigma, missed),
    )


class KindValues(NamedTuple):
    """What a method says of the pairs of one kind, or of a seeded sample of P of them; on the CPU."""

    total: int
    """Pairs of the kind in all."""
    score: Tensor
    """[P]"""
    uncertainty: Tensor | None
    """[P], None where the method has none."""


class Spread(NamedTuple):
    """Where numbers lie: mean and quartiles, NaN of none."""

    mean: float
    low: float
    median: float
    high: float


def values_by_kind(scores: Scores, kinds: PairKinds, *, pairs: int = _PAIRS, seed: int = 0) -> dict[str, KindValues]:
    """Scores and uncertainties by the name of the kind; of each at most ``pairs`` pairs, drawn by ``seed``."""
    found: dict[str, KindValues] = {}
    for name, mask in kinds._asdict().items():
        rows, cols = _draw(mask.cpu(), pairs, seed=seed)
        sigma = scores.uncertainty(rows, cols)
        score = scores.score.cpu()[rows, cols]
        found[name] = KindValues(int(mask.sum()), score, None if sigma is None else sigma.cpu())
    return found


def spread(values: Tensor) -> Spread:
    """Mean and quartiles of some numbers. [P]

    >>> spread(torch.tensor([0.0, 1.0, 2.0, 5.0]))
    Spread(mean=2.0, low=0.75, median=1.5, high=2.75)
    """
    if not len(values):
        return Spread(*[float("nan")] * 4)
    exact = values.double()
    quarters = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, median, high = exact.sort().values.quantile(quarters).tolist()
    return Spread(float(exact.mean()), low, median, high)


def false_negatives_above(values: Mapping[str, Tensor]) -> dict[str, float]:
    """How often a false negative has the higher value than a pair of each other kind: AUROC times 100, NaN of none.

    >>> false_negatives_above({"false_negatives": torch.tensor([0.3, 0.6]), "hard": torch.tensor([0.5])})
    {'hard': 50.0}
    """
    missed = values["false_negatives"]
    above: dict[str, float] = {}
    for name, others in values.items():
        if name != "false_negatives":
            is_missed = torch.cat((torch.ones(len(missed)), torch.zeros(len(others))))
            above[name] = 100 * auroc(torch.cat((missed, others)), is_missed)
    return above


def _draw(mask: Tensor, limit: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of the marked pairs, or of ``limit`` of them drawn at random. [N, M] bool -> [P], [P]"""
    rows, cols = mask.nonzero().unbind(1)
    if len(rows) <= limit:
        return rows, cols
    drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:limit]
    return rows[drawn], cols[drawn]
