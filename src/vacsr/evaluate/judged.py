"""Agreement of scores with human grades, as a section of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vacsr.data.labelled import LabelledPairs
from vacsr.evaluate.judgments import Judgments, Split, false_negative_auroc, grade_agreement
from vacsr.evaluate.scored import Scores

JUDGED: Mapping[str, Split] = {"judgments": "judged-test", "judgments_dev": "judged-dev"}
"""The sections of a result, and the half of the judged images that each is about."""


def judged_result(
    scores: Scores, pairs: LabelledPairs, judgments: Sequence[Judgments], *, split: Split
) -> dict[str, Any] | None:
    """Agreement with human grades over the judged pairs that are in ``pairs``; None where there are none."""
    images = {name: row for row, name in enumerate(pairs.image_ids)}
    captions = {name: row for row, name in enumerate(pairs.caption_ids)}
    result: dict[str, Any] = {}
    for judged in judgments:
        part = judged.subset(split)
        known = [i for i in range(len(part)) if part.image_ids[i] in images and part.caption_ids[i] in captions]
        if not known:
            continue
        part = part.take(known)
        rows = torch.tensor([images[name] for name in part.image_ids])
        cols = torch.tensor([captions[name] for name in part.caption_ids])
        result |= _agreement(scores, part, rows=rows, cols=cols)
    return result or None


def _agreement(scores: Scores, judged: Judgments, *, rows: Tensor, cols: Tensor) -> dict[str, Any]:
    score, sigma = scores.score_of(rows, cols), scores.uncertainty(rows, cols)
    agreement = grade_agreement(score, judged)
    tau = "expert_tau_c" if judged.kind == "expert" else "crowd_tau_b"
    result: dict[str, Any] = {
        tau: agreement.tau,
        f"{tau}_published": agreement.published,
        f"{judged.kind}_spearman": agreement.spearman,
        f"{judged.kind}_pairs": len(judged),
    }
    if judged.kind == "expert":
        result["auroc_false_negative_score"] = 100.0 * false_negative_auroc(score, judged)
        if sigma is not None:
            result["auroc_false_negative"] = 100.0 * false_negative_auroc(sigma, judged)
    return result
