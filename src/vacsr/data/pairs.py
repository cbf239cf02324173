"""Cached features of images and captions, and which caption belongs to which image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vacsr.data.checks import check_assignment, check_finite, check_matrix, check_text, check_unique
from vacsr.data.labelled import ImageSplit, LabelledPairs
from vacsr.provenance import UNKNOWN, Provenance

__all__ = ["ImageSplit", "PairSet", "Provenance"]


@dataclass(frozen=True, eq=False)
class PairSet(LabelledPairs):
    """N images and M captions, each caption of one image. An image without captions is a distractor.

    >>> import torch
    >>> pairs = PairSet(torch.ones(2, 4), torch.ones(3, 5), ("a", "b"), ("a#0", "a#1", "b#0"), torch.tensor([0, 0, 1]))
    >>> len(pairs), pairs.subset([1]).caption_ids
    (3, ('b#0',))
    >>> pairs.describe()
    'all: 2 images (4 dims), 3 captions (5 dims), 1–2 per image, backbone unknown'
    """

    images: Tensor
    """[N, D_image] float32, cached features."""
    texts: Tensor
    """[M, D_text] float32."""
    image_ids: tuple[str, ...]
    """[N], unique."""
    caption_ids: tuple[str, ...]
    """[M], unique."""
    caption_image: Tensor
    """[M] int64, the row of each caption's image."""
    captions: tuple[str, ...] | None = None
    """[M] texts, where known."""
    split: str = "all"
    provenance: Provenance = UNKNOWN

    def __post_init__(self) -> None:
        check_matrix(self.images, self.image_ids, kind="image")
        check_matrix(self.texts, self.caption_ids, kind="caption")
        check_unique(self.image_ids, kind="image")
        check_unique(self.caption_ids, kind="caption")
        check_assignment(self.caption_image, self.caption_ids, images=len(self.image_ids))
        check_finite(self.images, self.image_ids, kind="image")
        check_finite(self.texts, self.caption_ids, kind="caption")
        if self.captions is not None:
            check_text(self.captions, self.caption_ids)

    def describe(self) -> str:
        """One line: split, sizes, captions per image, backbone."""
        (images, image_dims), (captions, text_dims) = self.images.shape, self.texts.shape
        sizes = f"{images:,} images ({image_dims} dims), {captions:,} captions ({text_dims} dims)"
        backbone = self.provenance.backbone or "unknown"
        return f"{self.split}: {sizes}, {self.captions_per_image()} per image, backbone {backbone}"

    def taken(self, rows: Tensor, kept: Tensor) -> dict[str, Any]:
        """Features of the chosen images and captions."""
        return {"images": self.images[rows], "texts": self.texts[kept]}
