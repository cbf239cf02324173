"""The generated picture world as a set of labelled photos, for few-shot recognition without a download.

``scenes:classes=24[,train=40][,test=50][,size=64][,seed=0][,domain=plain]``. A photo depends on the seed, its split,
its class and its number among the class's photos alone: more photos leave the first as they are, and another domain
shows the same scenes, made otherwise. Rows go through all classes once, then again, so that fewer photos of each are
the first rows of more.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, PositiveInt

from vacsr.config.base import Config
from vacsr.data.fewshot.labelled import FewshotSource, LabelledPhotos
from vacsr.data.formats import CLASS_FORMATS, Spec, register
from vacsr.data.photos import ArrayPhotos
from vacsr.data.scenes.objects import COLOURS, SHAPES, Scene, draw_subject_scene, stream
from vacsr.data.scenes.render import Domain, SceneRenderer, Size, shifted

TEMPLATE = "a picture of a {}."
"""CLIP's "a photo of a {}." in words that the captions of scenes have; without the class, four words as there."""


def scene_class_list(count: int, *, seed: int) -> tuple[str, ...]:
    """So many classes, each a colour and a shape, in the order of their labels.

    The seed shuffles colours and shapes; labels then walk down both lists at once, each from its top again after its
    end, and one colour further whenever both end together. As many of either are used as half of the labels can
    show. So the second half, the "new" classes, has no colour and no shape that the first half has not, and no pair of
    them that it has. From 20 classes on, fewer are the first of more.

    >>> scene_class_list(4, seed=0)
    ('green star', 'red fish', 'red star', 'green fish')
    """
    half = math.ceil(count / 2)
    colours = stream(seed, "classes/colours").sample(COLOURS, len(COLOURS))[:half]
    shapes = stream(seed, "classes/shapes").sample(SHAPES, len(SHAPES))[:half]
    together = math.lcm(len(colours), len(shapes))
    return tuple(
        f"{colours[(label + label // together) % len(colours)]} {shapes[label % len(shapes)]}" for label in range(count)
    )


class ClassOptions(Config):
    """The size of the world, its seed, and how its photos are made."""

    classes: Annotated[int, Field(ge=4, le=len(SHAPES) * len(COLOURS))] = 24
    """Colours on shapes; see :func:`.scene_class_list` for which, and in what order."""
    train: PositiveInt = 40
    """Photos of each class to draw shots from; 16 shots and their validation take 20."""
    test: PositiveInt = 50
    """Photos of each class to test on."""
    size: Size = 64
    """Pixels along an edge of a photo."""
    seed: int = 0
    """Of classes and scenes."""
    domain: Domain = "plain"

    @property
    def name(self) -> str:
        """For messages and tables."""
        return "scenes" if self.domain == "plain" else f"scenes-{self.domain}"

    def class_list(self) -> tuple[str, ...]:
        """By label."""
        return scene_class_list(self.classes, seed=self.seed)


@register("scenes", options=("classes", "train", "test", "size", "seed", "domain"), formats=CLASS_FORMATS)
def scene_classes(spec: Spec, _whole: bool = False) -> FewshotSource:
    """The labelled photos that a ``scenes:`` SPEC names."""
    return class_source(spec.fill(ClassOptions))


@lru_cache(maxsize=8)
def class_source(options: ClassOptions) -> FewshotSource:
    """Draw and paint the world. Validation shots come out of the training photos.

    Kept, as the cells of a table ask for the same few worlds; what comes back is not to be written to.
    """
    renderer = SceneRenderer(options.size)
    train, test = (_labelled(options, split, renderer=renderer) for split in ("train", "test"))
    return FewshotSource(train=train, val=None, test=test, name=options.name, template=TEMPLATE)


def photo_scene(options: ClassOptions, split: str, *, label: int, number: int) -> Scene:
    """What one photo shows, the ``number``-th of its class."""
    name = options.class_list()[label]
    colour, shape = name.split()
    return draw_subject_scene(stream(options.seed, f"classes/{split}/{name}/{number}"), shape=shape, colour=colour)


def _labelled(options: ClassOptions, split: str, *, renderer: SceneRenderer) -> LabelledPhotos:
    """The photos of one split, the first of every class, then the second."""
    classes, per_class = options.class_list(), {"train": options.train, "test": options.test}[split]
    pixels, names = [], []
    for number in range(per_class):
        for label, name in enumerate(classes):
            picture = renderer.render(photo_scene(options, split, label=label, number=number))
            rng = stream(options.seed, f"classes/{split}/{name}/{number}/{options.domain}")
            pixels.append(shifted(picture, options.domain, rng=rng))
            names.append(f"{split}/{name}/{number:03d}")
    return LabelledPhotos(
        photos=ArrayPhotos(np.stack(pixels), tuple(names)),
        labels=torch.arange(len(classes)).repeat(per_class),
        classes=classes,
        name=f"{options.name} {split}",
    )
