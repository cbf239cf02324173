"""The loss tolerance of a trained cell: r_i over the images of each reported split, at the scale that its loss has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vacsr.config import Recipe
from vacsr.data.labelled import LabelledPairs
from vacsr.evaluate.exact import scene_truth
from vacsr.evaluate.judgments import Judgments
from vacsr.evaluate.tolerance import Tolerance, contrastive_tolerance, sigmoid_tolerance, tolerance_figures
from vacsr.methods.base import Method
from vacsr.methods.infonce import InfoNCE
from vacsr.methods.sigmoid import Sigmoid
from vacsr.methods.vacsr import Vacsr
from vacsr.scoring import PairScorer
from vacsr.train.run import report_data

_MATCHES = 3.0  # mean expert grade from which a caption fits the photo


def run_tolerance(folder: Path, recipe: Recipe) -> dict[str, dict[str, Any]]:
    """By split: r_i, and the scale of the loss. Empty for losses without such an r_i.

    False negatives come from the exact truth of generated scenes, or from experts' grades of the judged-test half; a
    split without either, and images held out of training as dev, are left out.
    """
    scorer = PairScorer.from_pretrained(folder, device=recipe.train.device)
    data = report_data(recipe)
    found: dict[str, dict[str, Any]] = {}
    for pairs in data.sets:
        truth = scene_truth(recipe.data.pairs, pairs)
        missed = _judged(pairs, data.judgments) if truth is None else truth.false_negative
        if missed is None:
            continue
        labelled = torch.arange(len(pairs.image_ids))[:, None] == pairs.caption_image.cpu()
        score = scorer.score_set(pairs).score.detach().cpu()
        tolerance = method_tolerance(scorer.model.method, score, labelled=labelled, false_negative=missed)
        if tolerance is not None:
            figures = tolerance_figures(tolerance, missed)
            found[pairs.split] = {**figures._asdict(), "scale": method_scale(scorer.model.method)}
    return found


def method_tolerance(method: Method, score: Tensor, *, labelled: Tensor, false_negative: Tensor) -> Tolerance | None:
    """By the method's own loss; the adapter's straight-through loss is a sigmoid's on its logit. [I, T] each -> [I]"""
    scale = method_scale(method)
    if scale is None:
        return None
    if isinstance(method, InfoNCE):
        return contrastive_tolerance(score, labelled, false_negative, temperature=1 / scale)
    bias = float(method.affine[1].detach()) if isinstance(method, Sigmoid) else 0.0
    return sigmoid_tolerance(score, labelled, false_negative, scale=scale, bias=bias)


def method_scale(method: Method) -> float | None:
    """1/τ of the softmax, a of the sigmoid, 1 for a logit; None for losses that are neither."""
    if isinstance(method, InfoNCE):
        return float(method.log_scale.detach().exp())
    if isinstance(method, Sigmoid):
        return float(method.affine[0].detach())
    return 1.0 if isinstance(method, Vacsr) else None


def _judged(pairs: LabelledPairs, judgments: tuple[Judgments, ...]) -> Tensor | None:
    """Pairs across images that experts find fitting; None where no pair of the split was judged. [I, T] bool"""
    images = {name: row for row, name in enumerate(pairs.image_ids)}
    captions = {name: row for row, name in enumerate(pairs.caption_ids)}
    missed = torch.zeros(len(images), len(captions), dtype=torch.bool)
    known = 0
    for judged in (part.subset("judged-test") for part in judgments if part.kind == "expert"):
        for place, (image, caption) in enumerate(zip(judged.image_ids, judged.caption_ids, strict=True)):
            if image in images and caption in captions:
                known += 1
                if not judged.same_image[place] and judged.grades[place] >= _MATCHES:
                    missed[images[image], captions[caption]] = True
    return missed if known else None
