"""Label noise: captions permuted among images; seeded, saved and hashed, so that every method meets the same noise.

Noise that others published is a list of M whole numbers, one per caption, as ``.npy``, ``.json`` or ``.txt``, in the
convention of NCR (``t2i_index``), BiCro and DECL: entry j is the row of the **image** that **caption** j of the
training split is paired with. Each image occurs as often as it has captions. Captions and images must be in the order
of the file's authors; usually image i has the captions 5i to 5i + 4.

A permutation of 0 … M - 1, as such a file is where each image has one caption, is read as **slots**: caption j sits in
slot ``entry[j]`` and takes that slot's image. If entry k is the caption at position k instead, save its
``numpy.argsort``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from vacsr.data.pairs import LabelledPairs
from vacsr.errors import DataError, ShapeMismatch, UsageError
from vacsr.files import JSON_BYTES, load_json, read_npy, read_tensors, read_text, write_tensors

P = TypeVar("P", bound=LabelledPairs)
PROTOCOL = "permute-captions"
FROM_FILE = "file"  # the protocol of noise that someone else drew


@dataclass(frozen=True, eq=False)
class CaptionNoise:
    """Where each caption went.

    Slot k belongs to the image ``caption_image[k]`` and held caption k at first. Now caption j sits in slot
    ``permutation[j]``, so its image is ``assignment[j] == caption_image[permutation[j]]``.
    """

    assignment: Tensor  # [M] int64, the image row of each caption after the noise
    permutation: Tensor  # [M] int64, the slot of each caption; captions that were not chosen keep theirs
    ratio: float  # share of captions chosen; of noise from a file, the share that changed
    seed: int | None  # None of noise from a file
    protocol: str = PROTOCOL

    @property
    def sha256(self) -> str:
        """Of the permutation as little-endian int64."""
        return hashlib.sha256(self.permutation.cpu().numpy().astype("<i8").tobytes()).hexdigest()

    @property
    def original(self) -> Tensor:
        """[M] int64, the image row of each caption before the noise."""
        return torch.empty_like(self.assignment).scatter_(0, self.permutation, self.assignment)

    @property
    def changed_share(self) -> float:
        """Share of captions whose image really changed; below ``ratio``, as a caption may land on its own image."""
        return float((self.assignment != self.original).double().mean()) if len(self.assignment) else 0.0

    def save(self, path: str | Path) -> None:
        """Write it as safetensors; protocol, ratio, seed and hash go into the metadata."""
        tensors = {"assignment": self.assignment, "permutation": self.permutation}
        seed = "" if self.seed is None else str(self.seed)
        facts = {"protocol": self.protocol, "ratio": repr(self.ratio), "seed": seed, "sha256": self.sha256}
        write_tensors(Path(path), tensors, metadata=facts)


def permute_captions(caption_image: Tensor, *, ratio: float, seed: int) -> CaptionNoise:
    """Choose ``int(ratio * M)`` captions at random and permute them among their slots.

    As in the public protocols, a chosen caption may draw its own slot, or another slot of its own image.
    ``caption_image`` [M] int64.

    >>> noise = permute_captions(torch.arange(100), ratio=0.2, seed=0)
    >>> noise.assignment.sort().values.equal(torch.arange(100))
    True
    """
    generator, count = _generator(ratio, seed), len(caption_image)
    chosen = torch.randperm(count, generator=generator)[: int(ratio * count)]
    slots = chosen[torch.randperm(len(chosen), generator=generator)]
    return _moved(caption_image, chosen, slots, ratio=ratio, seed=seed, protocol=PROTOCOL)


def derange_captions(caption_image: Tensor, *, ratio: float, seed: int) -> CaptionNoise:
    """As :func:`permute_captions`, but every chosen caption ends at another image: exactly ``int(ratio * M)`` change.

    No image may hold more than half of the chosen captions, or some could not leave it; instead of more, later captions
    of the draw are chosen. ``caption_image`` [M] int64.

    >>> derange_captions(torch.arange(100) // 5, ratio=0.2, seed=0).changed_share
    0.2
    """
    generator, count = _generator(ratio, seed), len(caption_image)
    images, wanted = caption_image.cpu().long(), int(ratio * count)
    taken: Counter[int] = Counter()
    rows: list[int] = []
    order = torch.randperm(count, generator=generator)
    for row, image in zip(order.tolist(), images[order].tolist(), strict=True):
        if len(rows) < wanted and taken[image] < wanted // 2:
            taken[image] += 1
            rows.append(row)
    chosen = torch.tensor(rows, dtype=torch.int64)
    if len(chosen) < wanted:
        message = f"too few images to give {wanted:,} of {count:,} captions another image"
        raise DataError(f"{message} — lower the noise ratio, or use permute-captions")
    slots = chosen[torch.randperm(wanted, generator=generator)]
    for row in (images[slots] == images[chosen]).nonzero().flatten().tolist():
        home = images[chosen[row]]
        if images[slots[row]] != home:
            continue  # an earlier exchange sent it away
        free = ((images[chosen] != home) & (images[slots] != home)).nonzero().flatten()
        other = int(free[torch.randint(len(free), (1,), generator=generator)])
        slots[[row, other]] = slots[[other, row]]
    return _moved(images, chosen, slots, ratio=ratio, seed=seed, protocol="derange-captions")


PROTOCOLS = {PROTOCOL: permute_captions, "derange-captions": derange_captions}


def make_noise(protocol: str, caption_image: Tensor, *, ratio: float, seed: int) -> CaptionNoise:
    """Noise by the protocol's name."""
    if protocol not in PROTOCOLS:
        raise UsageError(f"unknown noise protocol {protocol!r} — write one of: {', '.join(PROTOCOLS)}")
    return PROTOCOLS[protocol](caption_image, ratio=ratio, seed=seed)


def _generator(ratio: float, seed: int) -> torch.Generator:
    if not 0 <= ratio <= 1:
        raise UsageError(f"noise ratio is {ratio}, expected 0 to 1 — write 0.2 for 20% of the captions")
    return torch.Generator().manual_seed(seed)


def _moved(
    caption_image: Tensor, chosen: Tensor, slots: Tensor, *, ratio: float, seed: int, protocol: str
) -> CaptionNoise:
    """Caption ``chosen[k]`` sits in slot ``slots[k]``, the others where they were."""
    permutation = torch.arange(len(caption_image))
    permutation[chosen] = slots
    assignment = caption_image.cpu().long()[permutation]
    return CaptionNoise(assignment, permutation, ratio=float(ratio), seed=seed, protocol=protocol)


def apply_noise(pairs: P, noise: CaptionNoise) -> P:
    """The same images and captions with noisy labels. For the training split only; that is the caller's choice."""
    if not torch.equal(noise.original, pairs.caption_image.cpu()):
        message = f"the noise was made for {len(noise.original):,} captions with other labels than these {len(pairs):,}"
        raise DataError(f"{message} — make it from these pairs: make_noise(protocol, pairs.caption_image, …)")
    return replace(pairs, caption_image=noise.assignment.to(pairs.caption_image.device))  # type: ignore[type-var]


def load_noise(path: str | Path, *, caption_image: Tensor | None = None) -> CaptionNoise:
    """Read what :meth:`CaptionNoise.save` wrote (``.safetensors``), or a list that others published, see above.

    A published list (``.npy``, ``.json``, ``.txt``) needs ``caption_image`` [M] of the pairs that it is for.
    """
    file = Path(path)
    if file.suffix.lower() != ".safetensors":
        return _read_published(file, caption_image)
    tensors, facts = read_tensors(file)
    try:
        permutation, assignment = tensors["permutation"], tensors["assignment"]
        protocol, ratio, stored = facts["protocol"], float(facts["ratio"]), facts["sha256"]
        seed = None if protocol == FROM_FILE else int(facts["seed"])
    except (KeyError, ValueError) as error:
        raise DataError(f"{path} is not a noise file ({error}) — write one with make_noise(…).save(path)") from error
    noise = CaptionNoise(assignment, permutation, ratio=ratio, seed=seed, protocol=protocol)
    rows = torch.arange(permutation.numel())
    whole = permutation.dtype == assignment.dtype == torch.int64 and permutation.shape == assignment.shape == rows.shape
    if not whole or not torch.equal(permutation.sort().values, rows) or noise.sha256 != stored:
        raise DataError(f"{path} does not match its sha256, {stored[:12]}… — it was changed: make or copy it again")
    return noise


def _read_published(path: Path, caption_image: Tensor | None) -> CaptionNoise:
    if path.suffix.lower() not in (".npy", ".json", ".txt"):
        raise DataError(f"{path} is not a noise file — give .safetensors, .npy, .json, .txt")
    if caption_image is None:
        raise UsageError(f"{path} does not say which images its captions belong to — pass caption_image= of the pairs")
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
        message = f"{path} may list caption positions or images: images have one caption each, in another order"
        raise DataError(f"{message} — put the captions into the order of the images")
    if is_permutation:
        return rows
    if are_images:  # its own slot where a caption stays, otherwise some free slot of its new image
        permutation, away = torch.arange(len(rows)), (rows != images).nonzero().flatten()
        permutation[away[rows[away].argsort(stable=True)]] = away[images[away].argsort(stable=True)]
        return permutation
    message = f"{path} is neither a permutation of {len(rows):,} captions nor has every image once per caption"
    raise DataError(f"{message} — give the file that was made for this training split")


def _read_list(path: Path) -> Tensor:
    """Whole numbers [M] int64; nothing in the file is executed."""
    kind = path.suffix.lower()
    try:
        if kind == ".npy":
            values = read_npy(path)
        elif kind == ".txt":
            words = read_text(path, limit=JSON_BYTES).replace(",", " ").split()
            values = np.asarray([int(word) for word in words])
        else:
            values = np.asarray(load_json(read_text(path, limit=JSON_BYTES), source=path))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path} is not a list of whole numbers ({error}) — write or copy it again") from error
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise DataError(f"{path} holds {values.dtype} {list(values.shape)}, expected whole numbers [M] — save those")
    return torch.from_numpy(values.astype(np.int64))
