"""Choices that recipes, functions and the command line share. Nothing is imported, so `vacsr --help` stays fast."""

from __future__ import annotations

from typing import Literal

Ties = Literal["stable", "pessimistic"]
"""Equal scores: in index order, or every wrong item before the right one."""
Bins = Literal["count", "equal"]
"""Uncertainty bins: of equal count, or of equal width."""
PostHoc = Literal["none", "cosine"]
"""Uncertainty for a method that scores by a cosine: none, or 1 − cosine."""
Pooling = Literal["auto", "cls", "mean"]
"""How the tokens of a pretrained tower become one vector; ``auto`` as the towers were trained."""
VectorType = Literal["float32", "float16"]
"""How a local index stores vectors."""
BenchName = Literal["scoring", "training", "metrics"]
BenchSize = Literal["small", "coco"]
