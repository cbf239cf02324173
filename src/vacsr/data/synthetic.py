"""A generated world of embeddings whose true similarities are known, for the demo and for tests.

An image has a few attributes (a dog, red, on a beach, at night). A caption names two to four attributes of its image,
and so is often true of other images: a false negative, since the labels know its own image only. Features are a fixed
random non-linear map of the attributes, plus noise. The maps depend on the seed alone; all splits share them.
"""

import hashlib
import math
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from vacsr.config.base import Config
from vacsr.data.captions import table_of
from vacsr.data.formats import OnError, Spec, register
from vacsr.data.pairs import PairSet, check_split
from vacsr.provenance import Provenance

IMAGE_DIMS, TEXT_DIMS, HIDDEN = 64, 48, 96
SPLITS = ("train", "dev", "test")
# Attributes of each kind, and how many of them an image has at least and at most.
GROUPS = {
    "colour": (("red", "blue", "green", "black", "white", "yellow"), 1, 2),
    "object": (("dog", "cat", "horse", "car", "boat", "bicycle", "kite", "guitar"), 1, 3),
    "place": (("on a beach", "in a village", "in a forest", "on a hill", "by a lake"), 1, 2),
    "moment": (("at night", "at sunset", "in the rain", "in the snow", "in the fog"), 1, 1),
}
ATTRIBUTES = tuple(name for names, _, _ in GROUPS.values() for name in names)  # 24, in the order of the columns


class WorldOptions(Config):
    """The size of a generated world and its seed."""

    images: PositiveInt = 800  # training images
    held_out: PositiveInt | None = None  # images in dev, and in test; a quarter of ``images`` unless given
    per_image: PositiveInt = 5  # captions of an image
    seed: int = 0

    def sizes(self) -> dict[str, int]:
        """Images in each split.

        >>> WorldOptions(images=400).sizes()
        {'train': 400, 'dev': 100, 'test': 100}
        """
        held_out = max(1, self.images // 4) if self.held_out is None else self.held_out
        return {"train": self.images, "dev": held_out, "test": held_out}

    def splits(self, split: str | None, *, source: str) -> tuple[str, ...]:
        """The named split, or all three for None and "all"."""
        if split is None or split == "all":
            return SPLITS
        check_split(split, self.sizes(), source=source)
        return (split,)


class SyntheticOptions(WorldOptions):
    """Of a world of embeddings."""

    noise: NonNegativeFloat = 0.3  # standard deviation of the noise on features, whose own is about 1


class SyntheticWorld(NamedTuple):
    pairs: PairSet
    present: Tensor  # [N, 24] bool, the attributes of each image
    mentioned: Tensor  # [M, 24] bool, the attributes that each caption names


def synthetic_world(options: SyntheticOptions | None = None, *, split: str | None = None) -> SyntheticWorld:
    """Generate one split; None or "all" for the three of them, one after the other."""
    chosen = options or SyntheticOptions()
    parts = chosen.splits(split, source="synthetic:")
    images, texts, present, mentioned = (torch.cat(t) for t in zip(*(_draw(chosen, p) for p in parts), strict=True))
    image_ids = tuple(f"{part}-{row:04d}" for part in parts for row in range(chosen.sizes()[part]))
    words, per_image = [caption_text(list(compress(ATTRIBUTES, row))) for row in mentioned.tolist()], chosen.per_image
    table = table_of("", image_ids, [words[start : start + per_image] for start in range(0, len(words), per_image)])
    provenance = Provenance(backbone=f"synthetic:seed={chosen.seed}")
    pairs = PairSet(images, texts, **table.labels(), split=split or "all", provenance=provenance)
    return SyntheticWorld(pairs, present, mentioned)


@register("synthetic", options=("images", "held_out", "per_image", "noise", "seed", "split"))
def load_synthetic(spec: Spec, _on_error: OnError) -> PairSet:
    return synthetic_world(spec.fill(SyntheticOptions), split=spec.option("split")).pairs


def caption_text(names: list[str]) -> str:
    """Say the attributes in words.

    >>> caption_text(["red", "car", "on a beach"])
    'a red car on a beach'
    >>> caption_text(["dog", "boat", "at night"]), caption_text(["blue", "white"]), caption_text(["by a lake"])
    ('a dog and a boat at night', 'something blue and white', 'a scene by a lake')
    """
    by_kind = {kind: [name for name in known if name in names] for kind, (known, _, _) in GROUPS.items()}
    colour = " and ".join(by_kind["colour"])
    things = [f"a {thing}" for thing in by_kind["object"]]
    if things and colour:
        things[0] = f"a {colour} {by_kind['object'][0]}"
    subject = enumerate_words(things) or (f"something {colour}" if colour else "a scene")
    return " ".join([subject, enumerate_words(by_kind["place"]), *by_kind["moment"]]).replace("  ", " ").strip()


def enumerate_words(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _draw(options: SyntheticOptions, split: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features of the images and captions of one split, and what is present and mentioned."""
    generator, count = _stream(options.seed, split), options.sizes()[split]
    parts = []
    for names, low, high in GROUPS.values():
        wanted = torch.randint(low, high + 1, (count, 1), generator=generator)
        parts.append(_first(torch.rand(count, len(names), generator=generator), wanted))
    present = torch.cat(parts, dim=1)
    owned = present.repeat_interleave(options.per_image, dim=0)
    wanted = torch.randint(2, 5, (len(owned), 1), generator=generator)
    mentioned = _first(torch.where(owned, torch.rand(owned.shape, generator=generator), 2.0), wanted)
    images = _embed(present, dims=IMAGE_DIMS, generator=_stream(options.seed, "image map"))
    texts = _embed(mentioned, dims=TEXT_DIMS, generator=_stream(options.seed, "text map"))
    images = images + options.noise * torch.randn(images.shape, generator=generator)
    texts = texts + options.noise * torch.randn(texts.shape, generator=generator)
    return images, texts, present, mentioned


def _first(keys: Tensor, wanted: Tensor) -> Tensor:
    """Mark the ``wanted`` smallest keys of each row. [R, A], [R, 1] -> [R, A] bool"""
    return keys.argsort(dim=1).argsort(dim=1) < wanted


def _embed(attributes: Tensor, *, dims: int, generator: torch.Generator) -> Tensor:
    """A random two-layer map whose weights depend on the generator alone. [R, A] -> [R, dims]"""
    inward = torch.randn(attributes.shape[1], HIDDEN, generator=generator)
    bias = torch.randn(HIDDEN, generator=generator)
    outward = torch.randn(HIDDEN, dims, generator=generator)
    hidden = torch.tanh((attributes.float() @ inward + bias) / 2)
    return hidden @ outward / math.sqrt(HIDDEN / 2)


def _stream(seed: int, purpose: str) -> torch.Generator:
    """An independent generator for each purpose of one seed."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
