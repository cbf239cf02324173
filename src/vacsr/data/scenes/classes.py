"""The generated picture world as a set of labelled photos, for few-shot recognition without a download.

``scenes:classes=24[,train=40][,test=50][,size=64][,seed=0][,domain=plain]``. A photo depends on the seed, its split,
its class and its place among the class's photos alone: more photos leave the first as they are, and another domain
shows the same scenes, made otherwise (:mod:`.shifts`). Rows go through all classes once, then again, so that fewer
photos of each are the first rows of more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import torch

from vacsr.data.fewshot.labelled import FewshotSource, LabelledPhotos
from vacsr.data.fewshot.specs import nearest
from vacsr.data.photos import ArrayPhotos
from vacsr.data.scenes.class_list import SceneClass, scene_class_list
from vacsr.data.scenes.objects import Scene
from vacsr.data.scenes.render import SceneRenderer, check_size
from vacsr.data.scenes.shifts import PLAIN, check_domain, shifted
from vacsr.data.scenes.subjects import draw_subject_scene
from vacsr.data.scenes.world import stream
from vacsr.data.spec import Spec
from vacsr.errors import UsageError

TEMPLATE = "a picture of a {}."
"""CLIP's "a photo of a {}." in words that the captions of scenes have; without the class, four words as there."""


@dataclass(frozen=True)
class ClassOptions:
    """The size of the world, its seed, and how its photos are made."""

    classes: int = 24
    """Colours on shapes; see :func:`.scene_class_list` for which, and in what order."""
    train: int = 40
    """Photos of each class to draw shots from; 16 shots and their validation take 20."""
    test: int = 50
    """Photos of each class to test on."""
    size: int = 64
    """Pixels along an edge of a photo."""
    seed: int = 0
    """Of classes and scenes."""
    domain: str = PLAIN
    """One of :data:`.DOMAINS`."""

    def __post_init__(self) -> None:
        for name in ("train", "test"):
            if getattr(self, name) < 1:
                raise UsageError(f"scenes: {name} is {getattr(self, name)}, expected at least 1 — write {name}=40")
        check_size(self.size)
        check_domain(self.domain)
        self.class_list()

    @property
    def name(self) -> str:
        """For messages and tables."""
        return "scenes" if self.domain == PLAIN else f"scenes-{self.domain}"

    def class_list(self) -> tuple[SceneClass, ...]:
        """By label."""
        return scene_class_list(self.classes, seed=self.seed)


def scene_classes(spec: Spec) -> FewshotSource:
    """The labelled photos that a ``scenes:`` SPEC names."""
    return class_source(read_options(spec.options))


def read_options(given: Mapping[str, str]) -> ClassOptions:
    """Options as a SPEC writes them.

    >>> read_options({"classes": "10", "domain": "blur"})
    ClassOptions(classes=10, train=40, test=50, size=64, seed=0, domain='blur')
    """
    known = [field.name for field in fields(ClassOptions)]
    for name in given:
        if name not in known:
            hint = nearest(name, known)
            raise UsageError(f"scenes: with classes has no option {name!r}{hint} — write {', '.join(known)}")
    try:
        numbers = {name: int(value) for name, value in given.items() if name != "domain"}
    except ValueError as error:
        raise UsageError(f"scenes: {error} — write whole numbers, as in scenes:classes=24,train=40,seed=0") from error
    return ClassOptions(**numbers, domain=given.get("domain", PLAIN))


@lru_cache(maxsize=8)
def class_source(options: ClassOptions) -> FewshotSource:
    """Draw and paint the world. Validation shots come out of the training photos.

    Kept, as the cells of a table ask for the same few worlds; what comes back is not to be written to.
    """
    renderer = SceneRenderer(options.size)
    train, test = (_labelled(options, split, renderer=renderer) for split in ("train", "test"))
    return FewshotSource(train=train, val=None, test=test, name=options.name, template=TEMPLATE)


def photo_scene(options: ClassOptions, split: str, *, label: int, place: int) -> Scene:
    """What one photo shows."""
    which = options.class_list()[label]
    rng = stream(options.seed, f"classes/{split}/{which.name}/{place}")
    return draw_subject_scene(rng, shape=which.shape, colour=which.colour)


def _labelled(options: ClassOptions, split: str, *, renderer: SceneRenderer) -> LabelledPhotos:
    """The photos of one split, the first of every class, then the second."""
    classes, number = options.class_list(), {"train": options.train, "test": options.test}[split]
    pixels, names = [], []
    for place in range(number):
        for label, which in enumerate(classes):
            picture = renderer.render(photo_scene(options, split, label=label, place=place))
            drawn = stream(options.seed, f"classes/{split}/{which.name}/{place}/{options.domain}")
            pixels.append(shifted(picture, options.domain, rng=drawn))
            names.append(f"{split}/{which.name}/{place:03d}")
    return LabelledPhotos(
        photos=ArrayPhotos(np.stack(pixels), tuple(names)),
        labels=torch.arange(len(classes)).repeat(number),
        classes=tuple(which.name for which in classes),
        name=f"{options.name} {split}",
    )
