"""Label noise: captions permuted among images; seeded, saved and hashed, so that every method meets the same noise."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vacsr.data.pairs import PairSet
from vacsr.errors import DataError, ShapeMismatch, UsageError
from vacsr.files import read_tensors, write_tensors

PROTOCOL = "permute-captions"


@dataclass(frozen=True, eq=False)
class CaptionNoise:
    """Where each caption went.

    Slot k belongs to the image ``caption_image[k]`` and held caption k at first. Now caption j sits in slot
    ``permutation[j]``, so its image is ``assignment[j] == caption_image[permutation[j]]``.
    """

    assignment: Tensor
    """[M] int64, the image row of each caption after the noise."""
    permutation: Tensor
    """[M] int64, the slot of each caption; captions that were not chosen keep theirs."""
    ratio: float
    seed: int
    protocol: str = PROTOCOL

    @property
    def sha256(self) -> str:
        """Of the permutation as little-endian int64."""
        values = self.permutation.cpu().contiguous().numpy()
        return hashlib.sha256((values if sys.byteorder == "little" else values.byteswap()).tobytes()).hexdigest()

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
        facts = {"protocol": self.protocol, "ratio": repr(self.ratio), "seed": str(self.seed), "sha256": self.sha256}
        write_tensors(Path(path), tensors, metadata=facts)


def permute_captions(caption_image: Tensor, *, ratio: float, seed: int) -> CaptionNoise:
    """Choose ``int(ratio * M)`` captions at random and permute them among their slots.

    As in the public protocols, a chosen caption may draw its own slot, or another slot of its own image.
    ``caption_image`` [M] int64.

    >>> noise = permute_captions(torch.arange(100), ratio=0.2, seed=0)
    >>> int((noise.permutation != torch.arange(100)).sum()) <= 20
    True
    >>> noise.assignment.sort().values.equal(torch.arange(100))
    True
    """
    if not 0 <= ratio <= 1:
        raise UsageError(f"noise ratio is {ratio}, expected 0 to 1 — write 0.2 for 20% of the captions")
    generator = torch.Generator().manual_seed(seed)
    count = len(caption_image)
    chosen = torch.randperm(count, generator=generator)[: int(ratio * count)]
    permutation = torch.arange(count)
    permutation[chosen] = chosen[torch.randperm(len(chosen), generator=generator)]
    assignment = caption_image.cpu().long()[permutation]
    return CaptionNoise(assignment, permutation, ratio=float(ratio), seed=seed)


def apply_noise(pairs: PairSet, noise: CaptionNoise) -> PairSet:
    """The same images and captions with noisy labels. For the training split only; that is the caller's choice."""
    if len(pairs) != len(noise.permutation):
        message = f"the noise is for {len(noise.permutation):,} captions, the pairs have {len(pairs):,}"
        raise ShapeMismatch(f"{message} — make it from these pairs: permute_captions(pairs.caption_image, …)")
    if not torch.equal(noise.original, pairs.caption_image.cpu()):
        message = (
            f"the noise (seed {noise.seed}, ratio {noise.ratio}) was made for other labels than {pairs.split!r} has"
        )
        raise DataError(f"{message} — make it from these pairs: permute_captions(pairs.caption_image, …)")
    return pairs.with_caption_image(noise.assignment.to(pairs.caption_image.device))


def load_noise(path: str | Path) -> CaptionNoise:
    """Read what :meth:`CaptionNoise.save` wrote, and see that the permutation is the one that was hashed."""
    tensors, facts = read_tensors(Path(path))
    if set(tensors) != {"assignment", "permutation"} or not {"protocol", "ratio", "seed", "sha256"} <= set(facts):
        raise DataError(f"{path} is not a noise file — write one with permute_captions(…).save(path)")
    if facts["protocol"] != PROTOCOL:
        raise DataError(f"{path} has protocol {facts['protocol']!r}, expected {PROTOCOL!r} — make the noise again")
    try:
        ratio, seed = float(facts["ratio"]), int(facts["seed"])
    except ValueError as error:
        raise DataError(f"{path} has an unreadable ratio or seed ({error}) — make the noise again") from error
    assignment, permutation = tensors["assignment"], tensors["permutation"]
    _check_permutation(permutation, assignment, path=path)
    noise = CaptionNoise(assignment, permutation, ratio=ratio, seed=seed)
    if noise.sha256 != facts["sha256"]:
        message = (
            f"the permutation in {path} has sha256 {noise.sha256[:12]}…, its metadata says {facts['sha256'][:12]}…"
        )
        raise DataError(f"{message} — the file was changed: make or copy it again")
    return noise


def _check_permutation(permutation: Tensor, assignment: Tensor, *, path: str | Path) -> None:
    """Both are int64 [M], and the permutation holds every slot once."""
    whole = permutation.dtype == assignment.dtype == torch.int64 and permutation.ndim == 1
    if not whole or permutation.shape != assignment.shape:
        given = f"{permutation.dtype} {list(permutation.shape)} and {assignment.dtype} {list(assignment.shape)}"
        raise DataError(f"{path} holds {given}, expected int64 [M] twice — make the noise again")
    if not torch.equal(permutation.sort().values, torch.arange(len(permutation))):
        raise DataError(f"{path} does not hold a permutation of {len(permutation):,} slots — make the noise again")
