"""How well scores agree with the exact truth of generated data, where every pair has a known grade.

A pair is relevant where its grade is 1; a relevant pair without a label is a false negative of the labels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.data.formats import parse_spec
from vacsr.data.pairs import LabelledPairs
from vacsr.data.scenes import load_scenes, scene_grades
from vacsr.evaluate.agreement import kendall_tau
from vacsr.evaluate.metrics import average_precisions_at_r, mean_of
from vacsr.evaluate.protocols import fits_in_memory
from vacsr.evaluate.ranks import Positives, positive_ranks
from vacsr.evaluate.score_files import Scores
from vacsr.evaluate.uncertainty import auroc

_ROUNDING = 1e-6  # a grade this close to 1 is 1
_PAIRS = 1 << 20  # pairs that τ and AUROC look at; of more, a seeded sample


class Truth(NamedTuple):
    """The grade of every pair, and which pairs are labelled; on the CPU. Build one with :func:`exact_truth`."""

    grades: Tensor  # [N, M] in [0, 1]
    labelled: Tensor  # [N, M] bool

    @property
    def relevant(self) -> Tensor:
        """Pairs of grade 1. [N, M] bool"""
        return self.grades >= 1 - _ROUNDING

    @property
    def false_negative(self) -> Tensor:
        """Relevant, but without a label. [N, M] bool"""
        return self.relevant & ~self.labelled


def exact_truth(grades: Tensor, caption_image: Tensor) -> Truth:
    """The truth of a data set from its grades [N, M] in 0 to 1 and the image row of each caption [M]."""
    return Truth(grades.cpu(), torch.arange(len(grades))[:, None] == caption_image.cpu())


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


def truth_facts(truth: Truth) -> dict[str, float]:
    """How much the labels leave out; shares in percent.

    ``images_per_caption`` is the mean number of images that a caption is true of. ``false_negative_share`` is of the
    unlabelled pairs, ``unlabelled_share`` of the relevant ones.
    """
    relevant, missed = int(truth.relevant.sum()), int(truth.false_negative.sum())
    images, captions = truth.grades.shape
    return {
        "images": images,
        "captions": captions,
        "images_per_caption": relevant / captions,
        "false_negatives": missed,
        "false_negative_share": 100 * missed / max(1, int((~truth.labelled).sum())),
        "unlabelled_share": 100 * missed / max(1, relevant),
    }


def exact_metrics(scores: Scores, truth: Truth, *, pairs: int = _PAIRS, seed: int = 0) -> dict[str, float | None]:
    """Compare scores with the truth; times 100, NaN where undefined. τ and AUROC see ``pairs`` pairs at most.

    mAP@R is over all relevant pairs. The AUROCs say whether a high score, or a high uncertainty, tells false negatives
    from the other unlabelled pairs; below 50 a low one does.
    """
    images, captions = truth.grades.shape
    relevant = truth.relevant.nonzero().unbind(1)
    ranks = positive_ranks(scores.blocks, Positives.from_pairs(*relevant, num_queries=images, num_items=captions))
    i2t, t2i = (mean_of(average_precisions_at_r, one) for one in ranks)
    score = scores.score.cpu()  # as large as the grades, which are in memory too
    every = _draw(torch.ones_like(truth.labelled), pairs, seed=seed)
    unlabelled = _draw(~truth.labelled, pairs, seed=seed)
    missed = truth.false_negative[unlabelled]
    sigma = scores.uncertainty(*unlabelled)
    return {
        "map_at_r": (i2t + t2i) / 2,
        "map_at_r_i2t": i2t,
        "map_at_r_t2i": t2i,
        "tau_b": kendall_tau(score[every].numpy(), truth.grades[every].numpy()),
        "auroc_false_negative_score": 100 * auroc(score[unlabelled], missed),
        "auroc_false_negative": None if sigma is None else 100 * auroc(sigma, missed),
    }


def _draw(mask: Tensor, limit: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of the marked pairs, or of ``limit`` of them drawn at random. [N, M] bool -> [P], [P]"""
    rows, cols = mask.nonzero().unbind(1)
    if len(rows) <= limit:
        return rows, cols
    drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:limit]
    return rows[drawn], cols[drawn]
