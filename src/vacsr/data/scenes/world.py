"""The generated picture world as a data set: scenes, their pictures, five captions each, and sparse labels.

A caption is labelled as its own image's only, though it is often true of others. What it says is known, so every such
false negative is known too. A scene depends on the seed, its split and its place in it alone: a larger world begins
with the smaller one, and more captions per image leave the first ones as they are.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vacsr.data.checks import check_split
from vacsr.data.photos import ArrayPhotos, PhotoSet
from vacsr.data.scenes.claims import Claim, draw_claim, facts_of
from vacsr.data.scenes.facts import Statement
from vacsr.data.scenes.language import say
from vacsr.data.scenes.objects import Scene, draw_scene
from vacsr.data.scenes.render import SceneRenderer, check_size
from vacsr.data.scenes.subjects import draw_subject_claim, draw_subject_scene
from vacsr.data.spec import Spec
from vacsr.errors import UsageError

SPLITS = ("train", "dev", "test")
_TRIES = 20  # draws for a caption that its image does not have yet


@dataclass(frozen=True)
class SceneOptions:
    """The size of the world and its seed."""

    images: int = 2000
    """Training images."""
    held_out: int | None = None
    """Images in dev, and in test; a quarter of ``images`` unless given."""
    per_image: int = 5
    """Captions of an image."""
    size: int = 64
    """Pixels along an edge of a picture."""
    seed: int = 0
    subject: int = 0
    """1: every scene has a subject, larger than all else there, and captions speak of it (:mod:`.subjects`)."""

    def __post_init__(self) -> None:
        counts = {"images": self.images, "per_image": self.per_image, "held_out": self.sizes()["dev"]}
        for name, value in counts.items():
            if value < 1:
                raise UsageError(f"scenes: {name} is {value}, expected at least 1 — write {name}=5")
        if self.subject not in (0, 1):
            raise UsageError(f"scenes: subject is {self.subject}, expected 0 or 1 — write subject=1 or leave it out")
        check_size(self.size)

    def sizes(self) -> dict[str, int]:
        """Images in each split.

        >>> SceneOptions(images=400).sizes()
        {'train': 400, 'dev': 100, 'test': 100}
        """
        held_out = max(1, self.images // 4) if self.held_out is None else self.held_out
        return {"train": self.images, "dev": held_out, "test": held_out}


class SceneWorld(NamedTuple):
    """Photos and captions, and the truth behind them."""

    pairs: PhotoSet
    scenes: tuple[Scene, ...]
    """[N], in the order of the photos."""
    statements: tuple[Statement, ...]
    """[M], in the order of the captions."""


def scene_world(options: SceneOptions | None = None, *, split: str | None = None) -> SceneWorld:
    """Generate one split; None or "all" for the three of them, one after the other.

    >>> world = scene_world(SceneOptions(images=8), split="dev")
    >>> world.pairs.describe(), len(world.scenes), len(world.statements)
    ('dev: 2 photos, 10 captions, 5 per photo', 2, 10)
    """
    chosen = options or SceneOptions()
    name = split or "all"
    if name != "all":
        check_split(name, chosen.sizes(), source="scenes:")
    draw, claim_of = (draw_subject_scene, draw_subject_claim) if chosen.subject else (draw_scene, draw_claim)
    image_ids: list[str] = []
    scenes: list[Scene] = []
    statements: list[Statement] = []
    for part in SPLITS if name == "all" else (name,):
        for row in range(chosen.sizes()[part]):
            image_ids.append(f"{part}-{row:04d}")
            scenes.append(draw(stream(chosen.seed, f"{part}/{row}/scene")))
            words = stream(chosen.seed, f"{part}/{row}/words")
            statements += _draw_statements(scenes[-1], chosen.per_image, claim_of=claim_of, rng=words)
    renderer = SceneRenderer(chosen.size)
    pairs = PhotoSet(
        photos=ArrayPhotos(np.stack([renderer.render(scene) for scene in scenes]), tuple(image_ids)),
        image_ids=tuple(image_ids),
        captions=tuple(statement.text for statement in statements),
        caption_ids=tuple(f"{image}#{index}" for image in image_ids for index in range(chosen.per_image)),
        caption_image=torch.arange(len(image_ids)).repeat_interleave(chosen.per_image),
        split=name,
    )
    return SceneWorld(pairs, tuple(scenes), tuple(statements))


def load_scenes(spec: Spec) -> SceneWorld:
    """The world that a ``scenes:`` SPEC names."""
    names = ("images", "held_out", "per_image", "size", "seed", "subject")
    try:
        numbers = {name: int(spec.options[name]) for name in names if name in spec.options}
    except ValueError as error:
        raise UsageError(f"{spec}: {error} — write whole numbers, as in scenes:images=2000,size=64,seed=0") from error
    return scene_world(SceneOptions(**numbers), split=spec.options.get("split"))


def _draw_statements(
    scene: Scene, number: int, *, claim_of: Callable[[Scene, random.Random], Claim], rng: random.Random
) -> list[Statement]:
    """Captions of one scene, of unlike meaning as long as it has more to say."""
    drawn: list[Statement] = []
    for _ in range(number):
        for _ in range(_TRIES):
            claim = claim_of(scene, rng)
            facts = facts_of(claim)
            if all(facts != other.facts for other in drawn):
                break
        drawn.append(Statement(say(claim, rng), facts))
    return drawn


def stream(seed: int, purpose: str) -> random.Random:
    """An independent generator for each purpose of one seed."""
    digest = hashlib.sha256(f"scenes/{seed}/{purpose}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))
