"""``scenes:``, a generated world of pictures with captions, in which the truth of every pair is known.

A scene is a background and a few things with shape, colour, size and position (:mod:`.objects`). A caption states facts
(:mod:`.facts`) that are all true of its own scene, and often of others. Its grade for a scene is the share of its facts
that hold there. The labels know its own image only, so every false negative is known.

A scene depends on the seed, its split and its position in it alone: a larger world begins with the smaller one, and
more captions per image do not change the first ones.
"""

import random
from collections.abc import Callable
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field, PositiveInt
from torch import Tensor

from vacsr.data.captions import table_of
from vacsr.data.formats import OnError, Spec, register
from vacsr.data.photos import ArrayPhotos, PhotoSet
from vacsr.data.scenes.captions import Claim, draw_claim, draw_subject_claim, facts_of, say
from vacsr.data.scenes.facts import EASY_BELOW, SceneTable, Statement, share_true
from vacsr.data.scenes.objects import Scene, draw_scene, draw_subject_scene, stream
from vacsr.data.scenes.render import SceneRenderer, Size, render_scene
from vacsr.data.synthetic import WorldOptions

__all__ = [
    "EASY_BELOW", "SceneOptions", "SceneWorld", "load_scenes", "render_scene", "scene_grades", "scene_world",
]  # fmt: skip
_TRIES = 20  # draws for a caption that its image does not have yet


class SceneOptions(WorldOptions):
    """Of a world of pictures."""

    images: PositiveInt = 2000
    size: Size = 64  # pixels along an edge of a picture
    subject: Annotated[int, Field(ge=0, le=1)] = 0
    """1: every scene has a subject, larger than all else there, and captions speak of it."""


class SceneWorld(NamedTuple):
    pairs: PhotoSet
    scenes: tuple[Scene, ...]  # [N], in the order of the photos
    statements: tuple[Statement, ...]  # [M], in the order of the captions


def scene_world(options: SceneOptions | None = None, *, split: str | None = None) -> SceneWorld:
    """Generate one split; None or "all" for the three of them, one after the other."""
    chosen = options or SceneOptions()
    draw, claim_of = (draw_subject_scene, draw_subject_claim) if chosen.subject else (draw_scene, draw_claim)
    image_ids: list[str] = []
    scenes: list[Scene] = []
    statements: list[list[Statement]] = []
    for part in chosen.splits(split, source="scenes:"):
        for row in range(chosen.sizes()[part]):
            image_ids.append(f"{part}-{row:04d}")
            scenes.append(draw(stream(chosen.seed, f"{part}/{row}/scene")))
            words = stream(chosen.seed, f"{part}/{row}/words")
            statements.append(_draw_statements(scenes[-1], chosen.per_image, claim_of=claim_of, rng=words))
    renderer = SceneRenderer(chosen.size)
    photos = ArrayPhotos(np.stack([renderer.render(scene) for scene in scenes]), tuple(image_ids))
    table = table_of("scenes:", image_ids, [[statement.text for statement in some] for some in statements])
    splits = tuple(name.partition("-")[0] for name in image_ids)
    pairs = PhotoSet(photos, **table.labels(), split=split or "all", splits=splits)
    return SceneWorld(pairs, tuple(scenes), tuple(statement for some in statements for statement in some))


def scene_grades(world: SceneWorld) -> Tensor:
    """The share of each caption's facts that hold in each image. [N, M] float32 in [0, 1]"""
    return share_true(world.scenes, world.statements)


@register("scenes", options=("images", "held_out", "per_image", "size", "subject", "seed", "split"))
def load_scene_pairs(spec: Spec, _on_error: OnError) -> PhotoSet:
    return load_scenes(spec).pairs


def load_scenes(spec: Spec) -> SceneWorld:
    return scene_world(spec.fill(SceneOptions), split=spec.option("split"))


def _draw_statements(
    scene: Scene, number: int, *, claim_of: Callable[[Scene, SceneTable, random.Random], Claim], rng: random.Random
) -> list[Statement]:
    """Captions of one scene, of unlike meaning as long as it has more to say."""
    drawn: list[Statement] = []
    table = SceneTable([scene])
    for _ in range(number):
        for _ in range(_TRIES):
            claim = claim_of(scene, table, rng)
            facts = facts_of(claim)
            if all(facts != other.facts for other in drawn):
                break
        drawn.append(Statement(say(claim, rng), facts))
    return drawn
