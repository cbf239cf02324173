"""Cached embeddings on disk: safetensors with ``image`` and ``text``, or two ``.npy`` files."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vacsr.data.captions import CaptionTable, number_captions, read_captions
from vacsr.data.checks import check_assignment, check_split
from vacsr.data.pairs import PairSet, Provenance
from vacsr.errors import DataError, NoSuchSplit, ShapeMismatch, UsageError
from vacsr.files import read_tensors, write_tensors

_NAME_THEM = "add captions=FILE (.json, .csv or .jsonl), or a tensor caption_image [M] with each caption's image row"


@dataclass(frozen=True, eq=False)
class _Arrays:
    """What the file holds, in its own dtype."""

    image: Tensor
    """[N, D_image]"""
    text: Tensor
    """[M, D_text]"""
    per_image: int | None
    """C where the text was [N, C, D]."""
    caption_image: Tensor | None
    """[M] int64, where the layout or the file says it."""
    provenance: Provenance


def load_features(
    path: str | Path, *, captions: str | Path | None = None, text: str | Path | None = None, split: str | None = None
) -> PairSet:
    """Read cached embeddings as pairs; any float dtype in, float32 out.

    ``path``: safetensors with ``image`` [N, D] and ``text`` [N, C, D] or [M, D] (with an optional int tensor
    ``caption_image`` [M], and metadata ``backbone``, ``preprocessing``, ``revision``), or a ``.npy`` file of images
    with ``text`` naming the ``.npy`` file of texts. ``captions``: the ids, texts and splits, see
    :mod:`vacsr.data.captions`; without it, ids are row numbers. ``split``: None or "all" for everything.
    """
    arrays = _read_arrays(Path(path).expanduser(), text=None if text is None else Path(text).expanduser())
    table = _numbered(arrays, source=str(path)) if captions is None else read_captions(captions)
    _check_agreement(arrays, table, path=str(path))
    everything = split is None or split == "all"
    kept = torch.ones(len(table.image_ids), dtype=torch.bool) if everything else _in_split(table, str(split))
    if table.apart is not None and arrays.caption_image is None:  # nothing can tell a shuffled file from this one
        message = f"{table.apart}; images are taken to stand in the features in the order of first appearance"
        warnings.warn(f"{message} — add a column image_row with each image's row, counted from 0", stacklevel=2)
    return _select(arrays, table, kept=kept, split="all" if split is None else split)


def write_features(
    path: str | Path,
    *,
    image: Tensor,
    text: Tensor,
    caption_image: Tensor | None = None,
    provenance: Provenance | None = None,
) -> None:
    """Write embeddings as :func:`load_features` reads them, in the dtype given.

    ``image`` [N, D_image]; ``text`` [N, C, D_text], or [M, D_text] with ``caption_image`` [M].
    """
    tensors = {"image": image, "text": text}
    if caption_image is not None:
        tensors["caption_image"] = caption_image
    origin = provenance or Provenance()
    rows = _arrays(tensors, provenance=origin, source=str(path)).caption_image
    if rows is None:
        raise DataError(f"text has shape {list(text.shape)}, nothing names its images — pass caption_image= [M]")
    check_assignment(rows, [str(row) for row in range(len(rows))], images=len(image))
    write_tensors(Path(path), tensors, metadata=origin.as_metadata())


def _read_arrays(path: Path, *, text: Path | None) -> _Arrays:
    if path.suffix.lower() == ".npy":
        if text is None:
            raise UsageError(f"{path} holds images only — name the texts too: features:{path},text=FILE.npy")
        tensors = {"image": _read_npy(path), "text": _read_npy(text)}
        return _arrays(tensors, provenance=Provenance(), source=str(path))
    if path.suffix.lower() != ".safetensors":
        raise DataError(f"{path} is not a features file — give .safetensors, or .npy with text=FILE.npy")
    if text is not None:
        raise UsageError(f"text= goes with .npy images, {path} holds its texts itself — leave text={text} out")
    tensors, metadata = read_tensors(path)
    return _arrays(tensors, provenance=Provenance.from_metadata(metadata), source=str(path))


def _read_npy(path: Path) -> Tensor:
    """One array as a tensor; nothing in the file is executed."""
    if not path.is_file():
        raise DataError(f"no such file: {path} — check the path")
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path} is not a whole .npy array ({error}) — write or copy it again") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        found = array.dtype if isinstance(array, np.ndarray) else "an archive"
        raise DataError(f"{path} holds {found}, expected one array of floats — save it with numpy.save")
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(native if native.dtype.itemsize <= 8 else native.astype(np.float64))


def _arrays(tensors: Mapping[str, Tensor], *, provenance: Provenance, source: str) -> _Arrays:
    """Flatten [N, C, D] texts, and see that shapes and dtypes can be read."""
    for name in ("image", "text"):
        if name not in tensors:
            found = ", ".join(sorted(tensors)) or "nothing"
            raise DataError(f"{source} holds {found}, expected tensors image and text — rename them")
        if not tensors[name].is_floating_point():
            raise DataError(f"{name} in {source} is {tensors[name].dtype}, expected floats — store embeddings there")
    image, text = tensors["image"], tensors["text"]
    if image.ndim != 2:
        raise ShapeMismatch(f"image in {source} has shape {list(image.shape)}, expected [N, D] — pool or flatten it")
    if text.ndim not in (2, 3):
        shape = list(text.shape)
        raise ShapeMismatch(f"text in {source} has shape {shape}, expected [N, C, D] or [M, D] — pool or flatten it")
    per_image = text.shape[1] if text.ndim == 3 else None
    if per_image is not None and text.shape[0] != image.shape[0]:
        message = f"text in {source} is for {text.shape[0]:,} images, image for {image.shape[0]:,}"
        raise ShapeMismatch(f"{message} — write both for the same images")
    caption_image = _caption_image(tensors.get("caption_image"), image=image, text=text, source=source)
    return _Arrays(image, text.flatten(0, -2), per_image, caption_image, provenance)


def _caption_image(given: Tensor | None, *, image: Tensor, text: Tensor, source: str) -> Tensor | None:
    """The image row of each caption [M]: from the layout [N, C, D], from the file, or unknown."""
    implied = torch.arange(len(image)).repeat_interleave(text.shape[1]) if text.ndim == 3 else None
    if given is None:
        return implied
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise DataError(f"caption_image in {source} is {given.dtype}, expected integers — store image rows there")
    captions = text.shape[:-1].numel()
    if given.numel() != captions:
        message = f"caption_image in {source} has {given.numel():,} entries, text has {captions:,} captions"
        raise ShapeMismatch(f"{message} — give one image row per caption")
    rows = given.long().flatten()
    if implied is not None and not torch.equal(rows, implied):
        raise DataError(f"caption_image in {source} contradicts the layout [N, C, D] of text — leave it out")
    return rows


def _numbered(arrays: _Arrays, *, source: str) -> CaptionTable:
    """Ids by row number, where no captions file names them."""
    if arrays.caption_image is None:
        message = f"nothing says which image each of the {len(arrays.text):,} captions in {source} belongs to"
        raise DataError(f"{message} — {_NAME_THEM}")
    rows = arrays.caption_image.tolist()
    image_ids = tuple(str(row) for row in range(len(arrays.image)))
    return CaptionTable(source, image_ids, number_captions([str(row) for row in rows]), tuple(rows))


def _check_agreement(arrays: _Arrays, table: CaptionTable, *, path: str) -> None:
    """The captions file and the features speak of the same images and captions."""
    counts = (
        ("images", len(table.image_ids), len(arrays.image)),
        ("captions", len(table.caption_ids), len(arrays.text)),
    )
    if counts[0][1] == counts[0][2] and arrays.per_image is not None:
        _check_per_image(table, arrays.per_image, path=path)
    for kind, named, stored in counts:
        if named != stored:
            message = f"{table.source} has {named:,} {kind}, the features in {path} have {stored:,}"
            raise ShapeMismatch(f"{message} — give the captions file that these features were made from")
    if arrays.caption_image is None:
        return
    wrong = (torch.tensor(table.caption_image, dtype=torch.int64) != arrays.caption_image).nonzero().flatten().tolist()
    if wrong:
        name, stored = table.caption_ids[wrong[0]], int(arrays.caption_image[wrong[0]])
        message = f"caption {name!r} belongs to image row {table.caption_image[wrong[0]]} in {table.source}"
        raise DataError(f"{message}, to row {stored} in {path} — put both in the same order")


def _check_per_image(table: CaptionTable, per_image: int, *, path: str) -> None:
    """The layout [N, C, D] needs exactly C captions for every image."""
    found = Counter(table.caption_image)
    for row, name in enumerate(table.image_ids):
        if found[row] != per_image:
            message = f"image {name!r} has {found[row]} captions in {table.source}, {per_image} in {path}"
            raise ShapeMismatch(f"{message} — give each image {per_image}, or store text as [M, D]")


def _in_split(table: CaptionTable, split: str) -> Tensor:
    """The images [N] of one split, as a mask."""
    if table.splits is None:
        message = f"split {split!r} was asked for, {table.source} has no splits"
        raise NoSuchSplit(f'{message} — add captions=FILE with "split" for every image, or hold out with split_images')
    check_split(split, Counter(table.splits), source=table.source)
    return torch.tensor([name == split for name in table.splits])


def _select(arrays: _Arrays, table: CaptionTable, *, kept: Tensor, split: str) -> PairSet:
    """The pairs of the kept images; captions of no image stay, so that :class:`PairSet` can name them."""
    caption_image = torch.tensor(table.caption_image, dtype=torch.int64)
    if bool(kept.all()):
        chosen = torch.arange(len(caption_image))
    else:
        chosen = kept[caption_image].nonzero().flatten()
        caption_image = (kept.cumsum(0) - 1)[caption_image[chosen]]
    rows = chosen.tolist()
    return PairSet(
        images=arrays.image[kept].float(),
        texts=arrays.text[chosen].float(),
        image_ids=tuple(name for name, keep in zip(table.image_ids, kept.tolist(), strict=True) if keep),
        caption_ids=tuple(table.caption_ids[row] for row in rows),
        caption_image=caption_image,
        captions=None if table.captions is None else tuple(table.captions[row] for row in rows),
        split=split,
        provenance=arrays.provenance,
    )
