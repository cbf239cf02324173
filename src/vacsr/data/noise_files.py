"""Noise that others published: a list of M whole numbers, one per caption, as ``.npy``, ``.json`` or ``.txt``.

What is assumed, as NCR and those who build on it write it (``t2i_index``, BiCro and DECL alike): entry j belongs to
**caption** j of the training split and is the row of the **image** that caption j is paired with. Each image then
occurs as often as it has captions. Captions and images must be counted as the file's makers counted them; in the usual
order, image i has the captions 5i to 5i + 4.

A permutation of 0 … M - 1, as such a file is where each image has one caption, is read as **slots**: caption j sits in
slot ``entry[j]`` and takes that slot's image. A file that lists the other way round (entry k is the caption put at
position k) is the inverse: save ``numpy.argsort`` of it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vacsr.data.noise import FROM_FILE, CaptionNoise
from vacsr.errors import DataError, ShapeMismatch, UsageError

_KINDS = (".npy", ".json", ".txt")


def read_published(path: Path, caption_image: Tensor | None) -> CaptionNoise:
    """The noise that a published list means for captions of these images [M]."""
    if path.suffix.lower() not in _KINDS:
        raise DataError(f"{path} is not a noise file — give .safetensors, {', '.join(_KINDS)}")
    if caption_image is None:
        raise UsageError(f"{path} does not say which images its captions have — pass caption_image= of the pairs")
    rows, images = _read_list(path), caption_image.cpu().long()
    if len(rows) != len(images):
        message = f"{path} is for {len(rows):,} captions, the pairs have {len(images):,}"
        raise ShapeMismatch(f"{message} — give the file that was made for this training split")
    permutation = _slots(rows, images, path=path)
    noise = CaptionNoise(images[permutation], permutation, ratio=0.0, seed=None, protocol=FROM_FILE)
    return replace(noise, ratio=noise.changed_share)


def _slots(rows: Tensor, images: Tensor, *, path: Path) -> Tensor:
    """The slot of each caption [M], whether the file lists slots or images."""
    is_permutation = torch.equal(rows.sort().values, torch.arange(len(rows)))
    are_images = torch.equal(rows.sort().values, images.sort().values)
    if is_permutation and are_images and not torch.equal(images, torch.arange(len(images))):
        message = f"{path} may list slots or images: each image has one caption, and captions are not in their order"
        raise DataError(f"{message} — put the captions into the order of the images")
    if is_permutation:
        return rows
    if are_images:
        return _slots_of_images(rows, images)
    wrong = rows[(rows < 0) | (rows >= len(rows))].tolist()
    reason = f"{wrong[0]} is out of range" if wrong else "some occur too often, others not at all"
    message = f"{path} holds neither a permutation of {len(rows):,} slots nor every image as often as it has captions"
    raise DataError(f"{message} ({reason}) — give the file that was made for this training split")


def _slots_of_images(rows: Tensor, images: Tensor) -> Tensor:
    """A permutation of slots that gives each caption j a slot of image ``rows[j]``; who is at home keeps his own."""
    permutation = torch.arange(len(rows))
    away = (rows != images).nonzero().flatten()
    arriving = away[rows[away].argsort(stable=True)]
    permutation[arriving] = away[images[away].argsort(stable=True)]
    return permutation


def _read_list(path: Path) -> Tensor:
    """Whole numbers [M] int64; nothing in the file is executed."""
    if not path.is_file():
        raise DataError(f"no such noise file: {path} — check the path")
    try:
        values = np.asarray(_values(path))
    except (OSError, ValueError, EOFError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read as a list of whole numbers ({error}) — write or copy it again"
        ) from error
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise DataError(f"{path} holds {values.dtype} {list(values.shape)}, expected whole numbers [M] — save those")
    return torch.from_numpy(values.astype(np.int64))


def _values(path: Path) -> Any:
    if path.suffix.lower() == ".npy":
        return np.load(path, allow_pickle=False)
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix.lower() == ".json":
        return json.loads(text)
    return [int(word) for word in text.replace(",", " ").split()]
