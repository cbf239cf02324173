"""Label noise: captions moved among images; seeded, saved and hashed, so that every method meets the same noise.

Noise that others published is a list of M whole numbers, one per caption, as ``.npy``, ``.json`` or ``.txt``, in the
convention of NCR (``t2i_index``), BiCro and DECL: entry j is the row of the **image** that **caption** j of the
training split is paired with. Each image occurs as often as it has captions. Captions and images must be in the order
of the file's authors; usually image i has the captions 5i to 5i + 4.

A permutation of 0 … M - 1, as such a file is where each image has one caption, is read as **slots**: caption j sits in
slot ``entry[j]`` and takes that slot's image. If entry k is the caption at position k instead, save its
``numpy.argsort``.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from vacsr.data.nouns import photo_nouns
from vacsr.data.pairs import LabelledPairs
from vacsr.errors import DataError, ShapeMismatch, UsageError
from vacsr.files import JSON_BYTES, load_json, read_npy, read_tensors, read_text, write_tensors

P = TypeVar("P", bound=LabelledPairs)
PROTOCOL = "permute-captions"
SHARED_NOUN = "swap-shared-noun"
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
    fallbacks: int = 0  # of swap-shared-noun: captions that moved to a photo without a noun of their own photo

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
        """Write it as safetensors; protocol, ratio, seed, fallbacks and hash go into the metadata."""
        tensors = {"assignment": self.assignment, "permutation": self.permutation}
        seed = "" if self.seed is None else str(self.seed)
        facts = {"protocol": self.protocol, "ratio": repr(self.ratio), "seed": seed, "sha256": self.sha256}
        facts |= {"fallbacks": str(self.fallbacks)} if self.protocol == SHARED_NOUN else {}
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
    generator, images = _generator(ratio, seed), caption_image.cpu().long()
    chosen = _choose_movable(images, int(ratio * len(images)), generator)
    slots = chosen[torch.randperm(len(chosen), generator=generator)]
    for row in (images[slots] == images[chosen]).nonzero().flatten().tolist():
        home = images[chosen[row]]
        if images[slots[row]] != home:
            continue  # an earlier exchange sent it away
        free = ((images[chosen] != home) & (images[slots] != home)).nonzero().flatten()
        other = int(free[torch.randint(len(free), (1,), generator=generator)])
        slots[[row, other]] = slots[[other, row]]
    return _moved(images, chosen, slots, ratio=ratio, seed=seed, protocol="derange-captions")


def swap_captions(caption_image: Tensor, captions: Sequence[str], *, ratio: float, seed: int) -> CaptionNoise:
    """Exchange ``int(ratio * M)`` captions in twos between photos whose captions share a noun: plausible wrong labels.

    Each chosen caption in turn is exchanged with one of another photo, by the rarest noun of its photo for which one is
    left (:mod:`.nouns` has the rule for nouns). What then remains is exchanged with any other photo; ``fallbacks``
    counts captions whose old and new photo share no noun. ``caption_image`` [M] int64, ``captions`` [M] texts.

    >>> texts = ["a dog on a beach", "the dog.", "a red car on a street", "a car in the street"]
    >>> swap_captions(torch.arange(4), texts, ratio=1.0, seed=0).assignment
    tensor([1, 0, 3, 2])
    """
    images, generator = caption_image.cpu().long(), _generator(ratio, seed)
    image_of, nouns = images.tolist(), photo_nouns(captions, images.tolist())
    chosen = _choose_movable(images, int(ratio * len(images)), generator)
    partner = _pair_by_noun(chosen.tolist(), image_of, nouns)
    slot_of = _pair_the_rest([row for row in chosen.tolist() if row not in partner], partner, image_of)
    slots = torch.tensor([slot_of[row] for row in chosen.tolist()], dtype=torch.int64)
    noise = _moved(images, chosen, slots, ratio=ratio, seed=seed, protocol=SHARED_NOUN)
    strangers = sum(nouns[image_of[row]].isdisjoint(nouns[image_of[slot]]) for row, slot in slot_of.items())
    return replace(noise, fallbacks=strangers)


def _pair_by_noun(rows: Sequence[int], image_of: Sequence[int], nouns: Mapping[int, frozenset[str]]) -> dict[int, int]:
    """Captions of different photos that share a noun, two by two, each under both names; some stay alone."""
    waiting: dict[str, deque[int]] = {}  # captions by the nouns of their photos
    for row in rows:
        for noun in nouns[image_of[row]]:
            waiting.setdefault(noun, deque()).append(row)
    frequency = Counter(noun for words in nouns.values() for noun in words)
    partner: dict[int, int] = {}
    for row in rows:
        for noun in sorted(nouns[image_of[row]], key=lambda word: (frequency[word], word)):
            if row in partner:
                break
            others = waiting[noun]
            while others[0] in partner:  # this caption is among them and still alone
                others.popleft()
            alone = (other for other in others if other not in partner and image_of[other] != image_of[row])
            for other in islice(alone, 1):
                partner[row], partner[other] = other, row
    return partner


def _pair_the_rest(alone: Sequence[int], partner: Mapping[int, int], image_of: Sequence[int]) -> dict[int, int]:
    """The slot of every caption, where those that are alone go to any other photo.

    Two of different photos are exchanged. In the end only captions of one photo are left: they join pairs of other
    photos, two at a time, or one as a ring of three. Half of the captions are of other photos, so pairs suffice.
    """
    slot_of, left = dict(partner), list[int]()
    for row in alone:
        if left and image_of[left[-1]] != image_of[row]:
            other = left.pop()
            slot_of[row], slot_of[other] = other, row
        else:
            left.append(row)
    if not left:
        return slot_of
    home = image_of[left[0]]
    pairs = (
        (row, slot)
        for row, slot in tuple(slot_of.items())
        if row < slot and home not in (image_of[row], image_of[slot])
    )
    while left:
        first, second = next(pairs)
        ring = [first, left.pop(), second, left.pop()] if len(left) > 1 else [first, left.pop(), second]
        slot_of |= dict(zip(ring, ring[1:] + ring[:1], strict=True))
    return slot_of


PROTOCOLS = (PROTOCOL, "derange-captions", SHARED_NOUN)


def make_noise(
    protocol: str, caption_image: Tensor, *, ratio: float, seed: int, captions: Sequence[str] | None = None
) -> CaptionNoise:
    """Noise by the protocol's name; ``swap-shared-noun`` needs the texts of the captions [M]."""
    if protocol == PROTOCOL:
        return permute_captions(caption_image, ratio=ratio, seed=seed)
    if protocol == "derange-captions":
        return derange_captions(caption_image, ratio=ratio, seed=seed)
    if protocol != SHARED_NOUN:
        raise UsageError(f"unknown noise protocol {protocol!r} — write one of: {', '.join(PROTOCOLS)}")
    if captions is None:
        message = f"noise {SHARED_NOUN} compares the words of captions, and these data have none"
        raise UsageError(f"{message} — name the file with them: features:FILE,captions=FILE")
    return swap_captions(caption_image, captions, ratio=ratio, seed=seed)


def _choose_movable(images: Tensor, wanted: int, generator: torch.Generator) -> Tensor:
    """Draw captions, of no image more than half of them, so that all can get another image. [M] -> [wanted]"""
    taken: Counter[int] = Counter()
    rows: list[int] = []
    order = torch.randperm(len(images), generator=generator)
    for row, image in zip(order.tolist(), images[order].tolist(), strict=True):
        if len(rows) < wanted and taken[image] < wanted // 2:
            taken[image] += 1
            rows.append(row)
    if len(rows) < wanted:
        message = f"too few images to give {wanted:,} of {len(images):,} captions another image"
        raise DataError(f"{message} — lower the noise ratio, or use permute-captions")
    return torch.tensor(rows, dtype=torch.int64)


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
        fallbacks = int(facts.get("fallbacks", 0))
    except (KeyError, ValueError) as error:
        raise DataError(f"{path} is not a noise file ({error}) — write one with make_noise(…).save(path)") from error
    noise = CaptionNoise(assignment, permutation, ratio=ratio, seed=seed, protocol=protocol, fallbacks=fallbacks)
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
