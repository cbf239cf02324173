"""Images, captions, and which caption belongs to which image: what training and evaluation read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.data.checks import check_assignment, check_finite, check_matrix, check_text, check_unique
from vacsr.errors import DataError, ProvenanceMismatch, UsageError


@dataclass(frozen=True)
class Provenance:
    """Where embeddings come from; "" means unknown."""

    backbone: str = ""
    """The towers."""
    preprocessing: str = ""
    """How pixels and words became tensors."""
    revision: str = ""
    """The version of the weights."""

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Provenance:
        """Read it from a file's metadata; what is not there is unknown."""
        return cls(**{field.name: metadata.get(field.name, "") for field in fields(cls)})

    def as_metadata(self) -> dict[str, str]:
        """The known fields, as a file's metadata holds them.

        >>> Provenance("tiny:").as_metadata()
        {'backbone': 'tiny:'}
        """
        return {name: value for name, value in asdict(self).items() if value}

    def check(self, other: Provenance) -> None:
        """Raise when ``other`` comes from elsewhere; call it on what the model expects. Unknown matches anything.

        >>> Provenance("clip:a").check(Provenance("clip:a", revision="2"))
        >>> Provenance("clip:a").check(Provenance("clip:b"))
        Traceback (most recent call last):
        vacsr.errors.ProvenanceMismatch: the model expects embeddings with backbone 'clip:a', these have 'clip:b' — \
embed the data as the model's were, or train a model on these
        """
        given = asdict(other)
        for name, expected in asdict(self).items():
            if expected and given[name] and expected != given[name]:
                message = f"the model expects embeddings with {name} {expected!r}, these have {given[name]!r}"
                raise ProvenanceMismatch(f"{message} — embed the data as the model's were, or train a model on these")


@dataclass(frozen=True, eq=False)
class PairSet:
    """N images and M captions, each caption of one image. An image without captions is a distractor.

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
    provenance: Provenance = Provenance()

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

    def __len__(self) -> int:
        """The number of captions."""
        return len(self.caption_ids)

    def describe(self) -> str:
        """One line: split, sizes, captions per image, backbone."""
        each = torch.bincount(self.caption_image, minlength=len(self.image_ids))
        low, high = int(each.min()), int(each.max())
        per_image = f"{low}" if low == high else f"{low}–{high}"
        (images, image_dims), (captions, text_dims) = self.images.shape, self.texts.shape
        sizes = f"{images:,} images ({image_dims} dims), {captions:,} captions ({text_dims} dims)"
        return f"{self.split}: {sizes}, {per_image} per image, backbone {self.provenance.backbone or 'unknown'}"

    def subset(self, image_rows: Tensor | Sequence[int]) -> PairSet:
        """These images, in the order given, with all their captions, in the order they had.

        ``image_rows``: row numbers [K], or a mask [N] of booleans.
        """
        rows = _as_rows(image_rows, count=len(self.image_ids), device=self.caption_image.device)
        new_row = torch.full((len(self.image_ids),), -1, dtype=torch.int64, device=rows.device)
        new_row[rows] = torch.arange(len(rows), device=rows.device)
        kept = (new_row[self.caption_image] >= 0).nonzero().flatten()
        names = kept.tolist()
        return replace(
            self,
            images=self.images[rows],
            texts=self.texts[kept],
            image_ids=tuple(self.image_ids[row] for row in rows.tolist()),
            caption_ids=tuple(self.caption_ids[row] for row in names),
            caption_image=new_row[self.caption_image[kept]],
            captions=None if self.captions is None else tuple(self.captions[row] for row in names),
        )

    def with_caption_image(self, new_assignment: Tensor) -> PairSet:
        """The same images and captions, with captions [M] assigned to other images (label noise)."""
        return replace(self, caption_image=new_assignment)

    def split_images(self, share: float, seed: int) -> ImageSplit:
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
        return ImageSplit(replace(self.subset(train), split="train"), replace(self.subset(dev), split="dev"))


class ImageSplit(NamedTuple):
    """Two sets of pairs that share no image."""

    train: PairSet
    dev: PairSet


def _as_rows(image_rows: Tensor | Sequence[int], *, count: int, device: torch.device) -> Tensor:
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
