"""What to do where a photo is absent or a caption is blank: stop, or leave it out and say so. Never silently."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import torch

from vacsr.data.captions import CaptionTable, take_captions, take_images
from vacsr.data.photos import PhotoSet, warn_left_out
from vacsr.data.sources import StoredPhotos
from vacsr.data.stored import LEAVE_OUT
from vacsr.errors import DataError, UsageError

OnError = Literal["fail", "skip"]
_NAMED = 5  # problems that an error names


class _Problems(NamedTuple):
    """Rows, and what is wrong there."""

    absent: dict[int, str]
    """Images whose photo is not there."""
    blank: dict[int, str]
    """Captions without words."""
    bare: dict[int, str]
    """Images without a caption, or none that is left."""


def photo_set(
    table: CaptionTable,
    photos: StoredPhotos,
    *,
    split: str | None,
    on_error: OnError,
    problems: Sequence[str] = (),
    dropped: Sequence[str] = (),
    captioned: bool = True,
    uncaptioned: str = "",
) -> PhotoSet:
    """The pairs of a table [N images] and its photos [N], after the policy.

    A photo that is absent goes with its captions; a blank caption goes alone, and its photo too if it was the last.
    ``problems`` are those that the reader met itself; ``dropped`` is what the data set is known to leave out, which is
    recorded and is no problem. One line each. A photo without captions is a problem where they are to be ``captioned``;
    ``uncaptioned`` says what else its owner may do.
    """
    if on_error not in ("fail", "skip"):
        raise UsageError(f"on_error is {on_error!r}, expected fail or skip — write on_error=skip to leave problems out")
    found = _find(table, photos, captioned=captioned)
    hint = uncaptioned if found.bare else ""
    lines = [*problems, *found.absent.values(), *found.blank.values(), *found.bare.values()]
    if lines and on_error == "fail":
        _refuse(lines, source=table.source, hint=hint)
    kept = [row for row in range(len(photos)) if row not in found.absent and row not in found.bare]
    if not kept:
        raise DataError(_nothing_left(table, lines, hint=hint))
    if lines:
        warn_left_out(lines, source=table.source)
    worded = [row for row in range(len(table.caption_ids)) if row not in found.blank]
    chosen = take_images(take_captions(table, worded), kept)
    return PhotoSet(
        photos=photos if len(kept) == len(photos) else photos.take(kept),
        image_ids=chosen.image_ids,
        captions=chosen.captions or (),
        caption_ids=chosen.caption_ids,
        caption_image=torch.tensor(chosen.caption_image, dtype=torch.int64),
        split=split or "all",
        skipped=(*dropped, *lines),
    )


def _find(table: CaptionTable, photos: StoredPhotos, *, captioned: bool) -> _Problems:
    texts = table.captions or ()
    absent = {row: f"{photos.name(row)}: no such file" for row in range(len(photos)) if not photos.has(row)}
    blank = {
        row: f"{table.caption_ids[row]}: the caption has no text"
        for row, text in enumerate(texts)
        if not text.strip() and table.caption_image[row] not in absent
    }
    told = {image for row, image in enumerate(table.caption_image) if row not in blank} | set(absent)
    without = [row for row in range(len(photos)) if row not in told] if captioned else []
    return _Problems(absent, blank, bare={row: f"{photos.name(row)}: no caption" for row in without})


def missing(root: Path, *, expected: str) -> DataError:
    """The refusal of a folder that does not hold what a data set needs."""
    found = "is no folder" if not root.is_dir() else "holds " + _listed(root)
    return DataError(f"{root} {found}; expected {expected} — put the files there or correct the path")


def _refuse(lines: Sequence[str], *, source: str, hint: str) -> NoReturn:
    more = " …" if len(lines) > _NAMED else ""
    first = "; ".join(lines[:_NAMED])
    message = f"{source}: {len(lines):,} photos or captions cannot be used: {first}{more}"
    raise DataError(f"{message} — mend them, or {LEAVE_OUT}{_also(hint)}")


def _nothing_left(table: CaptionTable, lines: Sequence[str], *, hint: str) -> str:
    first = f", first {lines[0]}" if lines else ""
    message = f"{table.source}: none of {len(table.image_ids):,} photos can be used{first}"
    return f"{message} — check where the photos lie{_also(hint)}"


def _also(hint: str) -> str:
    return f"; {hint}" if hint else ""


def _listed(root: Path) -> str:
    names = sorted(path.name + "/" * path.is_dir() for path in root.iterdir())
    return ", ".join(names[:8]) + (" …" if len(names) > 8 else "") if names else "nothing"
