"""Scores and uncertainties of image-text pairs from a trained model.

>>> from vacsr.scoring import PairScorer  # PairScorer(model).score_all(images, texts).topk(10)
"""

from vacsr.scoring.cascade import Precision as Precision
from vacsr.scoring.cascade import choose_engine as choose_engine
from vacsr.scoring.folded import BlockScorer as BlockScorer
from vacsr.scoring.folded import Engine as Engine
from vacsr.scoring.mlp import pair_scores as pair_scores
from vacsr.scoring.scorer import AlignedScores as AlignedScores
from vacsr.scoring.scorer import CosineDistanceScorer as CosineDistanceScorer
from vacsr.scoring.scorer import Images as Images
from vacsr.scoring.scorer import PairScorer as PairScorer
from vacsr.scoring.scorer import PairScores as PairScores
from vacsr.scoring.scorer import Texts as Texts
from vacsr.scoring.scorer import check_cosine as check_cosine
from vacsr.scoring.scorer import open_model as open_model
from vacsr.scoring.topk import Direction as Direction
