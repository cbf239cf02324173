"""Scenes with a subject: one thing larger than all others, as in a photo of something, and captions that name it.

The classes of few-shot recognition are shown so. Such pictures and captions teach a small CLIP to name things within
some hundred steps; captions of ordinary scenes speak of everything at once, and teach backgrounds first and for long.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TypeVar

from vacsr.data.scenes.claims import Claim, Mention
from vacsr.data.scenes.facts import Kind
from vacsr.data.scenes.objects import BACKGROUNDS, COLOURS, SHAPES, VARIANTS, Look, Scene, Thing, place

_T = TypeVar("_T")
_SIZES = {"large": 1, "huge": 2}  # of the subject, and how often
_OTHERS = {0: 1, 1: 2, 2: 2, 3: 1}  # small things beside it, and how often
_SAYS_COLOUR = 0.9  # how often a caption does


def draw_subject_scene(rng: random.Random, *, shape: str | None = None, colour: str | None = None) -> Scene:
    """A subject anywhere on any background, beside up to three small things of other shapes.

    Whatever is not given is drawn evenly, without the habits of ordinary scenes.
    """
    shape = rng.choice(SHAPES) if shape is None else shape
    colour = rng.choice(COLOURS) if colour is None else colour
    subject = Look(shape, colour, _drawn(_SIZES, rng))
    background, variant = rng.choice(BACKGROUNDS), rng.randrange(VARIANTS)
    rest = [other for other in SHAPES if other != shape]
    others = [Look(rng.choice(rest), rng.choice(COLOURS), "small") for _ in range(_drawn(_OTHERS, rng))]
    return Scene(background, variant, place([subject, *others], rng))


def subject_of(scene: Scene) -> Thing:
    """Its largest thing."""
    return max(scene.things, key=lambda thing: thing.radius)


def draw_subject_claim(scene: Scene, rng: random.Random) -> Claim:
    """Something true of the subject: what it is, and mostly its colour.

    Nothing is said of the background: it is what towers learn first, and for long the only thing.
    """
    subject = subject_of(scene)
    colour = subject.colour if rng.random() < _SAYS_COLOUR else None
    return Claim((Mention(Kind(subject.shape, colour)),))


def _drawn(weights: Mapping[_T, int], rng: random.Random) -> _T:
    return rng.choices(list(weights), weights=list(weights.values()))[0]
