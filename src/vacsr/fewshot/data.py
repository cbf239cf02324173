"""From a data set to shots, test sets and batches of augmented photos.

Every draw of a batch is a function of seed, pass over the shots, and shot.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor

from vacsr.backbones.images import PhotoTransform, read_ahead
from vacsr.data.fewshot import (
    FewshotSource,
    LabelledPhotos,
    Shots,
    base_and_new,
    check_template,
    draw_shots,
    load_classes,
    load_shots,
    take_shots,
)
from vacsr.errors import DataError, UsageError
from vacsr.fewshot.config import FewshotDataConfig, FewshotTrainConfig
from vacsr.fewshot.methods.base import ClassSet, ShotBatch
from vacsr.files import read_json
from vacsr.noise import RowNoise, Stream
from vacsr.train.data import batch_order

_TRIES = 10
_NARROW, _WIDE = 3 / 4, 4 / 3  # of a crop's width over its height
VIEW_DRAWS = {"crop": 4 * _TRIES + 1, "randaugment": 2 * 3}
"""Draws in (0, 1) that :func:`augmented` takes per photo; RandAugment applies two operations."""


class ReportSet(NamedTuple):
    """One test set, over its own classes."""

    split: str  # its name in the report
    photos: LabelledPhotos
    classes: ClassSet


class FewshotSets(NamedTuple):
    source: FewshotSource
    shots: Shots
    train: LabelledPhotos  # the shots to learn from
    val: LabelledPhotos  # the shots to choose settings on, of the same classes; may be empty
    classes: ClassSet  # of training
    tests: tuple[ReportSet, ...]


def load_sets(config: FewshotDataConfig) -> FewshotSets:
    """Load the data, draw the shots over all classes, and split by the protocol.

    ``base-to-novel`` trains on the base half and tests ``base`` and ``new``, each over its own half; ``domain`` trains
    on all classes and tests the ``source`` and every target over the target's own classes, all its photos where it has
    no splits; ``all`` tests the source.
    """
    source = load_classes(config.spec)
    if config.shots_file:
        shots = load_shots(config.shots_file, source)
    else:
        shots = draw_shots(source, shots=config.shots, seed=config.seed)
    train, val = take_shots(source, shots)
    splits = {"source" if config.protocol == "domain" else "test": source.test}
    if config.protocol == "base-to-novel":
        base, new = base_and_new(len(source.test.classes))
        train, val = train.only(base), val.only(base)
        splits = {"base": source.test.only(base), "new": source.test.only(new)}
    if not len(train):
        raise DataError(f"{train.name}: no shots of the classes to train on — draw them again")
    tests = [ReportSet(split, photos, _class_set(photos, source, config)) for split, photos in splits.items()]
    for name, spec in config.targets.items():
        target = load_classes(spec, whole=True)
        tests.append(ReportSet(name, target.test, _class_set(target.test, target, config)._replace(shifted=True)))
    for test in tests:
        if not len(test.photos):
            raise DataError(f"{test.photos.name} has no photos to test — check the data set")
        test.photos.check_files()
    classes = _class_set(train, source, config)
    if config.sentences:
        classes = classes._replace(sentences=read_sentences(Path(config.sentences).expanduser(), classes.names))
    return FewshotSets(source, shots, train, val, classes, tuple(tests))


def _class_set(photos: LabelledPhotos, source: FewshotSource, config: FewshotDataConfig) -> ClassSet:
    return ClassSet(photos.classes, check_template(config.template or source.template))


def read_sentences(path: Path, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Descriptions of these classes, in their order, from a JSON file {class name: [sentences]}.

    Names match regardless of case, and of underscores or spaces.
    """

    def plain(name: str) -> str:
        return name.replace("_", " ").casefold().strip()

    by_name = {plain(name): sentences for name, sentences in read_json(path).items()}
    for name in names:
        sentences = by_name.get(plain(name))
        if not isinstance(sentences, list) or not sentences or not all(isinstance(one, str) for one in sentences):
            raise DataError(f"{path}: class {name!r} has no list of sentences — add it as {{class name: [sentences]}}")
    return tuple(tuple(by_name[plain(name)]) for name in names)


