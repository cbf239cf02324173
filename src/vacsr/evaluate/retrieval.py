"""Retrieval reports: scores and ids in, the metrics of a protocol out, as a table or as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vacsr.data import PairSet, PhotoSet
from vacsr.data.labelled import LabelledPairs
from vacsr.evaluate.curves import score_curves
from vacsr.evaluate.exact import Truth, exact_metrics
from vacsr.evaluate.galleries import Gallery, fits_in_memory
from vacsr.evaluate.judged import JUDGED, judged_result
from vacsr.evaluate.judgments import Judgments
from vacsr.evaluate.metrics import RetrievalMetrics, retrieval_metrics, rsum
from vacsr.evaluate.outcomes import Outcomes, query_outcomes
from vacsr.evaluate.protocols import PROTOCOLS, check_protocols, protocol_galleries
from vacsr.evaluate.ranks import BothRanks, Ties
from vacsr.evaluate.reliability import TopUncertainty, pooled_uncertainty, uncertainty_result
from vacsr.evaluate.scored import Scores
from vacsr.evaluate.uncertainty import Width
from vacsr.scoring import PairScorer

__all__ = [
    "PROTOCOLS",
    "RetrievalReport",
    "both_ranks",
    "check_protocols",
    "dev_rsum",
    "evaluate_retrieval",
    "evaluate_scores",
    "retrieval_result",
    "uncertainty_result",
]

SCHEMA = 1


@dataclass(frozen=True)
class RetrievalReport:
    """One result per protocol, with the keys of the evaluation JSON."""

    results: tuple[dict[str, Any], ...]
    outcomes: tuple[Outcomes, ...] = field(default=(), compare=False, repr=False)
    """How each query fared, in the order of the results; not part of the JSON."""

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
    truth: Truth | None = None,
) -> RetrievalReport:
    """Score every pair of ``pairs`` and report each protocol.

    ``judgments`` adds agreement with human grades; ``ties`` says who goes first among equal scores; ``bins`` are the
    uncertainty's, of equal count or equal width; ``truth`` adds agreement with exact grades, where they are known.
    """
    protocol_galleries(protocols, pairs)  # what does not fit is refused before the towers work
    return evaluate_scores(
        scorer.score_set(pairs), pairs,
        protocols=protocols, judgments=judgments, ties=ties, bins=bins, truth=truth,
    )  # fmt: skip


def evaluate_scores(
    scores: Scores,
    pairs: LabelledPairs,
    *,
    protocols: Sequence[str] = ("flickr",),
    judgments: Sequence[Judgments] = (),
    ties: Ties = "stable",
    bins: Width = "count",
    truth: Truth | None = None,
) -> RetrievalReport:
    """Report each protocol on scores that are there already; the options are those of :func:`evaluate_retrieval`."""
    if fits_in_memory(pairs):
        _ = scores.score  # asked for once, it is kept: blocks are then views
    shared = _sections(scores, pairs, judgments=judgments, truth=truth)
    missed = shared.get("judgments", {}).pop("auroc_false_negative", None)
    top = TopUncertainty(scores)
    results: list[dict[str, Any]] = []
    outcomes: list[Outcomes] = []
    for name, galleries in protocol_galleries(protocols, pairs).items():
        ranks = [gallery.ranks(scores, ties=ties) for gallery in galleries]
        sigma = pooled_uncertainty(top, galleries, ranks, bins=bins)
        if sigma is not None and "judgments" in shared:
            sigma["auroc_false_negative"] = missed
        head = {"protocol": name, "split": pairs.split}
        results.append({**head, **mean_result(ranks), "uncertainty": sigma, **shared})
        outcomes.append(query_outcomes(name, pairs, galleries=galleries, ranks=ranks))
    return RetrievalReport(tuple(results), tuple(outcomes))


def _sections(
    scores: Scores, pairs: LabelledPairs, *, judgments: Sequence[Judgments], truth: Truth | None
) -> dict[str, Any]:
    """What does not depend on the protocol: human grades, exact grades, and how scores are distributed."""
    result: dict[str, Any] = {}
    for key, split in JUDGED.items():
        found = judged_result(scores, pairs, judgments, split=split)
        if found:
            result[key] = found
    if truth is not None:
        result["exact"] = exact_metrics(scores, truth)._asdict()
    result["scores"] = score_curves(scores, pairs)
    return result


def both_ranks(scores: Scores, pairs: LabelledPairs, *, ties: Ties = "stable") -> BothRanks:
    """Ranks of every labelled match, both directions; streamed where the matrix is too large to keep."""
    return Gallery.of_labels(pairs).ranks(scores, ties=ties)


def retrieval_result(ranks: BothRanks) -> dict[str, Any]:
    """Recalls, mAP@R, R-Precision and median rank per direction, and RSUM."""
    return mean_result([ranks])


def mean_result(ranks: Sequence[BothRanks]) -> dict[str, Any]:
    """The same as means over several galleries."""
    i2t = _mean([retrieval_metrics(both.i2t) for both in ranks])
    t2i = _mean([retrieval_metrics(both.t2i) for both in ranks])
    return {"i2t": i2t._asdict(), "t2i": t2i._asdict(), "rsum": rsum(i2t, t2i)}


def _mean(found: Sequence[RetrievalMetrics]) -> RetrievalMetrics:
    return RetrievalMetrics(*(statistics.fmean(values) for values in zip(*found, strict=True)))


def dev_rsum(scores: Scores, pairs: LabelledPairs) -> float:
    """RSUM alone: what model choice looks at."""
    return float(retrieval_result(both_ranks(scores, pairs))["rsum"])


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
