"""1 − cosine as a pair's uncertainty: what a score alone says of its mistakes, a measure for every other σ."""

from __future__ import annotations

import torch
from torch import Tensor

from vacsr.methods.base import Embedding
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer, Precision
from vacsr.scoring.posthoc import check_posthoc


class CosineDistanceScorer(PairScorer):
    """Scores as before, with 1 − score as uncertainty. It needs no fit.

    Among the answers to one query it is their ranking over again; it tells sure queries from unsure ones.
    """

    def __init__(
        self, model: MatchingModel, *, device: str | torch.device = "auto", dtype: Precision = torch.float32
    ) -> None:
        check_posthoc(model, "cosine")
        super().__init__(model, device=device, dtype=dtype)

    def uncertainty_of(self, images: Embedding, texts: Embedding, *, rows: Tensor, cols: Tensor) -> Tensor:
        """1 − cosine of the pairs (rows[n], cols[n]); of two networks, 1 − the mean of both cosines. [N]"""
        return 1.0 - self.score_of(images, texts, rows=rows, cols=cols)
