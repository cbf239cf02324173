"""Scores of any system from files: a matrix, and the ids of its rows and columns.

The matrix is a ``.npy`` file, which is mapped rather than read, or a ``.safetensors`` file. The ids are a JSON object
with ``images`` and ``captions``, in the order of rows and columns, and perhaps ``caption_image``, the image id of each
caption.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vacsr.config.io import load_json
from vacsr.data.checks import check_unique
from vacsr.data.labelled import LabelledPairs
from vacsr.errors import DataError, ShapeMismatch
from vacsr.evaluate.scored import MatrixScores
from vacsr.files import read_tensors
from vacsr.provenance import UNKNOWN, Provenance

_ROWS = 256  # images checked at a time
_NPY = b"\x93NUMPY"  # how such a file begins
_WHOLE = "where more is better save it as floats; ranks and distances are the reverse: save their negative, as floats"


@dataclass(frozen=True, eq=False)
class MatrixIds(LabelledPairs):
    """The names of a score matrix's rows and columns, and the labels."""

    image_ids: tuple[str, ...]
    """[N], unique."""
    caption_ids: tuple[str, ...]
    """[M], unique."""
    caption_image: Tensor
    """[M] int64, the row of each caption's image."""
    captions: tuple[str, ...] | None = None
    split: str = "all"
    provenance: Provenance = UNKNOWN


@dataclass(frozen=True)
class IdFile:
    """What an ids file says."""

    path: Path
    images: tuple[str, ...]
    captions: tuple[str, ...]
    caption_image: tuple[str, ...] | None
    """[M], the image id of each caption, where the file says it."""


def read_ids(path: Path) -> IdFile:
    """Read ``{"images": […], "captions": […], "caption_image": […]}``; ids are strings or whole numbers."""
    given = _read_json(path)
    images, captions = (_ids(given, name, path=path) for name in ("images", "captions"))
    for kind, ids in (("image", images), ("caption", captions)):
        if not ids:
            raise DataError(f"{path} names no {kind}s — list the id of each, in the order of the matrix")
        check_unique(ids, kind=kind)
    owners = _ids(given, "caption_image", path=path) if given.get("caption_image") is not None else None
    if owners is not None and len(owners) != len(captions):
        few = len(owners) < len(captions)
        first = f"first without one {captions[len(owners)]!r}" if few else f"first too many {owners[len(captions)]!r}"
        message = f"{path}: caption_image has {len(owners):,} entries for {len(captions):,} captions, {first}"
        raise ShapeMismatch(f"{message} — give one image id each")
    return IdFile(path, images, captions, owners)


def own_labels(ids: IdFile) -> Tensor:
    """The rows of ``caption_image``. -> [M] int64"""
    if ids.caption_image is None:
        message = f"{ids.path} does not say which image a caption belongs to"
        raise DataError(f"{message} — add caption_image, give --pairs SPEC, or choose a COCO protocol")
    return _rows(ids, dict(zip(ids.captions, ids.caption_image, strict=True)))


def labels_from(pairs: LabelledPairs, ids: IdFile) -> Tensor:
    """The rows of the images that another data set gives to these captions. -> [M] int64"""
    owners = [pairs.image_ids[row] for row in pairs.caption_image.tolist()]
    return _rows(ids, dict(zip(pairs.caption_ids, owners, strict=True)))


def _rows(ids: IdFile, owner: Mapping[str, str]) -> Tensor:
    place = {name: row for row, name in enumerate(ids.images)}
    found: list[int] = []
    for caption in ids.captions:
        if caption not in owner:
            raise DataError(f"caption {caption!r} of {ids.path} is not in the data of --pairs — check ids and split")
        if owner[caption] not in place:
            message = f"caption {caption!r} belongs to image {owner[caption]!r}, which {ids.path} does not list"
            raise DataError(f"{message} — caption_image holds image ids, not row numbers; add the image")
        found.append(place[owner[caption]])
    labels = torch.tensor(found)
    _tell_of_silent(ids, labels)
    return labels


def _tell_of_silent(ids: IdFile, labels: Tensor) -> None:
    """An image without captions is a wrong answer to every caption, and no query: averages leave it out."""
    count = torch.bincount(labels, minlength=len(ids.images))
    silent = (count == 0).nonzero().flatten().tolist()
    if silent:
        number = f"{len(silent):,} of {len(ids.images):,} images have no caption, first {ids.images[silent[0]]!r}"
        warnings.warn(f"{number}: image→text figures are over the others", stacklevel=4)


