"""The uncertainty of a protocol's answers against whether they are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vacsr.evaluate.galleries import DIRECTIONS, Direction, Gallery
from vacsr.evaluate.metrics import average_precisions_at_r, hits_at
from vacsr.evaluate.ranks import BothRanks
from vacsr.evaluate.scored import Scores
from vacsr.evaluate.uncertainty import Values, Width, aurc, binned_correlation, risk_coverage, topk_correlation

_TOP = 10
_POINTS = 20  # of a risk–coverage curve


class TopUncertainty:
    """σ of each query's ten best answers. What the whole gallery says is kept, for protocols share it."""

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self._whole: dict[Direction, Tensor | None] = {}

    def of(self, gallery: Gallery, direction: Direction) -> Tensor | None:
        """Best answer first; None without σ. -> [Q, min(10, items)]"""
        if not gallery.whole:
            return self._compute(gallery, direction)
        if direction not in self._whole:
            self._whole[direction] = self._compute(gallery, direction)
        return self._whole[direction]

    def _compute(self, gallery: Gallery, direction: Direction) -> Tensor | None:
        first = torch.zeros(1, dtype=torch.int64)
        if self.scores.uncertainty(first, first) is None:
            return None
        items = gallery.topk(self.scores, _TOP, direction=direction).index
        query = gallery.rows_of(direction).to(items.device).unsqueeze(1).expand_as(items)
        rows, cols = (query, items) if direction == "i2t" else (items, query)
        sigma = self.scores.uncertainty(rows.reshape(-1), cols.reshape(-1))
        return None if sigma is None else sigma.view_as(items).cpu()


def uncertainty_result(scores: Scores, ranks: BothRanks, *, bins: Width = "count") -> dict[str, Any] | None:
    """Of everything in one gallery; see :func:`pooled_uncertainty`."""
    gallery = Gallery(ranks.i2t.positives, ranks.t2i.positives)
    return pooled_uncertainty(TopUncertainty(scores), [gallery], [ranks], bins=bins)


def pooled_uncertainty(
    top: TopUncertainty, galleries: Sequence[Gallery], ranks: Sequence[BothRanks], *, bins: Width = "count"
) -> dict[str, Any] | None:
    """σ of the best hit against R@1 (ten bins), risk and coverage, and mean σ of the top K against mAP@R.

    The queries of all galleries together, ``ranks`` being one for each; None without σ.
    """
    result: dict[str, Any] = {}
    for direction in DIRECTIONS:
        parts = [top.of(gallery, direction) for gallery in galleries]
        own = [both.i2t if direction == "i2t" else both.t2i for both in ranks]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        sigma = torch.cat(known)
        hit = torch.cat([hits_at(found, 1) for found in own])
        quality = torch.cat([average_precisions_at_r(found) for found in own])
        result |= _direction(direction, sigma, hit=hit, quality=quality, bins=bins)
    return result


def _direction(direction: Direction, sigma: Tensor, *, hit: Tensor, quality: Tensor, bins: Width) -> dict[str, Any]:
    """sigma [Q, K], hit [Q], quality [Q]"""
    binned = binned_correlation(sigma[:, 0], hit, width=bins)
    top_k = topk_correlation(sigma, quality)
    return {
        f"corr_r1_{direction}": binned.correlation,
        f"aurc_{direction}": 100.0 * aurc(sigma[:, 0], 1.0 - hit),
        f"bins_{direction}": {"sigma": binned.bin_uncertainty.tolist(), "r1": binned.bin_score.tolist()},
        f"topk_{direction}": {"raw": top_k.raw.tolist(), "binned": top_k.binned.tolist()},
        f"risk_{direction}": risk_curve(sigma[:, 0], 1.0 - hit),
    }


def risk_curve(sigma: Values, loss: Values) -> dict[str, list[float]]:
    """Mean loss of the most certain 5%, 10%, …, 100% of the queries, in percent. sigma [Q], loss [Q]

    >>> risk_curve([0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 1.0, 1.0])["risk"][9::5]
    [0.0, 33.33333333333333, 50.0]
    """
    curve = risk_coverage(sigma, loss)
    share = np.arange(1, _POINTS + 1) / _POINTS
    last = np.maximum(np.ceil(share * len(curve.risk) - 1e-9).astype(int), 1) - 1
    return {"coverage": (100 * share).tolist(), "risk": (100 * curve.risk[last]).tolist()}
