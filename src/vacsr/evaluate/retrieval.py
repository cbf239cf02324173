"""Retrieval reports: scores and ids in, the metrics of a protocol out, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vacsr.data import PairSet, PhotoSet
from vacsr.data.labelled import LabelledPairs
from vacsr.errors import UsageError
from vacsr.evaluate.judgments import Judgments, Split, false_negative_auroc, grade_agreement
from vacsr.evaluate.metrics import (
    average_precisions_at_r,
    hits_at,
    retrieval_metrics,
    rsum,
)
from vacsr.evaluate.ranks import (
    BothRanks,
    Positives,
    Ties,
    positive_ranks,
    stream_positive_ranks,
)
from vacsr.evaluate.uncertainty import Width, aurc, binned_correlation, topk_correlation
from vacsr.scoring import PairScorer, PairScores

SCHEMA = 1
PROTOCOLS = ("flickr",)
_MATRIX = 1 << 28  # scores that may be kept at once; more are streamed
_TOP = 10


@dataclass(frozen=True)
class RetrievalReport:
    """One result per protocol, with the keys of the evaluation JSON."""

    results: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """``{"schema": 1, "results": [...]}``, percent where a share."""
        return {"schema": SCHEMA, "results": list(self.results)}

    def to_markdown(self) -> str:
        """One row per protocol and split."""
        head = ["protocol", "split", "i2t R@1/5/10", "t2i R@1/5/10", "RSUM", "mAP@R i2t/t2i", "σ–R@1 i2t/t2i"]
        head += ["τ-c experts", "τ-b crowd"]
        rows = [_markdown_row(result) for result in self.results]
        return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def evaluate_retrieval(
    scorer: PairScorer,
    pairs: PairSet | PhotoSet,
    *,
    protocols: Sequence[str] = ("flickr",),
    judgments: Sequence[Judgments] = (),
    ties: Ties = "stable",
    bins: Width = "count",
) -> RetrievalReport:
    """Score every pair of ``pairs`` and report each protocol.

    ``judgments`` adds agreement with human grades; ``ties`` says who goes first among equal scores; ``bins`` are the
    uncertainty's, of equal count or equal width.
    """
    check_protocols(protocols)
    scores = scorer.score_set(pairs)
    ranks = both_ranks(scores, pairs, ties=ties)
    result = retrieval_result(ranks)
    result["uncertainty"] = uncertainty_result(scores, ranks, bins=bins)
    for key, split in (("judgments", "judged-test"), ("judgments_dev", "judged-dev")):
        found = judged_result(scores, pairs, judgments, split=split)  # type: ignore[arg-type]
        if found:
            result[key] = found
    if result["uncertainty"] and "judgments" in result:
        result["uncertainty"]["auroc_false_negative"] = result["judgments"].pop("auroc_false_negative", None)
    return RetrievalReport(tuple({"protocol": name, "split": pairs.split, **result} for name in protocols))


def check_protocols(names: Sequence[str]) -> None:
    """Every name is a protocol."""
    unknown = [name for name in names if name not in PROTOCOLS]
    if unknown:
        raise UsageError(f"unknown protocol '{unknown[0]}' — choose from: {', '.join(PROTOCOLS)}")


def both_ranks(scores: PairScores, pairs: LabelledPairs, *, ties: Ties = "stable") -> BothRanks:
    """Ranks of every labelled match, both directions; streamed where the matrix is too large to keep."""
    positives = Positives.from_captions(pairs.caption_image, len(pairs.image_ids))
    if len(pairs.image_ids) * len(pairs.caption_ids) > _MATRIX:
        return stream_positive_ranks(scores.blocks, positives, ties=ties)
    matrix = scores.score.cpu()  # counting is many small steps: a processor does them without waiting for a GPU
    i2t = positive_ranks(matrix, positives, ties=ties)
    return BothRanks(i2t, positive_ranks(matrix.T, positives.transposed(), ties=ties))


def retrieval_result(ranks: BothRanks) -> dict[str, Any]:
    """Recalls, mAP@R, R-Precision and median rank per direction, and RSUM."""
    i2t, t2i = retrieval_metrics(ranks.i2t), retrieval_metrics(ranks.t2i)
    return {"i2t": i2t._asdict(), "t2i": t2i._asdict(), "rsum": rsum(i2t, t2i)}


def dev_rsum(scores: PairScores, pairs: LabelledPairs) -> float:
    """RSUM alone: what model choice looks at."""
    return float(retrieval_result(both_ranks(scores, pairs))["rsum"])


def uncertainty_result(scores: PairScores, ranks: BothRanks, *, bins: Width = "count") -> dict[str, Any] | None:
    """σ of the best hit against R@1 (ten bins), AURC, and mean σ of the top K against mAP@R; None without σ."""
    result: dict[str, Any] = {}
    for direction, found in (("i2t", ranks.i2t), ("t2i", ranks.t2i)):
        top = scores.topk(_TOP, direction=direction)  # type: ignore[arg-type]
        query = torch.arange(len(top.index), device=top.index.device).unsqueeze(1).expand_as(top.index)
        rows, cols = (query, top.index) if direction == "i2t" else (top.index, query)
        flat = scores.uncertainty(rows.reshape(-1), cols.reshape(-1))
        if flat is None:
            return None
        sigma = flat.view_as(top.index)
        hit, quality = hits_at(found, 1), average_precisions_at_r(found)
        binned = binned_correlation(sigma[:, 0], hit, width=bins)
        top_k = topk_correlation(sigma, quality)
        result[f"corr_r1_{direction}"] = binned.correlation
        result[f"aurc_{direction}"] = 100.0 * aurc(sigma[:, 0], 1.0 - hit)
        result[f"bins_{direction}"] = {"sigma": binned.bin_uncertainty.tolist(), "r1": binned.bin_score.tolist()}
        result[f"topk_{direction}"] = {"raw": top_k.raw.tolist(), "binned": top_k.binned.tolist()}
    return result


def judged_result(
    scores: PairScores, pairs: LabelledPairs, judgments: Sequence[Judgments], *, split: Split
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


def _agreement(scores: PairScores, judged: Judgments, *, rows: Tensor, cols: Tensor) -> dict[str, Any]:
    found = scores.scorer.score_at(scores, rows=rows, cols=cols)
    agreement = grade_agreement(found.score, judged)
    tau = "expert_tau_c" if judged.kind == "expert" else "crowd_tau_b"
    result: dict[str, Any] = {
        tau: agreement.tau,
        f"{tau}_published": agreement.published,
        f"{judged.kind}_spearman": agreement.spearman,
        f"{judged.kind}_pairs": len(judged),
    }
    if judged.kind == "expert":
        result["auroc_false_negative_score"] = 100.0 * false_negative_auroc(found.score, judged)
        if found.uncertainty is not None:
            result["auroc_false_negative"] = 100.0 * false_negative_auroc(found.uncertainty, judged)
    return result


def _markdown_row(result: dict[str, Any]) -> list[str]:
    def recalls(direction: str) -> str:
        return " / ".join(f"{result[direction][k]:.1f}" for k in ("r1", "r5", "r10"))

    def optional(section: str, key: str, form: str) -> str:
        value = (result.get(section) or {}).get(key)
        return "–" if value is None or value != value else format(value, form)

    return [
        result["protocol"],
        result["split"],
        recalls("i2t"),
        recalls("t2i"),
        f"{result['rsum']:.1f}",
        f"{result['i2t']['map_at_r']:.1f} / {result['t2i']['map_at_r']:.1f}",
        f"{optional('uncertainty', 'corr_r1_i2t', '.2f')} / {optional('uncertainty', 'corr_r1_t2i', '.2f')}",
        optional("judgments", "expert_tau_c", ".1f"),
        optional("judgments", "crowd_tau_b", ".1f"),
    ]
