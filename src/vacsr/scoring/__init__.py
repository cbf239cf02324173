"""Scores and uncertainties of image-text pairs from a trained model.

>>> from vacsr.scoring import PairScorer  # PairScorer(model).score_all(images, texts).topk(10)
"""

from vacsr.scoring.folded import BlockScorer, Engine, Precision
from vacsr.scoring.scorer import (
    AlignedScores,
    Features,
    Images,
    PairScorer,
    PairScores,
    Texts,
    choose_device,
    choose_engine,
)
from vacsr.scoring.topk import BothTopK, Direction, TopK

__all__ = [
    "AlignedScores",
    "BlockScorer",
    "BothTopK",
    "Direction",
    "Engine",
    "Features",
    "Images",
    "PairScorer",
    "PairScores",
    "Precision",
    "Texts",
    "TopK",
    "choose_device",
    "choose_engine",
]