def read_scores(path: Path, ids: IdFile, *, uncertainty: Path | None = None) -> MatrixScores:
    """The matrix [images, captions], and another of the same shape; NaN or infinity names the first such pair."""
    score = _checked(path, ids)
    return MatrixScores(score, None if uncertainty is None else _checked(uncertainty, ids))


def _checked(path: Path, ids: IdFile) -> Tensor:
    matrix = _read_matrix(path)
    expected = [len(ids.images), len(ids.captions)]
    if list(matrix.shape) != expected:
        message = f"{path} has shape {list(matrix.shape)}, {ids.path} names {expected[0]:,} images"
        message = f"{message} and {expected[1]:,} captions{_first_offenders(matrix, ids)}"
        raise ShapeMismatch(f"{message} — save it as [images, captions], {expected}")
    for start in range(0, len(matrix), _ROWS):
        finite = torch.isfinite(matrix[start : start + _ROWS])
        if not bool(finite.all()):
            row, col = (~finite).nonzero()[0].tolist()
            value, where = float(matrix[start + row, col]), f"image {ids.images[start + row]!r}"
            raise DataError(
                f"{path} holds {value} for {where} and caption {ids.captions[col]!r}, expected numbers — score the pair"
            )
    return matrix


def _first_offenders(matrix: Tensor, ids: IdFile) -> str:
    """The first image and caption that a matrix of another shape leaves out, or what of it has no name."""
    if matrix.ndim != 2:
        return ""
    found = ""
    sides = (("image", "row", ids.images), ("caption", "column", ids.captions))
    for (kind, line, names), length in zip(sides, matrix.shape, strict=True):
        if length < len(names):
            found += f"; first {kind} without a {line}: {names[length]!r}"
        elif length > len(names):
            found += f"; first {line} without {kind} id: {len(names)}, counted from 0"
    return found


def _read_matrix(path: Path) -> Tensor:
    """As it lies in the file, but for half precision, which becomes float32."""
    if path.suffix.lower() == ".safetensors":
        found = _one_tensor(path)
    elif path.suffix.lower() == ".npy":
        found = _mapped(path)
    else:
        raise DataError(f"{path} is no .npy or .safetensors file — save the matrix with numpy.save")
    return found if found.dtype in (torch.float32, torch.float64) else found.float()


def _one_tensor(path: Path) -> Tensor:
    tensors, _ = read_tensors(path)
    name = "scores" if "scores" in tensors else next(iter(tensors), "")
    if not name or (len(tensors) > 1 and name != "scores"):
        names = ", ".join(sorted(tensors)) or "nothing"
        raise DataError(f"{path} holds {names}, expected one tensor or one called scores — rename it")
    if not tensors[name].is_floating_point():
        raise DataError(f"{name} in {path} is {tensors[name].dtype}, expected floats — {_WHOLE}")
    return tensors[name]


def _mapped(path: Path) -> Tensor:
    if not path.is_file():
        raise DataError(f"no such file: {path} — check the path")
    try:  # copy-on-write, for torch knows no read-only memory; nothing is ever written
        with path.open("rb") as file:
            begins = file.read(len(_NPY))
        if begins != _NPY:
            raise DataError(f"{path} begins with {begins!r}, which is no .npy array — write the matrix with numpy.save")
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path} is not a whole .npy array ({error}) — write or copy it again") from error
    if array.dtype.kind != "f":
        raise DataError(f"{path} holds {array.dtype}, expected floats — {_WHOLE}")
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(native if native.dtype.itemsize <= 8 else native.astype(np.float64))


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise DataError(f"no such file: {path} — check the path")
    try:
        given = load_json(path.read_text(encoding="utf-8-sig"), source=path)
    except (ValueError, RecursionError) as error:  # a RecursionError: lists within lists, thousands deep
        raise DataError(f"{path} is not JSON ({error}) — write or copy it again") from error
    if not isinstance(given, dict):
        message = f'{path} holds a {type(given).__name__}, expected {{"images": […], "captions": […]}}'
        raise DataError(f"{message} — write such an object")
    return given


def _ids(given: Mapping[str, Any], name: str, *, path: Path) -> tuple[str, ...]:
    """Ids as strings: COCO's are numbers, in files as in ours."""
    values: Sequence[Any] | None = given.get(name)
    if not isinstance(values, list):
        raise DataError(f'{path} has no list {name!r}, expected {{"images": […], "captions": […]}} — add the ids')
    for place, value in enumerate(values):
        if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
            raise DataError(f"{path}: {name}[{place}] is {value!r}, expected an id — write a string or a whole number")
    return tuple(str(value) for value in values)
