"""What is judged: scores of all pairs, from a model of ours or from a matrix that anybody made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from vacsr.errors import ShapeMismatch

_ROWS = 256  # images a block


class Scores(Protocol):
    """Scores of N images and M captions; :class:`vacsr.scoring.PairScores` and :class:`MatrixScores` are such."""

    def blocks(self) -> Iterator[Tensor]:
        """Consecutive row blocks [b, M]; the same numbers every time."""

    @property
    def score(self) -> Tensor:
        """The whole matrix. [N, M]"""

    def score_of(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Of the pairs (rows[n], cols[n]). [P], [P] -> [P]"""

    def uncertainty(self, rows: Tensor, cols: Tensor) -> Tensor | None:
        """Of the pairs (rows[n], cols[n]); None where there is none. [P], [P] -> [P]"""

    def grade(self, score: Tensor) -> Tensor | None:
        """Scores as grades in [0, 1], order kept; None where nobody says how. [...] -> [...]"""


@dataclass(frozen=True, eq=False)
class MatrixScores:
    """A score matrix as it is, and perhaps the uncertainty of every pair.

    >>> import torch
    >>> MatrixScores(torch.eye(2)).score_of(torch.tensor([0, 1]), torch.tensor([0, 0]))
    tensor([1., 0.])
    """

    score: Tensor
    """[N, M]"""
    sigma: Tensor | None = None
    """[N, M]"""

    def __post_init__(self) -> None:
        shape = list(self.score.shape)
        if self.score.ndim != 2:
            raise ShapeMismatch(f"scores have shape {shape}, expected [images, captions] — one row an image")
        if self.sigma is not None and list(self.sigma.shape) != shape:
            raise ShapeMismatch(
                f"uncertainties have shape {list(self.sigma.shape)}, the scores {shape} — give one a score"
            )

    def blocks(self) -> Iterator[Tensor]:
        """Views of some rows."""
        for start in range(0, len(self.score), _ROWS):
            yield self.score[start : start + _ROWS]

    def score_of(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Entries of the matrix."""
        return self.score[rows, cols]

    def uncertainty(self, rows: Tensor, cols: Tensor) -> Tensor | None:
        """Entries of the other matrix."""
        return None if self.sigma is None else self.sigma[rows, cols]

    def grade(self, score: Tensor) -> Tensor | None:
        """None: a foreign score's scale is not known."""
        return None
