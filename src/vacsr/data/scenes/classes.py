"""Drawn scenes as labelled photos, for few-shot recognition without a download.

``scenes:classes=24[,train=40][,test=50][,size=64][,seed=0][,domain=plain]``. A photo depends on the seed, its split,
its class and its number in the class alone: more photos do not change the first ones, and another domain shows the same
scenes. Rows go through all classes once, then again, so that fewer photos of each are the first rows of more.
"""

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

TEMPLATE = "a picture of a {}."  # CLIP's "a photo of a {}." in words that the captions of scenes have


def scene_class_list(count: int, *, seed: int) -> tuple[str, ...]:
    """So many classes, each a colour and a shape, in the order of their labels.

    The seed shuffles colours and shapes; labels walk through both lists in parallel, again and again, one colour
    further whenever both end together. So the second half, the "new" classes, has new pairs of the colours and shapes
    of the first half. From 20 classes on, fewer are the first of more.

    >>> scene_class_list(6, seed=0)
    ('green star', 'red fish', 'purple boat', 'red star', 'purple fish', 'green boat')
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
    train: PositiveInt = 40  # photos of each class to draw shots from; 16 shots and their validation take 20
    test: PositiveInt = 50  # photos of each class to test on
    size: Size = 64  # pixels along an edge of a photo
    seed: int = 0  # of classes and scenes
    domain: Domain = "plain"


@register("scenes", options=("classes", "train", "test", "size", "seed", "domain"), formats=CLASS_FORMATS)
def scene_classes(spec: Spec, _whole: bool = False) -> FewshotSource:
    return class_source(spec.fill(ClassOptions))


@lru_cache(maxsize=8)
def class_source(options: ClassOptions) -> FewshotSource:
    """Draw and paint the world; do not write to it: it is cached, since the cells of a table share a few worlds."""
    renderer = SceneRenderer(options.size)
    name = "scenes" if options.domain == "plain" else f"scenes-{options.domain}"
    train, test = (_labelled(options, split, renderer=renderer, name=name) for split in ("train", "test"))
    return FewshotSource(train=train, val=None, test=test, name=name, template=TEMPLATE)


def photo_scene(seed: int, split: str, *, class_name: str, number: int) -> Scene:
    """What one photo shows, the ``number``-th of its class."""
    colour, shape = class_name.split()
    return draw_subject_scene(stream(seed, f"classes/{split}/{class_name}/{number}"), shape=shape, colour=colour)


def _labelled(options: ClassOptions, split: str, *, renderer: SceneRenderer, name: str) -> LabelledPhotos:
    """The photos of one split, the first of every class, then the second."""
    per_class = options.train if split == "train" else options.test
    classes, pixels, ids = scene_class_list(options.classes, seed=options.seed), [], []
    for number in range(per_class):
        for class_name in classes:
            picture = renderer.render(photo_scene(options.seed, split, class_name=class_name, number=number))
            rng = stream(options.seed, f"classes/{split}/{class_name}/{number}/{options.domain}")
            pixels.append(shifted(picture, options.domain, rng=rng))
            ids.append(f"{split}/{class_name}/{number:03d}")
    photos, labels = ArrayPhotos(np.stack(pixels), tuple(ids)), torch.arange(len(classes)).repeat(per_class)
    return LabelledPhotos(photos, labels, classes, name=f"{name} {split}")
