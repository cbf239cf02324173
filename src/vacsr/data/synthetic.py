"""A generated world of embeddings whose true similarities are known, for the demo and for tests.

An image has a few attributes (a dog, red, on a beach, at night). A caption names two to four attributes of its image,
and so is often true of other images too: a false negative under the official labels, which know its own image only.
Features are a fixed random non-linear map of the attributes, plus noise. The maps depend on the seed alone; train, dev
and test share them and draw different images.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.data.checks import check_split
from vacsr.data.pairs import PairSet, Provenance
from vacsr.data.spec import Spec, parse_spec
from vacsr.errors import UsageError

IMAGE_DIMS, TEXT_DIMS, HIDDEN = 64, 48, 96
SPLITS = ("train", "dev", "test")


class Group(NamedTuple):
    """Attributes of one kind, and how many of them an image has at least and at most."""

    names: tuple[str, ...]
    low: int
    high: int


GROUPS = {
    "colour": Group(("red", "blue", "green", "black", "white", "yellow"), 1, 2),
    "object": Group(("dog", "cat", "horse", "car", "boat", "bicycle", "kite", "guitar"), 1, 3),
    "place": Group(("on a beach", "in a village", "in a forest", "on a hill", "by a lake"), 1, 2),
    "moment": Group(("at night", "at sunset", "in the rain", "in the snow", "in the fog"), 1, 1),
}
ATTRIBUTES = tuple(name for group in GROUPS.values() for name in group.names)
"""The 24 attributes, in the order of the columns."""


@dataclass(frozen=True)
class SyntheticOptions:
    """The size of the world and its seed."""

    images: int = 800
    """Training images."""
    held_out: int | None = None
    """Images in dev, and in test; a quarter of ``images`` unless given."""
    per_image: int = 5
    """Captions of an image."""
    noise: float = 0.3
    """Standard deviation of the noise on features, whose own is about 1."""
    seed: int = 0

    def __post_init__(self) -> None:
        counts = {"images": self.images, "per_image": self.per_image, "held_out": self.sizes()["dev"]}
        for name, value in counts.items():
            if value < 1:
                raise UsageError(f"synthetic: {name} is {value}, expected at least 1 — write {name}=5")
        if not 0 <= self.noise < math.inf:
            raise UsageError(f"synthetic: noise is {self.noise}, expected 0 or more — write noise=0.3")

    def sizes(self) -> dict[str, int]:
        """Images in each split.

        >>> SyntheticOptions(images=400).sizes()
        {'train': 400, 'dev': 100, 'test': 100}
        """
        held_out = max(1, self.images // 4) if self.held_out is None else self.held_out
        return {"train": self.images, "dev": held_out, "test": held_out}


class SyntheticWorld(NamedTuple):
    """Pairs, and the truth behind them."""

    pairs: PairSet
    present: Tensor
    """[N, 24] bool, the attributes of each image."""
    mentioned: Tensor
    """[M, 24] bool, the attributes that each caption names."""


def synthetic_world(options: SyntheticOptions | None = None, *, split: str | None = None) -> SyntheticWorld:
    """Generate one split; None or "all" for the three of them, one after the other.

    >>> world = synthetic_world(SyntheticOptions(images=100), split="dev")
    >>> world.pairs.describe()
    'dev: 25 images (64 dims), 125 captions (48 dims), 5 per image, backbone synthetic:seed=0'
    """
    chosen = options or SyntheticOptions()
    name = split or "all"
    if name != "all":
        check_split(name, chosen.sizes(), source="synthetic:")
    names = SPLITS if name == "all" else (name,)
    return _join([_draw_split(chosen, part) for part in names], options=chosen, split=name)


def load_synthetic(spec: Spec) -> SyntheticWorld:
    """The world that a ``synthetic:`` SPEC names."""
    try:
        whole = {name: int(spec.options[name]) for name in ("images", "held_out", "per_image") if name in spec.options}
        noise = float(spec.options.get("noise", SyntheticOptions.noise))
        seed = int(spec.options.get("seed", SyntheticOptions.seed))
    except ValueError as error:
        raise UsageError(f"{spec}: {error} — write numbers, as in synthetic:images=800,noise=0.3,seed=0") from error
    return synthetic_world(SyntheticOptions(**whole, noise=noise, seed=seed), split=spec.options.get("split"))


def true_share(present: Tensor, mentioned: Tensor) -> Tensor:
    """Graded relevance: the share of a caption's attributes that an image has. [N, A], [M, A] -> [N, M]

    >>> true_share(torch.tensor([[1, 1, 0], [0, 1, 1]]).bool(), torch.tensor([[1, 1, 0]]).bool())
    tensor([[1.0000],
            [0.5000]])
    """
    named = mentioned.float()
    return present.float() @ named.T / named.sum(dim=1)


def synthetic_grades(spec: str, *, split: str | None = None) -> Tensor:
    """The true grade in [0, 1] of every pair of a ``synthetic:`` SPEC, in the order of its pairs. [N, M]

    The grade of a caption for its own image is 1. ``split`` overrides the SPEC's.
    """
    parsed = parse_spec(spec)
    if parsed.scheme != "synthetic":
        raise UsageError(f"{spec!r} has no known truth — grades exist for synthetic: only")
    world = load_synthetic(parsed.with_options({"split": split}))
    return true_share(world.present, world.mentioned)


def caption_text(names: list[str]) -> str:
    """Say the attributes in words.

    >>> caption_text(["red", "car", "on a beach"])
    'a red car on a beach'
    >>> caption_text(["dog", "boat", "at night"]), caption_text(["blue", "white"]), caption_text(["by a lake"])
    ('a dog and a boat at night', 'something blue and white', 'a scene by a lake')
    """
    said = {kind: [name for name in group.names if name in names] for kind, group in GROUPS.items()}
    colour = " and ".join(said["colour"])
    things = [f"a {thing}" for thing in said["object"]]
    if things and colour:
        things[0] = f"a {colour} {said['object'][0]}"
    subject = _enumerate(things) or (f"something {colour}" if colour else "a scene")
    return " ".join([subject, _enumerate(said["place"]), *said["moment"]]).replace("  ", " ").strip()


def _enumerate(words: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


class _Drawn(NamedTuple):
    """One split, as drawn."""

    image_ids: tuple[str, ...]
    images: Tensor
    texts: Tensor
    present: Tensor
    mentioned: Tensor


def _draw_split(options: SyntheticOptions, split: str) -> _Drawn:
    count = options.sizes()[split]
    generator = _stream(options.seed, split)
    present = _draw_present(count, generator=generator)
    mentioned = _draw_mentioned(present.repeat_interleave(options.per_image, dim=0), generator=generator)
    images = _embed(present, dims=IMAGE_DIMS, generator=_stream(options.seed, "image map"))
    texts = _embed(mentioned, dims=TEXT_DIMS, generator=_stream(options.seed, "text map"))
    images = images + options.noise * torch.randn(images.shape, generator=generator)
    texts = texts + options.noise * torch.randn(texts.shape, generator=generator)
    return _Drawn(tuple(f"{split}-{row:04d}" for row in range(count)), images, texts, present, mentioned)


def _draw_present(count: int, *, generator: torch.Generator) -> Tensor:
    """Attributes of ``count`` images, group by group. [count, 24] bool"""
    parts = []
    for group in GROUPS.values():
        wanted = torch.randint(group.low, group.high + 1, (count, 1), generator=generator)
        keys = torch.rand(count, len(group.names), generator=generator)
        parts.append(_first(keys, wanted))
    return torch.cat(parts, dim=1)


def _draw_mentioned(present: Tensor, *, generator: torch.Generator) -> Tensor:
    """Two to four of the present attributes. [M, 24] -> [M, 24] bool"""
    wanted = torch.randint(2, 5, (len(present), 1), generator=generator)
    keys = torch.rand(present.shape, generator=generator)
    return _first(torch.where(present, keys, 2.0), wanted)


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


def _join(drawn: list[_Drawn], *, options: SyntheticOptions, split: str) -> SyntheticWorld:
    """One world of the drawn splits."""
    image_ids = tuple(name for part in drawn for name in part.image_ids)
    mentioned = torch.cat([part.mentioned for part in drawn])
    named = [[name for name, said in zip(ATTRIBUTES, row, strict=True) if said] for row in mentioned.tolist()]
    pairs = PairSet(
        images=torch.cat([part.images for part in drawn]),
        texts=torch.cat([part.texts for part in drawn]),
        image_ids=image_ids,
        caption_ids=tuple(f"{image}#{index}" for image in image_ids for index in range(options.per_image)),
        caption_image=torch.arange(len(image_ids)).repeat_interleave(options.per_image),
        captions=tuple(caption_text(names) for names in named),
        split=split,
        provenance=Provenance(backbone=f"synthetic:seed={options.seed}"),
    )
    return SyntheticWorld(pairs, torch.cat([part.present for part in drawn]), mentioned)
