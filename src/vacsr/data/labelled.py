"""What all sets of pairs share: ids, labels, and the choice of some images with their captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from vacsr.errors import DataError, UsageError
from vacsr.provenance import Provenance

if TYPE_CHECKING:
    from typing import Self

P = TypeVar("P")


class ImageSplit(NamedTuple, Generic[P]):
    """Two sets of pairs that share no image."""

    train: P
    dev: P


class LabelledPairs:
    """N images and M captions, each caption of one image: the part of a frozen dataclass that knows no inputs."""

    image_ids: tuple[str, ...]
    caption_ids: tuple[str, ...]
    caption_image: Tensor
    captions: tuple[str, ...] | None
    split: str
    provenance: Provenance

    def __len__(self) -> int:
        """The number of captions."""
        return len(self.caption_ids)

    def taken(self, rows: Tensor, kept: Tensor) -> dict[str, Any]:
        """The input fields of the image rows [K] and caption rows [J]."""
        raise NotImplementedError

    def captions_per_image(self) -> str:
        """``5``, or ``1–3`` where images differ."""
        each = torch.bincount(self.caption_image, minlength=len(self.image_ids))
        low, high = int(each.min()), int(each.max())
        return f"{low}" if low == high else f"{low}–{high}"

    def subset(self, image_rows: Tensor | Sequence[int]) -> Self:
        """These images, in the order given, with all their captions, in the order they had.

        ``image_rows``: row numbers [K], or a mask [N] of booleans.
        """
        rows = as_rows(image_rows, count=len(self.image_ids), device=self.caption_image.device)
        new_row = torch.full((len(self.image_ids),), -1, dtype=torch.int64, device=rows.device)
        new_row[rows] = torch.arange(len(rows), device=rows.device)
        kept = (new_row[self.caption_image] >= 0).nonzero().flatten()
        names = kept.tolist()
        return replace(  # type: ignore[type-var]
            self,
            **self.taken(rows, kept),
            image_ids=tuple(self.image_ids[row] for row in rows.tolist()),
            caption_ids=tuple(self.caption_ids[row] for row in names),
            caption_image=new_row[self.caption_image[kept]],
            captions=None if self.captions is None else tuple(self.captions[row] for row in names),
        )

    def with_caption_image(self, new_assignment: Tensor) -> Self:
        """The same images and captions, with captions [M] assigned to other images (label noise)."""
        return replace(self, caption_image=new_assignment)  # type: ignore[type-var]

    def split_images(self, share: float, seed: int) -> ImageSplit[Self]:
        """Hold out a ``share`` of the images (rounded, at least one) as "dev"; the rest is "train".

        By image, so that no image has captions on both sides; the same seed gives the same two sets.
        """
        count = len(self.image_ids)
        if not 0 < share < 1 or count < 2:
            message = f"cannot hold out a share of {share} of {count} images; expected 0 < share < 1 and two images"
            raise UsageError(f"{message} — try share=0.1")
        held = min(max(round(share * count), 1), count - 1)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        dev, train = order[:held].sort().values, order[held:].sort().values
        named = [replace(self.subset(rows), split=name) for name, rows in (("train", train), ("dev", dev))]  # type: ignore[type-var]
        return ImageSplit(named[0], named[1])


def as_rows(image_rows: Tensor | Sequence[int], *, count: int, device: torch.device) -> Tensor:
    """Row numbers [K] int64 from row numbers or a mask, each inside 0 … count - 1."""
    rows = torch.as_tensor(image_rows, device=device).flatten()
    if rows.dtype == torch.bool:
        if len(rows) != count:
            raise DataError(f"the mask has {len(rows)} entries, expected {count} — give one boolean per image")
        return rows.nonzero().flatten()
    if len(rows) and (rows.is_floating_point() or rows.is_complex()):
        raise DataError(f"image rows are {rows.dtype}, expected integers or a mask — convert them with .long()")
    rows = rows.long()
    outside = rows[(rows < 0) | (rows >= count)].tolist()
    if outside:
        raise DataError(f"image row {outside[0]} does not exist, expected 0 to {count - 1} — check the rows")
    return rows
