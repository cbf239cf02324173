"""Sets of pairs: N images and M captions, each caption of one image."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from vacsr.errors import DataError, NoSuchSplit, ShapeMismatch, UsageError
from vacsr.provenance import UNKNOWN, Provenance


class LabelledPairs:
    """What all sets of pairs share, whatever their inputs: the base of frozen dataclasses."""

    image_ids: tuple[str, ...]  # [N], unique
    caption_ids: tuple[str, ...]  # [M], unique
    caption_image: Tensor  # [M] int64, the row of each caption's image
    captions: tuple[str, ...] | None  # [M] texts, where known
    split: str
    provenance: Provenance

    def __len__(self) -> int:
        return len(self.caption_ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()})"

    def describe(self) -> str:
        raise NotImplementedError

    def check_labels(self) -> None:
        """Unique ids, an image for every caption, and no blank text."""
        check_unique(self.image_ids, kind="image")
        check_unique(self.caption_ids, kind="caption")
        check_assignment(self.caption_image, self.caption_ids, images=len(self.image_ids))
        if self.captions is None:
            return
        if len(self.captions) != len(self):
            raise ShapeMismatch(f"{len(self.captions):,} captions and {len(self):,} caption ids — give one text per id")
        blank = [name for name, text in zip(self.caption_ids, self.captions, strict=True) if not text.strip()]
        if blank:
            raise DataError(f"caption {blank[0]!r} has no text ({len(blank):,} in all) — write one or leave it out")

    def labels(self) -> dict[str, Any]:
        """Ids, assignment and texts, as arguments of another set."""
        return {name: getattr(self, name) for name in ("image_ids", "caption_ids", "caption_image", "captions")}

    def taken(self, images: Tensor, captions: Tensor) -> dict[str, Any]:
        """The input fields of the image rows [K] and caption rows [J]."""
        raise NotImplementedError

    def words(self, col: int) -> str:
        """The text of a caption, or its id where texts are not known."""
        return self.caption_ids[col] if self.captions is None else self.captions[col]

    def captions_per_image(self) -> str:
        """``5``, or ``1–3`` where images differ."""
        counts = torch.bincount(self.caption_image, minlength=len(self.image_ids))
        low, high = int(counts.min()), int(counts.max())
        return f"{low}" if low == high else f"{low}–{high}"

    def subset(self, image_rows: Tensor | Sequence[int]) -> Self:
        """These images, in the order given, with all their captions, in the order they had.

        ``image_rows``: row numbers [K], or a mask [N] of booleans.
        """
        rows = as_rows(image_rows, count=len(self.image_ids), device=self.caption_image.device)
        new_row = torch.full((len(self.image_ids),), -1, dtype=torch.int64, device=rows.device)
        new_row[rows] = torch.arange(len(rows), device=rows.device)
        captions = (new_row[self.caption_image] >= 0).nonzero().flatten()
        return self._chosen(rows, captions, new_row[self.caption_image[captions]])

    def subset_captions(self, captions: Tensor) -> Self:
        """These captions, rows [K] that rise, and their images; no image without a caption is left."""
        rows, owner = torch.unique(self.caption_image[captions], return_inverse=True)
        return self._chosen(rows, captions, owner)

    def _chosen(self, rows: Tensor, captions: Tensor, owner: Tensor) -> Self:
        return replace(  # type: ignore[type-var]
            self,
            **self.taken(rows, captions),
            image_ids=tuple(self.image_ids[row] for row in rows.tolist()),
            caption_ids=tuple(self.caption_ids[row] for row in captions.tolist()),
            caption_image=owner,
            captions=None if self.captions is None else tuple(self.captions[row] for row in captions.tolist()),
        )

    def split_images(self, share: float, seed: int) -> tuple[Self, Self]:
        """Train and dev: hold out a ``share`` of the images (rounded, at least one) as "dev".

        By image, so that no image has captions on both sides; the same seed gives the same two sets.
        """
        count = len(self.image_ids)
        if not 0 < share < 1 or count < 2:
            raise UsageError(f"cannot hold out a share of {share} of {count} images — try share=0.1 of two or more")
        held_out = min(max(round(share * count), 1), count - 1)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        train, dev = self.subset(order[held_out:].sort().values), self.subset(order[:held_out].sort().values)
        return replace(train, split="train"), replace(dev, split="dev")  # type: ignore[type-var]


@dataclass(frozen=True, eq=False, repr=False)
class PairSet(LabelledPairs):
    """Cached features of N images and M captions. An image without captions is a distractor.

    >>> pairs = PairSet(torch.ones(2, 4), torch.ones(3, 5), ("a", "b"), ("a#0", "a#1", "b#0"), torch.tensor([0, 0, 1]))
    >>> len(pairs), pairs.subset([1]).caption_ids
    (3, ('b#0',))
    >>> pairs.describe()
    'all: 2 images (4 dims), 3 captions (5 dims), 1–2 per image, backbone unknown'
    """

    images: Tensor  # [N, D_image] float32, cached features
    texts: Tensor  # [M, D_text] float32
    image_ids: tuple[str, ...]
    caption_ids: tuple[str, ...]
    caption_image: Tensor
    captions: tuple[str, ...] | None = None
    split: str = "all"
    provenance: Provenance = UNKNOWN

    def __post_init__(self) -> None:
        _check_features(self.images, self.image_ids, kind="image")
        _check_features(self.texts, self.caption_ids, kind="caption")
        self.check_labels()

    def describe(self) -> str:
        (images, image_dims), (captions, text_dims) = self.images.shape, self.texts.shape
        sizes = f"{images:,} images ({image_dims} dims), {captions:,} captions ({text_dims} dims)"
        backbone = self.provenance.backbone or "unknown"
        return f"{self.split}: {sizes}, {self.captions_per_image()} per image, backbone {backbone}"

    def digest(self) -> str:
        data = hashlib.sha256()
        for tensor in (self.images, self.texts, self.caption_image):
            data.update(tensor.contiguous().numpy().tobytes())
        return data.hexdigest()

    def taken(self, images: Tensor, captions: Tensor) -> dict[str, Any]:
        return {"images": self.images[images], "texts": self.texts[captions]}


def as_rows(image_rows: Tensor | Sequence[int], *, count: int, device: torch.device) -> Tensor:
    """Row numbers [K] int64 from row numbers or a mask, each inside 0 … count - 1."""
    rows = torch.as_tensor(image_rows, device=device).flatten()
    if rows.dtype == torch.bool and len(rows) == count:
        return rows.nonzero().flatten()
    whole = not (rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool)
    if len(rows) and not (whole and int(rows.min()) >= 0 and int(rows.max()) < count):
        raise DataError(f"rows {rows[:3].tolist()} … are out of range — give rows below {count}, or a mask of {count}")
    return rows.long()


def _check_features(features: Tensor, ids: Sequence[str], *, kind: str) -> None:
    """Finite float32 features [R, D] with R ≥ 1 and D ≥ 1, and one id per row."""
    shape = list(features.shape)
    if features.ndim != 2 or shape[1] == 0 or shape[0] != len(ids):
        raise ShapeMismatch(f"{kind} features have shape {shape} for {len(ids):,} ids — pass [rows, dims], one per id")
    if shape[0] == 0:
        raise DataError(f"no {kind}s: the {kind} features have shape {shape} — give at least one {kind}")
    if features.dtype != torch.float32:
        raise DataError(f"{kind} features are {features.dtype}, expected torch.float32 — convert them with .float()")
    bad = (~torch.isfinite(features).all(dim=1)).nonzero().flatten().tolist()
    if bad:
        message = f"{len(bad):,} of {len(ids):,} {kind}s have NaN or infinite features, first {kind} {ids[bad[0]]!r}"
        raise DataError(f"{message} — embed these again, or leave them out")


def check_unique(ids: Sequence[str], *, kind: str) -> None:
    if len(set(ids)) < len(ids):
        name, times = Counter(ids).most_common(1)[0]
        raise DataError(f"duplicate {kind} id {name!r} ({times:,} times) — give every {kind} its own id")


def check_assignment(caption_image: Tensor, caption_ids: Sequence[object], *, images: int) -> None:
    """``caption_image`` is int64 [M] and each value is one of the ``images`` rows."""
    if list(caption_image.shape) != [len(caption_ids)]:
        message = f"caption_image has shape {list(caption_image.shape)}, expected [{len(caption_ids)}]"
        raise ShapeMismatch(f"{message} — give one image row per caption")
    if caption_image.dtype != torch.int64:
        raise DataError(f"caption_image is {caption_image.dtype}, expected torch.int64 — convert it with .long()")
    lost = ((caption_image < 0) | (caption_image >= images)).nonzero().flatten().tolist()
    if lost:
        name, row = caption_ids[lost[0]], int(caption_image[lost[0]])
        message = f"caption {name!r} points to image row {row}, expected 0 to {images - 1}"
        raise DataError(f"{message} ({len(lost):,} such captions) — add the image or leave the caption out")


def check_split(split: str, counts: Mapping[str, int], *, source: str) -> None:
    """``split`` is one of the splits that exist, given with their image counts."""
    if split not in counts:
        known = ", ".join(f"{name} ({count:,} images)" for name, count in counts.items())
        raise NoSuchSplit(f"{source} has no split {split!r}; it has {known} — ask for one of these, or for all")