def crop_box(
    width: int, height: int, *, draws: Sequence[float], scale: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of a random resized crop: a share of the area from ``scale``, an aspect of 3/4 to 4/3.

    Four draws in (0, 1) for each of ten tries: area, aspect, top, left; the first box that fits into the photo counts.
    If none fits, the largest centred box with an aspect in that range.

    >>> crop_box(100, 50, draws=[0.5] * 40, scale=(0.5, 0.5))
    (25, 0, 75, 50)
    """
    low, high = min(scale), max(scale)
    for start in range(0, 4 * _TRIES, 4):
        area, aspect, top, left = draws[start : start + 4]
        pixels = width * height * (low + (high - low) * area)
        ratio = math.exp(math.log(_NARROW) + (math.log(_WIDE) - math.log(_NARROW)) * aspect)
        w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            x, y = (min(int(draw * (room + 1)), room) for draw, room in ((left, width - w), (top, height - h)))
            return x, y, x + w, y + h
    w, h = min(width, round(height * _WIDE)), min(height, round(width / _NARROW))
    x, y = (width - w) // 2, (height - h) // 2
    return x, y, x + w, y + h


def augmented(
    photo: Image.Image, draws: Sequence[float], *, kind: str, config: FewshotTrainConfig, transform: PhotoTransform
) -> Image.Image:
    """``crop``: a random resized crop and a flip; ``randaugment``: the whole photo squeezed, then RandAugment.

    An RGB square in the tower's size, resized with its filter (CLIP: bicubic).
    """
    size, resample = (transform.size, transform.size), Image.Resampling[transform.resample.upper()]
    if kind != "crop":
        return randaugment(photo.resize(size, resample), draws)
    square = photo.crop(crop_box(photo.width, photo.height, draws=draws, scale=config.crop)).resize(size, resample)
    return square.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draws[-1] < config.flip else square


def _signed(strength: float, draw: float) -> float:
    return -strength if draw > 0.5 else strength


def _affine(photo: Image.Image, *rows: float) -> Image.Image:
    """Each pixel is the nearest to (a·x + b·y + c, d·x + e·y + f); black comes in from outside."""
    return photo.transform(photo.size, Image.Transform.AFFINE, rows)


def _cutout(photo: Image.Image, across: float, down: float) -> Image.Image:
    """A grey square around a random centre."""
    side = 40 / 3
    left, top = int(max(0.0, across * photo.width - side / 2)), int(max(0.0, down * photo.height - side / 2))
    photo = photo.copy()
    box = (left, top, min(photo.width, left + side), min(photo.height, top + side))
    ImageDraw.Draw(photo).rectangle(box, (125, 123, 114))
    return photo


RANDAUGMENT: dict[str, Callable[[Image.Image, float, float], Image.Image]] = {
    "autocontrast": lambda photo, a, b: ImageOps.autocontrast(photo),
    "equalize": lambda photo, a, b: ImageOps.equalize(photo),
    "invert": lambda photo, a, b: ImageOps.invert(photo),
    "rotate": lambda photo, a, b: photo.rotate(_signed(10, a)),
    "posterize": lambda photo, a, b: ImageOps.posterize(photo, 5),
    "solarize": lambda photo, a, b: ImageOps.solarize(photo, 86),
    "solarize-add": lambda photo, a, b: ImageOps.solarize(photo.point(lambda v: min(255, int(v + 110 / 3)))),
    "color": lambda photo, a, b: ImageEnhance.Color(photo).enhance(0.7),
    "contrast": lambda photo, a, b: ImageEnhance.Contrast(photo).enhance(0.7),
    "brightness": lambda photo, a, b: ImageEnhance.Brightness(photo).enhance(0.7),
    "sharpness": lambda photo, a, b: ImageEnhance.Sharpness(photo).enhance(0.7),
    "shear-x": lambda photo, a, b: _affine(photo, 1, _signed(0.1, a), 0, 0, 1, 0),
    "shear-y": lambda photo, a, b: _affine(photo, 1, 0, 0, _signed(0.1, a), 1, 0),
    "cutout": _cutout,
    "translate-x": lambda photo, a, b: _affine(photo, 1, 0, _signed(100 / 3, a), 0, 1, 0),
    "translate-y": lambda photo, a, b: _affine(photo, 1, 0, 0, 0, 1, _signed(100 / 3, a)),
}
"""Dassl's sixteen operations on an RGB photo, which CoPrompt trains with, at magnitude 10 of 30: a third of the way
through the range of each. ``a`` and ``b`` are uniform draws: a direction, or the centre of the square."""


def randaugment(photo: Image.Image, draws: Sequence[float]) -> Image.Image:
    """One operation for every three uniform ``draws`` in [0, 1): which one, and its own two. RGB of the same size."""
    photo = photo if photo.mode == "RGB" else photo.convert("RGB")
    operations = list(RANDAUGMENT.values())
    for which, first, second in zip(*[iter(draws)] * 3, strict=True):
        photo = operations[int(which * len(operations))](photo, first, second)
    return photo


class ShotLoader:
    """The dataloader of the training shots. Threads prepare photos ahead of need."""

    def __init__(
        self, shots: LabelledPhotos, config: FewshotTrainConfig, *, transform: PhotoTransform, second: bool = False
    ) -> None:
        self.shots, self.config, self.transform = shots, config, transform
        self.views = (config.view, config.second_view) if second else (config.view,)
        self.cache: dict[int, Image.Image] = {}
        self.free = config.cache_gb * 2**30  # bytes left for the cache
        self.batch_size = min(config.batch_size, len(shots))
        self.batches_per_pass = len(shots) // self.batch_size  # what does not fill a batch comes in other passes
        batches = config.steps_per_epoch or self.batches_per_pass
        self.steps_per_epoch = batches // config.accumulate * config.accumulate
        if not self.steps_per_epoch:
            message = f"an epoch has {batches} batches, train.accumulate={config.accumulate}"
            raise UsageError(f"{message} — lower train.accumulate or train.batch_size, or set train.steps_per_epoch")

    def stream(self, start: int, stop: int) -> Iterator[ShotBatch]:
        """The batches of the steps from ``start`` up to ``stop``; a batch depends on its step only.

        Pixels are uint8 [B, 3, S, S], on the CPU.
        """
        steps = range(start, stop)
        photos = read_ahead(self._read, map(self._draws, steps), workers=self.config.workers)
        for step, views in zip(steps, photos, strict=True):
            labels, (first, *second) = self.shots.labels[self.pass_and_rows(step)[1]], views.unbind(1)
            yield ShotBatch(first, labels, second[0] if second else None, seed=self.config.seed, step=step)

    def pass_and_rows(self, step: int) -> tuple[int, Tensor]:
        """The pass over the shots that a step belongs to, and its shots [B].

        An epoch is one or more passes, the last perhaps incomplete.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        passes = -(-self.steps_per_epoch // self.batches_per_pass)
        number, position = divmod(index, self.batches_per_pass)
        number += epoch * passes
        order = batch_order(len(self.shots), batch=self.batch_size, seed=self.config.seed, epoch=number)
        return number, order[position]

    def _draws(self, step: int) -> list[tuple[int, list[list[float]]]]:
        """The shots of a step, and the draws of each of their views."""
        number, rows = self.pass_and_rows(step)
        noise = RowNoise(self.config.seed, torch.tensor(number), rows, Stream.IMAGE)
        streams = zip(self.views, (Stream.FIRST_VIEW, Stream.SECOND_VIEW), strict=False)
        draws = [noise.other(stream).uniform(VIEW_DRAWS[kind]).tolist() for kind, stream in streams]
        return [(row, [view[index] for view in draws]) for index, row in enumerate(rows.tolist())]

    def _read(self, shot: tuple[int, list[list[float]]]) -> Tensor:
        """The views of one shot. -> uint8 [V, 3, S, S]"""
        photo = self._open(shot[0])
        squares = [
            np.asarray(augmented(photo, draws, kind=kind, config=self.config, transform=self.transform))
            for kind, draws in zip(self.views, shot[1], strict=True)
        ]
        return torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2)

    def _open(self, row: int) -> Image.Image:
        """In full size, since a crop may show any part of it; cached while there is room. Threads may call this."""
        photo = self.cache.get(row)
        if photo is None:
            photo = self.shots.photos.open(row)
            size = 4 * photo.width * photo.height  # of RGB in PIL
            if size <= self.free and self.cache.setdefault(row, photo) is photo:
                self.free -= size
        return photo
