"""What a set of pairs must satisfy. Each check returns nothing, or raises an error that names the first offender."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vacsr.errors import DataError, NoSuchSplit, ShapeMismatch


def check_matrix(features: Tensor, ids: Sequence[str], *, kind: str) -> None:
    """Float32 features [R, D] with R ≥ 1 rows, D ≥ 1, and one id per row. ``kind`` is "image" or "caption"."""
    shape = list(features.shape)
    if features.ndim != 2 or shape[1] == 0:
        raise ShapeMismatch(f"{kind} features have shape {shape}, expected [rows, dims] — pass one row per {kind}")
    if features.dtype != torch.float32:
        raise DataError(f"{kind} features are {features.dtype}, expected torch.float32 — convert them with .float()")
    if shape[0] == 0:
        raise DataError(f"no {kind}s: the {kind} features have shape {shape} — give at least one {kind}")
    if shape[0] != len(ids):
        message = f"{shape[0]:,} rows of {kind} features and {len(ids):,} {kind} ids — give one id per row"
        raise ShapeMismatch(message)


def check_unique(ids: Sequence[str], *, kind: str) -> None:
    """Every id occurs once.

    >>> check_unique(["a", "b", "a"], kind="image")
    Traceback (most recent call last):
    vacsr.errors.DataError: image id 'a' is given 2 times, expected once — give every image its own id
    """
    if len(set(ids)) == len(ids):
        return
    name, times = next((name, times) for name, times in Counter(ids).items() if times > 1)
    raise DataError(f"{kind} id {name!r} is given {times:,} times, expected once — give every {kind} its own id")


def check_finite(features: Tensor, ids: Sequence[str], *, kind: str) -> None:
    """No NaN or infinity in features [R, D]."""
    bad = (~torch.isfinite(features).all(dim=1)).nonzero().flatten().tolist()
    if bad:
        message = f"{len(bad):,} of {len(ids):,} {kind}s have NaN or infinite features, first {kind} {ids[bad[0]]!r}"
        raise DataError(f"{message} — embed these again, or leave them out")


def check_assignment(caption_image: Tensor, caption_ids: Sequence[str], *, images: int) -> None:
    """``caption_image`` is int64 [M] and each value is one of the ``images`` rows."""
    if list(caption_image.shape) != [len(caption_ids)]:
        shape = list(caption_image.shape)
        message = f"caption_image has shape {shape}, expected [{len(caption_ids)}] — give one image row per caption"
        raise ShapeMismatch(message)
    if caption_image.dtype != torch.int64:
        raise DataError(f"caption_image is {caption_image.dtype}, expected torch.int64 — convert it with .long()")
    lost = ((caption_image < 0) | (caption_image >= images)).nonzero().flatten().tolist()
    if lost:
        name, row = caption_ids[lost[0]], int(caption_image[lost[0]])
        message = f"caption {name!r} points to image row {row}, expected 0 to {images - 1}"
        raise DataError(f"{message} ({len(lost):,} such captions) — add the image or leave the caption out")


def check_text(captions: Sequence[str], caption_ids: Sequence[str]) -> None:
    """One text per caption id, none of them blank."""
    if len(captions) != len(caption_ids):
        message = f"{len(captions):,} caption texts and {len(caption_ids):,} caption ids — give one text per id"
        raise ShapeMismatch(message)
    blank = [name for name, text in zip(caption_ids, captions, strict=True) if not text.strip()]
    if blank:
        message = f"caption {blank[0]!r} has no text ({len(blank):,} such captions), expected words"
        raise DataError(f"{message} — write a text for it or leave the caption out")


def check_split(split: str, counts: Mapping[str, int], *, source: str) -> None:
    """``split`` is one of the splits that exist, given with their image counts.

    >>> check_split("val", {"train": 800, "dev": 200}, source="captions.json")
    Traceback (most recent call last):
    vacsr.errors.NoSuchSplit: captions.json has no split 'val'; it has train (800 images), dev (200 images) — ask for \
one of these, or for all
    """
    if split not in counts:
        known = ", ".join(f"{name} ({count:,} images)" for name, count in counts.items())
        raise NoSuchSplit(f"{source} has no split {split!r}; it has {known} — ask for one of these, or for all")
